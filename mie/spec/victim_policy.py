"""What any victim policy must do.

    victim = policy(candidates)    one of them: it gives its blocks back and waits again

``candidates`` run now, in the order of their admission, at least one of them. The scheduler calls
the policy when a block is needed and none is free; it leaves out the first in line, so any choice
is legal, and a bad one costs time. What no choice may cost is a token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Candidates
from typing import Any

from mie.memory.manager import BlockManager
from mie.request import Request, Sequence
from mie.scheduling.queue import FirstComeFirstServed, StrictPriority, WaitingQueue
from mie.scheduling.scheduler import Scheduler
from mie.spec.device import SIZE
from mie.spec.expect import CounterExample, equal
from mie.spec.fake_runner import asked, finished
from mie.spec.machine import Machine
from mie.spec.sequences import arrived, at_random, leaves_alone, lived

Policy = Callable[[Candidates[Sequence]], Sequence]


def some(seed: int, count: int) -> list[Sequence]:
    """``count`` candidates that ran for a while, some longer, some with answers begun."""
    rng = random.Random(seed)
    memory = BlockManager(10 * count + 1, SIZE)
    made = []
    for sequence in at_random(seed, count):
        output = rng.randrange(4)
        made.append(lived(sequence, memory, rng.randrange(1, sequence.num_tokens + 1), output))
        sequence.num_preemptions = rng.randrange(3)
    return made


def chosen(policy: Policy, candidates: list[Sequence], what: str) -> int:
    """The place of the victim among ``candidates``."""
    victim: Any = policy(list(candidates))
    places = [place for place, each in enumerate(candidates) if each is victim]
    if not places:
        raise CounterExample(f"{what}: got {victim!r}, who is none of {candidates}")
    return places[0]


# -- one call -----------------------------------------------------------------------------------


def case_one_of_them(policy: Policy) -> None:
    """The victim is one of the candidates, itself and no copy. Otherwise: blocks are taken from
    somebody who may not lose them, or from nobody, and the step asks for ever."""
    for seed in range(30):
        count = 1 + seed % 9
        chosen(policy, some(seed, count), f"victim of {count}")


def case_the_only_one(policy: Policy) -> None:
    """Of one candidate, that one is chosen. Otherwise: a policy that spares somebody breaks as soon
    as two sequences run."""
    for seed in range(8):
        equal(chosen(policy, some(seed, 1), "victim of 1"), 0, "place of the victim among 1")


def case_equals(policy: Policy) -> None:
    """Candidates that have the same numbers are no reason to fail. Otherwise: answers to one
    request, which have the same prompt and the same length, stop the engine when memory is full."""
    for count in (2, 3, 5):
        memory = BlockManager(50, SIZE)
        requests = [one for number in range(1, count + 1) for one in arrived(number)]
        for twins in (arrived(1, n=count), requests):
            candidates = [lived(sequence, memory, 5) for sequence in twins]
            chosen(policy, candidates, f"victim of {count} that are alike")


def case_any_state(policy: Policy) -> None:
    """Candidates may have computed nothing yet, have no output, or have been preempted before.
    Otherwise: what runs well in a test divides by zero on the first busy day."""
    memory = BlockManager(50, SIZE)
    [fresh], [cut], [talks], [back] = (arrived(n, 9, priority=n - 3, out=20) for n in range(1, 5))
    lived(fresh, memory, 0)
    lived(cut, memory, 3)
    cut.to_fork = 2
    lived(talks, memory, 14, output=6)
    lived(back, memory, 0, output=2)
    back.num_ever_computed, back.num_preemptions, back.num_cached_tokens = 11, 3, 4
    everybody = [fresh, cut, talks, back]
    for candidates in ([fresh], [back], [cut], [fresh, back], [back, cut], everybody):
        chosen(policy, candidates, f"victim of {candidates}")


def case_changes_nothing(policy: Policy) -> None:
    """Neither the list nor a sequence is changed by choosing. Otherwise: the scheduler gives the
    blocks back a second time, or somebody runs on without them."""
    for seed in range(12):
        candidates = some(seed, 2 + seed % 5)
        leaves_alone(lambda c=candidates: policy(c), candidates, "choosing")  # type: ignore[misc]


def case_same_choice_again(policy: Policy) -> None:
    """The same candidates give the same victim, whatever was asked before. Otherwise: a run with a
    fault in it can't be repeated."""
    asked_before: list[tuple[list[Sequence], int]] = []
    for seed in range(8):
        candidates = some(seed, 2 + seed % 6)
        asked_before.append((candidates, chosen(policy, candidates, "victim")))
    for candidates, place in [*asked_before, *reversed(asked_before)]:
        again = chosen(policy, candidates, "victim")
        equal(again, place, f"place of the victim among {candidates}, asked again")


# -- an engine that runs on it ------------------------------------------------------------------


def serves(policy: Policy, requests: list[Request], queue: type[WaitingQueue], host: int) -> None:
    """All ``requests``, in a third of the memory that they would like to have."""
    machine = Machine(
        Scheduler, seqs=8, budget=24, blocks=14, host=host, queue=queue, policy=policy
    )
    waiting = list(requests)
    while waiting or machine.scheduler.has_work:
        if waiting:
            machine.add(waiting.pop(0))
        machine.step()
    machine.drain()
    preempted = sum(len(plan.preempted) for plan in machine.plans)
    equal(preempted > 0, True, "whether memory was too small for all")
    for request in requests:
        for index in range(request.sampling.n):
            name, text = request.name(index), finished(request, index)
            expected = text.tokens[len(request.prompt) :]
            equal(machine.output(name), expected, f"tokens of {name}, with {preempted} preemptions")
            equal(machine.ends[name], text.reason, f"finish reason of {name}")


def case_under_pressure(policy: Policy) -> None:
    """An engine that runs out of blocks again and again gives the tokens that it would have given
    without. Otherwise: what a client reads depends on who else was there."""
    lengths = ((9, 15), (14, 10), (3, 20), (6, 6), (17, 12), (5, 16), (8, 18), (2, 9))
    requests = [asked(f"p{i}", length, out) for i, (length, out) in enumerate(lengths)]
    serves(policy, requests, FirstComeFirstServed, 0)


def case_with_all_there_is(policy: Policy) -> None:
    """So it does with priorities, several answers to one request, and a host to swap to. Otherwise:
    the one that may not be chosen is, or a swapped sequence comes back to another's blocks."""
    requests = [
        asked("q0", 9, 14, priority=1),
        asked("q1", 7, 12, n=3, priority=1),
        asked("q2", 12, 12),
        asked("q3", 4, 18, n=2),
        asked("q4", 6, 14, priority=1),
        asked("q5", 10, 9, priority=-1),
    ]
    serves(policy, requests, StrictPriority, 8)
