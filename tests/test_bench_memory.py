"""What paging saves: the same counts everywhere, agreeing with formulas that nobody used for them.

The golden file holds every number of ``mie bench memory``. It changes only with the workload or
with what the engine does with its memory; then write it anew:

    mie bench memory --json tests/golden/bench_memory.json
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strict_html import Tree
from typer.testing import CliRunner

from mie import cli
from mie.bench import memory_plots
from mie.bench.first_fit import NO_HOLE, FirstFit
from mie.bench.memory import (
    block_sizes,
    churn,
    memory_report,
    mixed_requests,
    paged_against_contiguous,
    prefix_sharing,
)
from mie.bench.memory_plots import FIGURES
from mie.bench.memory_report import memory_page
from mie.bench.memory_tables import memory_tables
from mie.bench.scheduling_plots import SCHEDULING_FIGURES
from mie.bench.workloads import KINDS, draw, shuffle, token_ids
from mie.errors import ConfigError
from mie.memory.block_pool import BlockPool
from mie.memory.block_table import BlockTable

ALL_FIGURES = FIGURES | SCHEDULING_FIGURES
ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "bench_memory.json"
FOOTPRINT = 12_288
REQUESTS = mixed_requests()
FEW = REQUESTS[:24]
LENGTHS = [request.prompt_tokens + request.answer_tokens for request in REQUESTS]


@pytest.fixture(scope="module")
def report():
    return memory_report()


def up(number: int, step: int) -> int:
    """`number` rounded up to a multiple of `step`, counted in steps."""
    return -(-number // step)


# -- the workload -------------------------------------------------------------------------------


def test_every_number_is_the_one_in_the_golden_file(report):
    assert json.loads(json.dumps(report.as_dict())) == json.loads(GOLDEN.read_text())


def test_as_dict_is_json_already(report):
    assert json.loads(json.dumps(report.as_dict())) == report.as_dict()


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_another_process_with_other_hashes_counts_the_same(hash_seed):
    code = f"""
import json
from mie.bench.memory import *
few = mixed_requests()[:{len(FEW)}]
for result in (paged_against_contiguous(few), prefix_sharing(few), churn(few)):
    print(json.dumps(result.as_dict()))
"""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    here = [paged_against_contiguous(FEW), prefix_sharing(FEW), churn(FEW)]
    assert [json.loads(line) for line in run.stdout.splitlines()] == [r.as_dict() for r in here]


def test_only_the_method_with_a_promised_sequence_is_called():
    """But for the workloads that other engines are measured on, which say how they are drawn."""
    files = {*(ROOT / "mie" / "bench").glob("*.py")}
    files -= {ROOT / "mie" / "bench" / "standard_workloads.py"}
    sources = [path.read_text("utf-8") for path in files]
    assert {name for source in sources for name in re.findall(r"\brng\.(\w+)", source)} == {
        "random"
    }
    assert not any(
        re.search(r"import math\b|from math\b|import random\b|numpy", s) for s in sources
    )


def test_the_first_draws_are_those_of_any_python():
    rng = Random(0)
    assert [draw(rng, 1, 100) for _ in range(6)] == [85, 76, 43, 26, 52, 41]
    assert token_ids(0, 0, 3) == [128_298, 115_160, 63_899]


@pytest.mark.parametrize(("share", "expected"), [(0.0, 5), (0.5, 7), (1 - 2**-53, 8)])
def test_draw_reaches_both_ends_and_nothing_beyond(share, expected):
    class Fixed(Random):
        def random(self):
            return share

    assert draw(Fixed(), 5, 8) == expected


def test_shuffle_keeps_every_item():
    items = list(range(50))
    shuffle(Random(3), items)
    assert items != sorted(items) == list(range(50))


def test_requests_keep_to_the_table_of_kinds():
    assert len(REQUESTS) == 256
    kinds = {kind.name: kind for kind in KINDS}
    assert {request.kind for request in REQUESTS} == set(kinds)
    for request in REQUESTS:
        kind = kinds[request.kind]
        assert kind.prompt[0] <= request.prompt_tokens <= kind.prompt[1]
        assert kind.answer[0] <= request.answer_tokens <= kind.answer[1] <= request.max_tokens
        assert request.limit <= 32_768
    for kind in KINDS:
        count = sum(request.kind == kind.name for request in REQUESTS)
        assert abs(count / 256 - kind.share / 100) < 0.05


def test_another_seed_is_another_workload():
    assert mixed_requests(1) != REQUESTS == mixed_requests(0)


# -- paged against contiguous -------------------------------------------------------------------


def fits(sizes: list[int], budget: int) -> int:
    return next((i for i in range(len(sizes)) if sum(sizes[: i + 1]) > budget), len(sizes))


def test_reservations_agree_with_the_formulas(report):
    budget = 8 * 2**30
    whole, power, exact, paged = report.reservations.policies
    assert whole.reserved_bytes == 256 * 32_768 * FOOTPRINT
    assert whole.fit == budget // (32_768 * FOOTPRINT) == 21
    powers = [next(2**k for k in range(20) if 2**k >= request.limit) for request in REQUESTS]
    assert power.reserved_tokens == sum(powers)
    assert power.fit == fits(powers, budget // FOOTPRINT)
    assert exact.reserved_tokens == exact.used_tokens == sum(LENGTHS) and exact.waste_share == 0
    assert exact.fit == fits(LENGTHS, budget // FOOTPRINT)
    blocks = [up(length, 16) for length in LENGTHS]
    assert paged.reserved_tokens == 16 * sum(blocks) and paged.used_tokens == sum(LENGTHS)
    assert paged.fit == fits(blocks, budget // (16 * FOOTPRINT) - 1)  # one block is scratch
    assert paged.waste_share == pytest.approx(1 - sum(LENGTHS) / (16 * sum(blocks)))


def test_paging_wastes_less_than_a_block_for_each_request(report):
    paged = report.reservations.policies[-1]
    assert paged.reserved_tokens - paged.used_tokens < 256 * 16


FEW_BLOCKS = [up(request.num_tokens, 16) for request in FEW]
BARELY = sum(FEW_BLOCKS[:5])  # what the first five need


@pytest.mark.parametrize("blocks", [2, 3, 500, BARELY, BARELY + 1, BARELY + 2, 100_000])
def test_how_many_fit_in_any_budget(blocks):
    """One block of the budget is scratch, so five fit from ``BARELY + 1`` on."""
    result = paged_against_contiguous(FEW, budget_bytes=blocks * 16 * FOOTPRINT)
    assert result.policies[-1].fit == fits(FEW_BLOCKS, blocks - 1)
    assert result.policies[2].fit == fits([r.num_tokens for r in FEW], blocks * 16)


# -- prefix sharing -----------------------------------------------------------------------------


def test_sharing_saves_the_system_prompt_once_for_each_but_the_first(report):
    none, *caches = report.sharing.caches
    system, prompts = 512, sum(512 + request.prompt_tokens for request in REQUESTS)
    assert none.used_blocks == none.listed_blocks == sum(up(system + n, 16) for n in LENGTHS)
    assert none.owners == ((1, 256 * 32),) and none.found_tokens == none.saved_blocks == 0
    assert [cache.cache for cache in caches] == ["hash", "radix tree"]
    for cache in caches:
        assert cache.listed_blocks == none.used_blocks
        assert cache.saved_blocks == 255 * 32 == none.used_blocks - cache.used_blocks
        assert cache.owners == ((256, 32),)
        assert cache.prompt_tokens == prompts and cache.found_tokens == 255 * 512
        assert cache.computed_tokens == prompts - 255 * 512
        assert cache.hit_rate == pytest.approx(255 * 512 / prompts)


@pytest.mark.parametrize("system", [0, 15, 16, 40])
def test_whole_blocks_are_shared_and_no_more(system):
    for cache in prefix_sharing(FEW, system_prompt_tokens=system).caches[1:]:
        assert cache.saved_blocks == (len(FEW) - 1) * (system // 16)
        assert cache.found_tokens == 16 * cache.saved_blocks
        assert cache.owners == (((len(FEW), system // 16),) if system >= 16 else ())


# -- fragmentation ------------------------------------------------------------------------------


def test_block_sizes_agree_with_the_formula(report):
    sizes = report.block_sizes.sizes
    assert [each.block_size for each in sizes] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    for each in sizes:
        entries = sum(up(length, each.block_size) for length in LENGTHS)
        assert each.table_entries == entries
        assert each.empty_bytes == (entries * each.block_size - sum(LENGTHS)) * FOOTPRINT
        assert each.waste_share == pytest.approx(1 - sum(LENGTHS) / (entries * each.block_size))
    assert sizes[4].table_entries * 16 == report.reservations.policies[-1].reserved_tokens


def naive_first_fit(taken: list[tuple[int, int]], size: int, length: int) -> int:
    """The lowest place where `length` slots overlap nothing; it begins at 0 or where one ends."""
    places = sorted([0, *(begin + room for begin, room in taken)])
    return next(
        (
            place
            for place in places
            if place + length <= size
            and all(place + length <= begin or begin + room <= place for begin, room in taken)
        ),
        NO_HOLE,
    )


def naive_churn(requests, rounds, size, *, in_blocks):
    """(admitted, refused for want of memory, refused because of holes), by lists and sums."""
    rng, trace = Random(0), []
    for _ in range(rounds):
        order = list(requests)
        shuffle(rng, order)
        trace += order
    inside = []  # (end, first slot, length)
    counts = [0, 0, 0]
    for now, request in enumerate(trace):
        inside = [each for each in inside if each[0] > now]
        length = up(request.num_tokens, 16) * 16 if in_blocks else request.num_tokens
        taken = [(start, room) for _, start, room in inside]
        free = size - sum(room for _, room in taken)
        place = naive_first_fit(taken, size, length)
        if in_blocks:
            place = 0 if length <= free else NO_HOLE
        if place != NO_HOLE:
            inside.append((now + 1 + request.answer_tokens // 16, place, length))
        counts[0 if place != NO_HOLE else 1 if request.num_tokens > free else 2] += 1
    return counts


@pytest.mark.parametrize("memory", ["contiguous", "paged"])
def test_churn_agrees_with_a_naive_memory(report, memory):
    outcome = getattr(report.churn, memory)
    size = 5 * 2**28 // FOOTPRINT // 16 * 16
    assert report.churn.budget_tokens == size and report.churn.arrivals == 8 * 256
    counts = naive_churn(REQUESTS, 8, size, in_blocks=memory == "paged")
    assert [outcome.admitted, outcome.refused_full, outcome.refused_by_holes] == counts


def test_holes_refuse_only_where_memory_is_in_one_piece(report):
    pieces, paged = report.churn.contiguous, report.churn.paged
    assert pieces.refused_by_holes > 0 and paged.refused_by_holes == 0
    assert paged.worst_refusal is None
    worst = pieces.worst_refusal
    assert worst.largest_hole < worst.request_tokens <= worst.free_tokens
    assert all(hole == free for free, hole in paged.samples)
    assert all(hole <= free for free, hole in pieces.samples)
    assert len(paged.samples) == len(pieces.samples) == 2_048 // 32


class Bitmap:
    """A memory as a row of slots, each with the number of its stretch: the oracle of first fit."""

    def __init__(self, size):
        self.slots = [None] * size

    def allocate(self, length):
        for start in range(len(self.slots) - length + 1):
            if not any(owner is not None for owner in self.slots[start : start + length]):
                self.slots[start : start + length] = [start] * length
                return start
        return NO_HOLE

    def free(self, start):
        self.slots = [None if owner == start else owner for owner in self.slots]

    def holes(self):
        marks = "".join("." if owner is None else "#" for owner in self.slots)
        return [(hole.start(), len(hole[0])) for hole in re.finditer(r"\.+", marks)]


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_first_fit_is_the_bitmap_that_it_stands_for(size, trace):
    memory, oracle, starts = FirstFit(size), Bitmap(size), []
    for takes, number in trace:
        if takes or not starts:
            start = memory.allocate(number)
            assert start == oracle.allocate(number)
            starts += [start] if start != NO_HOLE else []
        else:
            start = starts.pop(number % len(starts))
            memory.free(start)
            oracle.free(start)
        memory.check()
        assert memory.holes == oracle.holes()
        assert memory.num_free == oracle.slots.count(None)
        assert memory.largest_hole == max((length for _, length in oracle.holes()), default=0)
    for start in starts:
        memory.free(start)
    assert memory.holes == [(0, size)]


def test_a_memory_without_slots_is_refused():
    with pytest.raises(ConfigError, match="0 slots"):
        FirstFit(0)


# -- nothing is left behind ---------------------------------------------------------------------

RUNS = [paged_against_contiguous, prefix_sharing, block_sizes, churn]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_every_benchmark_ends_with_a_whole_pool(monkeypatch, run):
    pools = []

    class Seen(BlockPool):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            pools.append(self)

    for module in ("generous_pool", "reservations", "churn"):
        monkeypatch.setattr(import_module(f"mie.bench.{module}"), "BlockPool", Seen)
    run(FEW)
    assert pools
    for pool in pools:
        pool.check(owners=[])
        assert pool.num_used == 0


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_a_leak_does_not_go_unseen(monkeypatch, run):
    monkeypatch.setattr(BlockTable, "release", lambda table: table.truncate(table.num_tokens // 2))
    with pytest.raises(AssertionError, match="owners and has"):
        run(FEW)


# -- the command and what it writes -------------------------------------------------------------


@pytest.fixture
def ready(monkeypatch, report):
    """The command finds the report made: what is tested is what it does with it."""
    module = import_module("mie.bench.memory")

    def made(seed, tell):
        tell("paged against contiguous")
        return report

    monkeypatch.setattr(module, "memory_report", made)


def bench(*arguments):
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


def test_every_table_and_its_reading_go_to_stdout(ready, report):
    result = bench("memory")
    assert result.exit_code == 0, result.stderr
    shown = " ".join(result.stdout.split())
    for table in memory_tables(report).values():
        assert table.title in shown and " ".join(table.reading.split()) in shown
        for row in table.rows:
            assert all(" ".join(cell.split()) in shown for cell in row), row
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_numbers_can_be_written_as_json(ready, tmp_path):
    file = tmp_path / "numbers.json"
    result = bench("memory", "--json", file)
    assert result.exit_code == 0, result.stderr
    assert file.read_text() == GOLDEN.read_text()
    assert file.name in result.stderr.replace("\n", "") and file.name not in result.stdout


def test_a_dash_means_standard_output_and_nothing_but_json_goes_there(ready, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = bench("memory", "--json", "-", "--report", "page.html")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == GOLDEN.read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("option", ["--json", "--report"])
def test_a_missing_folder_is_refused_before_the_work(monkeypatch, tmp_path, option):
    monkeypatch.setattr(import_module("mie.bench.memory"), "memory_report", None)
    result = bench("memory", option, tmp_path / "nowhere" / "file")
    assert result.exit_code == 2 and "there is no folder" in " ".join(result.stderr.split())


def test_a_file_that_cannot_be_written_is_one_clear_message(ready, tmp_path):
    result = bench("memory", "--json", tmp_path / ("x" * 300))
    assert result.exit_code == 1 and "cannot be written" in " ".join(result.stderr.split())


def test_a_report_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_plots, "find_spec", lambda name: None)
    monkeypatch.setattr(import_module("mie.bench.memory"), "memory_report", None)
    result = bench("memory", "--report", tmp_path / "page.html")
    assert result.exit_code == 1 and "pip install 'mie[book]'" in result.stderr


def test_the_help_names_both_benchmarks():
    shown = bench("--help").stdout
    assert "memory" in shown and "pool" in shown
    shown = " ".join(bench("memory", "--help").stdout.split())
    assert "--report" in shown and "'-' for standard output" in re.sub(r"[\s│]+", " ", shown)


@pytest.fixture(scope="module")
def page(report):
    return memory_page(report)


def test_the_report_is_written_and_repeatable(ready, tmp_path, page):
    file = tmp_path / "page.html"
    assert bench("memory", "--report", file).exit_code == 0
    assert file.read_text("utf-8") == page


def test_the_report_is_well_formed_and_needs_nothing_else(page):
    tree = Tree(page)
    assert len(tree.ids) == len(set(tree.ids))
    pointed = re.findall(r'url\(#([^)"]+)\)|href="#([^"]+)"', page)
    assert {a or b for a, b in pointed} <= set(tree.ids)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tree.tags}
    addresses = set(re.findall(r"https?://[^\"<\s]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_every_plot_in_the_report_has_its_words_and_its_table(page, report):
    tree = Tree(page)
    drawings = [svg for svg in tree.named("svg") if svg.get("role") == "img"]
    assert len(drawings) == len(ALL_FIGURES) == 6 and len(tree.named("table")) == 7
    shown = " ".join(tree.words)
    for table in memory_tables(report).values():
        assert all(cell in shown for row in table.rows for cell in row)


def test_a_plot_stands_above_its_own_table(page, report):
    """Whatever the order of either list: both go by the name of the benchmark."""
    tables = memory_tables(report)
    assert ALL_FIGURES.keys() < tables.keys()
    sections = page.replace("&#x27;", "'").split("<section>")[1:]
    assert len(sections) == len(tables)
    for (name, table), section in zip(tables.items(), sections, strict=True):
        assert f"<h2>{table.title}</h2>" in section
        titles = re.findall(r"<title>(.*?)</title>", section, re.S)
        expected = [ALL_FIGURES[name][1](getattr(report, name))] if name in ALL_FIGURES else []
        assert titles == expected


def test_a_plot_without_a_table_is_an_error(monkeypatch, report):
    """A benchmark that is added to one of the two is not left out of the page in silence."""
    monkeypatch.setitem(memory_plots.FIGURES, "another", memory_plots.FIGURES["churn"])
    with pytest.raises(AssertionError, match="another"):
        memory_page(report)


@pytest.mark.parametrize("name", ALL_FIGURES)
def test_words_say_what_the_plot_draws(report, name):
    figure_of, words_of = ALL_FIGURES[name]
    result = getattr(report, name)
    words = words_of(result)
    figure = figure_of(result)
    labels = [text.get_text() for panel in figure.axes for text in panel.texts]
    for label in labels:
        number = re.match(r"[\d.,]+", label)
        assert number and number[0] in words, label
    assert "None" not in words and "nan" not in words


@pytest.mark.parametrize("name", ALL_FIGURES)
def test_colour_is_never_alone(report, name):
    """Bars of one panel differ in hatching, lines in their dashes and markers."""
    for panel in ALL_FIGURES[name][0](getattr(report, name)).axes:
        hatches = [bars.patches[0].get_hatch() for bars in panel.containers]
        assert len(hatches) == len(set(hatches))
        looks = [(line.get_marker(), line.get_linestyle()) for line in panel.lines]
        assert len(looks) == len(set(looks))
