"""Plans print as what they are; traces say what happened, to the tools that draw them as well."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from itertools import pairwise

import pytest
from engine_harness import Harness, engine

from mie.memory.block_copies import BlockCopy
from mie.memory.block_pool import blocks_needed
from mie.memory.prefix_cache import NoPrefixCache
from mie.memory.swap import SwapIn, SwapOut
from mie.request import Request, Sequence
from mie.sampling_params import Draw
from mie.scheduling.plan import KINDS, ScheduledSequence, StepPlan, StepResult
from mie.scheduling.planned import planned
from mie.scheduling.static import StaticScheduler
from mie.scheduling.trace import NAMES_KEPT, StepTimes, Trace, to_json, to_perfetto


def scheduled(name: str, position: int, count: int) -> ScheduledSequence:
    tokens = tuple(range(count))
    return ScheduledSequence(1, name, "decode", tokens, position, (1,), 4, ())


@pytest.fixture(scope="module")
def run() -> Harness:
    """Chunks, forks, preemptions, swaps, recomputing, and a prefix that is found."""
    harness = engine(11, token_budget=8, host_blocks=4, max_num_seqs=4)
    harness.ask("first", tuple(range(12)), 14)
    harness.step()
    harness.step()
    harness.ask("again", (*range(10), 3), 3)
    for number in range(4):
        harness.ask(f"r{number}", 7, 14, n=1 + number % 2)
    harness.drain()
    harness.is_right()
    return harness


# -- plans ---------------------------------------------------------------------------------------


def test_a_plan_prints_as_in_its_docstring():
    plan = StepPlan(
        7,
        64,
        (scheduled("a", 40, 1), scheduled("b", 21, 1), scheduled("c", 0, 33)),
        preempted=("d", "e"),
    )
    assert repr(plan) == "step 7: 35 of 64 tokens: a[40] b[21] c[0:33], 2 preempted"


def test_what_moves_is_counted_and_an_empty_plan_says_so():
    assert repr(StepPlan(3, 8)) == "step 3: 0 of 8 tokens" and StepPlan(3, 8).is_empty
    full = StepPlan(
        4,
        8,
        (scheduled("a", 0, 2),),
        (BlockCopy(1, 2),),
        (SwapOut(3, 0),),
        (SwapIn(1, 4),) * 2,
        ("b",),
        num_padding=3,
    )
    assert repr(full) == (
        "step 4: 2 of 8 tokens: a[0:2], 3 padding, 1 blocks copied, 1 blocks out, 2 blocks in, "
        "1 preempted"
    )
    for part in ("copies", "swap_out", "swap_in"):
        assert not StepPlan(1, 8, **{part: getattr(full, part)}).is_empty
    assert StepPlan(1, 8, preempted=("b",)).is_empty, "there is nothing to run"


def test_a_result_prints_its_tokens():
    assert repr(StepResult({4: (17,), 9: (3, 5)})) == "StepResult(4: 17; 9: 3, 5)"


def test_a_plan_does_not_change_when_its_sequence_does():
    harness = engine()
    sequence = Sequence(Request("r", (4, 5, 6, 7, 8)), 1, 1, 9)
    sequence.table = harness.memory.empty_table()
    sequence.table.append(5)
    plan = planned(sequence, 5)
    before = plan._asdict()
    sequence.num_computed = 5
    sequence.append(3)
    sequence.table.append(1)
    sequence.table.release()
    assert plan._asdict() == before
    with pytest.raises(AttributeError):
        plan.position = 3


def test_what_a_plan_says_of_a_sequence():
    """A chunk draws nothing; the last one draws for each answer; afterwards one token at a time."""
    harness = engine(token_budget=4)
    harness.ask("r", (4, 5, 6, 7, 8, 9), 3, n=2, temperature=0.5, seed=8)
    harness.drain()
    chunk, last, decode = (plan.scheduled[0] for plan in harness.plans[:3])
    assert (chunk.token_ids, chunk.position, chunk.draws) == ((4, 5, 6, 7), 0, ())
    assert last.token_ids == (8, 9) and last.num_tokens == 6 and last.num_new == 2
    assert last.draws == (Draw(0.5, 8, 6, 0), Draw(0.5, 8, 6, 1))
    assert decode.draws == (Draw(0.5, 8, 7, 0),) and decode.num_new == 1
    assert [s.kind for s in (chunk, last, decode)] == ["prefill", "prefill", "decode"]


def test_a_table_that_does_not_fit_the_plan_is_noticed():
    harness = engine()
    sequence = Sequence(Request("r", (4, 5, 6)), 1, 1, 9)
    sequence.table = harness.memory.empty_table()
    sequence.table.append(2)
    with pytest.raises(AssertionError, match="3 planned"):
        planned(sequence, 3)


# -- records -------------------------------------------------------------------------------------


def test_one_record_a_step_and_it_says_what_the_plan_did(run):
    records = list(run.core.trace.records)
    assert [record.number for record in records] == [plan.number for plan in run.plans]
    for record, plan in zip(records, run.plans, strict=True):
        assert record.num_tokens == plan.num_tokens and record.num_running == len(plan.scheduled)
        assert [work.name for work in record.work] == [s.name for s in plan.scheduled]
        assert record.preempted == plan.preempted and record.token_budget == 8
        assert record.blocks_copied == len(plan.copies)
        assert record.blocks_swapped_out == len(plan.swap_out)
        assert record.blocks_swapped_in == len(plan.swap_in)
        assert record.num_sampled == sum(len(s.draws) for s in plan.scheduled)
        assert sum(map(record.count, KINDS)) == record.num_tokens
        assert record.num_waiting == len(record.waiting) + len(record.returning)
        assert record.used_blocks <= record.usable_blocks == 11


def test_the_counters_add_up_to_the_run(run):
    records = run.core.trace.records
    assert sum(record.num_sampled for record in records) == sum(map(len, run.tokens.values()))
    assert sum(record.num_recomputed for record in records) == run.fake.num_recomputed > 0
    ended = Counter(name for record in records for name, _ in record.ended)
    assert {*ended.values()} == {1} and len(ended) == len(run.ends)
    assert {name for name, _ in run.ends} == {name.partition("/")[0] for name in ended}
    assert any(record.blocks_swapped_in for record in records)
    assert any(record.blocks_copied for record in records)
    assert any(record.num_cached_tokens for record in records)
    assert any(record.returning for record in records) and any(r.waiting for r in records)
    computed = Counter()
    for record in records:
        for work in record.work:
            computed[work.name] += work.num_tokens - work.num_recomputed
    assert computed["first"] == 12 + 14 - 1


def test_memory_in_a_record_is_that_of_the_running():
    harness = engine(20, memory={"prefix_cache": NoPrefixCache})
    harness.ask("a", 6, 4)
    harness.ask("b", 3, 4, n=2)
    harness.step()
    record = harness.core.trace.records[0]
    assert record.used_blocks == blocks_needed(6, 4) + 1 and record.usable_blocks == 20
    assert record.internal_fragmentation == pytest.approx(1 - 9 / 12)
    harness.step()
    record = harness.core.trace.records[1]
    assert record.used_blocks == 2 + 2 and record.saved_by_sharing == 0, "the fork has split"


def test_many_waiting_names_are_counted_and_not_kept():
    harness = engine(max_num_seqs=1)
    for number in range(NAMES_KEPT + 3):
        harness.ask(f"r{number}", 2, 1)
    harness.drain()
    first, _, third, *_ = harness.core.trace.records
    assert (first.num_waiting, first.waiting) == (NAMES_KEPT + 2, ())
    assert (third.num_waiting, len(third.waiting)) == (NAMES_KEPT, NAMES_KEPT)


def test_padding_is_in_the_record():
    harness = engine(scheduler=StaticScheduler)
    harness.ask("a", 5, 3)
    harness.ask("b", 2, 1)
    harness.drain()
    assert [record.num_padding for record in harness.core.trace.records] == [3, 1, 1]


def test_clear_forgets_all(run):
    trace = Trace(5)
    trace.records.extend(list(run.core.trace.records)[:2])
    began = trace.began
    trace.clear()
    assert not trace.records and trace.began > began


# -- for other tools -----------------------------------------------------------------------------


def test_json_has_every_record_and_its_sums(run):
    records = list(run.core.trace.records)
    loaded = json.loads(to_json(records))
    assert len(loaded) == len(records)
    for entry, record in zip(loaded, records, strict=True):
        assert entry["num_tokens"] == record.num_tokens
        assert entry["num_recomputed"] == record.num_recomputed
        assert entry["work"] == [asdict(work) for work in record.work]
        assert entry["times"] == asdict(record.times)
    assert json.loads(to_json([])) == []


def test_perfetto_gets_slices_that_nest_and_counters(run):
    records = list(run.core.trace.records)
    events = json.loads(to_perfetto(records))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "engine", 2: "sequences"}
    rows = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in slices} == rows, "each row has a name and slices"
    assert len(rows) == 1 + len({work.name for record in records for work in record.work})
    for row in rows:
        spans = sorted((e["ts"], e["dur"]) for e in slices if (e["pid"], e["tid"]) == row)
        for (start, duration), (following, _) in pairwise(spans):
            assert duration >= 0 and start + duration <= following + 1e-3, "in one row, one by one"
    inside = [(e["ts"], e["ts"] + e["dur"]) for e in slices if e["name"] == "run"]
    for event in slices:
        if event["pid"] == 2:
            begin, end = event["ts"], event["ts"] + event["dur"]
            assert any(b - 1e-3 <= begin and end <= e + 1e-3 for b, e in inside)
    counters = Counter(e["name"] for e in events if e["ph"] == "C")
    assert counters == dict.fromkeys(("tokens", "blocks", "waiting"), len(records))
    tokens = [e["args"] for e in events if e["name"] == "tokens"]
    assert [args["prefill"] + args["decode"] + args["recompute"] for args in tokens] == [
        record.num_tokens for record in records
    ]
    assert {e["name"] for e in slices} == {"schedule", "run", "update", *KINDS}


def test_times_are_those_of_the_clock_since_the_trace_began():
    trace = Trace()
    scheduler = engine().scheduler
    record = trace.begin(StepPlan(1, 8), scheduler)
    trace.end(record, [], StepTimes(trace.began + 2.0, 0.25, 0.5, 0.125))
    (kept,) = trace.records
    assert kept.times.start == pytest.approx(2.0) and kept.times.total == 0.875
