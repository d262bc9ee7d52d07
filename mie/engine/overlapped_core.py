"""The heart of the engine where the device works by itself: the next step is launched before the
tokens of this one are known.

Invariant: there is one order. Steps are planned, launched, brought back and taken in one after the
other; only that two are out at once. So the same tokens come out as of ``EngineCore``, and a step
that breaks off takes the one behind it along.

    EngineCore         CPU   plan 1 | launch 1 | wait . . . . . . | take in 1 | plan 2 | launch 2
                       GPU                     | step 1 . . . . . |                    | step 2

    OverlappedCore     CPU   plan 2 | launch 2 | wait . . . . | take in 1 | plan 3 | launch 3 | wait
                       GPU   step 1 . . . . . . . . . . . . . | step 2 . . . . . . . . . . . . . |

A step is planned without its last tokens: ``mie.request`` counts them as pending, and the device
has them. Where that is not enough (somebody would have to be thrown out, or has ended), the
scheduler asks for the step before to come back first. An end that is seen one step late costs a
token that is computed and thrown away. After vLLM's asynchronous scheduling and NanoFlow (Zhu et
al., 2024).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from mie.engine.core import EngineCore
from mie.scheduling.plan import SequenceOutput, StepPlan, StepResult, StepsInFlightError
from mie.scheduling.scheduler import Scheduler
from mie.scheduling.trace import StepRecord, StepTimes, Trace


class Launched(Protocol):
    """A step that the device works on."""

    def result(self) -> StepResult:
        """Wait for it, and say which tokens it chose."""
        ...


class Flight(NamedTuple):
    """A step that is out, and what is known of it."""

    plan: StepPlan
    launched: Launched
    record: StepRecord | None
    times: StepTimes  # until it was launched


class OverlappedCore(EngineCore):
    """``launch`` begins a step and returns at once; ``depth`` steps are out together."""

    def __init__(
        self,
        scheduler: Scheduler,
        launch: Callable[[StepPlan], Launched],
        trace: Trace | None = None,
        depth: int = 2,
    ) -> None:
        assert depth >= 1, f"{depth} steps at once"
        super().__init__(scheduler, lambda plan: launch(plan).result(), trace)
        scheduler.max_in_flight = depth
        self.launch = launch
        self.depth = depth
        self._flights: deque[Flight] = deque()
        self._landed = 0.0  # when the last step came back

    def step(self) -> list[SequenceOutput]:
        """Launch what can be launched, then take in the oldest step. As ``EngineCore.step``."""
        plan = StepPlan(0, 0)
        try:
            while len(self._flights) < self.depth:
                plan = self.scheduler.schedule()
                self._flights.append(self._begin(plan))
                if not plan.scheduled:
                    break
        except StepsInFlightError:
            pass
        except BaseException:
            self._lose_all(plan)
            raise
        return self._land()

    def settle(self) -> list[SequenceOutput]:
        """Take in what is out and nobody waits for: all of its sequences have ended."""
        outputs: list[SequenceOutput] = []
        while self._flights and self.scheduler.has_only_ended:
            outputs += self._land()
        return outputs

    def _begin(self, plan: StepPlan) -> Flight:
        began = time.perf_counter()
        record = self.trace.begin(plan, self.scheduler)
        planned = time.perf_counter()
        launched: Launched = NOTHING if plan.is_empty else self.launch(plan)
        return Flight(plan, launched, record, StepTimes(began, planned - began))

    def _land(self) -> list[SequenceOutput]:
        """The oldest step comes back."""
        plan, launched, record, times = self._flights[0]
        try:
            result = launched.result()
            ran = time.perf_counter()
            self._flights.popleft()
            outputs = self.scheduler.update(plan, result)
        except BaseException:
            self._lose_all(plan)
            raise
        self._close(outputs)
        idle = not (plan.scheduled or plan.preempted or outputs or self._flights)
        assert not (idle and self.has_work), f"{plan} did nothing, and somebody waits"
        began = max(times.start + times.schedule, self._landed)  # behind the step before
        self._landed = ran
        update = time.perf_counter() - ran
        start, run = began - times.schedule, ran - began
        self.trace.end(record, outputs, StepTimes(start, times.schedule, run, update))
        return outputs

    def _lose_all(self, plan: StepPlan) -> None:
        """Whatever is out is computed again."""
        self._flights.clear()
        self.scheduler.failed(plan)


class _Nothing:
    def result(self) -> StepResult:
        return StepResult()


NOTHING = _Nothing()
