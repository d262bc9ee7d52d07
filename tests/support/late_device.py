"""A device that is behind: what is launched happens when somebody waits for it, and in order.

Invariant: between launch and result nothing is looked at, as on a GPU: the plans are carried out
one after the other, each with the tokens that the one before has chosen. So a plan that counts on
what the CPU did meanwhile, or on a token that was never chosen, goes wrong here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mie.scheduling.plan import PENDING, ScheduledSequence, StepPlan, StepResult


class LateDevice:
    """``run`` carries out one plan in which every token is known."""

    def __init__(self, run: Callable[[StepPlan], StepResult]) -> None:
        self.run = run
        self._queue: deque[LateStep] = deque()
        self._last: dict[int, int] = {}  # by sequence id: the token chosen last

    def launch(self, plan: StepPlan) -> LateStep:
        step = LateStep(self, plan)
        self._queue.append(step)
        return step

    def work_until(self, step: LateStep) -> None:
        """Carry out everything up to ``step``. What fails takes along what is behind it."""
        while step.tokens is None:
            first = self._queue.popleft()
            try:
                first.tokens = self.run(self._known(first.plan))
            except BaseException:
                self._queue.clear()
                raise
            for sequence_id, tokens in first.tokens.tokens.items():
                self._last[sequence_id] = tokens[0]

    def _known(self, plan: StepPlan) -> StepPlan:
        """``plan`` with the tokens that only the device has."""
        return StepPlan(**{**vars(plan), "scheduled": tuple(map(self._filled, plan.scheduled))})

    def _filled(self, scheduled: ScheduledSequence) -> ScheduledSequence:
        if PENDING not in scheduled.token_ids:
            return scheduled
        *known, last = scheduled.token_ids
        assert last == PENDING and PENDING not in known, f"{scheduled}: {scheduled.token_ids}"
        return scheduled._replace(token_ids=(*known, self._last[scheduled.sequence_id]))


class LateStep:
    """A step that has been launched."""

    def __init__(self, device: LateDevice, plan: StepPlan) -> None:
        self.device = device
        self.plan = plan
        self.tokens: StepResult | None = None

    def result(self) -> StepResult:
        self.device.work_until(self)
        assert self.tokens is not None
        return self.tokens
