"""The waiting: the order is that of the rank, whoever comes, leaves the middle, or comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mie.request import Request, Sequence
from mie.scheduling.queue import FirstComeFirstServed, RankedQueue, StrictPriority


def sequence(number: int, priority: int = 0, index: int = 0) -> Sequence:
    request = Request(f"r{number}", (1,), priority=priority)
    return Sequence(request, 10 * number + index, number, 4, index)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "remove", "take", "look"]), st.integers(0, 30)),
    max_size=60,
)


@pytest.mark.parametrize(
    ("queue_class", "key"),
    [
        (FirstComeFirstServed, lambda s: (s.arrival, s.index)),
        (StrictPriority, lambda s: (s.request.priority, s.arrival, s.index)),
    ],
)
@given(operations=OPERATIONS, priorities=st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_it_is_always_a_sorted_list(queue_class, key, operations, priorities):
    """Each of twelve sequences may come and go as often as it likes."""
    everyone = [sequence(n // 2, priorities[n], n % 2) for n in range(12)]
    queue, naive = queue_class(), []
    for what, number in operations:
        if what == "add" and (absent := [s for s in everyone if s not in naive]):
            chosen = absent[number % len(absent)]
            queue.add(chosen)
            naive.append(chosen)
        elif what == "remove" and naive:
            queue.remove(naive.pop(number % len(naive)))
        elif what == "take" and naive:
            first = queue.peek()
            assert first is min(naive, key=key)
            queue.remove(first)
            naive.remove(first)
        assert queue.peek() is (min(naive, key=key) if naive else None)
        assert len(queue) == len(naive) and list(queue) == sorted(naive, key=key)
        assert [queue.rank(s) for s in queue] == sorted(key(s) for s in naive)


def test_first_come_first_served_knows_no_urgency():
    queue = FirstComeFirstServed()
    assert {queue.urgency(sequence(n, priority)) for n, priority in ((1, 0), (2, 9))} == {0}


def test_urgency_is_the_priority_alone():
    queue = StrictPriority()
    assert queue.urgency(sequence(1, 2)) == queue.urgency(sequence(9, 2)) == 2
    assert queue.urgency(sequence(9, 1)) < queue.urgency(sequence(1, 2))


def test_nobody_waits_twice():
    queue = FirstComeFirstServed()
    queue.add(one := sequence(1))
    with pytest.raises(AssertionError, match="waits already"):
        queue.add(one)


def test_marked_entries_do_not_pile_up():
    """Those that leave from the middle stay in the heap for a while, and not for ever."""
    queue = FirstComeFirstServed()
    queue.add(sequence(0))
    for number in range(1, 1_000):
        queue.add(one := sequence(number))
        queue.remove(one)
    assert len(queue._heap) < 20 and len(queue) == 1


def test_a_queue_of_a_readers_own_says_what_its_rank_is():
    with pytest.raises(NotImplementedError):
        RankedQueue().add(sequence(1))

    class ShortestPromptFirst(RankedQueue):
        def rank(self, sequence: Sequence):
            return sequence.num_prompt_tokens, sequence.arrival, sequence.index

    queue = ShortestPromptFirst()
    for number, length in ((1, 5), (2, 2), (3, 9)):
        queue.add(Sequence(Request(f"r{number}", (0,) * length), number, number, 1))
    assert [each.name for each in queue] == ["r2", "r1", "r3"]
