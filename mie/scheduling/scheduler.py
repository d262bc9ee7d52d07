"""Which tokens run in the next step: continuous batching under one token budget.

Invariant: after every step, each sequence waits or runs or has ended, and owns exactly the blocks
of the tokens that it has computed. The first in line among those that run is never thrown out, so
somebody always comes nearer to its end.

A step is planned in three movements:

    reap      who has ended leaves, and its blocks are free before anybody asks for one
    running   each takes what it has left to compute, as long as the budget lasts
    waiting   the rest of the budget goes to the queue, which nobody jumps

    budget 16      a decodes   b decodes   c has 40 tokens left of its prompt, d waits
    step 1         a 1         b 1         c 14
    step 2         a 1         b 1         c 14
    step 3         a 1         b 1         c 12              d 2: the beginning of its prompt

There are no phases (see ``mie.request``), so chunks of a prompt, prefix hits and what is computed
again after a preemption need no case of their own.

When a block is needed and none is free, the victim policy chooses who gives all of its blocks back.
The victim keeps its tokens and goes back to the queue, to the place that its arrival gives it; if
it had been planned for this step, that is undone. In a step that preempted, nobody is admitted but
the one for whom it was done, and whoever is admitted leaves a free block for each sequence that
runs: without both, a sequence would come in only to be thrown out.

After Orca (Yu et al., 2022) and the scheduler of vLLM V1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from mie.memory.block_pool import blocks_needed
from mie.memory.block_table import BlockTable
from mie.memory.manager import BlockManager
from mie.request import FinishReason, Request, Sequence, count_seats
from mie.scheduling.limits import Limits, max_output
from mie.scheduling.plan import SequenceOutput, StepPlan, StepResult, StepsInFlightError
from mie.scheduling.planned import check_result, chosen, ended, planned
from mie.scheduling.policy import VictimPolicy, choose, last_admitted, least_urgent
from mie.scheduling.queue import FirstComeFirstServed, WaitingQueue


class Scheduler:
    """``schedule()`` makes a plan, ``update()`` takes in what came of it, in the same order.

    At most ``max_in_flight`` plans are out at once. With more than one, a step is planned before
    the tokens of the step before are known: a sequence then counts tokens that nobody has seen.
    """

    max_in_flight = 1

    def __init__(
        self,
        limits: Limits,
        memory: BlockManager,
        queue: WaitingQueue | None = None,
        victim_policy: VictimPolicy = last_admitted,
    ) -> None:
        self.limits = limits
        self.memory = memory
        self.waiting: WaitingQueue = FirstComeFirstServed() if queue is None else queue
        self.running: list[Sequence] = []  # in the order of admission
        self.victim_policy = victim_policy
        self._num_arrived = self._num_sequences = self._num_steps = 0
        self._in_flight: deque[tuple[StepPlan, tuple[Sequence, ...]]] = deque()  # oldest first
        self._busy = False  # a step is being planned
        self._outputs: list[SequenceOutput] = []  # what no step has reported yet
        self._left_queue: list[Sequence] = []  # ended while they waited
        self._open: dict[str, list[Sequence]] = {}  # by request id, all that have not left
        self._budget = 0  # what is left of this step's
        self._planned: dict[Sequence, int] = {}  # how many tokens each computes in this step
        self._preempted: list[Sequence] = []  # in this step
        self._num_found = 0  # tokens of prompts that came in since the last plan, found in blocks

    # -- what comes from outside -----------------------------------------------------------------

    def check(self, request: Request) -> int:
        """How many tokens its answers may have. Raises what ``limits.max_output`` raises."""
        pool = self.memory.pool
        return max_output(request, self.limits, self.memory.num_usable_blocks, pool.block_size)

    def add(self, request: Request) -> Sequence:
        """One more waits. Raises what ``check`` raises; then nothing has changed."""
        output = self.check(request)
        self._num_arrived += 1
        sequence = Sequence(request, self._next_id(), self._num_arrived, output)
        self.waiting.add(sequence)
        self._open.setdefault(request.request_id, []).append(sequence)
        return sequence

    def abort(self, request_id: str) -> None:
        """All answers of the request end, in whatever state. Unknown or ended: nothing happens."""
        for sequence in self._open.get(request_id, []):
            self._end(sequence, FinishReason.ABORT)
        if not (self._busy or self._in_flight):
            self._reap()

    @property
    def has_only_ended(self) -> bool:
        """Whether nobody waits for what the steps in flight bring."""
        return not len(self.waiting) and all(s.finish_reason is not None for s in self.running)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something or has something to report."""
        return bool(self.running or len(self.waiting) or self._outputs)

    # -- a step ----------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The plan of the next step. ``update`` or ``failed`` must follow.

        Raises StepsInFlightError, with nothing planned, where the steps in flight have to come back
        first: nobody is thrown out while the device still works for somebody. Who came in stays.
        """
        self._begin_step()
        self._grow_running()
        if not self._preempted:
            self._admit()
        return self._make_plan()

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceOutput]:
        """What came of ``plan``: tokens and ends, in the order of the plan.

        Raises PartError, with nothing changed, for a result that is not one of this plan.
        """
        first = self._in_flight[0][0] if self._in_flight else None
        assert plan is first, f"{plan} is not the oldest step that is out"
        check_result(plan, result)
        sequences = self._come_back()
        for scheduled, sequence in zip(plan.scheduled, sequences, strict=True):
            if sequence.finish_reason is not None:
                continue  # it ended, or was aborted, while this was computed
            self._computed(sequence, scheduled.num_tokens)
            if scheduled.draws:
                tokens = result.tokens[scheduled.sequence_id]
                forks = self._forks(sequence, len(tokens) - 1) if len(tokens) > 1 else ()
                for answer, token_id in zip((sequence, *forks), tokens, strict=True):
                    answer.append(token_id)
                    self._outputs.append(chosen(answer))
        self._reap()
        outputs, self._outputs = self._outputs, []
        return outputs

    def failed(self, plan: StepPlan) -> None:
        """``plan`` broke off, before, while or after it ran, and nobody knows what was written: all
        that it touched is computed again, as after a preemption, and all that the steps touched
        that are out beside it. What else there is stays."""
        self._undo_planned()
        plans = [plan, *[each for each, _ in self._in_flight]]
        touched = {scheduled.sequence_id for each in plans for scheduled in each.scheduled}
        self._in_flight.clear()
        for sequence in self.running:
            sequence.num_in_flight = sequence.num_pending = 0
        self.memory.launched()
        self._reap()
        for sequence in list(self.running):
            if sequence.sequence_id in touched or sequence.num_to_compute == 0:
                self._send_back(sequence)
        lost = {move.host for each in plans for move in each.swap_out}
        for sequence in self.waiting:
            if sequence.host_blocks and lost & {*sequence.host_blocks}:
                self._drop_host_blocks(sequence)

    # -- reap, running, waiting ------------------------------------------------------------------

    def _begin_step(self) -> None:
        if len(self._in_flight) >= self.max_in_flight:  # nobody has brought it back
            self.failed(self._in_flight[0][0])
        self._undo_planned()
        self._reap()
        self._busy = True
        self._budget = self.limits.token_budget
        self._planned, self._preempted = {}, []

    def _undo_planned(self) -> None:
        """A plan broke off in the making, and nobody runs it."""
        self.memory.launched()  # what earlier plans have taken is on its way
        for sequence in self._planned:
            if sequence.table is not None:
                sequence.table.truncate(sequence.num_computed)
        self._planned, self._busy = {}, False

    def _wait_for_steps(self) -> None:
        """Go on only if no step is out. What a victim gives back, or one that has ended, would be
        handed on while a step still reads and writes it."""
        if self._in_flight:
            self._undo_planned()
            raise StepsInFlightError

    def _reap(self) -> None:
        """Who has ended leaves and gives everything back, once no step works for it any longer."""
        for sequence in [s for s in self.running if s.finish_reason is not None]:
            if not sequence.num_in_flight:
                self._leave(sequence)
        for sequence in self._left_queue:
            if sequence.table is None:
                self.waiting.remove(sequence)
                self._drop_host_blocks(sequence)
                self._forget(sequence)
        self._left_queue.clear()

    def _grow_running(self) -> None:
        """In the order of admission, as far as the budget goes; a victim of this step is left out.

        Only the last one admitted can have more than a token to compute: whoever comes behind a
        prompt that is cut by the budget finds none of it left. So decodes go first."""
        for sequence in list(self.running):
            if self._budget > 0 and sequence not in self._preempted:
                self._grow(sequence)

    def _grow(self, sequence: Sequence) -> None:
        """Plan what ``sequence`` has left to compute, whoever has to make room for it."""
        if sequence.finish_reason is not None or sequence.waits_for_a_step:
            return
        table, count = _table(sequence), min(sequence.num_to_compute, self._budget)
        while not table.append(count):
            self._wait_for_steps()
            first = min(self.running, key=self.waiting.rank)
            others = [each for each in self.running if each is not first]
            candidates = least_urgent(others, self.waiting)
            if not candidates:  # it is alone, and all there is does not suffice
                self._end(sequence, FinishReason.KV_EXHAUSTED)
                self._leave(sequence)
                return
            victim = choose(self.victim_policy, candidates)
            self._preempt(victim)
            if victim is sequence:
                return
            count = min(sequence.num_to_compute, self._budget)
        self._take(sequence, count)

    def _admit(self) -> None:
        """The queue in its order, until the first that does not fit: nobody jumps it."""
        while self._budget > 0 and (sequence := self._next_in_line()) is not None:
            seats = count_seats(self.running) + sequence.num_seats
            spare = len(self.running)  # a block for each sequence that runs already
            if seats > self.limits.max_num_seqs or not self._enter(sequence, spare):
                if not self._displace_for(sequence):
                    return
            elif self._preempted:
                return  # it has the place that was made for it; nobody else comes in

    def _next_in_line(self) -> Sequence | None:
        """The head of the queue; those that have grown beyond all memory there is end here."""
        size = self.memory.pool.block_size
        while (sequence := self.waiting.peek()) is not None:
            if blocks_needed(sequence.num_tokens, size) <= self.memory.num_usable_blocks:
                return sequence
            self._wait_for_steps()
            self._end(sequence, FinishReason.KV_EXHAUSTED)
            self._reap()
        return None

    def _enter(self, sequence: Sequence, spare: int) -> bool:
        """From waiting to running, if all of its tokens fit and leave ``spare`` blocks free."""
        table = self._place(sequence, spare)
        if table is None:
            return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.table = table
        count = min(sequence.num_to_compute, self._budget)
        fits = table.append(count)
        assert fits, f"{sequence} was placed and does not fit"
        self._take(sequence, count)
        return True

    def _place(self, sequence: Sequence, spare: int) -> BlockTable | None:
        """A table with all that ``sequence`` has computed already, found or swapped in."""
        if sequence.host_blocks is not None:
            table = self.memory.empty_table()
        else:
            table = self.memory.table(sequence.token_ids, sequence.request.salt)
        needed = table.blocks_to_append(sequence.num_tokens - table.num_tokens)
        if needed + spare > self.memory.pool.num_free:
            table.release()
            return None
        if sequence.host_blocks is not None:
            table.append(sequence.num_computed)
            self.memory.host.swap_in(sequence.host_blocks, table.blocks)
            sequence.host_blocks = None
        else:
            sequence.num_computed = table.num_tokens
            if sequence.num_cached_tokens is None:  # admitted for the first time
                sequence.num_cached_tokens = table.num_tokens
                self._num_found += table.num_tokens
                self.memory.prefix_cache.hits.add(sequence.num_tokens, table.num_tokens)
        return table

    # -- making room -----------------------------------------------------------------------------

    def _displace_for(self, sequence: Sequence) -> bool:
        """If something strictly less urgent runs, one of that goes: ``sequence`` is next."""
        running = least_urgent(self.running, self.waiting)
        if not running or self.waiting.urgency(sequence) >= self.waiting.urgency(running[0]):
            return False
        self._wait_for_steps()
        self._preempt(choose(self.victim_policy, running))
        return True

    def _preempt(self, victim: Sequence) -> None:
        """``victim`` gives its blocks back, and its part of this step; it keeps its tokens."""
        self._budget += self._planned.pop(victim, 0)
        table, computed = _table(victim), victim.num_computed
        table.truncate(computed)
        host_blocks = self.memory.swap_out(table)
        self._send_back(victim)
        if host_blocks:
            victim.host_blocks, victim.num_computed = host_blocks, computed
        victim.num_preemptions += 1
        self._preempted.append(victim)

    def _send_back(self, sequence: Sequence) -> None:
        """From the running to the waiting, without K and V."""
        self.running.remove(sequence)
        self.memory.release(_table(sequence))
        sequence.table, sequence.num_computed = None, 0
        self.waiting.add(sequence)
        if sequence.finish_reason is not None:
            self._left_queue.append(sequence)

    # -- small steps -----------------------------------------------------------------------------

    def _take(self, sequence: Sequence, count: int) -> None:
        self._planned[sequence] = count
        self._budget -= count

    def _make_plan(self, token_budget: int | None = None, num_padding: int = 0) -> StepPlan:
        """What has been planned goes out; from now on it counts as computed."""
        if not self._planned:
            self._wait_for_steps()
        self._num_steps += 1
        outs, ins = self.memory.host.waiting
        plan = StepPlan(
            number=self._num_steps,
            token_budget=self.limits.token_budget if token_budget is None else token_budget,
            scheduled=tuple([planned(s, count) for s, count in self._planned.items()]),
            copies=tuple(self.memory.copies.waiting),
            swap_out=outs,
            swap_in=ins,
            preempted=tuple([sequence.name for sequence in self._preempted]),
            num_padding=num_padding,
            num_cached_tokens=self._num_found,
        )
        self._in_flight.append((plan, tuple(self._planned)))
        self.memory.copies.take()
        self.memory.host.take()
        for scheduled, sequence in zip(plan.scheduled, self._planned, strict=True):
            sequence.num_computed = scheduled.num_tokens
            sequence.num_in_flight += 1
            sequence.num_pending += bool(scheduled.draws)
        self._planned, self._num_found, self._busy = {}, 0, False
        return plan

    def _come_back(self) -> tuple[Sequence, ...]:
        """The oldest step is out no longer. Returns its sequences."""
        plan, sequences = self._in_flight.popleft()
        for scheduled, sequence in zip(plan.scheduled, sequences, strict=True):
            sequence.num_in_flight -= 1
            sequence.num_pending -= bool(scheduled.draws)
        self.memory.launched()
        return sequences

    def _computed(self, sequence: Sequence, num_tokens: int) -> None:
        """The K and V of the first ``num_tokens`` tokens have been written."""
        if num_tokens > sequence.num_ever_computed:
            sequence.num_ever_computed = num_tokens
        self.memory.prefix_cache.insert(
            _table(sequence), sequence.token_ids, num_tokens, sequence.request.salt
        )

    def _forks(self, sequence: Sequence, count: int) -> Iterable[Sequence]:
        """``count`` more answers on the same blocks; they run from now on, right behind it."""
        forks = [sequence.fork(self._next_id(), index) for index in range(1, count + 1)]
        sequence.to_fork = 0
        place = self.running.index(sequence) + 1
        self.running[place:place] = forks
        self._open[sequence.request.request_id] += forks
        return forks

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Without a token; answers that were to be forked end with it."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        self._outputs += ended(sequence)
        if sequence.table is None:
            self._left_queue.append(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.memory.release(_table(sequence))
        sequence.table = None
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        answers = self._open[sequence.request.request_id]
        answers.remove(sequence)
        if not answers:
            del self._open[sequence.request.request_id]

    def _drop_host_blocks(self, sequence: Sequence) -> None:
        if sequence.host_blocks is not None:
            self.memory.host.drop(sequence.host_blocks)
            sequence.host_blocks, sequence.num_computed = None, 0

    def _next_id(self) -> int:
        self._num_sequences += 1
        return self._num_sequences


def _table(sequence: Sequence) -> BlockTable:
    assert sequence.table is not None, f"{sequence} has no table: it does not run"
    return sequence.table
