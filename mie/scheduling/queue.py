"""Who waits, and in which order: first come first served, or by priority.

Invariant: the order is that of ``rank``, which never changes for a sequence. So whoever comes back
after a preemption stands where it would have stood without ever having left: before all that
arrived later. With first come first served that is the front.

    FirstComeFirstServed    rank = (arrival, index)              nobody pushes anybody out
    StrictPriority          rank = (priority, arrival, index)    less is more urgent

``urgency`` is what may push others out: a sequence that waits takes the place of one that runs only
if its urgency is *strictly* less. If equal were enough, two of one urgency would throw each other
out in turn.

Cost: log n for each that comes or goes, in a heap; one that leaves from the middle is marked and
dropped when it reaches the top.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, Protocol

from mie.request import Sequence


class WaitingQueue(Protocol):
    """What the scheduler asks of a queue."""

    def add(self, sequence: Sequence) -> None:
        """One more waits: a new one, or one that was preempted."""
        ...

    def peek(self) -> Sequence | None:
        """Who is next; None if nobody waits. Nobody overtakes the one that is next."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer: admitted or aborted."""
        ...

    def rank(self, sequence: Sequence) -> Any:
        """Its place in the order; comparable, different for different sequences, never changing."""
        ...

    def urgency(self, sequence: Sequence) -> int:
        """The coarse part of its rank: only strictly less may push out what runs."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in their order."""
        ...


class RankedQueue:
    """A heap by ``rank``. Subclasses say what that is."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Sequence]] = []  # the number keeps equals apart
        self._num_added = 0
        self._waiting: dict[int, Sequence] = {}  # by sequence id

    def rank(self, sequence: Sequence) -> Any:
        raise NotImplementedError

    def urgency(self, sequence: Sequence) -> int:
        return 0

    def add(self, sequence: Sequence) -> None:
        assert sequence.sequence_id not in self._waiting, f"{sequence} waits already"
        self._num_added += 1
        heapq.heappush(self._heap, (self.rank(sequence), self._num_added, sequence))
        self._waiting[sequence.sequence_id] = sequence

    def peek(self) -> Sequence | None:
        while self._heap:
            sequence = self._heap[0][-1]
            if self._waiting.get(sequence.sequence_id) is sequence:
                return sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[sequence.sequence_id]
        if self._heap[0][-1] is sequence:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._waiting) + 8:  # more marked than waiting
            self._heap = [entry for entry in self._heap if entry[-1].sequence_id in self._waiting]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted(self._waiting.values(), key=self.rank))


class FirstComeFirstServed(RankedQueue):
    """In the order of arrival."""

    def rank(self, sequence: Sequence) -> tuple[int, int]:
        return sequence.arrival, sequence.index


class StrictPriority(RankedQueue):
    """The smallest ``priority`` first, and in one priority the order of arrival.

    Urgent requests that never end keep all others waiting: that is what strict means. Whoever runs
    already has its tokens of a step first, though: beside a long prompt that fills the budget, an
    urgent request comes in when the prompt is done.
    """

    def rank(self, sequence: Sequence) -> tuple[int, int, int]:
        return sequence.priority, sequence.arrival, sequence.index

    def urgency(self, sequence: Sequence) -> int:
        return sequence.priority
