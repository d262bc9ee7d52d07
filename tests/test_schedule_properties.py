"""For any schedule the tokens are those of the plain loop.

A case is an engine, requests, and when everything happens: ``support/schedules.py``. It varies the
sizes of blocks, pool, host pool, budget and batch, the prefix cache, the queue, the scheduler, the
victim policy, arrivals, aborts, failing steps, greedy and seeded sampling, and the operations. All
of K and V is NaN at first, so what is read and was not written shows.

Between any two steps ``support/engine_harness.py`` looks whether a block leaks, a limit is broken
or a token comes twice; at the end everything is empty, and each answer is held against the
definition: the whole text computed at once, alone.

    cases                                       short     long (MIE_PROFILE=long)
    a small random model in float32               100      2,000
    a device of dictionaries, exact               400     10,000
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from engine_harness import Harness
from fake_runner import StepFailedError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedules import ASKS, CASES, SETTINGS, Ask, Case, Setting
from tiny_decoder import count_near_ties, tiny_decoder

from mie.execution.kv_cache import PagedKVCache
from mie.execution.model_runner import ModelRunner
from mie.memory.manager import BlockManager
from mie.request import FinishReason
from mie.scheduling.plan import StepPlan, StepResult

LONG = settings.get_current_profile_name() == "long"
COUNTS: Counter[str] = Counter()


class Model:
    """The small model on poisoned memory, with steps that may break off."""

    def __init__(self, memory: BlockManager, fused: bool) -> None:
        decoder, pool = tiny_decoder(fused), memory.pool
        cache = PagedKVCache.for_decoder(decoder, pool.num_blocks, pool.block_size)
        self.runner = ModelRunner(decoder, cache, memory.host.num_blocks)
        for bytes_of in (cache, self.runner.swap_space):
            bytes_of.kv_L2NBGD.fill_(float("nan"))
        self.fail_next: str | None = None

    def fail(self, when: str) -> None:
        self.fail_next = when

    def run(self, plan: StepPlan) -> StepResult:
        failing, self.fail_next = self.fail_next, None
        if failing == "before":
            raise StepFailedError
        if failing == "between":
            self.runner.run(replace(plan, scheduled=()))
            raise StepFailedError
        result = self.runner.run(plan)
        if failing == "after":
            raise StepFailedError
        return result


def on_the_model(case: Case) -> Harness:
    memory = case.memory()
    model = Model(memory, case.setting.fused)
    harness = case.harness(memory, model.run)
    case.drive(harness, model.fail)
    for (request_id, index), reason in harness.ends.items():
        request, answer = harness.requests[request_id], harness.answer(request_id, index)
        harness.ends_rightly(request, answer, reason)
        if answer:
            harness.counts["near ties"] += count_near_ties(request, index, answer)
            harness.counts["tokens"] += len(answer)
    return harness


def on_the_fake_device(case: Case) -> Harness:
    harness = case.harness(case.memory())
    case.drive(harness, lambda when: setattr(harness.fake, "fail_next", when))
    harness.is_right()
    assert harness.counts["failed"] or harness.fake.num_recomputed == harness.counts["recomputed"]
    harness.counts["tokens"] += sum(map(len, harness.tokens.values()))
    return harness


def counted(harness: Harness) -> Harness:
    COUNTS.update(harness.counts)
    COUNTS["cases"] += 1
    return harness


@pytest.mark.parametrize(
    ("run", "short", "long"),
    [(on_the_model, 100, 2_000), (on_the_fake_device, 400, 10_000)],
)
def test_for_any_schedule_the_tokens_are_those_of_the_plain_loop(run, short, long):
    """And nearly every kind of trouble has come up meanwhile, or the cases prove nothing."""
    cases = long if LONG else short
    COUNTS.clear()

    @settings(max_examples=cases, suppress_health_check=list(HealthCheck))
    @given(CASES)
    def every_case(case: Case) -> None:
        counted(run(case))

    every_case()
    print(f"{run.__name__}:", ", ".join(f"{n:,} {what}" for what, n in sorted(COUNTS.items())))
    assert COUNTS["cases"] >= cases
    assert COUNTS["near ties"] <= COUNTS["tokens"] / 10_000 + 1
    troubles = ["preempted", "recomputed", "blocks out", "blocks in", "blocks copied", "failed"]
    for trouble in [*troubles, "refused", *FinishReason]:
        assert COUNTS[trouble] >= cases / 20, f"{trouble}: {COUNTS}"


@settings(max_examples=1_000 if LONG else 60, suppress_health_check=list(HealthCheck))
@given(
    settings_of=st.tuples(SETTINGS, SETTINGS),
    asks=st.lists(ASKS, min_size=2, max_size=6).map(tuple),
    data=st.data(),
)
def test_batch_mates_and_order_of_arrival_change_no_answer(settings_of, asks, data):
    """Other company, another order, another engine: as far as both answer, they say the same."""
    order = data.draw(st.permutations(range(len(asks))))
    left = order[data.draw(st.integers(0, len(order) - 1)) :]
    first = on_the_fake_device(Case(settings_of[0], asks))
    again = on_the_fake_device(Case(settings_of[1], tuple(asks[number] for number in left)))
    for place, number in enumerate(left):
        for index in range(asks[number].n):
            one, two = first.answer(f"r{number}", index), again.answer(f"r{place}", index)
            both = min(len(one), len(two))
            assert one[:both] == two[:both]


def test_the_oracle_sees_a_wrong_token():
    """Otherwise the tests above would pass on anything."""
    ask = Ask((1, 9), 12, 0.0, 1, 1, False, 0, 0, None, False, "")
    setting = Setting(4, 9, 0, 4, 9, 60, "hash", "continuous", "first come", "any", False)
    case = Case(setting, (ask, replace(ask, temperature=1.0)))
    harness = on_the_model(case)
    for name in ("r0", "r1"):
        request, answer = harness.requests[name], harness.answer(name)
        for place in range(len(answer)):
            wrong = [*answer]
            wrong[place] = (wrong[place] + 1) % 31
            with pytest.raises(AssertionError, match="tokens"):
                count_near_ties(request, 0, wrong)
