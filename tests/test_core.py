"""The loop around the scheduler: what it accepts ends, and a step that fails harms no answer."""

from __future__ import annotations

import pytest
from engine_harness import Harness, engine
from fake_runner import StepFailedError

from mie.engine.core import EngineCore
from mie.errors import PartError, RequestError
from mie.memory.manager import BlockManager
from mie.memory.prefix_cache import NoPrefixCache
from mie.request import FinishReason, Request
from mie.scheduling.limits import Limits
from mie.scheduling.plan import StepPlan, StepResult
from mie.scheduling.scheduler import Scheduler
from mie.scheduling.static import StaticScheduler
from mie.scheduling.trace import Trace


def busy(scheduler=Scheduler, host_blocks: int = 0, **memory) -> Harness:
    """Forks, chunks, preemptions and swaps: something is under way in each step."""
    harness = engine(
        11, token_budget=8, host_blocks=host_blocks, scheduler=scheduler, memory=memory
    )
    harness.ask("r0", 5, 14)
    harness.ask("r1", 9, 9, n=2, temperature=1.0, seed=1)
    harness.ask("r2", 14, 12)
    harness.ask("r3", 3, 12)
    return harness


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize(
    ("scheduler", "host_blocks", "memory"),
    [
        (Scheduler, 0, {}),
        (Scheduler, 0, {"prefix_cache": NoPrefixCache}),
        (Scheduler, 5, {"prefix_cache": NoPrefixCache}),
        (Scheduler, 30, {}),
        (StaticScheduler, 0, {}),
    ],
)
def test_the_engine_goes_on_after_any_step_has_failed(when, scheduler, host_blocks, memory):
    """One step after the other is the one that breaks off, and then all of them once."""
    harness = busy(scheduler, host_blocks, **memory)
    harness.drain()
    for failing in range(len(harness.plans)):
        again = busy(scheduler, host_blocks, **memory)
        for _ in range(failing):
            again.step()
        again.fake.fail_next = when
        with pytest.raises(StepFailedError):
            again.step()
        again.drain()
        again.is_right()
        assert again.tokens == harness.tokens


def test_steps_may_fail_again_and_again():
    harness = busy(host_blocks=5)
    for step in range(400):
        if not harness.core.has_work:
            break
        if step % 3:
            harness.fake.fail_next = ("before", "between", "after")[step % 3]
            with pytest.raises(StepFailedError):
                harness.step()
        else:
            harness.step()
    harness.is_empty()
    harness.is_right()


def test_a_failed_step_tells_nothing_and_loses_no_end():
    """An abort that came during the failing step is told by the next one."""
    harness = busy()
    harness.step()
    harness.fake.fail_next = "after"
    harness.abort_in_flight("r0")
    with pytest.raises(StepFailedError):
        harness.step()
    assert ("r0", 0) not in harness.ends
    harness.step()
    assert harness.ends["r0", 0] is FinishReason.ABORT
    harness.drain()
    harness.is_right()


def test_a_keyboard_interrupt_is_a_failed_step_too():
    harness = busy()
    harness.step()
    runner = harness.run

    def interrupted(plan: StepPlan) -> StepResult:
        raise KeyboardInterrupt

    harness.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        harness.step()
    harness.run = runner
    harness.drain()
    harness.is_right()


def test_without_work_a_step_is_empty_and_runs_nothing():
    harness = engine()
    assert not harness.core.has_work and harness.step() == []
    assert harness.fake.plans == [] and harness.plans[0].is_empty


def test_an_end_without_tokens_runs_nothing():
    harness = engine()
    harness.ask("r", 3)
    harness.abort("r")
    (output,) = harness.step()
    assert output.token_id is None and output.finish_reason is FinishReason.ABORT
    assert harness.fake.plans == []


def test_an_engine_that_stands_still_says_so():
    """It must never spin. Here a queue hides the one that it holds."""
    harness = engine()
    harness.ask("r", 3)
    harness.scheduler.waiting.peek = lambda: None
    with pytest.raises(AssertionError, match="did nothing"):
        harness.core.step()


@pytest.mark.parametrize("capacity", [0, 3])
def test_a_trace_decides_nothing(capacity):
    """With a trace, with a short one, or without: the same plans."""
    harness = busy()
    harness.core.trace = Trace(capacity)
    harness.drain()
    with_all = busy()
    with_all.drain()
    assert list(map(repr, harness.plans)) == list(map(repr, with_all.plans))
    assert harness.tokens == with_all.tokens
    records = list(harness.core.trace.records)
    assert [r.number for r in records] == [p.number for p in harness.plans][
        len(harness.plans) - capacity :
    ]


def test_a_core_has_a_trace_of_its_own():
    scheduler = Scheduler(Limits(1, 4, 9), BlockManager(5, 4))
    core = EngineCore(scheduler, lambda plan: StepResult({1: (7,)}))
    core.add(Request("r", (1, 2)))
    core.step()
    assert len(core.trace.records) == 1


def test_an_id_is_taken_until_its_request_has_ended():
    """Else two requests' outputs could not be told apart, and an abort would end both."""
    harness = engine(20)
    harness.ask("same", 4, 2)
    with pytest.raises(RequestError, match="'same' has not ended"):
        harness.core.add(Request("same", (1, 2, 3)))
    harness.drain()
    harness.is_right()
    harness.core.add(Request("same", (1, 2, 3)))  # it has ended: the name is free


def test_the_engine_goes_on_after_a_policy_that_broke():
    """What was planned before the policy was asked is undone when the next step begins."""
    broken = [True]

    def policy(candidates):
        return None if broken[0] else candidates[-1]

    harness = engine(9, memory={"prefix_cache": NoPrefixCache}, victim_policy=policy)
    for number in range(4):
        harness.ask(f"r{number}", 5 + number, 9)
    with pytest.raises(PartError, match="None"):
        while True:  # step() would look at the tables before the next step has begun
            for output in harness.core.step():
                harness._take(output)
    broken[0] = False
    harness.drain()
    harness.is_right()


@pytest.mark.parametrize("step", range(1, 9))
@pytest.mark.parametrize(
    "where",
    [
        "scheduler._begin_step",
        "scheduler._grow_running",
        "scheduler._make_plan",
        "trace.begin",
        "run",
        "scheduler._computed",
        "scheduler._forks",
        "scheduler._reap",
        "scheduler.memory.prefix_cache.insert",
        "scheduler.memory.copies.take",
        "scheduler.memory.host.take",
        "scheduler.memory.launched",
    ],
)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("host_blocks", [0, 20])
def test_the_engine_goes_on_after_an_interrupt_anywhere(
    monkeypatch, where, step, before, host_blocks
):
    """Before or after each part of a step: no token lost, none told twice, no block leaked."""
    harness = busy(host_blocks=host_blocks)
    for _ in range(step):
        harness.step()
    *path, name = where.split(".")
    owner = harness.core
    for part in path:
        owner = getattr(owner, part)
    real = getattr(owner, name)

    times = []

    def interrupted(*arguments):
        result = None if before and not times else real(*arguments)
        times.append(1)
        if len(times) == 1:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        try:
            for output in harness.core.step():
                harness._take(output)
        except KeyboardInterrupt:
            pass
    harness.drain()
    harness.is_right()
