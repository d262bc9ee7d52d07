#!/usr/bin/env bash
# Makes .venv with the exact versions of requirements.lock, and this project in it, editable.
#
# uv takes seconds where pip takes minutes. UV_TORCH_BACKEND=cpu lets it take the small CPU build of torch, which
# a machine without a GPU wants. Where PIP_FIND_LINKS names a folder of wheels, uv looks there too.
set -euo pipefail
python=${1:-python3}

"$python" - <<'PY'
import sys
if sys.version_info < (3, 11):
    sys.exit(
        f"This project needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}.\n"
        "Name another one: make setup PYTHON=python3.12"
    )
PY

test -x .venv/bin/python || "$python" -m venv .venv
test -x .venv/bin/uv || .venv/bin/python -m pip install --quiet uv
export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
.venv/bin/uv pip install --python .venv/bin/python -r requirements.lock
.venv/bin/uv pip install --python .venv/bin/python --no-deps -e .
