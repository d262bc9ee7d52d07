"""From an implementation to the line where it stands, and from words to an implementation."""

from __future__ import annotations

import re
from functools import partial, wraps
from pathlib import Path

import pytest

from mie import parts, spec
from mie.spec.location import location_of, name_of

# -- where code stands --------------------------------------------------------------------------


class Plain:
    limit = 3

    def method(self):
        pass


class Inherits(Plain):
    pass


def decorated(function):
    @wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


@decorated
def inner():
    pass


@pytest.mark.parametrize(
    ("thing", "name", "line"),
    [
        (Plain, "Plain", "class Plain:"),
        (Plain(), "Plain", "class Plain:"),
        (Plain().method, "Plain.method", "def method(self):"),
        (partial(decorated, inner), "decorated", "def decorated(function):"),
        (inner, "inner", "@decorated"),
    ],
)
def test_a_location_is_the_line_the_author_wrote(thing, name, line):
    location = location_of(thing)
    assert name_of(thing) == name and location.place == "tests/test_spec_location.py"
    assert Path(__file__).read_text().splitlines()[location.line - 1].strip() == line


def test_what_is_not_python_has_no_location():
    assert location_of(len) is None and name_of(len) == "len"


def test_no_folder_above_the_project_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert location_of(parts.default("rope")).place == "mie/ops/reference.py"
    elsewhere = tmp_path.parent / "elsewhere.py"
    elsewhere.write_text("def rope(x, cos, sin):\n    return x\n")
    assert str(location_of(spec.implementation_of(f"{elsewhere}:rope"))) == "elsewhere.py:1"


def test_in_a_notebook_the_location_is_the_cell(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="needs the book extra")
    nbclient = pytest.importorskip("nbclient", reason="needs the book extra")
    cells = [
        "from mie.spec import check",
        "import torch\n\ndef mine(gate, up):\n    return torch.nn.functional.silu(gate) * up",
        "class Half:\n    def __init__(self, path):\n        raise NotImplementedError",
        "def bad(gate, up):\n    gate = gate + 1\n    return gate / 0 / None",
        "print(check('swiglu', mine))",
        "print(check('safetensors_reader', Half))",
        "check('swiglu', bad).raise_if_failed()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, kernel_name="python3", allow_errors=True)
    client.execute(cwd=str(tmp_path))
    passed, todo, failed = (cell.outputs[0] for cell in notebook.cells[4:])
    assert "mine (cell In[2], line 3), all 8 rules hold" in passed.text
    assert (
        "Half (cell In[3], line 1), 22 of 22 rules wait for code at cell In[3], line 3" in todo.text
    )
    assert failed.output_type == "error" and failed.ename == "SpecFailure"
    assert "✗ FAIL  swiglu: bad (cell In[4], line 1), 8 of 8 rules broken" in failed.traceback[0]
    assert "      raised at: cell In[4], line 3" in failed.traceback
    assert not any("checker.py" in line or "ipykernel" in line for line in failed.traceback)


# -- from words to an implementation ------------------------------------------------------------


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A reader's folder, with a module of theirs beside the part that uses it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "angles_of_mine.py").write_text("import torch\n")
    (tmp_path / "parts_of_mine.py").write_text(
        "from angles_of_mine import torch\n\nSCALE = 3\n\ndef my_rope(x, cos, sin):\n    return x\n"
    )
    return tmp_path


def test_a_target_is_a_name_in_a_file_or_in_a_module(mine, monkeypatch):
    for target in (
        "parts_of_mine.py:my_rope",
        "parts_of_mine:my_rope",
        f"{mine}/parts_of_mine.py:my_rope",
    ):
        assert spec.implementation_of(target)(7, None, None) == 7
    assert spec.implementation_of("mie.ops.reference:rope") is parts.default("rope")


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("my_rope", "'my_rope' should look like file.py:Name or package.module:Name"),
        ("parts_of_mine.py:", "should look like"),
        ("absent.py:my_rope", "there is no file absent.py"),
        ("no.such.module:f", "no.such.module could not be imported: ModuleNotFoundError"),
        ("parts_of_mine.py:my_rop", "parts_of_mine.py has no my_rop; did you mean my_rope?"),
        ("parts_of_mine:attention", "parts_of_mine has no attention; it has my_rope"),
        ("angles_of_mine.py:f", "it defines no function or class"),
        ("parts_of_mine.py:SCALE", "is a int, not a function or class"),
        ("broken_of_mine.py:f", "broken_of_mine.py could not be imported: SyntaxError: "),
    ],
)
def test_a_target_that_leads_nowhere_says_how_far_it_led(mine, target, says):
    (mine / "broken_of_mine.py").write_text("def f(:\n")
    with pytest.raises(spec.TargetError, match=re.escape(says)):
        spec.implementation_of(target)
