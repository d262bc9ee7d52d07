"""The heart of the engine: schedule, run, update.

Invariant: every request that was accepted comes to exactly one end for each of its answers, and a
step that breaks off loses nothing: what it touched is computed again, and who asked is told.

    add(request) ──► waiting ──► running ──► outputs of step(): a token, an end, or both
                        ▲           │
                        └───────────┘  preempted

The scheduler decides, the runner computes, and neither knows the other: what passes between them is
a plan and a result.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mie.errors import RequestError
from mie.request import Request
from mie.scheduling.plan import SequenceOutput, StepPlan, StepResult
from mie.scheduling.scheduler import Scheduler
from mie.scheduling.trace import StepTimes, Trace


class EngineCore:
    """``run`` computes a plan: ``ModelRunner.run``, or whatever gives tokens for one."""

    def __init__(
        self,
        scheduler: Scheduler,
        run: Callable[[StepPlan], StepResult],
        trace: Trace | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.run = run
        self.trace = Trace() if trace is None else trace
        self._open: dict[str, int] = {}  # how many answers of each request have not ended

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def check(self, request: Request) -> None:
        """Raise what ``add`` would raise, and queue nothing."""
        self._refuse_taken(request.request_id)
        self.scheduler.check(request)

    def add(self, request: Request) -> None:
        """Queue a request. Raises at once, with nothing changed, if it can never be served."""
        self._refuse_taken(request.request_id)
        self.scheduler.add(request)
        self._open[request.request_id] = request.sampling.n

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is. Twice, too late or unknown: nothing happens."""
        self.scheduler.abort(request_id)

    def settle(self) -> list[SequenceOutput]:
        """Take in what is out and nobody waits for. Here nothing is out between two steps."""
        return []

    def step(self) -> list[SequenceOutput]:
        """One step for all sequences that run. Empty-handed only where nobody waits for anything.

        Raises whatever the runner raises; the engine can go on afterwards.
        """
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        try:
            record = self.trace.begin(plan, self.scheduler)
            planned = time.perf_counter()
            result = StepResult() if plan.is_empty else self.run(plan)
            ran = time.perf_counter()
            outputs = self.scheduler.update(plan, result)
        except BaseException:
            self.scheduler.failed(plan)
            raise
        self._close(outputs)
        idle = not (plan.scheduled or plan.preempted or outputs)
        assert not (idle and self.has_work), f"{plan} did nothing, and somebody waits"
        done = time.perf_counter()
        times = StepTimes(began, planned - began, ran - planned, done - ran)
        self.trace.end(record, outputs, times)
        return outputs

    def _refuse_taken(self, request_id: str) -> None:
        """Two requests of one name could not be told apart."""
        if request_id in self._open:
            raise RequestError(f"a request called {request_id!r} has not ended yet")

    def _close(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._open[output.request_id] -= 1
                if self._open[output.request_id] == 0:
                    del self._open[output.request_id]
