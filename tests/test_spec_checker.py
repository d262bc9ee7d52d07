"""What the checker says of an implementation: three ends, and the words for each."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mie import parts, spec
from mie.spec import State, check
from mie.spec.expect import CounterExample, refuses
from mie.spec.stubs import STUBS
from mie.spec.tensors import close, same_bits, untouched


def mutant(part: str, name: str):
    return spec.implementation_of(f"{Path(__file__).parent}/mutants/{part}.py:{name}")


PLAIN_READER = mutant("safetensors_reader", "PlainReader")

# -- the three ends of a check ------------------------------------------------------------------


class HalfWritten(PLAIN_READER):
    def load(self, name, dtype=None):
        raise NotImplementedError


class HalfWrittenAndWrong(HalfWritten):
    def refuse(self, why):
        pass


def test_half_written_is_todo_and_says_where_code_is_missing():
    report = check("safetensors_reader", HalfWritten)
    assert report.state is State.TODO
    assert 0 < len(report.having(State.TODO)) < len(report.outcomes)
    line = HalfWritten.load.__code__.co_firstlineno + 1
    assert f"7 of 22 rules wait for code at tests/test_spec_checker.py:{line}" in str(report)
    assert report.raise_if_failed() is report
    with pytest.raises(spec.SpecFailure):
        report.require()


def test_a_broken_rule_is_a_failure_even_where_others_wait_for_code():
    report = check("safetensors_reader", HalfWrittenAndWrong)
    assert report.having(State.TODO) and report.state is State.FAIL
    with pytest.raises(spec.SpecFailure):
        report.raise_if_failed()


def test_torch_lacking_a_kernel_is_a_failure_and_not_a_todo():
    def bits_of_floats(x, weight, eps):
        return torch.bitwise_and(x, x)

    report = check("rms_norm", bits_of_floats)
    assert report.state is State.FAIL
    assert "NotImplementedError" in report.outcomes[0].found


def test_an_unexpected_exception_shows_its_type_its_message_and_the_readers_line():
    def inverse(of):
        return 1 / of

    def divides(x, cos, sin):
        return x * inverse(0)

    report = check("rope", divides)
    assert report.outcomes[0].found == "ZeroDivisionError: division by zero"
    line = inverse.__code__.co_firstlineno + 1
    assert str(report.outcomes[0].at) == f"tests/test_spec_checker.py:{line}"
    assert f"raised at: tests/test_spec_checker.py:{line}" in str(report)


def test_an_error_in_a_decorator_from_elsewhere_shows_the_line_there(tmp_path):
    (tmp_path / "decorators.py").write_text(
        "from functools import wraps\n\ndef timed(f):\n    @wraps(f)\n"
        "    def wrapper(*args):\n        return f(*args) + start\n    return wrapper\n"
    )
    timed = spec.implementation_of(f"{tmp_path}/decorators.py:timed")
    report = check("swiglu", timed(lambda gate, up: gate))
    assert str(report.outcomes[0].at) == "decorators.py:6"
    assert report.location.place == "tests/test_spec_checker.py"


@pytest.mark.parametrize("name", ["block_pool", "block_table", "prefix_cache"])
def test_a_memory_part_is_checked_without_torch(name):
    """Its import takes seconds, and a reader checks a pool after every line of it."""
    code = (
        "import sys; from mie import parts; from mie.spec import check, stubs; "
        f"print(check({name!r}, parts.default({name!r})).require().state); "
        f"print(check({name!r}, stubs.STUBS[{name!r}]).state); print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    passed, todo, modules = run.stdout.splitlines()
    assert (passed, todo) == ("PASS", "TODO") and f"mie.spec.{name}" in modules.split()
    assert not {"torch", "numpy", "mie.spec.tensors"} & {*modules.split()}


def test_a_part_with_tensors_is_checked_on_the_cpu_whatever_the_default_is():
    used = []

    def swiglu(gate, up):
        used.append(torch.empty(0).device.type)
        return parts.default("swiglu")(gate, up)

    with torch.device("meta"):
        check("swiglu", swiglu).require()
    assert set(used) == {"cpu"}


def test_a_wrong_signature_is_a_failure():
    report = check("rope", lambda x: x)
    assert report.state is State.FAIL and len(report.having(State.FAIL)) == 13
    assert report.outcomes[0].found.endswith("takes 1 positional argument but 3 were given")
    assert report.outcomes[0].at is None


def test_a_missing_return_is_told_as_such():
    report = check("swiglu", lambda gate, up: None)
    assert "counter-example: swiglu of (1, 1) tensors: expected a tensor, got None" in str(report)


def test_an_error_of_another_class_where_a_refusal_is_due_shows_where_it_came_from():
    unchecked = mutant("safetensors_reader", "LengthUnchecked")
    [outcome] = [
        o for o in check("safetensors_reader", unchecked).outcomes if o.case.name == "no_header"
    ]
    assert outcome.found.startswith(
        "a file of 0 bytes: expected a CheckpointError, got error: unpack"
    )
    assert re.fullmatch(r"tests/mutants/safetensors_reader\.py:\d+", str(outcome.at))


# -- what the reader sees -----------------------------------------------------------------------


def neighbours_paired():
    return check("rope", mutant("rope", "neighbours_paired"))


def test_a_failure_says_rule_counter_example_consequence_and_case():
    said = " ".join(str(neighbours_paired()).split())
    assert said.startswith("✗ FAIL rope: neighbours_paired (tests/mutants/rope.py:")
    assert "7 of 13 rules broken" in said
    assert (
        "✗ half_split_pairs: Element i is paired with element i + R, not with its neighbour."
        in said
    )
    assert (
        "counter-example: rope by a quarter turn, x = 1 in element 0 only, at [0, 0, 1]: "
        "expected 0, got 1 otherwise: the checkpoint was trained with other pairs" in said
    )
    assert "case: mie/spec/rope.py:" in said
    assert said.count("otherwise:") == 1  # the first broken rule in full, the others short


def test_a_pass_says_who_where_and_how_many():
    said = str(check("rope", parts.default("rope")))
    assert re.fullmatch(
        r"✓ PASS  rope: rope \(mie/ops/reference.py:\d+\), all 13 rules hold, \d\.\d\d s", said
    )


@pytest.mark.parametrize(
    ("report", "state"),
    [
        (partial(check, "rope", STUBS["rope"]), "TODO"),
        (neighbours_paired, "FAIL"),
        (partial(check, "rope", parts.default("rope")), "PASS"),
    ],
)
def test_the_page_says_the_same_as_the_terminal(report, state):
    report = report()
    page = report._repr_html_()
    assert page.startswith(f'<div class="mie-output mie-check mie-{state.lower()}">')
    assert f"{report.state.mark}&nbsp;{state}" in page and str(report) == repr(report)
    words = " ".join(re.sub(r"<[^>]+>", " ", page.replace("&#x27;", "'")).split())
    assert report.headline in words
    assert all(outcome.found in words for outcome in report.having(State.FAIL))
    assert all(outcome.case.name in words for outcome in report.outcomes)


@pytest.mark.parametrize("ticks", ["`tick`", "`tick"])
def test_what_an_implementation_says_is_text_and_not_html(ticks):
    def angry(gate, up):
        raise ValueError(f"<script>alert(1)</script> & {ticks}")

    page = check("swiglu", angry)._repr_html_()
    shown = {"`tick`": "<code>tick</code>", "`tick": "`tick"}[ticks]
    assert f"&lt;script&gt;alert(1)&lt;/script&gt; &amp; {shown}" in page and "<script>" not in page


def test_a_terminal_gets_colour_and_a_pipe_does_not():
    report = check("rope", parts.default("rope"))
    for system, opening in (("standard", "\x1b[1;32m✓ PASS\x1b[0m  rope"), (None, "✓ PASS  rope")):
        console = Console(force_terminal=True, width=200, color_system=system)
        with console.capture() as captured:
            console.print(report)
        assert captured.get().startswith(opening)


# -- expectations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "expected", "said"),
    [
        (None, ValueError, "the call: expected a ValueError, and there was none"),
        (KeyError("x"), ValueError, "the call: expected a ValueError, got KeyError('x')"),
        (None, Exception, "the call: expected an error, and there was none"),
    ],
)
def test_refuses_says_what_came_in_place_of_the_error(raised, expected, said):
    def call():
        if raised is not None:
            raise raised

    with pytest.raises(CounterExample, match=f"^{re.escape(said)}$") as found:
        refuses("the call", call, error=expected)
    assert found.value.__cause__ is raised


@pytest.mark.parametrize("error", [NotImplementedError("later"), CounterExample("x: 1, got 2")])
def test_refuses_passes_on_what_is_not_written_and_what_has_been_said(error):
    def call(number):
        raise error

    with pytest.raises(type(error)) as found:
        refuses("the call", call, 1)
    assert found.value is error


def test_refuses_takes_the_error_that_it_expects():
    refuses("int('x')", int, "x", error=ValueError)
    refuses("int('x')", int, "x")


@given(
    st.integers(0, 2), st.integers(0, 3), st.sampled_from([1e-2, -5.0, float("nan"), float("inf")])
)
def test_close_names_the_first_place_that_differs(row, column, by):
    expected = torch.arange(12.0).reshape(3, 4)
    got = expected.clone()
    got[row, column] += by
    got[2, 3] = float("nan")
    with pytest.raises(
        CounterExample, match=re.escape(f"the sum, at [{row}, {column}]: expected ")
    ):
        close(got, expected, 1e-4, "the sum")


@given(st.floats(-1e6, 1e6), st.floats(-0.9, 0.9))
def test_close_allows_its_tolerance_and_no_more(expected, share):
    room = 1e-3 * max(1.0, abs(expected))
    close(torch.tensor(expected + share * room, dtype=torch.float64), expected, 1e-3, "x")
    with pytest.raises(CounterExample, match=r"^x: expected"):
        close(torch.tensor(expected + 1.1 * room, dtype=torch.float64), expected, 1e-3, "x")


def test_same_bits_tells_zeros_and_nans_apart():
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    same_bits(nan, nan.clone(), "nan")
    with pytest.raises(
        CounterExample, match=r"element 1: expected the bytes 01 00 c0 7f, got 00 00"
    ):
        same_bits(nan[[0, 0]], nan, "nan")
    with pytest.raises(CounterExample, match="element 0"):
        same_bits(torch.tensor(-0.0), torch.tensor(0.0), "zero")


def test_untouched_names_the_tensor_that_was_written_to():
    kept, changed = torch.zeros(2), torch.zeros(2)
    with (
        pytest.raises(CounterExample, match="changed after the call, element 1"),
        untouched(kept=kept, changed=changed),
    ):
        changed[1] = 1.0
