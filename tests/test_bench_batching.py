"""Schedules without a model count what a few lines of arithmetic count."""

from __future__ import annotations

from collections import deque

import pytest
from hash_seeds import outputs_of
from hypothesis import given
from hypothesis import strategies as st

from mie.bench import batching as module
from mie.bench.batching import batching
from mie.bench.counted_run import RunCounts, counted_run
from mie.bench.workloads import Request, mixed_requests
from mie.memory.manager import BlockManager
from mie.memory.prefix_cache import NoPrefixCache
from mie.scheduling.limits import Limits
from mie.scheduling.scheduler import Scheduler
from mie.scheduling.static import StaticScheduler

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=12)
ROWS = st.integers(1, 5)


def counted(scheduler: type[Scheduler], lengths: list[tuple[int, int]], rows: int) -> RunCounts:
    """In a pool where nothing is short, with a budget that cuts no prompt."""
    memory = BlockManager(500, 4, prefix_cache=NoPrefixCache)
    requests = [Request("any", prompt, answer, answer) for prompt, answer in lengths]
    return counted_run(scheduler(Limits(rows, 1000, 100), memory), requests)


def continuous_steps(answers: list[int], rows: int) -> int:
    waiting, running, steps = deque(answers), [], 0
    while waiting or running:
        while waiting and len(running) < rows:
            running.append(waiting.popleft())
        steps += 1
        running = [left - 1 for left in running if left > 1]
    return steps


@given(LENGTHS, ROWS)
def test_waves_are_rectangles(lengths, rows):
    counts = counted(StaticScheduler, lengths, rows)
    waves = [lengths[start : start + rows] for start in range(0, len(lengths), rows)]
    area = sum(
        len(wave) * (max(p for p, _ in wave) + max(a for _, a in wave) - 1) for wave in waves
    )
    assert counts.steps == sum(max(answer for _, answer in wave) for wave in waves)
    assert counts.computed_tokens == sum(p + a - 1 for p, a in lengths)
    assert counts.padding_tokens == area - counts.computed_tokens


@given(LENGTHS, ROWS)
def test_continuous_batches_agree_with_the_toy_and_hold_no_padding(lengths, rows):
    counts = counted(Scheduler, lengths, rows)
    answers = [answer for _, answer in lengths]
    assert counts.steps == continuous_steps(answers, rows)
    assert counts.padding_tokens == counts.recomputed_tokens == counts.preemptions == 0
    assert counts.computed_tokens == sum(p + a - 1 for p, a in lengths)
    assert counts.output_tokens == counts.sequence_steps == sum(answers)
    contexts = [sum(range(p, p + a)) for p, a in lengths]
    assert counts.context_tokens == sum(contexts)


@given(LENGTHS, ROWS)
def test_every_schedule_completes_all_and_chooses_as_many_tokens(lengths, rows):
    for scheduler in (Scheduler, StaticScheduler):
        counts = counted(scheduler, lengths, rows)
        assert counts.completed == len(lengths)
        assert counts.output_tokens == sum(answer for _, answer in lengths)
        assert counts.mean_running == pytest.approx(rows * counts.slot_use)
        assert 0 < counts.slot_use <= 1


@pytest.fixture(scope="module")
def result():
    short = [Request("any", 1 + 7 * n % 90, 1 + 5 * n % 40, 64) for n in range(40)]
    return batching(short)


def test_the_four_ways_do_the_same_work(result):
    runs = [result.run(n) for n in ("one at a time", "static", "static, exact", "continuous")]
    assert list(result.runs) == runs
    assert {run.counts.completed for run in runs} == {result.num_requests} == {40}
    assert len({run.counts.output_tokens for run in runs}) == 1
    assert runs[0].counts.steps == runs[0].counts.output_tokens
    assert runs[0].counts.padding_tokens == runs[3].counts.padding_tokens == 0
    assert all(run.counts.most_blocks < result.num_blocks for run in runs)


def test_seconds_follow_from_the_counts(result):
    for run in result.runs:
        counts = run.counts
        read = counts.steps * module.WEIGHT_BYTES + counts.context_tokens * module.BYTES_PER_TOKEN
        assert run.reading_seconds == pytest.approx(read / module.READ_BYTES_PER_S)
        assert run.derived_seconds == run.reading_seconds + run.computing_seconds
        assert run.derived_tokens_per_second == counts.output_tokens / run.derived_seconds


def test_no_more_than_the_first_requests_run(monkeypatch):
    monkeypatch.setattr(module, "NUM_REQUESTS", 3)
    assert batching(mixed_requests(count=5)) == batching(mixed_requests(count=3))


def test_another_hash_seed_counts_the_same():
    one, other = outputs_of(
        "from mie.bench.batching import *\n"
        "few = [Request('any', 1 + 7 * n % 90, 1 + 5 * n % 40, 64) for n in range(20)]\n"
        "print(batching(few).as_dict())"
    )
    assert one == other != ""
