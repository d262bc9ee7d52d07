"""Schedulers and queues with one rule dropped: what the tests of known bugs must fail on.

Invariant: each class here makes one sentence of a docstring of ``mie.scheduling`` untrue, and
nothing else that the test needs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mie.memory.block_table import BlockTable
from mie.request import Request, Sequence
from mie.scheduling.limits import max_output
from mie.scheduling.plan import SequenceOutput, StepPlan, StepResult
from mie.scheduling.queue import FirstComeFirstServed, StrictPriority
from mie.scheduling.scheduler import Scheduler

ENDLESS = 1 << 30  # blocks

# -- what is refused, what ends (S1 to S4) -------------------------------------------------------


class AssertsThatMemorySuffices(Scheduler):
    """A sequence that cannot grow is a bug of somebody else."""

    def _grow(self, sequence: Sequence) -> None:
        super()._grow(sequence)
        assert sequence.finish_reason is None, "nothing scheduled"


class TriesAgainForEver(Scheduler):
    """Whoever has outgrown all memory waits for more."""

    def _next_in_line(self) -> Sequence | None:
        return self.waiting.peek()


class AcceptsWhatNeverFits(Scheduler):
    """Looks at the length of the context alone."""

    def add(self, request: Request) -> Sequence:
        size = self.memory.pool.block_size
        output = max_output(request, self.limits, ENDLESS, size)
        sequence = Sequence(request, self._next_id(), self._next_id(), output)
        self.waiting.add(sequence)
        return sequence


class WantsRoomForTheLastToken(Scheduler):
    """Counts a slot for the last token, which nobody computes."""

    def add(self, request: Request) -> Sequence:
        longer = replace(request, prompt=(*request.prompt, 0))
        limits = replace(self.limits, max_model_len=self.limits.max_model_len + 1)
        max_output(longer, limits, self.memory.num_usable_blocks, self.memory.pool.block_size)
        return super().add(request)


class HasItsOwnLimit(Scheduler):
    """Admits by another length than the one that the runner was made for."""

    def add(self, request: Request) -> Sequence:
        own = self.limits
        self.limits = replace(own, max_model_len=own.max_model_len + 1)
        try:
            return super().add(request)
        finally:
            self.limits = own


class CountsTokensInsteadOfBlocks(Scheduler):
    """Admits while the slots of the free blocks are as many as the tokens."""

    def _place(self, sequence: Sequence, spare: int) -> BlockTable | None:
        table = self.memory.table(sequence.token_ids, sequence.request.salt)
        slots = (self.memory.num_usable_blocks) * self.memory.pool.block_size
        taken = sum(each.num_tokens for each in self.running)
        if sequence.num_tokens + taken > slots:
            table.release()
            return None
        sequence.num_computed = table.num_tokens
        sequence.num_cached_tokens = table.num_tokens
        return table


# -- who goes and who comes (S6 to S9) -----------------------------------------------------------


class KeepsTheBudgetOfTheVictim(Scheduler):
    """A victim's tokens stay counted in a step that they are no longer part of."""

    def _preempt(self, victim: Sequence) -> None:
        self._budget -= self._planned.get(victim, 0)
        super()._preempt(victim)


class KeepsTheVictimInThePlan(Scheduler):
    """A victim that was planned for this step stays in it, without its blocks."""

    def _preempt(self, victim: Sequence) -> None:
        planned = self._planned.get(victim)
        super()._preempt(victim)
        if planned is not None:
            self._planned[victim] = planned


class BackOfTheQueue(FirstComeFirstServed):
    """Whoever was preempted waits behind all others."""

    def __init__(self) -> None:
        super().__init__()
        self._turns: dict[int, int] = {}

    def rank(self, sequence: Sequence) -> tuple[int, int]:
        return self._turns[sequence.sequence_id], sequence.index

    def add(self, sequence: Sequence) -> None:
        self._turns[sequence.sequence_id] = self._num_added
        super().add(sequence)


class AdmitsAfterPreempting(Scheduler):
    """The blocks of a victim go to the next in the queue, in the same step."""

    def schedule(self) -> StepPlan:
        self._begin_step()
        self._grow_running()
        self._admit()
        return self._make_plan()


class LeavesNoBlockFree(Scheduler):
    """Admits whatever fits, and what runs finds nothing left to grow into."""

    def _enter(self, sequence: Sequence, spare: int) -> bool:
        return super()._enter(sequence, 0)


class DisplacesItsEquals(Scheduler):
    """The first in the queue takes the place of what is not more urgent."""

    def _displace_for(self, sequence: Sequence) -> bool:
        urgency = self.waiting.urgency
        running = [each for each in self.running if urgency(each) >= urgency(sequence)]
        if len(self.running) < 2 or not running or self._preempted:
            return False
        self._preempt(running[-1])
        return True


class TiesByLastArrival(StrictPriority):
    """Who came later is more urgent."""

    def urgency(self, sequence: Sequence) -> int:
        return 1_000 * sequence.priority - sequence.arrival


class ForgetsWhatWasComputed(Scheduler):
    """Tokens that are computed again are not counted as such."""

    def _preempt(self, victim: Sequence) -> None:
        super()._preempt(victim)
        victim.num_ever_computed = 0


class ThrowsOutTheLongest(Scheduler):
    """By default, whoever has most to lose goes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.victim_policy = lambda candidates: max(candidates, key=lambda s: s.num_computed)


# -- phases (S10, S11) ---------------------------------------------------------------------------


class PromptsFirst(Scheduler):
    """New prompts take the budget, and decodes what is left of it."""

    def _grow_running(self) -> None:
        for sequence in sorted(self.running, key=lambda each: -each.num_to_compute):
            if self._budget > 0 and sequence not in self._preempted:
                self._grow(sequence)


class OneTokenOnceItAnswers(Scheduler):
    """A sequence with output decodes: one token a step, and anything else is an error."""

    def _take(self, sequence: Sequence, count: int) -> None:
        assert count == 1 or not sequence.num_output_tokens, f"{sequence} decodes {count} tokens"
        super()._take(sequence, count)


# -- what a preemption leaves behind (S12 to S15) ------------------------------------------------


class TakesOutputForPrompt(Scheduler):
    """What is computed again counts as prompt."""

    def _preempt(self, victim: Sequence) -> None:
        super()._preempt(victim)
        victim.request = replace(victim.request, prompt=tuple(victim.token_ids))
        victim.num_prompt_tokens = len(victim.token_ids)


class LosesOutput(Scheduler):
    """With its K and V, a sequence loses the tokens that it has chosen."""

    def _preempt(self, victim: Sequence) -> None:
        super()._preempt(victim)
        del victim.token_ids[victim.num_prompt_tokens :]


class KeepsTheCountOfBefore(Scheduler):
    """What is left to compute was counted before the prefix cache was asked."""

    def _place(self, sequence: Sequence, spare: int) -> BlockTable | None:
        before = sequence.num_computed
        table = super()._place(sequence, spare)
        if sequence.num_preemptions:
            sequence.num_computed = before
        return table


class SaysItAgain(Scheduler):
    """Who comes back says its last token once more."""

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        by_id = {sequence.sequence_id: sequence for sequence in self.running}
        back = [by_id[s.sequence_id] for s in plan.scheduled if s.num_recomputed]
        again = [
            SequenceOutput(
                each.request.request_id,
                each.name,
                each.index,
                each.token_ids[-1],
                each.num_output_tokens,
            )
            for each in back
            if each.num_output_tokens
        ]
        return again + super().update(plan, result)


class NeedsTheHost(Scheduler):
    """There must be room in the host pool."""

    def _preempt(self, victim: Sequence) -> None:
        super()._preempt(victim)
        assert victim.host_blocks is not None, "aborted due to the lack of swap space"


class LosesTheHostBlocks(Scheduler):
    """An abort forgets what waits on the host."""

    def _drop_host_blocks(self, sequence: Sequence) -> None:
        sequence.host_blocks, sequence.num_computed = None, 0
