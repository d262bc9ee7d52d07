"""Timelines: the words tell every number of every step of a real run, a cell's pattern is what its
sequence did, and padding is where the rectangle of static batching has it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hash_seeds import outputs_of
from hypothesis import given
from hypothesis import strategies as st
from strict_html import Tree

from mie.engine.core import EngineCore
from mie.memory.manager import BlockManager
from mie.request import Request
from mie.sampling_params import SamplingParams
from mie.scheduling.limits import Limits
from mie.scheduling.plan import KINDS, StepPlan, StepResult
from mie.scheduling.scheduler import Scheduler
from mie.scheduling.static import StaticScheduler
from mie.scheduling.trace import StepRecord, StepTimes, Work
from mie.viz import Frame, Stepper, timeline, timeline_figure
from mie.viz.svg import WIDTH
from mie.viz.timeline_parts import BLOCKS, LEFT, STATES, TOKENS
from mie.viz.timeline_rows import rows_of

SVG = "{http://www.w3.org/2000/svg}"
ABORTED = 16  # the step before which a request is taken back


def compute(plan: StepPlan) -> StepResult:
    """A token for every draw, as a model would give them."""
    return StepResult({s.sequence_id: (7,) * len(s.draws) for s in plan.scheduled if s.draws})


def play(scheduler: Scheduler, requests, aborts=()) -> list[StepRecord]:
    """``requests``: (step of arrival, name, prompt, answer, n)."""
    core = EngineCore(scheduler, compute)
    waiting, step = sorted(requests, key=lambda each: each[0]), 0
    while waiting or core.has_work:
        while waiting and waiting[0][0] <= step:
            _, name, prompt, answer, n = waiting.pop(0)
            ids = tuple(100 + (ord(name[0]) * 31 + i * i) % 89 for i in range(prompt))
            core.add(Request(name, ids, SamplingParams(max_tokens=answer, n=n)))
        if step == ABORTED:
            for name in aborts:
                core.abort(name)
        core.step()
        step += 1
    return list(core.trace.records)


THREE = [(0, "a", 5, 8, 1), (0, "b", 2, 3, 1), (0, "c", 3, 5, 1), (0, "d", 6, 4, 1)]


def waves() -> list[StepRecord]:
    return play(StaticScheduler(Limits(3, 16, 64), BlockManager(40, 4)), THREE)


def refilled() -> list[StepRecord]:
    return play(Scheduler(Limits(3, 16, 64), BlockManager(40, 4)), THREE)


def chunks() -> list[StepRecord]:
    requests = [(0, "a", 5, 12, 1), (2, "long", 40, 4, 1), (3, "d", 7, 3, 1)]
    return play(Scheduler(Limits(4, 16, 128), BlockManager(60, 4)), requests)


def preempted() -> list[StepRecord]:
    """c has two answers; both are thrown out; x is aborted while it waits."""
    requests = [(0, "a", 9, 14, 1), (0, "b", 8, 14, 1), (1, "c", 10, 9, 2), (9, "x", 9, 30, 1)]
    return play(Scheduler(Limits(4, 16, 64), BlockManager(11, 4)), requests, aborts="x")


def swapped() -> list[StepRecord]:
    requests = [(0, "a", 9, 14, 1), (0, "b", 8, 14, 1), (1, "c", 10, 9, 1)]
    return play(Scheduler(Limits(4, 16, 64), BlockManager(11, 4, 12)), requests)


def exhausted() -> list[StepRecord]:
    requests = [(0, "a", 9, None, 1), (0, "b", 6, 9, 1)]
    return play(Scheduler(Limits(4, 200, 200), BlockManager(6, 4)), requests)


def crowd() -> list[StepRecord]:
    requests = [(i, f"request-{i}", 9 + i * 7 % 40, 5 + i * 5 % 21, 1) for i in range(20)]
    return play(Scheduler(Limits(12, 512, 1000), BlockManager(400, 16)), requests)


RUNS = (waves, refilled, chunks, preempted, swapped, exhausted, crowd)


@st.composite
def traces(draw) -> list[StepRecord]:
    seats, size = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4]))
    limits = Limits(seats, draw(st.integers(seats, 20)), 40)
    memory = BlockManager(draw(st.integers(44 // size + 1, 80 // size)), size, draw(st.just(0)))
    kind = draw(st.sampled_from([Scheduler, StaticScheduler]))
    count = draw(st.integers(1, 6))
    requests = [
        (
            draw(st.integers(0, 9)),
            "abcdef"[index],
            draw(st.integers(1, 16)),
            draw(st.integers(1, 12)),
            draw(st.integers(1, min(seats, 2))),
        )
        for index in range(count)
    ]
    return play(kind(limits, memory), requests, aborts=draw(st.sampled_from(["", "a"])))


# -- reading a drawing -----------------------------------------------------------------------------

PLAIN = {
    "Found in the prefix cache": "num_cached_tokens",
    "Copied": "blocks_copied",
    "Swapped out": "blocks_swapped_out",
    "Swapped in": "blocks_swapped_in",
}


def read_words(frame: Frame) -> tuple[StepRecord, dict[str, int], dict[str, float]]:
    """The record that the words of a step tell, the padding in its rows, and the shares."""
    facts: dict = {"number": int(frame.name.removeprefix("step ")), "work": ()}
    rows: dict[str, int] = {}
    shares = {"empty": 0.0, "saved": 0.0}
    said = {}
    for line in frame.text.split("\n"):
        if match := re.fullmatch(r"(\d+) of (\d+) tokens?(?:: (.+))?\.", line):
            said["tokens"] = int(match[1])
            facts["token_budget"] = int(match[2])
            pairs = re.findall(r"(\d+) (\w+)", match[3] or "")
            said["kinds"] = {kind: int(count) for count, kind in pairs}
        elif match := re.fullmatch(
            r"(\S+): (prefill|decode|recompute), (\d+) tokens? at (\d+)(?: to (\d+))?"
            r"(?:, (\d+) computed before)?(?:, (\d+) chosen)?\.",
            line,
        ):
            name, kind, *counts = match.groups()
            count, first, last, again, chosen = (int(each or 0) for each in counts)
            assert (last or first) == first + count - 1
            facts["work"] += (Work(name, kind, first, count, again, chosen),)
        elif match := re.fullmatch(r"Padding: (\d+) tokens?(?:; (.+))?\.", line):
            facts["num_padding"] = int(match[1])
            rows = {n: int(c) for n, c in re.findall(r"(\S+) (\d+)", match[2] or "")}
        elif match := re.fullmatch(r"Waiting: (\d+) sequences?, names not kept\.", line):
            facts["num_waiting"] = int(match[1])
        elif match := re.fullmatch(r"(Waiting|Waiting again|Preempted): (.+)\.", line):
            key = {"Waiting again": "returning"}.get(match[1], match[1].lower())
            facts[key] = tuple(match[2].split(", "))
        elif match := re.fullmatch(r"Ended: (.+)\.", line):
            facts["ended"] = tuple(re.findall(r"(\S+) \((\w+)\)", match[1]))
        elif match := re.fullmatch(r"Memory: (\d+) of (\d+) blocks? used(.*)\.", line):
            facts["used_blocks"], facts["usable_blocks"] = int(match[1]), int(match[2])
            for share, what in re.findall(r"([\d.]+) % (?:of their slots )?(\w+)", match[3]):
                shares[what] = float(share) / 100
        else:
            match = re.fullmatch(rf"({'|'.join(PLAIN)}): (\d+) (?:token|block)s?\.", line)
            assert match, f"unexpected: {line}"
            facts[PLAIN[match[1]]] = int(match[2])
    if "num_waiting" not in facts:
        facts["num_waiting"] = len(facts.get("waiting", ())) + len(facts.get("returning", ()))
    record = StepRecord(**facts)
    assert said["tokens"] == record.num_tokens
    assert said["kinds"] == {kind: record.count(kind) for kind in KINDS if record.count(kind)}
    return record, rows, shares


def boxes(frame: Frame) -> list[tuple[float, float, float, float, str]]:
    """Every filled box: left, top, width, height, fill."""
    found = []
    for path in ET.fromstring(frame.svg).findall(f"{SVG}path"):
        corners = re.findall(r"M([\d.-]+) ([\d.-]+)h([\d.]+)v([\d.]+)h-[\d.]+z", path.get("d", ""))
        found += [(*map(float, each), path.get("fill", "")) for each in corners]
    return found


def is_of(state: str, fill: str) -> bool:
    look = STATES[state]
    if look.pattern in ("solid", "empty"):
        return fill.startswith(f"var(--mie-{look.colour}")
    return f"-{look.pattern}-{look.colour})" in fill


def in_rows(frame: Frame, names) -> dict[str, list[tuple[float, float, float, str]]]:
    """Of each row: its boxes, as left edge, right edge, height and fill."""
    tops = {
        name: float(text.get("y"))
        for name in names
        for text in texts(frame)
        if text.get("x") == "2" and text.text in (name, f"…{name[-7:]}")
    }
    assert len(set(tops.values())) == len(names)
    found: dict = {name: [] for name in names}
    for x, y, width, height, fill in boxes(frame):
        for name, baseline in tops.items():
            if x >= LEFT and y < baseline < y + height and height < 24:
                found[name].append((x, x + width, height, fill))
    return found


def texts(frame: Frame) -> list[ET.Element]:
    return ET.fromstring(frame.svg).findall(f"{SVG}text")


def shown(frame: Frame) -> list[str]:
    return [text.text or "" for text in texts(frame)]


# -- the words -------------------------------------------------------------------------------------


def told(record: StepRecord) -> StepRecord:
    """What words can tell: without times, shares apart."""
    return replace(record, times=StepTimes(), internal_fragmentation=0.0, saved_by_sharing=0.0)


@given(traces())
def test_the_words_tell_every_number_of_every_step(records):
    for record, frame in zip(records, timeline(records[:60], "t").frames, strict=False):
        said, _, shares = read_words(frame)
        assert said == told(record)
        assert shares["empty"] == pytest.approx(record.internal_fragmentation, abs=0.00051)
        assert shares["saved"] == pytest.approx(record.saved_by_sharing, abs=0.00051)


@pytest.mark.parametrize("run", RUNS)
def test_the_runs_of_these_tests_are_told_as_well(run):
    records = run()
    for record, frame in zip(records, timeline(records, "t").frames, strict=True):
        assert read_words(frame)[0] == told(record)


def test_the_runs_of_these_tests_have_all_there_is():
    records = [record for run in RUNS for record in run()]
    assert {work.kind for record in records for work in record.work} == set(KINDS)
    assert {reason for r in records for _, reason in r.ended} == {"length", "abort", "kv_exhausted"}
    for number in ("num_padding", "preempted", "returning", "waiting", "saved_by_sharing"):
        assert any(getattr(record, number) for record in records), number
    for number in ("blocks_copied", "blocks_swapped_out", "blocks_swapped_in", "num_recomputed"):
        assert any(getattr(record, number) for record in records), number


def test_prefix_hits_and_crowds_without_names_are_told():
    record = StepRecord(3, 64, (Work("a", "prefill", 16, 2),), num_cached_tokens=16)
    text = timeline([replace(record, num_waiting=70)], "t").frames[0].text
    assert "Found in the prefix cache: 16 tokens." in text
    assert "Waiting: 70 sequences, names not kept." in text


def test_the_words_of_a_whole_run_add_up():
    records = preempted()
    head, most, *rows = timeline_figure(records, "t").text.split("\n")
    sums = {kind: sum(record.count(kind) for record in records) for kind in KINDS}
    total = sum(sums.values())
    assert head == (
        f"Steps 1 to {len(records)}: {total} tokens computed, {sums['prefill']} prefill, "
        f"{sums['decode']} decode, {sums['recompute']} recompute."
    )
    assert most.startswith("At most 16 of 16 tokens, in step 1; at most 10 of 10 blocks, in step ")
    assert [row.split(": ")[0] for row in rows] == ["a", "b", "c/0", "c/1", "x"]
    for row in rows:
        name, said = row.split(": ", 1)
        work = [work for record in records for work in record.work if work.name == name]
        counted = sum(int(count) for count in re.findall(r"of (\d+) in", said))
        assert counted == sum(each.num_tokens for each in work)
        end = next(r for r in records if name in dict(r.ended))
        assert said.endswith(f"ended in step {end.number} ({dict(end.ended)[name]}).")
        thrown_out = [r.number for r in records if name in r.preempted]
        assert [int(n) for n in re.findall(r"preempted, waiting again in steps? (\d+)", said)] == (
            thrown_out
        )
    assert "and 13 of padding." in timeline_figure(waves(), "t").text.split("\n")[0]


# -- padding ---------------------------------------------------------------------------------------


@given(traces())
def test_padding_is_in_the_rows_that_have_ended_or_are_shorter(records):
    rows = rows_of(records)
    for column, record in enumerate(records):
        padding = {n: row[column].padding for n, row in rows.items() if column in row}
        assert sum(padding.values()) in (0, record.num_padding)
        counts = {work.name: work.num_tokens for work in record.work}
        longest = max(counts.values(), default=0)
        ended = {name for r in records[:column] for name, _ in r.ended}
        for name, count in padding.items():
            assert count in (0, longest - counts.get(name, 0))
            assert not count or name in counts or name in ended


@pytest.mark.parametrize("n", [1, 2])
def test_a_wave_shows_all_of_its_padding(n):
    requests = [(0, "a", 5, 8, n), (0, "b", 2, 3, 1), (0, "d", 6, 4, 1), (0, "e", 1, 1, n)]
    records = play(StaticScheduler(Limits(3, 16, 64), BlockManager(40, 4)), requests)
    rows = rows_of(records)
    assert sum(record.num_padding for record in records) > 0
    for column, (record, frame) in enumerate(
        zip(records, timeline(records, "t").frames, strict=True)
    ):
        padding = {n: row[column].padding for n, row in rows.items() if column in row}
        assert sum(padding.values()) == record.num_padding
        assert read_words(frame)[1] == {name: count for name, count in padding.items() if count}


def test_padding_takes_its_share_of_a_cell_and_the_rest_of_a_row():
    frame = timeline(waves(), "t").frames[7]
    rows = in_rows(frame, "abcd")
    solid = next((left, right) for left, right, _, f in rows["b"] if is_of("prefill", f))
    first, rest = [(left, right) for left, right, _, f in rows["b"] if is_of("padding", f)]
    assert first[0] == pytest.approx(solid[1], abs=0.01)
    assert (first[1] - first[0]) / (first[1] - solid[0]) == pytest.approx(3 / 5, rel=1e-3)
    cell = first[1] - solid[0] + 2
    assert rest[1] - rest[0] == pytest.approx(5 * cell - 2, abs=0.01)  # ended in step 3 of 8
    assert not any(is_of("padding", fill) for *_, fill in rows["a"])


# -- the cells -------------------------------------------------------------------------------------


def test_every_state_has_a_pattern_of_its_own():
    assert len({look.pattern for look in STATES.values()}) == len(STATES) == 6


@given(traces(), st.integers(6, 30))
def test_every_cell_up_to_now_shows_what_its_sequence_did(records, window):
    records = records[:60]
    rows = rows_of(records)
    stepper = timeline(records, "t", window=window)
    columns = min(window, len(records))
    cell = min(26, (WIDTH - LEFT - 16) / columns)
    for now, frame in enumerate(stepper.frames):
        numbers = [t for t in texts(frame) if t.get("text-anchor") == "middle" and t.text.isdigit()]
        here = next(t for t in numbers if t.get("font-weight") and t.text == str(now + 1))
        first = now - round((float(here.get("x")) - LEFT) / cell - 0.5)
        assert 0 <= first <= now < first + columns <= len(records)
        drawn = in_rows(frame, rows)
        for name, row in rows.items():
            for column in range(first, first + columns):
                middle = LEFT + cell * (column - first) + cell * 0.1
                over = [fill for left, right, _, fill in drawn[name] if left <= middle <= right]
                patterns = [fill for fill in over if fill != "currentColor"]
                moment = row.get(column)
                if column > now or moment is None or moment.state is None:
                    assert patterns == []
                else:
                    assert len(patterns) == 1
                    assert is_of(moment.state, patterns[0])


def test_columns_to_come_are_shadows():
    records = refilled()
    first, *_, last = timeline(records, "t").frames
    faint = [p for p in ET.fromstring(first.svg).iter() if p.get("opacity") == "0.06"]
    work = sum(len(record.work) for record in records[1:])
    bars = sum(bool(record.count(kind)) for record in records[1:] for kind in KINDS)
    assert len(faint) == work + bars + len(records) - 1
    assert not [p for p in ET.fromstring(last.svg).iter() if p.get("opacity") == "0.06"]


def test_a_chunk_has_its_number_of_tokens_in_its_cell():
    records = chunks()
    frame = timeline(records, "t").frames[-1]
    sizes = [text.text for text in texts(frame) if text.get("font-size") == "10.5"]
    work = [work for record in records for work in record.work if work.num_tokens > 1]
    numbers = sorted(str(each.num_tokens) for each in work)
    assert len(numbers) > 4
    assert sorted(size for size in sizes if size.isdigit()) == numbers
    assert not [t for t in shown(timeline_figure(crowd(), "t"))[:200] if t in ("33", "37")]


def test_ends_and_preemptions_are_marked():
    def bars(frame: Frame) -> int:
        paths = ET.fromstring(frame.svg).findall(f"{SVG}path")
        return sum(path.get("opacity") == "0.95" for path in paths) - 1  # one in the legend

    for run in (waves, preempted, exhausted):
        records = run()
        frames = timeline(records, "t", window=30).frames
        for now, frame in enumerate(frames):
            assert bars(frame) == sum(len(record.ended) for record in records[: now + 1])
            drawn = shown(frame)
            thrown_out = sum(len(record.preempted) for record in records[: now + 1])
            assert drawn.count("P") == thrown_out + ("preempted" in drawn)
    drawn = shown(timeline(preempted(), "t", window=30).frames[-1])
    assert drawn.count("✗") == 2  # the end of x, and the legend
    assert "abort" in drawn
    drawn = shown(timeline(exhausted(), "t", window=30).frames[-1])
    assert drawn.count("!") == 2
    assert "kv_exhausted" in drawn
    assert "kv_exhausted" not in shown(timeline(refilled(), "t").frames[-1])


def test_answers_to_one_request_stand_together():
    first, then = (Work("r/0", "prefill", 0, 4), Work("s", "decode", 7, 1)), ("r/0", "s", "r/1")
    records = [
        StepRecord(1, 8, first, waiting=("t",)),
        StepRecord(2, 8, tuple(Work(name, "decode", 8, 1) for name in then)),
    ]
    assert list(rows_of(records)) == ["r/0", "r/1", "s", "t"]


def test_a_name_may_come_again():
    waves = [*THREE[:2], (9, "a", 4, 3, 1), (9, "b", 2, 1, 1)]
    records = play(StaticScheduler(Limits(3, 16, 64), BlockManager(40, 4)), waves)
    padding = {n: [m.padding for m in row.values()] for n, row in rows_of(records).items()}
    assert padding == {"a": [0] * 11, "b": [3, 0, 0, 1, 1, 1, 1, 1, 2, 1, 1]}
    twice = [StepRecord(n, 8, (Work("a", "decode", 5, 1),), ended=(("a", "stop"),)) for n in (1, 2)]
    said = "a: decode of 1 in step 1; ended in step 1 (stop); decode of 1 in step 2; ended in step"
    assert said in timeline_figure(twice, "t").text


# -- the strips ------------------------------------------------------------------------------------


def test_bars_of_tokens_and_blocks_are_to_scale():
    records = chunks()
    frame = timeline_figure(records, "t")
    strip = [box for box in boxes(frame) if box[1] >= 42 + 22 * 3 + 10 and box[0] >= LEFT]
    solid = [height for *_, height, fill in strip if is_of("prefill", fill) and height != 12]
    expected = [TOKENS * r.count("prefill") / 16 for r in records if r.count("prefill")]
    assert solid == pytest.approx(expected, rel=1e-3)
    base = 42 + 22 * 3 + 26 + TOKENS
    stacks: dict[float, list[float]] = {}
    for x, y, _, height, fill in strip:
        if y + height < base + 1 and not fill.startswith("var(--mie-grey"):
            stacks.setdefault(x, []).append(y)
    tops = [min(ys) for _, ys in sorted(stacks.items())]
    assert tops == pytest.approx([base - TOKENS * r.num_tokens / 16 for r in records], rel=1e-3)
    used = [box[3] for box in strip if box[4].startswith("var(--mie-grey") and box[3] != 12]
    assert used == pytest.approx([BLOCKS * r.used_blocks / 59 for r in records], rel=1e-3)


def test_a_budget_far_above_is_said_and_not_drawn():
    drawn = shown(timeline(crowd(), "t", every=5, names=["request-1"]).frames[-1])
    assert any("budget 512, beyond the picture" in text for text in drawn)
    assert "budget 16" in shown(timeline(chunks(), "t").frames[-1])


def test_the_strips_count_sequences_that_have_no_row():
    records = refilled()
    some, everything = (timeline(records, "t", names=n).frames[2] for n in ("b", None))
    assert some.text == everything.text
    assert set(in_rows(some, "b")) == {"b"}
    assert "a" not in shown(some)


# -- form ------------------------------------------------------------------------------------------


def overlaps(frame: Frame) -> list[tuple[str, str]]:
    """Texts that cover one another or leave the picture, by a rough measure of their width."""
    spans = []
    for text in texts(frame):
        words, size = text.text or "", float(text.get("font-size"))
        width = size * len(words) * 0.52
        shift = {"end": 1, "middle": 0.5}.get(text.get("text-anchor"), 0)
        left = float(text.get("x")) - shift * width
        spans.append((left, left + width, float(text.get("y")), size, words))
    found = [
        (words, "edge") for left, right, _, _, words in spans if left < -1 or right > WIDTH + 2
    ]
    for i, (left, right, y, size, words) in enumerate(spans):
        for other_left, other_right, other_y, other_size, other in spans[i + 1 :]:
            apart = 0.75 * min(size, other_size)
            if left < other_right and other_left < right and abs(y - other_y) < apart:
                found.append((words, other))
    return found


def pictures(run) -> list[Frame]:
    records = run()
    every = -(-len(records) // 40)
    return [*timeline(records, "A run", every=every).frames, timeline_figure(records, "A run")]


@pytest.mark.parametrize("run", RUNS)
def test_pages_are_well_formed_and_no_text_covers_another(run):
    *frames, figure = pictures(run)
    Tree(Stepper(frames, "A run").html())
    Tree(figure._repr_mimebundle_()["text/html"])
    assert len({ET.fromstring(frame.svg).get("viewBox") for frame in frames}) == 1
    for frame in (*frames, figure):
        root = ET.fromstring(frame.svg)
        assert [child.tag for child in root[:2]] == [f"{SVG}title", f"{SVG}desc"]
        assert root[1].text == frame.text
        assert overlaps(frame) == []


@pytest.mark.parametrize("run", RUNS)
def test_colours_follow_the_page(run):
    for frame in pictures(run):
        for element in ET.fromstring(frame.svg).iter():
            for channel in ("fill", "stroke"):
                value = element.get(channel, "none")
                assert re.fullmatch(r"none|currentColor|url\(#.+\)|var\(--mie-\w+, #\w+\)", value)


def test_awkward_names_stay_apart_and_harm_nothing():
    ends = [f'"<&{"x" * 40}{end}' for end in "12"]
    work = tuple(Work(name, "decode", 3, 1) for name in ends)
    stepper = timeline([StepRecord(1, 8, work, usable_blocks=4)], "<t>")
    Tree(stepper.html())
    drawn = shown(stepper.frames[0])
    assert {"…xxxxxx1", "…xxxxxx2"} <= set(drawn)


def test_times_make_no_difference():
    records = preempted()
    later = [replace(record, times=StepTimes(1.0, 2.0, 3.0, 4.0)) for record in records]
    assert timeline(records, "t").frames == timeline(later, "t").frames
    assert timeline_figure(records, "t") == timeline_figure(later, "t")


def test_the_same_run_gives_the_same_bytes_and_needs_no_torch():
    program = (
        "from mie.scheduling.trace import StepRecord, Work; from mie.viz import *\n"
        "work = [Work(n, 'prefill', 0, 3) for n in ('a', 'b/0', 'b/1')]\n"
        "ended = (('a', 'abort'), ('b/0', 'kv_exhausted'))\n"
        "records = [StepRecord(1, 8, tuple(work), ('c', 'd'), ended=ended, usable_blocks=9)]\n"
        "print(timeline(records, 'T').html(), timeline_figure(records, 'T').svg)\n"
        "import sys; assert 'torch' not in sys.modules"
    )
    runs = outputs_of(program)
    assert runs[0] == runs[1]


# -- what is shown of long runs --------------------------------------------------------------------


def test_every_and_steps_choose_the_frames():
    records = crowd()
    frames = timeline(records, "t", every=10).frames
    expected = [1, 11, 21, 31, len(records)]
    assert [frame.name for frame in frames] == [f"step {n}" for n in sorted({*expected})]
    frames = timeline(records, "t", steps=range(8, 13), names=["request-0"]).frames
    assert [frame.name for frame in frames] == [f"step {number}" for number in range(8, 13)]
    assert shown(frames[0]).count("8") == 1
    assert "7" not in shown(frames[0])


def test_steps_leave_out_sequences_that_are_not_there():
    records = waves()
    drawn = shown(timeline(records, "t", steps=range(1, 9)).frames[-1])
    assert "d" in drawn  # it waits
    drawn = shown(timeline(records, "t", steps=range(9, 99)).frames[-1])
    assert {"a", "b", "c"}.isdisjoint(drawn)


def test_a_timeline_refuses_what_it_cannot_draw():
    record = StepRecord(1, 8, usable_blocks=4)
    for draw in (timeline, timeline_figure):
        with pytest.raises(ValueError, match="the timeline 't' has no steps to show"):
            draw([], "t")
        with pytest.raises(ValueError, match="no record names z; there are a, b"):
            draw([replace(record, waiting=("a", "b"))], "t", names=["a", "z"])
        crowd = replace(record, waiting=tuple(f"r{i}" for i in range(33)))
        with pytest.raises(ValueError, match="33 sequences; a timeline has 32 rows"):
            draw([crowd], "t")
        draw([crowd], "t", names=crowd.waiting[:32])
    many = [replace(record, number=n) for n in range(1, 362)]
    with pytest.raises(ValueError, match="61 frames; a timeline has 60"):
        timeline(many[:61], "t")
    timeline(many[:60], "t")
    with pytest.raises(ValueError, match="361 steps; a picture shows 360"):
        timeline_figure(many, "t")
    timeline_figure(many[:360], "t")
    for window in (5, 31):
        with pytest.raises(ValueError, match=f"a window of {window} steps; it must be 6 to 30"):
            timeline(many[:9], "t", window=window)
    with pytest.raises(ValueError, match="every is 0; it must be at least 1"):
        timeline(many[:9], "t", every=0)
    with pytest.raises(ValueError, match="has no steps to show"):
        timeline(many[:9], "t", steps=range(50, 60))
