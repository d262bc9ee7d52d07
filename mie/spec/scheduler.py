"""What any scheduler must do.

    scheduler = Scheduler(limits, memory, queue, victim_policy)
    scheduler.add(request)           one more waits; refused if it can never be served
    scheduler.abort(request_id)      its answers end, in whatever state they are
    scheduler.schedule()             the plan of the next step
    scheduler.update(plan, result)   tokens and ends, one SequenceOutput each
    scheduler.failed(plan)           instead of update: nobody knows what the step has written
    scheduler.running, .waiting      lists of sequences: those with a table, and the queue
    scheduler.has_work               whether a step would compute something or has an end to report

Memory, queue and policy are the engine's. ``Machine`` runs the plans and checks every step: slots
hold what is read, tokens and ends are right, blocks have the owners that list them. Which tokens
of which sequences go first, and what is reserved for whom, is the scheduler's own business as far
as no case says otherwise.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from collections.abc import Sequence as Candidates
from typing import Any

from mie.errors import PartError, RequestError
from mie.request import FinishReason, Request, Sequence, count_seats
from mie.scheduling.plan import StepPlan
from mie.scheduling.policy import VictimPolicy, last_admitted
from mie.scheduling.queue import StrictPriority
from mie.spec.expect import CounterExample, equal, refuses
from mie.spec.fake_runner import asked, finished
from mie.spec.machine import Machine, SchedulerClass, first_step, names
from mie.spec.scheduler_traces import trace_of_scheduler

ABORT, KV_EXHAUSTED = FinishReason.ABORT, FinishReason.KV_EXHAUSTED

# -- one budget ---------------------------------------------------------------------------------


def case_within_the_budget(Scheduler: SchedulerClass) -> None:
    """No step computes more than `token_budget` tokens. Otherwise: one long prompt makes a step so
    long that everybody else's next word is late."""
    machine = Machine(Scheduler, budget=6)
    machine.add(asked("a", 3), asked("b", 20), asked("c", 5, n=2))
    machine.steps(3)
    machine.add(asked("d", 13))
    machine.drain()
    for plan in machine.plans:
        equal(plan.num_tokens <= 6, True, f"whether {plan} keeps to a budget of 6")


def case_fills_the_budget(Scheduler: SchedulerClass) -> None:
    """While prompts have tokens left and places and blocks are there, each step computes as much as
    the budget allows. Otherwise: weights are read for few tokens, and all answers begin later."""
    machine = Machine(Scheduler, budget=16)
    left = [11, 18, 7, 9]
    machine.add(*(asked(f"p{length}", length) for length in left))
    computed = 0
    while computed < sum(left) - 16:
        plan = machine.step()
        equal(plan.num_tokens, 16, f"tokens of {plan}, with {sum(left) - computed} left of prompts")
        computed += sum(part.num_new for part in plan.scheduled if part.kind == "prefill")
    machine.drain()


def case_beside_a_long_prompt(Scheduler: SchedulerClass) -> None:
    """Whoever has a token to compute gets it in every step, also beside a long prompt. Otherwise:
    all conversations stop for as long as somebody's document is read."""
    machine = Machine(Scheduler, budget=8)
    short = [asked(name, 4, 30) for name in "abc"]
    machine.add(*short)
    machine.steps(3)
    machine.add(asked("long", 50))
    while machine.texts["long"].num_out == 0:
        plan = machine.step()
        for name in "abc":
            equal(name in names(plan), True, f"whether {name} goes on in {plan}")
    machine.drain()


def case_each_token_once(Scheduler: SchedulerClass) -> None:
    """The pieces of a prompt follow one another, and each token is computed once. Otherwise: a gap
    in the K and V, or the budget is spent on what is there already."""
    machine = Machine(Scheduler, budget=7)
    requests = [asked("a", 23), asked("b", 5, 9), asked("c", 30, n=2)]
    machine.add(*requests)
    computed: dict[str, int] = {}
    for plan in machine.drain():
        for part in plan.scheduled:
            begin = 30 if part.name == "c/1" else 0  # it is forked after the prompt
            equal(part.position, computed.get(part.name, begin), f"where {part} begins in {plan}")
            computed[part.name] = part.num_tokens
    total = sum(plan.num_tokens for plan in machine.plans)
    equal(total, (23 + 3) + (5 + 8) + (30 + 3 + 3), "tokens computed, the last of each answer not")


def case_a_plan_stays(Scheduler: SchedulerClass) -> None:
    """A plan doesn't change after it was made. Otherwise: a runner in another thread reads blocks
    and tokens of a later step."""
    machine = Machine(Scheduler, budget=8)
    machine.add(asked("a", 10), asked("b", 6, n=2))
    kept = []
    while machine.scheduler.has_work:
        plan = machine.plan()
        kept.append((plan, repr(plan), pickle.dumps(plan)))
        machine.finish(plan)
    for plan, said, copied in kept:
        equal((repr(plan), plan), (said, pickle.loads(copied)), "a plan after all steps")


# -- who comes in -------------------------------------------------------------------------------


def case_nobody_jumps(Scheduler: SchedulerClass) -> None:
    """Who waits comes in by the queue's order, though a later one would fit and the next doesn't.
    Otherwise: short requests keep coming, and a long one never gets its turn."""
    for what, big in (("blocks", asked("big", 30)), ("places", asked("big", 4, n=4))):
        machine = Machine(Scheduler, blocks=12)
        machine.add(asked("first", 20, 8))
        machine.step()
        machine.add(big, asked("small", 2), asked("tiny", 1))
        plans = machine.drain()
        began = [first_step(plans, name) for name in (big.name(0), "small", "tiny")]
        equal(began, sorted(began), f"steps in which big, small, tiny begin; big lacks {what}")


def case_comes_in_at_once(Scheduler: SchedulerClass) -> None:
    """A place that is left is taken in the next step, whoever still runs. Otherwise: all wait for
    the longest answer of a batch, which is what continuous batching ends."""
    machine = Machine(Scheduler, seqs=2)
    machine.add(asked("short", 4, 3), asked("long", 4, 12), asked("next", 4, 2), asked("last", 4))
    plans = machine.drain()
    for before, after in (("short", "next"), ("next", "last")):
        end = max(number for number, plan in enumerate(plans) if before in names(plan))
        equal(
            first_step(plans, after), end + 1, f"step of {after}'s beginning; {before} ends {end}"
        )
    at_work = [names(plan) for plan in plans].count(["long"])
    equal(at_work < 7, True, "whether others ran beside the long one")


def case_places(Scheduler: SchedulerClass) -> None:
    """At most `max_num_seqs` sequences run, the answers that a prompt will be forked into counted
    from its first step on. Otherwise: a step has more rows than the runner has room for."""
    machine = Machine(Scheduler, seqs=4, budget=8)
    machine.add(asked("a", 9, n=3), asked("b", 9, n=2), asked("c", 3), asked("d", 3, n=4))
    while machine.scheduler.has_work:
        plan = machine.plan()
        for when in ("planned", "done"):
            places = count_seats(machine.scheduler.running)
            equal(places <= 4, True, f"whether {places} places are at most 4, {plan} {when}")
            if when == "planned":
                machine.finish(plan)
    machine.drain()


def case_never_fits(Scheduler: SchedulerClass) -> None:
    """A request that can't be served however long it waits is refused at once, and nothing has
    changed. Otherwise: it stands at the head of the queue for ever, and all others behind it."""
    machine = Machine(Scheduler, seqs=2, context=40, blocks=6)
    machine.add(asked("a", 5))
    machine.step()
    for what, request in (
        ("no token", asked("x", 0)),
        ("a prompt of 40 tokens and a context of 40", asked("x", 40)),
        ("a prompt of 25 tokens and memory for 24", asked("x", 25, None)),
        ("20 tokens and an answer of 6, and memory for 24", asked("x", 20, 6)),
        ("3 answers at once, of 2", asked("x", 5, n=3)),
    ):
        before = (machine.running(), machine.waiting(), machine.memory.pool.num_free)
        refuses(f"add of {what}", machine.scheduler.add, request, error=RequestError)
        after = (machine.running(), machine.waiting(), machine.memory.pool.num_free)
        equal(after, before, f"(running, waiting, free blocks) after {what} was refused")
    machine.add(asked("fits", 20, 5), asked("cut", 4, 21, eos_ids=frozenset(range(97))))
    machine.drain()
    equal(machine.output("a"), finished(asked("a", 5)).tokens[5:], "tokens of one that ran")


# -- what is shared -----------------------------------------------------------------------------


def case_known_beginning(Scheduler: SchedulerClass) -> None:
    """What the prefix cache finds isn't computed, and at least one token is. Otherwise: a system
    prompt costs as much each time, or no logits are there to choose the first token from."""
    machine = Machine(Scheduler, budget=64)
    document = asked("a", 14).prompt
    machine.add(asked("a", 14, 20), asked("red", 14, begin=document, salt="red"))
    machine.step()
    equal([part.position for part in machine.plans[0].scheduled], [0, 0], "where both begin")
    for name, length, begin, found in (
        ("b", 17, document, 12),  # three full blocks, while a runs
        ("same", 12, document[:12], 8),  # all of it is known
        ("c", 14, document[:6], 4),
        ("new", 14, (), 0),
    ):
        machine.add(asked(name, length, 2, begin=begin))
        plan = machine.step()
        [part] = [part for part in plan.scheduled if part.name == name]
        equal((part.position, part.num_tokens), (found, length), f"what {name} computes in {plan}")
        said = [output.num_cached_tokens for output in machine.outputs if output.name == name]
        equal(said, [found], f"num_cached_tokens that {name} is told")
    machine.drain()


def case_several_answers(Scheduler: SchedulerClass) -> None:
    """A prompt with n answers is computed once; the answers share its blocks and split the last one
    before they write. Otherwise: n times the work and the memory, or one answer reads another's."""
    machine = Machine(Scheduler, budget=8)
    machine.add(asked("a", 10, 5, n=3))
    machine.steps(3)
    blocks = machine.memory.num_usable_blocks - machine.memory.pool.num_free
    equal(blocks, 2 + 3, "blocks in use after the first token of each: two shared, one for each")
    machine.drain()
    for index in range(3):
        expected = finished(asked("a", 10, 5, n=3), index).tokens[10:]
        equal(machine.output(f"a/{index}"), expected, f"answer number {index}")
    total = sum(plan.num_tokens for plan in machine.plans)
    equal(total, 10 + 3 * 4, "tokens computed for a prompt of 10 and 3 answers of 5")


# -- how it ends --------------------------------------------------------------------------------


def case_ends(Scheduler: SchedulerClass) -> None:
    """An answer ends with its eos token, after `max_tokens`, or where the context ends; nothing is
    computed for it after that, and its blocks are free. Otherwise: clients read past the end."""
    eos = frozenset({finished(asked("a", 6, 30)).tokens[6 + 2]})
    length = finished(asked("a", 6, 30, eos_ids=eos)).num_out
    for request, expected in (
        (asked("a", 6, 30, eos_ids=eos), (FinishReason.STOP, length)),
        (asked("a", 6, length, eos_ids=eos), (FinishReason.STOP, length)),
        (asked("a", 6, 30, eos_ids=eos, ignore_eos=True), (FinishReason.LENGTH, 30)),
        (asked("a", 6, 1), (FinishReason.LENGTH, 1)),
        (asked("a", 6, 99), (FinishReason.LENGTH, 34)),
        (asked("a", 6, None), (FinishReason.LENGTH, 34)),
    ):
        machine = Machine(Scheduler, context=40)
        machine.add(request)
        machine.until("a")
        got = (machine.ends["a"], len(machine.output("a")))
        equal(got, expected, f"(reason, tokens) of {request.sampling} in a context of 40")
        machine.drain()


def case_alone_and_full(Scheduler: SchedulerClass) -> None:
    """Who has grown beyond all memory there is ends as `kv_exhausted`, not before, and others go
    on. Otherwise: it is thrown out and computed again, for ever, and everybody waits."""
    machine = Machine(Scheduler, blocks=5)
    machine.add(asked("open", 6, None), asked("other", 6, None), asked("small", 3, 6))
    machine.drain()
    for name in ("open", "other"):
        got = (machine.ends[name], len(machine.texts[name].tokens))
        equal(got, (KV_EXHAUSTED, 21), f"(reason, tokens) of {name}, with slots for 20")
    equal(machine.ends["small"], FinishReason.LENGTH, "finish reason of one that is small")


def case_aborted(Scheduler: SchedulerClass) -> None:
    """A request ends once when it is aborted, in whatever state, and others go on; again, too late
    or unknown, nothing happens. Otherwise: blocks leak for each client that hangs up."""
    for states in range(6):
        machine = Machine(Scheduler, budget=8, blocks=9, host=9 if states % 2 else 0)
        machine.add(asked("a", 9, 12, n=2), asked("b", 15, 12))
        plan = None
        if states:
            machine.steps(states - 1)
            plan = machine.plan()  # this one is on its way when the client hangs up
        for request_id in ("b", "a", "b", "nobody"):
            machine.scheduler.abort(request_id)
        equal(machine.scheduler.has_work, True, "has_work with ends to report")
        machine.add(asked("c", 4, 3))
        if plan is not None:
            machine.finish(plan)
        machine.drain()
        ends = [machine.ends[name] for name in ("a/0", "a/1", "b", "c")]
        expected = [ABORT, ABORT, ABORT, FinishReason.LENGTH]
        equal(ends, expected, f"finish reasons, a and b aborted after {states} steps")
        machine.scheduler.abort("c")
        equal(machine.scheduler.has_work, False, "has_work after an abort that came too late")


def case_aborted_while_preempted(Scheduler: SchedulerClass) -> None:
    """So it is for one that was preempted, and for one that runs when another waits to come back.
    Otherwise: host blocks leak, or a sequence that nobody reads is computed again."""
    for host in (0, 20):
        for who in ("preempted", "running"):
            machine = pressed(Scheduler, host=host)
            [victim] = machine.until_preempted().preempted
            kept = [name for name in machine.running() if name != victim]
            gone = victim if who == "preempted" else kept[0]
            machine.scheduler.abort(gone)
            plans = machine.drain()
            for plan in plans:
                equal(
                    gone in names(plan), False, f"whether {gone}, aborted while {who}, is in {plan}"
                )
            equal(machine.ends[gone], ABORT, f"finish reason of {gone}, aborted while {who}")


# -- out of blocks ------------------------------------------------------------------------------


A = asked("a", 7, 14)
GROW = (A, asked("b", 5, 14), asked("c", 4, 14, begin=A.prompt[:4], salt="red"))


def pressed(
    Scheduler: SchedulerClass, policy: VictimPolicy = last_admitted, host: int = 0
) -> Machine:
    """Three that begin in five of eight blocks and would need fifteen, one of them like another
    with another salt; and a fourth that waits for a place."""
    machine = Machine(Scheduler, seqs=3, blocks=8, host=host, policy=policy)
    machine.add(*GROW)
    machine.step()
    machine.add(asked("late", 6, 5))
    return machine


def case_keeps_its_tokens(Scheduler: SchedulerClass) -> None:
    """Who is preempted waits with all of its tokens, and goes on after the last of them. Otherwise:
    an answer begins again, and the client reads its beginning twice."""
    machine = pressed(Scheduler)
    [victim] = machine.until_preempted().preempted
    [waits] = [each for each in machine.scheduler.waiting if each.name == victim]
    equal(waits.token_ids, machine.texts[victim].tokens, f"tokens of {victim}, preempted")
    equal(waits.num_output_tokens > 0, True, f"whether {victim} had begun its answer")
    machine.drain()
    for request in GROW:
        name, expected = request.request_id, finished(request).tokens[len(request.prompt) :]
        equal(machine.output(name), expected, f"tokens of {name}, with preemptions")


def case_back_in_its_place(Scheduler: SchedulerClass) -> None:
    """Who was preempted comes in again before all that arrived after it. Otherwise: each preemption
    sends it to the end of the line, and what it had computed was for nothing."""
    machine = pressed(Scheduler)
    plan = machine.until_preempted()
    [victim] = plan.preempted
    machine.add(asked("later", 2, 3))
    plans = machine.drain()
    back = first_step(plans, victim)
    for name in ("late", "later"):
        equal(back <= first_step(plans, name), True, f"whether {victim} is back before {name}")


def case_unwound(Scheduler: SchedulerClass) -> None:
    """A victim that was planned in this step is taken out of the plan. Otherwise: it writes into
    blocks that are somebody else's in the same step."""
    for host in (0, 20):
        machine = pressed(Scheduler, policy=lambda candidates: candidates[0], host=host)
        plan = machine.until_preempted()
        equal(plan.preempted, ("b",), f"who is preempted in {plan}")
        equal("b" in names(plan), False, f"whether b, preempted, is in {plan}")
        machine.drain()


def case_asks_the_policy(Scheduler: SchedulerClass) -> None:
    """The policy chooses the victims, among those that run, in the order of admission, and never
    sees the first in line. Otherwise: nobody is sure to end, and all lose their K and V in turn."""
    asked_of: list[str] = []

    def policy(candidates: Candidates[Sequence]) -> Sequence:
        order = machine.running()
        names_of = [each.name for each in candidates]
        equal(names_of, [name for name in order if name in names_of], f"candidates, of {order}")
        first = min(machine.scheduler.running, key=machine.scheduler.waiting.rank).name
        equal(first in names_of, False, f"whether {first}, first in line, is a candidate")
        victim = candidates[len(asked_of) % len(candidates)]
        asked_of.append(victim.name)
        return victim

    machine = pressed(Scheduler, policy=policy)
    machine.drain()
    preempted = [name for plan in machine.plans for name in plan.preempted]
    equal(preempted, asked_of, "who was preempted, and whom the policy chose")
    equal(len(preempted) > 2, True, "whether memory was too small for all")


def case_refuses_a_stranger(Scheduler: SchedulerClass) -> None:
    """A policy that chooses somebody who is no candidate is refused, as a `PartError`. Otherwise: a
    fault in a reader's policy looks like a fault of the memory."""

    def first_in_line(candidates: Candidates[Sequence]) -> Sequence:
        running: list[Sequence] = machine.scheduler.running
        return min(running, key=machine.scheduler.waiting.rank)

    strangers: dict[str, Any] = {"None": lambda _: None, "the first in line": first_in_line}
    for who, policy in strangers.items():
        machine = pressed(Scheduler, policy=policy)
        refuses(f"a policy that chooses {who}", machine.drain, error=PartError)


def case_nobody_comes_in_while_another_goes(Scheduler: SchedulerClass) -> None:
    """In a step that preempts, nobody is admitted. Otherwise: who comes in takes the blocks that
    somebody was thrown out for, and is thrown out next."""
    machine = pressed(Scheduler, policy=lambda candidates: candidates[0])
    before: list[str] = []
    while machine.scheduler.has_work:
        plan = machine.step()
        came = [name for name in names(plan) if name not in before or name in plan.preempted]
        if plan.preempted:
            equal(came, [], f"who came in in {plan}")
        before = machine.running()


# -- priorities ---------------------------------------------------------------------------------


def case_urgent_first(Scheduler: SchedulerClass) -> None:
    """A strictly more urgent sequence takes the place of the least urgent that runs. Otherwise: an
    urgent request waits for the longest answer of somebody who has time."""
    for lacks, seqs, blocks in (("a place", 2, 40), ("blocks", 4, 9)):
        machine = Machine(Scheduler, seqs=seqs, blocks=blocks, queue=StrictPriority)
        for request in (asked("patient", 9, 20, priority=5), asked("normal", 9, 8, priority=1)):
            machine.add(request)
            machine.step()
        machine.add(asked("urgent", 9, 5))
        plans = machine.until("urgent")
        said = f"urgent, which lacks {lacks}"
        equal(first_step(plans, "urgent") <= 2, True, f"whether {said}, begins within three steps")
        gone = [name for plan in machine.plans for name in plan.preempted]
        equal(gone, ["patient"], f"who was preempted for {said}")
        machine.drain()


def case_equals_wait(Scheduler: SchedulerClass) -> None:
    """One that is as urgent as those that run, or less, waits until there is room. Otherwise: two
    equals throw each other out in turn, and neither gets on."""
    for priority in (1, 2):
        machine = Machine(Scheduler, seqs=2, queue=StrictPriority)
        machine.add(asked("a", 9, 9, priority=1), asked("b", 9, 9, priority=1))
        machine.steps(2)
        machine.add(asked("c", 2, 3, priority=priority))
        machine.drain()
        gone = [name for plan in machine.plans for name in plan.preempted]
        equal(gone, [], f"who was preempted for one of priority {priority}, by those of 1")


# -- the host's memory --------------------------------------------------------------------------


def case_swapped(Scheduler: SchedulerClass) -> None:
    """With room on the host, a preempted sequence's K and V move there and come back, and nothing
    is computed twice. Otherwise: bytes go over the bus, and the work is done again as well."""
    machine = pressed(Scheduler, host=20)
    machine.drain()
    outs, ins, twice = moved(machine)
    equal(outs > 0, True, "whether blocks were swapped out")
    equal(ins, outs, "blocks swapped in, of those swapped out")
    equal(twice, 0, "tokens that were computed again")


def case_host_full(Scheduler: SchedulerClass) -> None:
    """A sequence for whose blocks the host has no room is computed again, all of it. Otherwise: the
    half that was swapped is read together with nothing, or the engine stops."""
    for host in (0, 1):
        machine = pressed(Scheduler, host=host)
        machine.drain()
        outs, ins, twice = moved(machine)
        equal((outs, ins), (0, 0), f"blocks swapped (out, in), with {host} on the host")
        equal(twice > 0, True, "whether tokens were computed again")


def moved(machine: Machine) -> tuple[int, int, int]:
    """Blocks out, blocks in, and tokens computed again, in all steps."""
    plans = machine.plans
    return (
        sum(len(plan.swap_out) for plan in plans),
        sum(len(plan.swap_in) for plan in plans),
        sum(part.num_recomputed for plan in plans for part in plan.scheduled),
    )


def case_swapped_before_its_copy(Scheduler: SchedulerClass) -> None:
    """Of a block whose copy still waits, the host gets what the copy would have held. Otherwise: an
    answer that was forked and thrown out in one step comes back to a block that nobody filled."""

    def the_forked_one(candidates: Candidates[Sequence]) -> Sequence:
        return next((each for each in candidates if each.name == "fork/0"), candidates[-1])

    for blocks in (6, 7, 8):
        machine = Machine(Scheduler, seqs=5, blocks=blocks, host=20, policy=the_forked_one)
        machine.add(asked("a", 5, 10), asked("b", 4, 6), asked("fork", 6, 6, n=3))
        machine.drain()


# -- a step that breaks off ---------------------------------------------------------------------

EVENTS: dict[str, Callable[[StepPlan], bool]] = {
    "decodes": lambda plan: bool(plan.scheduled),
    "a prompt": lambda plan: any(part.num_new > 1 for part in plan.scheduled),
    "copies": lambda plan: bool(plan.copies),
    "a preemption": lambda plan: bool(plan.preempted),
    "a return": lambda plan: any(part.kind == "recompute" for part in plan.scheduled),
    "blocks coming in": lambda plan: bool(plan.swap_in),
}


def case_failed(Scheduler: SchedulerClass) -> None:
    """After a step that broke off, whatever it was writing is computed again, and no token is lost
    or told twice. Otherwise: one bad step makes all answers after it wrong, and nobody notices."""

    def begun(host: int) -> Machine:
        machine = pressed(Scheduler, host=host)
        machine.add(asked("fork", 6, 4, n=2))
        return machine

    for host in (0, 20):
        plans = begun(host).drain()
        for what, happens in EVENTS.items():
            good = next((number for number, plan in enumerate(plans) if happens(plan)), len(plans))
            machine = begun(host)
            machine.steps(good)
            machine.fail()  # the one with the event in it
            machine.fail()
            machine.drain()
            for request in GROW:
                text = machine.texts[request.request_id]
                equal(text.num_out, 14, f"tokens of {text.name}, after a step with {what} failed")


# -- all of it ----------------------------------------------------------------------------------


def case_everything_goes_back(Scheduler: SchedulerClass) -> None:
    """When nobody waits or runs, all blocks are free, and a request that needs them all is served.
    Otherwise: an engine that was busy for a day has no memory left."""
    machine = pressed(Scheduler)
    machine.add(asked("fork", 5, 3, n=3))
    machine.drain()
    request: Request = asked("all", 25, 8)
    machine.add(request)
    machine.drain()
    if machine.ends["all"] is not FinishReason.LENGTH:
        raise CounterExample(f"all, which needs 8 blocks of 8: ended as {machine.ends['all']}")


def case_random_traces(Scheduler: SchedulerClass) -> None:
    """In random runs with little memory, everybody gets the answer that they would have got alone.
    Otherwise: some order of events that no rule thought of ends in a wrong word."""
    trace_of_scheduler(Scheduler)
