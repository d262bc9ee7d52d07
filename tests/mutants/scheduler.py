"""A scheduler built differently, and the ways to get one wrong.

The mutants are the scheduler below with one piece exchanged, or the engine's own.
"""

from dataclasses import replace
from itertools import count

from mie.errors import ContextLengthError
from mie.memory.block_pool import blocks_needed
from mie.request import FinishReason, Sequence, count_seats
from mie.scheduling.limits import max_output
from mie.scheduling.plan import ScheduledSequence, SequenceOutput, StepPlan
from mie.scheduling.policy import choose, last_admitted, least_urgent
from mie.scheduling.queue import FirstComeFirstServed
from mie.scheduling.scheduler import Scheduler


class FairShares:
    """Everybody who runs gets one token, then another, round after round, until the budget is gone.

    Who comes in takes slots for all of its tokens at once, and leaves no block free for others. So
    prompts are computed side by side, and a step is divided after it is known who is in it.
    """

    def __init__(self, limits, memory, queue=None, victim_policy=last_admitted):
        self.limits, self.memory, self.policy = limits, memory, victim_policy
        self.waiting = FirstComeFirstServed() if queue is None else queue
        self.running, self.ends, self.gone = [], [], []
        self.ids, self.arrivals, self.numbers = count(1), count(1), count(1)
        self.flying = False

    @property
    def has_work(self):
        return bool(self.running or len(self.waiting) or self.ends)

    # -- from outside --

    def add(self, request):
        sequence = Sequence(request, next(self.ids), next(self.arrivals), self.room(request))
        self.waiting.add(sequence)
        return sequence

    def room(self, request):
        memory = self.memory
        return max_output(request, self.limits, memory.num_usable_blocks, memory.pool.block_size)

    def abort(self, request_id):
        for sequence in [*self.running, *self.waiting]:
            if sequence.request.request_id == request_id and sequence.finish_reason is None:
                self.end(sequence, FinishReason.ABORT)
        if not self.flying:
            self.reap()

    # -- a step --

    def schedule(self):
        self.reap()
        self.gone = []
        self.grow()
        self.admit()
        parts = self.parts()
        outs, ins = self.memory.host.take()
        self.flying = True
        return StepPlan(
            number=next(self.numbers),
            token_budget=self.limits.token_budget,
            scheduled=tuple(parts),
            copies=tuple(self.memory.copies.take()),
            swap_out=outs,
            swap_in=ins,
            preempted=tuple(sequence.name for sequence in self.gone),
        )

    def update(self, plan, result):
        self.landed()
        outputs, running = [], {sequence.sequence_id: sequence for sequence in self.running}
        for part in plan.scheduled:
            sequence = running[part.sequence_id]
            if sequence.finish_reason is None:
                self.computed(sequence, part.num_tokens)
                if part.draws:
                    outputs += self.answer(sequence, result.tokens[part.sequence_id])
        self.reap()
        ends, self.ends = self.ends, []
        return outputs + ends

    def failed(self, plan):
        self.landed()
        self.reap()
        touched = {part.sequence_id for part in plan.scheduled}
        for sequence in [each for each in self.running if each.sequence_id in touched]:
            self.send_back(sequence)
        lost = {move.host for move in plan.swap_out}
        for sequence in self.waiting:
            if lost & {*(sequence.host_blocks or ())}:
                self.drop(sequence)

    # -- who runs --

    def grow(self):
        for sequence in list(self.running):
            if sequence in self.running:
                self.make_room(sequence)

    def make_room(self, sequence):
        while not sequence.table.append(sequence.num_tokens - sequence.table.num_tokens):
            candidates = self.candidates()
            if not candidates:
                self.alone_and_full(sequence)
                return
            victim = self.victim(candidates)
            self.preempt(victim)
            if victim is sequence:
                return

    def candidates(self):
        first = min(self.running, key=self.waiting.rank)
        return least_urgent([each for each in self.running if each is not first], self.waiting)

    def victim(self, candidates):
        return choose(self.policy, candidates)

    def alone_and_full(self, sequence):
        self.end(sequence, FinishReason.KV_EXHAUSTED)
        self.leave(sequence)

    def admit(self):
        while not self.gone and (sequence := self.head()) is not None:
            if not (self.has_places(sequence) and self.enter(sequence)):
                self.displace(sequence)
                return

    def head(self):
        while (sequence := self.waiting.peek()) is not None and self.is_too_long(sequence):
            self.end(sequence, FinishReason.KV_EXHAUSTED)
            self.reap()
        return sequence

    def is_too_long(self, sequence):
        size = self.memory.pool.block_size
        return blocks_needed(sequence.num_tokens, size) > self.memory.num_usable_blocks

    def has_places(self, sequence):
        places = count_seats(self.running) + sequence.num_seats
        return places <= self.limits.max_num_seqs

    def enter(self, sequence):
        swapped = sequence.host_blocks is not None
        table = self.memory.empty_table() if swapped else self.found(sequence)
        known = sequence.num_computed if swapped else table.num_tokens
        if not table.append(sequence.num_tokens - table.num_tokens):
            table.release()
            return False
        if swapped:
            self.swap_in(sequence, table)
        sequence.num_computed = known
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = known
        self.waiting.remove(sequence)
        sequence.table = table
        self.running.append(sequence)
        return True

    def found(self, sequence):
        return self.memory.table(sequence.token_ids, sequence.request.salt)

    def swap_in(self, sequence, table):
        host_blocks, sequence.host_blocks = sequence.host_blocks, None
        self.memory.host.swap_in(host_blocks, table.blocks[: len(host_blocks)])

    def displace(self, sequence):
        others = least_urgent(self.running, self.waiting)
        if others and self.pushes(sequence, others[0]):
            self.preempt(self.victim(others))

    def pushes(self, sequence, other):
        return self.waiting.urgency(sequence) < self.waiting.urgency(other)

    # -- what runs --

    def parts(self):
        return [self.part(sequence, share) for sequence, share in self.shares().items()]

    def shares(self):
        shares, budget = dict.fromkeys(self.running, 0), self.limits.token_budget
        while budget and any(each.num_to_compute > shares[each] for each in shares):
            for sequence in shares:
                if budget and sequence.num_to_compute > shares[sequence]:
                    shares[sequence] += 1
                    budget -= 1
        return shares

    def part(self, sequence, share):
        begin = sequence.num_computed
        end = begin + share
        prompt = begin < sequence.num_prompt_tokens
        lost = max(0, min(end, sequence.num_ever_computed) - begin)
        return ScheduledSequence(
            sequence_id=sequence.sequence_id,
            name=sequence.name,
            kind="recompute" if lost else "prefill" if prompt else "decode",
            token_ids=tuple(sequence.token_ids[begin:end]),
            position=begin,
            blocks=self.blocks(sequence),
            block_size=sequence.table.pool.block_size,
            draws=self.draws(sequence, end),
            num_recomputed=lost,
        )

    def blocks(self, sequence):
        return tuple(sequence.table.blocks)

    def draws(self, sequence, end):
        if end < sequence.num_tokens:
            return ()
        sampling, first = sequence.request.sampling, sequence.index
        return tuple(sampling.draw(end, first + i) for i in range(sequence.num_seats))

    # -- what came of it --

    def landed(self):
        self.flying = False
        self.memory.launched()

    def computed(self, sequence, num_tokens):
        sequence.num_computed = num_tokens
        sequence.num_ever_computed = max(sequence.num_ever_computed, num_tokens)
        self.insert(sequence)

    def insert(self, sequence):
        self.memory.prefix_cache.insert(
            sequence.table, sequence.token_ids, sequence.num_computed, sequence.request.salt
        )

    def answer(self, sequence, tokens):
        twins = [sequence.fork(next(self.ids), index) for index in range(1, len(tokens))]
        sequence.to_fork = 0
        place = self.running.index(sequence) + 1
        self.running[place:place] = twins
        for each, token in zip([sequence, *twins], tokens, strict=True):
            self.append(each, token)
            yield self.output(each, each.index, token)

    def append(self, sequence, token):
        sequence.append(token)

    def output(self, sequence, index, token=None):
        return SequenceOutput(
            sequence.request.request_id,
            sequence.request.name(index),
            index,
            token,
            sequence.num_output_tokens,
            sequence.num_cached_tokens or 0,
            sequence.finish_reason,
        )

    # -- who leaves --

    def end(self, sequence, reason):
        sequence.finish_reason = reason
        answers = range(sequence.index, sequence.index + sequence.num_seats)
        self.ends += [self.output(sequence, index) for index in answers]

    def reap(self):
        for sequence in [each for each in self.running if each.finish_reason]:
            self.leave(sequence)
        for sequence in [each for each in self.waiting if each.finish_reason]:
            self.waiting.remove(sequence)
            self.drop(sequence)

    def leave(self, sequence):
        self.running.remove(sequence)
        sequence.table.release()
        sequence.table = None

    def preempt(self, sequence):
        computed = sequence.num_computed
        sequence.table.truncate(computed)
        host_blocks = self.swap_out(sequence)
        self.send_back(sequence)
        if host_blocks:
            sequence.host_blocks, sequence.num_computed = host_blocks, computed
        sequence.num_preemptions += 1
        self.gone.append(sequence)

    def swap_out(self, sequence):
        return self.memory.swap_out(sequence.table)

    def send_back(self, sequence):
        self.leave(sequence)
        sequence.num_computed = 0
        self.waiting.add(sequence)

    def drop(self, sequence):
        if sequence.host_blocks is not None:
            self.memory.host.drop(sequence.host_blocks)
            sequence.host_blocks, sequence.num_computed = None, 0


# -- one budget ---------------------------------------------------------------------------------


class DecodesAreFree(FairShares):
    """Only what is left of prompts counts."""

    def shares(self):
        shares = super().shares()
        for sequence in shares:
            if sequence.num_to_compute > shares[sequence]:
                shares[sequence] += sum(each.num_to_compute == 1 for each in shares)
                shares[sequence] = min(shares[sequence], sequence.num_to_compute)
        return shares


class WholePrompts(FairShares):
    """A prompt isn't cut, whatever the budget."""

    def shares(self):
        return {sequence: sequence.num_to_compute for sequence in self.running}


class EvenOnce(FairShares):
    """What one leaves of its share is not given to the others."""

    def shares(self):
        share = self.limits.token_budget // max(len(self.running), 1)
        return {each: min(share, each.num_to_compute) for each in self.running}


class LongestFirst(FairShares):
    """Whoever has most to compute takes all that there is."""

    def shares(self):
        shares, budget = {}, self.limits.token_budget
        for sequence in sorted(self.running, key=lambda each: -each.num_to_compute):
            if budget:
                shares[sequence] = min(budget, sequence.num_to_compute)
                budget -= shares[sequence]
        return shares


class Phases(FairShares):
    """While a prompt is incomplete, nobody decodes."""

    def shares(self):
        shares = super().shares()
        prompts = {each: n for each, n in shares.items() if each.num_to_compute > 1}
        return prompts or shares


class OneTokenAgain(FairShares):
    """Each piece begins with the last token of the one before."""

    def part(self, sequence, share):
        again = sequence.num_computed > 0 and share < sequence.num_to_compute
        sequence.num_computed -= again
        try:
            return super().part(sequence, share)
        finally:
            sequence.num_computed += again


class LiveBlocks(FairShares):
    """A plan that looks at the table, not at what the table said."""

    def blocks(self, sequence):
        return sequence.table.blocks


# -- who comes in --


class WhoeverFits(FairShares):
    """Goes through the queue for somebody who fits."""

    def admit(self):
        for sequence in [] if self.gone else list(self.waiting):
            if not self.is_too_long(sequence) and self.has_places(sequence):
                self.enter(sequence)
        self.head()


class ShortestFirst(FairShares):
    """Has an order of its own, whatever the queue is."""

    def head(self):
        super().head()
        return min(self.waiting, key=lambda each: each.num_tokens, default=None)


class Waves(FairShares):
    """Static batching: nobody comes in while somebody runs."""

    def has_places(self, sequence):
        fresh = all(each.num_ever_computed == 0 for each in self.running)
        return fresh and super().has_places(sequence)


class EveryOtherStep(FairShares):
    def admit(self):
        self.turn = not getattr(self, "turn", False)
        if self.turn or not self.running:
            super().admit()


class ForksNeedNoPlace(FairShares):
    def has_places(self, sequence):
        return len(self.running) < self.limits.max_num_seqs


class ForksComeAsASurprise(FairShares):
    """Counts the answers that there are, not those to come of the ones that run."""

    def has_places(self, sequence):
        return len(self.running) + sequence.num_seats <= self.limits.max_num_seqs


class TakesAnything(FairShares):
    def room(self, request):
        return min(request.sampling.max_tokens or 99, self.limits.max_model_len)


class LooksAtPromptsOnly(FairShares):
    """An answer that can't fit is found out when it is too late."""

    def room(self, request):
        try:
            return super().room(request)
        except ContextLengthError:
            if len(request.prompt) > self.memory.num_tokens:
                raise
            return request.sampling.max_tokens or self.limits.max_model_len - len(request.prompt)


class QueuesThenRefuses(FairShares):
    def add(self, request):
        self.waiting.add(Sequence(request, next(self.ids), next(self.arrivals), 99))
        self.room(request)


# -- what is shared --


class NeverLooks(FairShares):
    """The prefix cache is filled and never asked."""

    def found(self, sequence):
        return self.memory.empty_table()


class HitsAreASecret(FairShares):
    def enter(self, sequence):
        sequence.num_cached_tokens = 0
        return super().enter(sequence)


class SaltLost(FairShares):
    def insert(self, sequence):
        self.memory.prefix_cache.insert(sequence.table, sequence.token_ids, sequence.num_computed)


class InsertsWhatIsPlanned(FairShares):
    """Slots are there, K and V are not."""

    def part(self, sequence, share):
        self.memory.prefix_cache.insert(
            sequence.table, sequence.token_ids, sequence.num_tokens, sequence.request.salt
        )
        return super().part(sequence, share)


class OneTokenForAll(FairShares):
    """All answers begin with what was chosen for the first one."""

    def answer(self, sequence, tokens):
        return super().answer(sequence, [tokens[0]] * len(tokens))


class ForksWithTheirTail(FairShares):
    """Whoever is forked gets its own copy of the last block, though nobody writes into it yet."""

    def answer(self, sequence, tokens):
        yield from list(super().answer(sequence, tokens))
        for each in self.running[:] if len(tokens) > 1 else []:
            if each.request is sequence.request and each.finish_reason is None:
                each.table.truncate((each.num_computed - 1) // 4 * 4)
                each.num_computed = each.table.num_tokens


# -- how it ends --


class DeafToEos(FairShares):
    def append(self, sequence, token):
        sequence.append(token)
        if sequence.num_output_tokens < sequence.max_output:
            sequence.finish_reason = None


class OneMoreForEos(FairShares):
    """`max_tokens` is looked at first."""

    def append(self, sequence, token):
        sequence.append(token)
        if sequence.num_output_tokens >= sequence.max_output:
            sequence.finish_reason = FinishReason.LENGTH


class ContextIsTheClientsBusiness(FairShares):
    def room(self, request):
        return max(super().room(request), request.sampling.max_tokens or 0)


class ReapsALittleLater(FairShares):
    """Who has ended is in one step more."""

    def reap(self):
        for sequence in [*self.running, *self.waiting]:
            sequence.finish_reason, late = None, sequence.finish_reason
            if late and getattr(sequence, "late", False):
                sequence.finish_reason = late
            elif late:
                sequence.late = True
        super().reap()


class ThrowsItselfOut(FairShares):
    """Alone and out of blocks, it waits for somebody to give some back."""

    def alone_and_full(self, sequence):
        self.preempt(sequence)

    def is_too_long(self, sequence):
        return False


class EndsWhoeverAsks(FairShares):
    """Nobody is preempted: who needs a block when there is none has had its time."""

    def candidates(self):
        return []


class AbortsOneAnswer(FairShares):
    def abort(self, request_id):
        for sequence in [*self.running, *self.waiting]:
            if sequence.request.request_id == request_id and sequence.finish_reason is None:
                self.end(sequence, FinishReason.ABORT)
                break
        if not self.flying:
            self.reap()


class AbortsAndSaysNothing(FairShares):
    def abort(self, request_id):
        super().abort(request_id)
        self.ends = []


class AbortsAgain(FairShares):
    """Who was aborted during a step and is aborted again ends twice."""

    def abort(self, request_id):
        for sequence in [*self.running, *self.waiting]:
            if sequence.request.request_id == request_id:
                self.end(sequence, FinishReason.ABORT)
        if not self.flying:
            self.reap()


class AbortsAtOnce(FairShares):
    """Blocks go back while a step writes into them."""

    def abort(self, request_id):
        super().abort(request_id)
        self.reap()


class KnowsWhomItAborts(FairShares):
    def abort(self, request_id):
        known = {sequence.request.request_id for sequence in [*self.running, *self.waiting]}
        if request_id not in known:
            raise KeyError(request_id)
        super().abort(request_id)


class AbortForgetsTheHost(FairShares):
    def reap(self):
        for sequence in self.waiting:
            if sequence.finish_reason:
                sequence.host_blocks = None
        super().reap()


class AbortsWhatRuns(FairShares):
    def abort(self, request_id):
        preempted = [s for s in self.waiting if s.num_preemptions]
        if request_id not in [sequence.request.request_id for sequence in preempted]:
            super().abort(request_id)


# -- out of blocks --


class BeginsAgain(FairShares):
    def preempt(self, sequence):
        super().preempt(sequence)
        del sequence.token_ids[sequence.num_prompt_tokens :]


class LosesItsLastToken(FairShares):
    """The token that was chosen and isn't computed yet goes with the blocks."""

    def preempt(self, sequence):
        super().preempt(sequence)
        if sequence.num_output_tokens > 1:
            sequence.token_ids.pop()


class ToTheEndOfTheLine(FairShares):
    def preempt(self, sequence):
        sequence.arrival = next(self.arrivals)
        super().preempt(sequence)


class StaysInThePlan(FairShares):
    """What was planned before its blocks were taken is computed all the same."""

    def preempt(self, sequence):
        if sequence.table.num_tokens == sequence.num_tokens:
            self.stale = [*getattr(self, "stale", []), self.part(sequence, 1)]
        super().preempt(sequence)

    def parts(self):
        stale, self.stale = getattr(self, "stale", []), []
        return [*stale, *super().parts()]


class KeepsItsBudget(Scheduler):
    """A victim gives its blocks back and stays in the plan."""

    def _preempt(self, victim):
        share = self._planned.pop(victim, 0)
        super()._preempt(victim)
        if share:
            self._planned[victim] = share


class AlwaysTheLast(FairShares):
    def victim(self, candidates):
        return candidates[-1]


class AnybodyMayGo(FairShares):
    """The first in line is as good a victim as any."""

    def candidates(self):
        return least_urgent(self.running, self.waiting) if len(self.running) > 1 else []


class NewestFirst(FairShares):
    def candidates(self):
        return super().candidates()[::-1]


class PreemptsTwo(FairShares):
    """Makes room for more than was asked for."""

    def preempt(self, sequence):
        super().preempt(sequence)
        if others := self.running and self.candidates():
            super().preempt(others[-1])


class BelievesThePolicy(FairShares):
    def victim(self, candidates):
        return self.policy(list(candidates))


class TakesAnybodyWhoRuns(FairShares):
    def victim(self, candidates):
        victim = self.policy(list(candidates))
        return victim if victim in self.running else choose(self.policy, candidates)


class AdmitsAnyway(FairShares):
    def admit(self):
        gone, self.gone = self.gone, []
        super().admit()
        self.gone = gone + self.gone


# -- priorities --


class NobodyIsPushed(FairShares):
    def pushes(self, sequence, other):
        return False


class PushesWhoeverCameLast(FairShares):
    def displace(self, sequence):
        if self.running and self.pushes(sequence, self.running[-1]):
            self.preempt(self.running[-1])


class EqualsPush(FairShares):
    def pushes(self, sequence, other):
        return self.waiting.urgency(sequence) <= self.waiting.urgency(other)


class TheLessUrgentPush(FairShares):
    def pushes(self, sequence, other):
        return self.waiting.urgency(sequence) != self.waiting.urgency(other)


# -- the host --


class NeverSwaps(FairShares):
    def swap_out(self, sequence):
        return None


class SwapsForNothing(FairShares):
    """The blocks come back, and everything is computed again."""

    def swap_in(self, sequence, table):
        super().swap_in(sequence, table)
        sequence.num_computed = 0

    def enter(self, sequence):
        swapped = sequence.host_blocks is not None
        entered = super().enter(sequence)
        if swapped and entered:
            sequence.num_computed = 0
        return entered


class SwapsInBackwards(FairShares):
    def swap_in(self, sequence, table):
        sequence.host_blocks = sequence.host_blocks[::-1]
        super().swap_in(sequence, table)


class SwapsTheTarget(FairShares):
    """Of a block whose copy waits, it moves the target, where nothing is yet."""

    def swap_out(self, sequence):
        return self.memory.host.swap_out(sequence.table.blocks)


class SwapsWhatFits(FairShares):
    """Half of the blocks go to the host, and all tokens count as computed."""

    def swap_out(self, sequence):
        blocks = sequence.table.blocks[: self.memory.host.num_free]
        return self.memory.host.swap_out(blocks)


class NoRoomOnTheHost(FairShares):
    """Who can't be swapped ends."""

    def preempt(self, sequence):
        super().preempt(sequence)
        if sequence.host_blocks is None and sequence.num_ever_computed:
            self.end(sequence, FinishReason.KV_EXHAUSTED)
            self.waiting.remove(sequence)


# -- a step that breaks off --


class FailedIsDone(FairShares):
    """What was planned counts as computed."""

    def failed(self, plan):
        self.landed()
        running = {sequence.sequence_id: sequence for sequence in self.running}
        for part in plan.scheduled:
            self.computed(running[part.sequence_id], part.num_tokens - bool(part.draws))


class FailedIsTriedAgain(FairShares):
    """The same tokens once more, without the copies and moves that the step took with it."""

    def failed(self, plan):
        self.landed()


class FailedSwapsCount(FairShares):
    """Who was on its way to the host when the step broke off is believed to be there."""

    def failed(self, plan):
        super().failed(replace(plan, swap_out=()))


class FailedIsForgotten(FairShares):
    """All that was in the step is gone, and nobody hears of it."""

    def failed(self, plan):
        super().failed(plan)
        touched = {part.sequence_id for part in plan.scheduled}
        for sequence in [each for each in self.waiting if each.sequence_id in touched]:
            self.waiting.remove(sequence)


# -- all of it --


class KeepsABlock(FairShares):
    """Who leaves gives back all but one."""

    def leave(self, sequence):
        if sequence.table.blocks and sequence.finish_reason:
            self.memory.pool.incref(sequence.table.blocks[0])
        super().leave(sequence)


class SleepsAtTheEnd(FairShares):
    """Work is what runs; those that wait will be seen when somebody else comes."""

    @property
    def has_work(self):
        return bool(self.running or self.ends)


class ForgetsItsForks(FairShares):
    """Who is preempted before its answers are forked comes back as one."""

    def preempt(self, sequence):
        super().preempt(sequence)
        sequence.to_fork = 0


class NoSaltOnReturn(FairShares):
    """Who comes back looks for its prefix without a salt."""

    def found(self, sequence):
        salt = "" if sequence.num_preemptions else sequence.request.salt
        return self.memory.table(sequence.token_ids, salt)


ALTERNATIVES = [FairShares]
KILLED_BY = {
    DecodesAreFree: "within_the_budget",
    WholePrompts: "within_the_budget",
    EvenOnce: "fills_the_budget",
    LongestFirst: "beside_a_long_prompt",
    Phases: "beside_a_long_prompt",
    OneTokenAgain: "each_token_once",
    LiveBlocks: "a_plan_stays",
    WhoeverFits: "nobody_jumps",
    ShortestFirst: "nobody_jumps",
    Waves: "comes_in_at_once",
    EveryOtherStep: "comes_in_at_once",
    ForksNeedNoPlace: "places",
    ForksComeAsASurprise: "places",
    TakesAnything: "never_fits",
    LooksAtPromptsOnly: "never_fits",
    QueuesThenRefuses: "never_fits",
    NeverLooks: "known_beginning",
    HitsAreASecret: "known_beginning",
    SaltLost: "known_beginning",
    InsertsWhatIsPlanned: "random_traces",
    OneTokenForAll: "several_answers",
    ForksWithTheirTail: "several_answers",
    DeafToEos: "ends",
    OneMoreForEos: "ends",
    ContextIsTheClientsBusiness: "ends",
    ReapsALittleLater: "ends",
    ThrowsItselfOut: "alone_and_full",
    EndsWhoeverAsks: "alone_and_full",
    AbortsOneAnswer: "aborted",
    AbortsAndSaysNothing: "aborted",
    AbortsAgain: "aborted",
    AbortsAtOnce: "aborted",
    KnowsWhomItAborts: "aborted",
    AbortForgetsTheHost: "aborted_while_preempted",
    AbortsWhatRuns: "aborted_while_preempted",
    BeginsAgain: "keeps_its_tokens",
    LosesItsLastToken: "keeps_its_tokens",
    ToTheEndOfTheLine: "back_in_its_place",
    StaysInThePlan: "unwound",
    KeepsItsBudget: "unwound",
    AlwaysTheLast: "asks_the_policy",
    AnybodyMayGo: "asks_the_policy",
    NewestFirst: "asks_the_policy",
    PreemptsTwo: "asks_the_policy",
    BelievesThePolicy: "refuses_a_stranger",
    TakesAnybodyWhoRuns: "refuses_a_stranger",
    AdmitsAnyway: "nobody_comes_in_while_another_goes",
    NobodyIsPushed: "urgent_first",
    PushesWhoeverCameLast: "urgent_first",
    EqualsPush: "equals_wait",
    TheLessUrgentPush: "equals_wait",
    NeverSwaps: "swapped",
    SwapsForNothing: "swapped",
    SwapsInBackwards: "swapped",
    SwapsWhatFits: "host_full",
    NoRoomOnTheHost: "host_full",
    FailedIsDone: "failed",
    FailedIsTriedAgain: "failed",
    FailedSwapsCount: "failed",
    FailedIsForgotten: "failed",
    KeepsABlock: "everything_goes_back",
    SleepsAtTheEnd: "everything_goes_back",
    SwapsTheTarget: "swapped_before_its_copy",
    ForgetsItsForks: "random_traces",
    NoSaltOnReturn: "keeps_its_tokens",
}
