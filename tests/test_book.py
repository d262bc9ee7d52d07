"""The chapters' own tools: numbers and units, the clock, predictions, sources, the strip."""

from __future__ import annotations

import html
import importlib
import importlib.metadata
import inspect
import json
import os
import random
import re
import textwrap
from pathlib import Path

import matplotlib
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strict_html import Tree

from mie import machine
from mie.book import (
    Prediction,
    Timing,
    bar_style,
    compare,
    exact,
    measure,
    observed,
    plots,
    recorded,
    recording,
    recordings,
    reported,
    show,
    strip,
    timing,
)
from mie.book.output import escape
from mie.book.palette import COLOURS, LOOKS
from mie.book.source import locate, repository_path, repository_url
from mie.book.units import duration, duration_range, quantity, scaled, significant

ROOT = Path(__file__).parents[1]
AWKWARD = "<|im_end|> \"quoted\" 'single' & </script> line\nbreak \x00 \ud800"


# -- units ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (12288, "B", "12,288 B"),
        (269_060_552, "B", "269,060,552 B (269 MB)"),
        (99_999, "B", "99,999 B"),
        (1.2345e9, "B", "1.23 GB"),
        (31.6e9, "B/s", "31.6 GB/s"),
        (999_600.0, "B", "1.00 MB"),
        (2_000_000_000, "FLOP", "2,000,000,000 FLOP (2.00 GFLOP)"),
        (1500.0, "FLOP/s", "1.50 kFLOP/s"),
        (0.0123, "s", "12.3 ms"),
        (1.2, "s", "1.20 s"),
        (0.9997, "s", "1.00 s"),
        (4.5e-5, "s", "45.0 µs"),
        (3e-8, "s", "30.0 ns"),
        (0, "s", "0 s"),
        (17.44, "tokens/s", "17.4 tokens/s"),
        (12345.0, "tokens/s", "12,300 tokens/s"),
        (30, "", "30"),
        (-1234, "blocks", "-1,234 blocks"),
    ],
)
def test_a_quantity_reads_as_people_write_it(value, unit, written):
    assert quantity(value, unit) == written


@given(st.integers(-(10**15), 10**15))
def test_a_count_keeps_every_digit(count):
    first = quantity(count, "B").split(" B")[0]
    assert int(first.replace(",", "")) == count


def test_numpy_and_torch_counts_are_counts_too():
    assert quantity(numpy.int64(1234), "B") == "1,234 B"


@given(st.floats(1e-9, 1e12), st.integers(1, 5))
def test_significant_digits_stay_within_half_a_digit(value, digits):
    back = float(significant(value, digits).replace(",", ""))
    assert abs(back - value) <= value * 0.5000001 * 10.0 ** (1 - digits)


@given(st.floats(1e-8, 1e14))
def test_a_prefix_never_leaves_four_digits_before_the_point(value):
    number = scaled(value, "B/s").split(" ")[0]
    assert len(number.split(".")[0].replace(",", "")) <= 3


def test_a_range_uses_the_unit_of_its_median():
    assert duration_range(0.0123, 0.0119, 0.013) == "12.3 ms (11.9–13.0)"
    assert duration_range(0.9, 0.5, 1.5) == "900 ms (500–1,500)"
    assert duration(0.9) == "900 ms"


# -- the clock -----------------------------------------------------------------------------------


class Device:
    """Does nothing until it is waited for, like a GPU; each piece of work takes what it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.queue: list[float] = []
        monkeypatch.setattr(timing, "clock", lambda: self.now)
        monkeypatch.setattr(timing, "synchronize", self.wait)

    def wait(self) -> None:
        self.now += sum(self.queue)
        self.queue.clear()


def test_measure_waits_for_the_device_and_not_for_the_warm_up(monkeypatch):
    device = Device(monkeypatch)
    work = iter([100.0, 3.0, 1.0, 2.0])  # the first call is the warm-up and must not be seen
    found = measure(lambda: device.queue.append(next(work)), n=3, warmup=1)
    assert (found.median, found.low, found.high, found.n) == (2.0, 1.0, 3.0, 3)


def test_measure_keeps_one_result_alive_and_no_other(monkeypatch):
    device = Device(monkeypatch)
    alive = []

    class Result:
        def __init__(self, run):
            self.run = run
            assert not alive, "the result before this one still takes up memory"
            alive.append(run)

        def __del__(self):
            alive.remove(self.run)
            device.now += 50.0  # giving memory back takes time, which belongs to no run

    runs = iter(range(10))

    def work():
        device.queue.append(1.0)
        return Result(next(runs))

    found = measure(work, n=4, warmup=1)
    assert (found.low, found.high) == (1.0, 1.0)
    assert found.result.run == 4


def test_synchronize_asks_torch(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: calls.append("waited"))
    timing.synchronize()
    assert calls == ["waited"]


def test_a_timing_speaks():
    found = Timing(0.0123, 0.0119, 0.013, 5, None)
    assert repr(found) == "12.3 ms (11.9–13.0, n=5)"
    assert found.ms == pytest.approx(12.3)
    assert Timing(0.5, 0.5, 0.5, 1, None).per_second(32) == 64
    with pytest.raises(ValueError, match="n is 0"):
        measure(lambda: None, n=0)


# -- predictions ---------------------------------------------------------------------------------

KV = Prediction("K/V per token", 12288, "B", "2 × 24 layers × 2 heads × 64 × 2 B")
STEP = Prediction("one step", 0.01, "s", "269 MB at 26.9 GB/s")


@given(st.integers(0, 10**12), st.integers(-(10**6), 10**6))
def test_exact_accepts_the_predicted_number_and_no_other(value, off):
    prediction = Prediction("blocks", value, "")
    if off == 0:
        assert exact(prediction, value).ratio == ("1.00×" if value else "")
        return
    with pytest.raises(AssertionError) as raised:
        exact(prediction, value + off)
    for number in (f"{value:,}", f"{value + off:,}", f"{off:+,}"):
        assert number in str(raised.value)


def test_a_reported_row_never_fails_and_shows_ratio_spread_and_cause():
    row = reported(STEP, Timing(0.0123, 0.0119, 0.013, 5, None), cause="launches")
    assert (row.predicted, row.measured, row.ratio) == (
        "10.0 ms",
        "12.3 ms (11.9–13.0, n=5)",
        "1.23×",
    )
    assert row.cause == "launches"


def test_seconds_are_not_compared_with_tokens_per_second():
    rate = Prediction("decode", 20.0, "tokens/s")
    with pytest.raises(ValueError, match="'tokens/s' and measured in 's'"):
        reported(rate, Timing(0.05, 0.05, 0.05, 1, None))
    assert reported(rate, Timing(0.05, 0.05, 0.05, 1, None).per_second(1)).ratio == "1.00×"


def test_a_recorded_number_needs_its_stamp():
    with pytest.raises(ValueError, match="where and when"):
        recorded("step", 0.001, "s", stamp="")


@pytest.mark.parametrize("path", [*(ROOT / "book/results").glob("*.json")], ids=lambda p: p.stem)
def test_every_recording_loads_with_its_stamp(path):
    loaded = recording(path.stem)
    assert re.fullmatch(r".+ · torch \d+\.\d+\S* · 20\d\d-\d\d-\d\d", loaded.stamp)
    assert all(isinstance(value, int | float) and value >= 0 for value in loaded.values.values())
    for name in loaded.values:
        assert recorded(name, loaded[name], "", loaded.stamp).cause == loaded.stamp


ACCOUNT = {
    "decode attention": (["decode_attention"], ["bound_kv"]),
    "products, prefill attention": (
        ["products", "prefill_attention"],
        ["bound_weights", "bound_prefill"],
    ),
    "norms, RoPE, K/V writes, SwiGLU": (["between_products"], []),
    "sampling": (["sampling"], []),
    "no kernel runs": (["idle"], []),
    "first kernel to last": (["span"], ["bound_kv", "bound_weights", "bound_prefill"]),
}


def table_rows(text: str) -> dict[str, list[float]]:
    """First cell of each row of a Markdown table -> the numbers that stand alone in the others."""
    rows = {}
    for line in text.splitlines():
        first, *rest = [cell.strip() for cell in line.strip("| ").split("|")]
        rows[first] = [
            float(cell.replace(",", "")) for cell in rest if re.fullmatch(r"[\d.,]+", cell)
        ]
    return rows


@pytest.mark.parametrize("row", ACCOUNT)
def test_the_account_in_chapter_17_is_the_recorded_one(row):
    cells = json.loads((ROOT / "chapters/17-overlap.ipynb").read_text())["cells"]
    shown = table_rows("\n".join("".join(cell["source"]) for cell in cells))[row]
    account = recording("h200-account")
    expected = [
        sum(account[f"{run}_{name}_s"] for name in names)
        for run in ("qwen3-0.6b_nano", "qwen2.5-7b_nano", "qwen2.5-7b_chat")
        for names in ACCOUNT[row]
    ]
    assert shown == [pytest.approx(value, abs=0.0051) for value in expected]


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen2.5-7b"])
@pytest.mark.parametrize("workload", ["nano", "single", "chat"])
def test_the_rates_in_the_readme_are_the_recorded_ones(model, workload):
    rows = table_rows((ROOT / "README.md").read_text())
    name = f"{model}, {workload}"
    if name not in rows:
        assert (model, workload) == ("qwen3-0.6b", "chat")  # not measured
        return
    measured = recording(f"h200-{model}-{workload}")
    assert rows[name][-1] == round(measured["output_tokens_per_s"])


def test_the_limits_of_an_h200_are_recorded_in_plain_units():
    h200 = recording("h200-limits")
    assert h200.stamp == "NVIDIA H200 · torch 2.11.0+cu130 · 2026-11-29"
    assert quantity(h200["matmul_bf16_flops"], "FLOP/s") == "783 TFLOP/s"
    assert quantity(h200["read_bytes_per_s"], "B/s") == "4.11 TB/s"
    with pytest.raises(KeyError, match=r"'tea'.*matmul_bf16_flops, read_bytes_per_s"):
        h200["tea"]


@pytest.mark.parametrize("left_out", ["gpu", "torch", "date", "how", "values"])
def test_a_recording_that_does_not_say_where_it_comes_from_is_refused(
    tmp_path, monkeypatch, left_out
):
    content = {"gpu": "G", "torch": "2.11", "date": "2026-11-29", "how": "so", "values": {"a": 1}}
    content[left_out] = ""
    (tmp_path / "some.json").write_text(json.dumps(content))
    monkeypatch.setattr(recordings, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match=rf"some\.json does not say: {left_out}"):
        recording("some")
    with pytest.raises(FileNotFoundError, match=r"no recording 'other'.*there are: some"):
        recording("other")


def all_kinds():
    return compare(
        exact(KV, 12288),
        reported(STEP, Timing(0.0123, 0.0119, 0.013, 5, None), cause=AWKWARD),
        observed("bandwidth", 31.6e9, "B/s"),
        recorded("one step", 0.0018, "s", stamp="H200 · torch 2.11 · 2026-11-29"),
        caption="float32, batch 1",
    )


def test_both_forms_of_a_comparison_carry_every_cell():
    table = all_kinds()
    tree = Tree(table.html())
    words = re.sub(r"\s+", " ", " ".join(tree.words)).replace("( ", "(")
    for row in table.rows:
        for cell in (row.name, row.predicted, row.measured, row.ratio, row.because, row.kind):
            assert cell in repr(table)
            assert re.sub(r"\s+", " ", cell) in words, cell
    assert "float32, batch 1" in repr(table)
    assert "float32, batch 1" in words


def test_a_comparison_is_a_table_to_a_screen_reader():
    tree = Tree(all_kinds().html())
    tags = [tag for tag, _ in tree.tags]
    heads = [attrs for tag, attrs in tree.tags if tag == "th"]
    assert tags.index("table") + 1 == tags.index("caption")
    assert [head["scope"] for head in heads] == ["col"] * 6 + ["row"] * 4
    assert {"table", "row", "columnheader", "rowheader", "cell"} <= {
        attrs.get("role") for _, attrs in tree.tags
    }


def test_columns_that_nobody_fills_are_left_out_and_text_lines_up():
    lines = repr(compare(observed("a", 1, "B"), observed("longer", 22222, "B"))).splitlines()
    assert lines[2].split() == ["quantity", "measured", "kind"]
    assert lines[4].index("1 B") == lines[5].index("22,222 B") == lines[2].index("measured")
    with pytest.raises(ValueError, match="at least one row"):
        compare()


def test_a_prediction_reads_as_a_sentence():
    assert str(KV) == "K/V per token: 12,288 B, because 2 × 24 layers × 2 heads × 64 × 2 B"


# -- sources -------------------------------------------------------------------------------------


def lines_of(place) -> str:
    text = (ROOT / place.path).read_text("utf-8").splitlines()
    return textwrap.dedent("\n".join(text[place.first - 1 : place.last]))


@pytest.mark.parametrize(
    "obj", [measure, Timing, Timing.per_second, Timing.ms, timing, locate, inspect.unwrap(escape)]
)
def test_the_lines_named_are_the_lines_shown(obj):
    place = locate(obj)
    assert lines_of(place) == place.code
    assert place.url == f"{repository_url()}/blob/main/{place.path}#L{place.first}-L{place.last}"


def test_a_decorated_function_shows_what_was_written():
    from mie.book.output import style

    assert locate(style).code.startswith("@cache\ndef style(")


def test_a_method_is_shown_by_its_full_name_without_its_indent():
    place = locate(Timing.per_second)
    assert place.name == "Timing.per_second"
    assert place.code.startswith("def per_second")


def test_kernels_are_found_where_the_repository_keeps_them():
    kernels = importlib.import_module("mie.kernels")
    assert repository_path(kernels) == "kernels/__init__.py"
    assert repository_path(importlib.import_module("mie.book")) == "mie/book/__init__.py"
    assert repository_path(textwrap) is None


def test_strangers_are_shown_without_a_link():
    place = locate(textwrap.dedent)
    assert place.path == "textwrap.py"
    assert place.url is None
    assert "](" not in show(textwrap.dedent).markdown()


def test_show_gives_highlighted_markdown_and_plain_text():
    shown = show(measure, Timing)
    bundle = shown._repr_mimebundle_()
    assert "text/html" not in bundle  # it would win over the Markdown and lose the highlighting
    assert bundle["text/markdown"].count("```python\n") == 2
    for place in shown.places:
        assert f"[{place.where}]({place.url})" in bundle["text/markdown"]
        assert place.code in bundle["text/markdown"]
        assert place.code in bundle["text/plain"]
    assert repr(shown) == bundle["text/plain"]


def fenced():
    """A docstring with a fence: ```` and ``` inside."""


def test_a_fence_in_the_source_does_not_end_the_block():
    shown = show(fenced).markdown()
    assert "`````python\n" in shown
    assert re.search(r"(?m)^`````$", shown)


# -- the strip -----------------------------------------------------------------------------------


@pytest.fixture
def quiet(monkeypatch):
    """A strip without side effects that would reach other tests."""
    threads, style = torch.get_num_threads(), dict(matplotlib.rcParams)
    yield monkeypatch
    torch.set_num_threads(threads)
    matplotlib.rcParams.update(style)


def test_the_strip_says_what_the_machine_says(quiet):
    quiet.setattr(machine, "cpu_model", lambda: "A CPU <with> signs")
    quiet.setattr(machine, "usable_cores", lambda: 1)
    quiet.setattr(machine, "memory_bytes", lambda: 7 * 2**30)
    quiet.setattr(machine, "gpu", lambda: "NVIDIA H200, 140 GiB")
    shown = strip(builds=["mie.book.timing"], spec="rope", seconds=40)
    words = "".join(Tree(shown.html()).words)
    expected = [
        "A CPU <with> signs, 1 core",
        "7 GiB of memory",
        "NVIDIA H200, 140 GiB",
        "about 40 s on two CPU cores",
        f"torch {importlib.metadata.version('torch')}",
        "mie/book/timing.py",
        f"rope ({len(importlib.import_module('mie.spec').cases('rope'))} cases)",
        "seed 0",
        "torch on 1 thread",
    ]
    for said in expected:
        assert said in repr(shown)
        assert said in words


def test_the_strip_names_the_numbers_that_the_chapter_asks_for(quiet):
    assert "float32 on the CPU" in repr(strip(seconds=1))
    assert "bfloat16 on CUDA" in repr(strip(seconds=1, numbers="bfloat16 on CUDA"))


def test_the_strip_makes_a_run_repeatable(quiet):
    quiet.setattr(machine, "usable_cores", lambda: 1)

    def draws():
        strip(seconds=1)
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    assert draws() == draws()
    assert torch.get_num_threads() == 1
    assert matplotlib.rcParams["svg.hashsalt"] == "mie"


def test_chapters_are_linked_with_their_titles(quiet, tmp_path):
    cell = '{"cell_type": "markdown", "source": ["# Reading <the> weights\\n", "text"]}'
    (tmp_path / "01-reading.ipynb").write_text(f'{{"cells": [{cell}]}}')
    quiet.chdir(tmp_path)
    quiet.delenv("MIE_BOOK", raising=False)
    live = strip(needs=["01", "02", "some Python"], seconds=1)
    assert "01 Reading <the> weights · chapter 02 · some Python" in repr(live)
    assert 'href="01-reading.ipynb"' in live.html()
    quiet.setenv("MIE_BOOK", "1")
    assert 'href="01-reading.html"' in strip(needs=["01"], seconds=1).html()


def test_a_strip_cannot_promise_what_does_not_exist(quiet):
    with pytest.raises(ModuleNotFoundError, match=r"mie\.nothing"):
        strip(builds=["mie.nothing"], seconds=1)
    with pytest.raises(Exception, match="nothing"):
        strip(spec="nothing", seconds=1)


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1), (None, 8)]
)
def test_a_container_has_as_many_cores_as_its_quota(monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "_cgroup", lambda _: quota)
    assert machine.usable_cores() == cores


def test_memory_is_the_containers_limit_where_there_is_one(monkeypatch):
    monkeypatch.setattr(machine, "_cgroup", lambda _: "max")
    whole = machine.memory_bytes()
    monkeypatch.setattr(machine, "_cgroup", lambda _: "1048576")
    assert machine.memory_bytes() == 2**20 < whole


def test_versions_are_those_installed():
    found = machine.versions("torch", "no-such-package")
    assert found == {"Python": ".".join(map(str, os.sys.version_info[:3])), "torch": found["torch"]}


# -- looks and plots -----------------------------------------------------------------------------


def test_no_two_looks_share_a_channel():
    for channel in ("colour", "pattern", "hatch", "marker", "dash"):
        values = [getattr(look, channel) for look in LOOKS]
        assert len(set(values)) == len(LOOKS), channel


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_colours_can_be_seen_on_light_and_dark_pages():
    css = (ROOT / "mie/book/output.css").read_text()
    light, dark = (dict(re.findall(r"--mie-(\w+): (#\w{6});", part)) for part in css.split("html["))
    assert light == COLOURS
    assert dark.keys() == COLOURS.keys()
    for name in COLOURS:
        assert 1.05 / (luminance(light[name]) + 0.05) >= 3, name
        assert (luminance(dark[name]) + 0.05) / (luminance("#222222") + 0.05) >= 3, name


def test_plots_are_the_same_bytes_each_time_and_never_colour_alone(quiet, tmp_path):
    from matplotlib.figure import Figure

    plots.use_style()

    def draw(name):
        figure = Figure()
        axes = figure.subplots()
        lines = axes.plot([[1] * 8, [2] * 8])
        bars = [axes.bar([0], [1], **bar_style(i)) for i in range(8)]
        figure.savefig(tmp_path / name, metadata={"Date": None})
        return lines, bars

    lines, bars = draw("one.svg")
    draw("two.svg")
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn == (tmp_path / "two.svg").read_text()
    assert len({line.get_marker() for line in lines}) == 8
    assert len({bar.patches[0].get_hatch() for bar in bars}) == 8
    assert len(set(re.findall(r"stroke-dasharray: [\d., ]+", drawn))) == 7  # and one unbroken


# -- HTML ----------------------------------------------------------------------------------------


@given(st.text())
def test_escaped_text_comes_back_and_holds_no_markup(text):
    escaped = escape(text)
    assert not re.search(r"[<>\"'\x00-\x08]", escaped)
    printable = not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]", text)
    if printable:
        assert html.unescape(escaped) == text


def test_every_html_output_carries_its_style_and_the_common_class(quiet):
    for output in (all_kinds(), strip(seconds=1)):
        tree = Tree(output.html())
        assert "mie-output" in tree.tags[0][1]["class"].split()
        assert "style" in [tag for tag, _ in tree.tags]
        assert set(output._repr_mimebundle_()) == {"text/html", "text/plain"}
