"""Static batching: what engines did before, kept as the baseline.

Invariant: the next wave begins when the whole wave before has ended. A wave is a rectangle, as long
as its longest prompt and then as long as its longest answer; where a sequence has nothing to
compute, padding is computed in its place.

    wave of 3         prompts        answers
    a                 a a a a a      a a a a a a a a
    b                 b b . . .      b b b . . . . .       b has ended and keeps its row
    c                 c c c . .      c c c c c . . .
    d (waits)                                         d    and d waits for a

Memory is reserved as well: a wave holds only sequences whose longest possible answers fit together.
So nobody is preempted, except answers to one request that alone could fill more than all memory.

Padding goes through every linear layer, where nearly all of the time goes; attention leaves it out,
which flatters the baseline a little.
"""

from __future__ import annotations

from mie.memory.block_pool import blocks_needed
from mie.request import Sequence
from mie.scheduling.plan import StepPlan
from mie.scheduling.scheduler import Scheduler

UNBOUNDED = 1 << 60


class StaticScheduler(Scheduler):
    """Waves of at most ``max_num_seqs``. The token budget cuts no prompt: a wave begins at once."""

    _num_rows = 0  # of the wave that runs

    def schedule(self) -> StepPlan:
        """See ``Scheduler.schedule``."""
        self._begin_step()
        self._budget = UNBOUNDED
        if self.running:
            self._grow_running()
            size = self._num_rows
        else:
            size = self._begin_wave()
        computed = sum(self._planned.values())
        padding = max(0, size - computed)
        return self._make_plan(token_budget=computed + padding, num_padding=padding)

    def _begin_wave(self) -> int:
        """Admit a wave. How many tokens the rectangle of its prompts has."""
        free = self.memory.num_usable_blocks
        self._num_rows = 0
        while (sequence := self._next_in_line()) is not None:
            free -= self._reserved(sequence)
            rows = self._num_rows + sequence.num_seats
            if self.running and (free < 0 or rows > self.limits.max_num_seqs):
                break
            entered = self._enter(sequence, spare=0)
            assert entered, f"the memory of {sequence} is reserved"
            self._num_rows = rows
        longest = max(self._planned.values(), default=0)
        return len(self._planned) * longest

    def _reserved(self, sequence: Sequence) -> int:
        """Blocks that all answers of ``sequence`` could come to need."""
        tokens = sequence.num_prompt_tokens + sequence.max_output - 1
        return blocks_needed(tokens, self.memory.pool.block_size) * sequence.num_seats
