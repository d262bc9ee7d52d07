"""What any queue must do.

    queue = Queue()
    queue.add(sequence)       it waits: a new one, or one that was preempted
    queue.peek()              who is next; None if nobody waits
    queue.remove(sequence)    it waits no longer, wherever it stood
    queue.rank(sequence)      its place in the order, to be compared with <; also while it runs
    queue.urgency(sequence)   a number; only one with strictly less may push out what runs
    len(queue), iter(queue)   how many wait; all of them, in their order

Which order is the queue's own business: by arrival, by priority, shortest prompt first. It has to
be an order, it has to stay, and all of the methods have to mean the same one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import combinations

from mie.request import Sequence
from mie.scheduling.queue import WaitingQueue
from mie.spec.expect import CounterExample, equal
from mie.spec.sequences import arrived, at_random, leaves_alone, several

QueueClass = Callable[[], WaitingQueue]


def ranked(queue: WaitingQueue, sequences: Iterable[Sequence]) -> list[Sequence]:
    """``sequences`` in the order that the queue's own ranks give them."""
    order: list[Sequence] = []
    for sequence in sequences:
        place = sum(bool(queue.rank(other) < queue.rank(sequence)) for other in order)
        order.insert(place, sequence)
    return order


def named(sequences: Iterable[Sequence | None]) -> list[str | None]:
    return [None if sequence is None else sequence.name for sequence in sequences]


def holds(queue: WaitingQueue, sequences: Iterable[Sequence], when: str) -> None:
    """``sequences`` wait, these very ones, and nobody else."""
    expected = ranked(queue, sequences)
    equal(len(queue), len(expected), f"len {when}")
    equal(named(queue), named(expected), f"who waits {when}")
    equal(named([queue.peek()]), named(expected[:1]) or [None], f"peek {when}")
    for got, sequence in zip([*queue, queue.peek()], [*expected, *expected[:1]], strict=False):
        if got is not sequence:
            raise CounterExample(f"{sequence} {when}: got another object of that name")


def filled(Queue: QueueClass, sequences: Iterable[Sequence]) -> WaitingQueue:
    queue = Queue()
    for sequence in sequences:
        queue.add(sequence)
    return queue


# -- the order ----------------------------------------------------------------------------------


def case_different_ranks(Queue: QueueClass) -> None:
    """Of any two sequences exactly one ranks before the other, two answers to one request and two
    equal requests as well. Otherwise: nobody is first in line, and all may be thrown out in turn.
    """
    queue, sequences = Queue(), several()
    for one, other in combinations(sequences, 2):
        before = (queue.rank(one) < queue.rank(other), queue.rank(other) < queue.rank(one))
        equal(sum(before), 1, f"how many of {one.name} and {other.name} rank before the other")


def case_one_order(Queue: QueueClass) -> None:
    """Who ranks before another ranks before all that come after that one. Otherwise: three pass the
    one free place around, each with a right to it."""
    queue = Queue()
    order = ranked(queue, at_random(3, 20))
    for one, other in combinations(order, 2):
        before = bool(queue.rank(one) < queue.rank(other))
        equal(before, True, f"whether {one.name} ranks before {other.name}, in {named(order)}")


def case_rank_stays(Queue: QueueClass) -> None:
    """The rank of a sequence and its urgency are the same while it waits, is computed, grows, is
    preempted and waits again. Otherwise: it comes back behind those that it stood before, and an
    old request starves under a stream of new ones."""
    sequences = several()
    queue = filled(Queue, sequences)
    order = ranked(queue, sequences)
    urgency = [queue.urgency(sequence) for sequence in order]
    for turn, sequence in enumerate(reversed(sequences)):
        queue.remove(sequence)
        sequence.num_computed = sequence.num_ever_computed = sequence.num_tokens
        sequence.num_cached_tokens, sequence.to_fork = 4, 0
        for token in range(turn % 4):
            sequence.append(token)
        sequence.num_preemptions += 1 + turn % 3
        sequence.num_computed = 0
        sequence.host_blocks = [turn] if turn % 2 else None
        if turn % 4:
            queue.add(sequence)
        later = f"after {sequence.name} ran and was preempted"
        equal(named(ranked(queue, sequences)), named(order), f"all by rank {later}")
        equal([queue.urgency(each) for each in order], urgency, f"their urgency {later}")


def case_urgency(Queue: QueueClass) -> None:
    """Whose urgency is strictly less than another's ranks before it. Otherwise: one pushes another
    out, which then stands before it in the queue and pushes back, in every step."""
    queue = Queue()
    sequences = several() + at_random(5, 20)
    for sequence in sequences:
        equal(isinstance(queue.urgency(sequence), int), True, "whether urgency gives an int")
    for one, other in combinations(ranked(queue, sequences[:12]), 2):
        later = queue.urgency(one) > queue.urgency(other)
        equal(later, False, f"whether {one.name}, before {other.name}, is less urgent")


# -- who waits ----------------------------------------------------------------------------------


def case_nobody_waits(Queue: QueueClass) -> None:
    """A queue begins empty and becomes empty again, and then `peek` is None. Otherwise: an idle
    engine breaks, or goes on for somebody who has left."""
    queue = Queue()
    holds(queue, [], "in a new queue")
    [sequence] = arrived(1)
    for times in (1, 2):
        queue.add(sequence)
        holds(queue, [sequence], f"after the only one came {times} times")
        queue.remove(sequence)
        holds(queue, [], f"after the only one has left {times} times")


def case_in_the_order_of_rank(Queue: QueueClass) -> None:
    """`peek` is the one with the lowest rank and iteration goes up from it, in whatever order they
    came. Otherwise: who is next is decided by one order and who may be thrown out by another."""
    for seed in range(6):
        sequences = several()
        random.Random(seed).shuffle(sequences)
        queue = Queue()
        for count, sequence in enumerate(sequences, 1):
            queue.add(sequence)
            holds(queue, sequences[:count], f"after {count} came, in the order {named(sequences)}")


def case_asking_changes_nothing(Queue: QueueClass) -> None:
    """Whatever is asked of a queue, nobody leaves and nothing about a sequence changes. Otherwise:
    a request whose memory isn't free yet is looked at once and never seen again."""
    sequences = several()
    queue = filled(Queue, sequences)

    def ask() -> None:
        for _ in range(3):
            queue.peek()
            list(queue)
            next(iter(queue))
            len(queue)
            for sequence in sequences:
                queue.rank(sequence)
                queue.urgency(sequence)

    leaves_alone(ask, sequences, "peek, iteration, len, rank and urgency")
    holds(queue, sequences, "after it was asked for everything")


def case_coming_and_going(Queue: QueueClass) -> None:
    """`add` and `remove` change nothing about a sequence. Otherwise: what it has computed, or how
    often it was preempted, depends on how long it waited."""
    sequences, queue = several(), Queue()

    def come_and_go() -> None:
        for sequence in sequences:
            queue.add(sequence)
        for sequence in sequences:
            queue.remove(sequence)

    leaves_alone(come_and_go, sequences, "add and remove")


def case_from_the_middle(Queue: QueueClass) -> None:
    """`remove` takes out any one that waits, and the others keep their order. Otherwise: a request
    that was aborted is served, or another one goes in its place."""
    for which in range(len(several())):
        sequences = several()
        queue = filled(Queue, sequences)
        gone = sequences.pop(which)
        queue.remove(gone)
        holds(queue, sequences, f"after {gone.name} has left")
        while sequences:  # from the front, as they are admitted
            sequence = ranked(queue, sequences)[0]
            queue.remove(sequence)
            sequences.remove(sequence)
            holds(queue, sequences, f"after {gone.name} and then {sequence.name} have left")


def case_comes_back(Queue: QueueClass) -> None:
    """Who was removed and is added again stands at its rank, once. Otherwise: a preempted sequence
    waits behind all that arrived after it, or an old entry of it is admitted a second time."""
    for which in range(len(several())):
        sequences = several()
        queue = filled(Queue, sequences)
        for times in (1, 2, 3):
            queue.remove(sequences[which])
            queue.add(sequences[which])
            holds(queue, sequences, f"after {sequences[which].name} came back {times} times")
        queue.remove(sequences[which])
        holds(queue, sequences[:which] + sequences[which + 1 :], "after it left for good")


def case_queues_apart(Queue: QueueClass) -> None:
    """Two queues share nobody. Otherwise: a second engine in one process serves the requests of the
    first."""
    one, other = Queue(), Queue()
    [a], [b] = arrived(1), arrived(2)
    one.add(a)
    other.add(b)
    holds(one, [a], "in the first of two queues")
    holds(other, [b], "in the second of two queues")


# -- all of it ----------------------------------------------------------------------------------


def case_random_trace(Queue: QueueClass) -> None:
    """Over 600 random steps a queue holds what a list that is sorted again each time would.
    Otherwise: some order of coming and going that no rule thought of loses somebody."""
    rng = random.Random(9)
    queue, outside = Queue(), at_random(9, 24)
    place = {one: number for number, one in enumerate(ranked(queue, outside))}
    inside: list[Sequence] = []
    for step in range(600):
        grows = step // 60 % 2 == 0  # stretches of coming and stretches of going
        if outside and (not inside or rng.random() < (0.7 if grows else 0.3)):
            sequence = outside.pop(rng.randrange(len(outside)))
            queue.add(sequence)
            inside.append(sequence)
            said = f"step {step}, {sequence.name} came"
        else:
            inside.sort(key=place.__getitem__)
            sequence = inside.pop(0 if rng.random() < 0.5 else rng.randrange(len(inside)))
            queue.remove(sequence)
            outside.append(sequence)
            said = f"step {step}, {sequence.name} left"
        expected = sorted(inside, key=place.__getitem__)
        equal(len(queue), len(expected), f"len after {said}")
        if step % 3 == 0:
            equal(named(queue), named(expected), f"who waits after {said}")
        equal(named([queue.peek()]), named(expected[:1]) or [None], f"peek after {said}")
