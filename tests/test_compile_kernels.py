"""Every kernel compiles for GPUs that are not here, and none spills in silence.

The command runs in a process of its own: in this one kernels are interpreted.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import compile_kernels
import kernel_cases
import pytest
from compile_kernels import Line

ROOT = Path(__file__).parents[1]
ARCHITECTURES = [80, 90]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton exists for Linux only"
)

TABLE = """
import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x):
    weights = tl.exp(x - tl.max(x))
    return weights / tl.sum(weights)


@triton.jit
def _tight_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, _softmax(tl.load(x_ptr + at)))


@triton.jit
def _known_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, _softmax(tl.load(x_ptr + at)))


@triton.jit
def _wrong_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.store(y_ptr, tl.load(x_ptr + tl.arange(0, BLOCK)))


class Model:
    name = "rows of 1024"


def launched_by(kernel, **options):
    def launch(model, capability):
        x = torch.empty(1024, device="meta")
        kernel[(1,)](x, torch.empty_like(x), 1024, num_warps=1, **options)

    return launch


MODELS = (Model(),)
CASES = {
    "_tight_kernel": (launched_by(_tight_kernel, maxnreg=32),),
    "_known_kernel": (launched_by(_known_kernel, maxnreg=32),),
    "_wrong_kernel": (launched_by(_wrong_kernel),),
    "_other_kernel": (launched_by(_tight_kernel),),
}
SETTING = "one row"
EXPLAINED_SPILLS = {("_known_kernel", 90): (4096, "it has 32 registers for 32 numbers")}
"""


def command(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run tools/compile_kernels.py as somebody at a terminal does."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "compile_kernels.py", *map(str, arguments)],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def jit_functions(folder: Path) -> Iterator[tuple[str, set[str]]]:
    """The name of each function under ``@triton.jit``, and the names that it mentions."""
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                "jit" in ast.unparse(decorator) for decorator in node.decorator_list
            ):
                yield node.name, {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def test_every_kernel_has_a_case() -> None:
    """A kernel is a function under @triton.jit that no other one calls."""
    functions = list(jit_functions(ROOT / "kernels"))
    called = set().union(*(names - {name} for name, names in functions))
    kernels = [name for name, _ in functions if name not in called]
    assert kernels, "no kernel was found"
    assert len(kernels) == len(set(kernels)), "two kernels have one name"
    assert set(kernels) == set(kernel_cases.CASES)


def test_explained_spills_name_kernels_and_reasons() -> None:
    for (name, _), (most_bytes, why) in kernel_cases.EXPLAINED_SPILLS.items():
        assert name in kernel_cases.CASES
        assert most_bytes > 0 and why


@needs_triton
def test_kernels_compile_and_do_not_spill(tmp_path: Path) -> None:
    """Shapes of Qwen3-0.6B, which has the widest heads and norms them."""
    done = command(
        "--architecture", *(f"sm_{architecture}" for architecture in ARCHITECTURES),
        "--model", "Qwen3-0.6B", "--json", tmp_path / "lines.json",
        TRITON_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    print(f"\n{done.stdout}")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    lines = json.loads((tmp_path / "lines.json").read_text())
    found = {(line["kernel"], line["architecture"]) for line in lines}
    assert found == {(name, a) for name in kernel_cases.CASES for a in ARCHITECTURES}
    assert all(line["registers"] > 0 and line["error"] == "" for line in lines)
    prefill = {
        line["architecture"]: line["instructions"]
        for line in lines
        if line["configurations"] == ["Qwen3-0.6B prompts"]
    }
    assert "mma" in prefill[80] and "wgmma" not in prefill[80]
    assert "wgmma" in prefill[90]


@needs_triton
def test_what_goes_wrong_is_reported(tmp_path: Path) -> None:
    """Spills beyond what is explained, an error in a kernel, a case that launches another."""
    (tmp_path / "odd_cases.py").write_text(TABLE)
    file = tmp_path / "lines.json"
    done = command(
        "--cases", "odd_cases", "--architecture", "sm_90", "--processes", 1, "--json", file,
        PYTHONPATH=str(tmp_path), TRITON_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    lines = {line["kernel"]: line for line in json.loads(file.read_text())}
    tight = lines["_tight_kernel"]
    assert tight["registers"] <= 32 and tight["spill_store_bytes"] > 0 < tight["spill_load_bytes"]
    spilled = tight["spill_store_bytes"] + tight["spill_load_bytes"]
    complaints = dict(
        line.removeprefix("wrong: ").split(" (", 1)
        for line in done.stdout.splitlines()
        if line.startswith("wrong: ")
    )
    assert complaints.keys() == {"_tight_kernel", "_wrong_kernel", "_other_kernel"}
    assert complaints["_tight_kernel"].endswith(f"{spilled} bytes of spills, 0 are explained")
    assert "CompilationError" in complaints["_wrong_kernel"]
    assert complaints["_other_kernel"].endswith("launched ['_tight_kernel'], not _other_kernel")
    assert "_known_kernel (sm_90) may spill 4096 bytes: it has 32 registers" in done.stdout


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"spill_store_bytes": 4}, ""),
        ({"spill_store_bytes": 4, "spill_load_bytes": 8}, "12 bytes of spills, 8 are explained"),
        ({"spill_load_bytes": 8, "architecture": 80}, "8 bytes of spills, 0 are explained"),
        ({"shared_bytes": 227 * 1024}, ""),
        ({"shared_bytes": 227 * 1024 + 1}, "232449 bytes of shared memory"),
        ({"shared_bytes": 163 * 1024 + 1, "architecture": 80}, "the architecture has 166912"),
        ({"error": "CompilationError: no"}, "CompilationError: no"),
    ],
)
def test_complaint(changes: dict[str, Any], said: str) -> None:
    line = replace(Line("_a_kernel", ["a model"], 90), **changes)
    complaint = compile_kernels.complaint(line, {("_a_kernel", 90): (8, "a reason")})
    assert said in complaint and bool(said) == bool(complaint)


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        ((), {"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET is set"),
        pytest.param(
            ("--architecture", "90"), {}, "'90' is no architecture", marks=needs_triton
        ),
        pytest.param(("--kernel", "_no_kernel"), {}, "no kernel '_no_kernel'", marks=needs_triton),
        pytest.param(("--model", "no-model"), {}, "no model 'no-model'", marks=needs_triton),
    ],
)  # fmt: skip
def test_wrong_calls_are_refused(
    arguments: tuple[str, ...],
    variables: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as refusal:
        compile_kernels.arguments(arguments)
    assert refusal.value.code == 2
    assert said in capsys.readouterr().err
