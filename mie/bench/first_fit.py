"""Memory without blocks: each request gets one stretch, the first hole that is long enough.

Invariant: holes and stretches together are the whole memory; no two of them overlap, and no two
holes touch, because a stretch that goes back is joined with the holes beside it.

    used 0 … 99    hole 100 … 149    used 150 … 399    hole 400 … 499
                        50                                  100         free: 150, but not for 120

This is what an engine does that wants a request's K and V in one piece. It is here to be measured
against, as well made as it can be in a page: a hole that could serve is always found.

Cost: looking at the holes, from the left, until one is long enough.
"""

from __future__ import annotations

from bisect import bisect_left

from mie.errors import ConfigError

NO_HOLE = -1  # what ``allocate`` returns when no hole is long enough


class FirstFit:
    """``size`` slots, of which stretches are handed out.

    Raises ConfigError for a memory without slots.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ConfigError(f"a memory of {size} slots holds nothing")
        self.size = size
        self.num_free = size
        self.holes = [(0, size)]  # first slot and length, from left to right
        self._lengths: dict[int, int] = {}  # of the stretches in use, by their first slot

    @property
    def largest_hole(self) -> int:
        return max((length for _, length in self.holes), default=0)

    def allocate(self, length: int) -> int:
        """The first slot of a stretch of ``length``; NO_HOLE when none is long enough."""
        assert length > 0, f"a stretch of {length} slots"
        for index, (start, room) in enumerate(self.holes):
            if room >= length:
                rest = [(start + length, room - length)] if room > length else []
                self.holes[index : index + 1] = rest
                self._lengths[start] = length
                self.num_free -= length
                return start
        return NO_HOLE

    def free(self, start: int) -> None:
        """Give back the stretch that begins at ``start``."""
        length = self._lengths.pop(start)
        self.num_free += length
        end = start + length
        first = last = bisect_left(self.holes, (start, 0))  # the hole right of the stretch
        if first > 0 and sum(self.holes[first - 1]) == start:
            first -= 1
            start = self.holes[first][0]
        if last < len(self.holes) and self.holes[last][0] == end:
            end = sum(self.holes[last])
            last += 1
        self.holes[first:last] = [(start, end - start)]

    def check(self) -> None:
        """Prove that the memory is whole. For tests."""
        pieces = sorted([*self.holes, *self._lengths.items()])
        assert self.holes == sorted(self.holes)
        place = 0
        for start, length in pieces:
            assert start == place and length > 0, f"{length} slots at {start}, expected at {place}"
            place += length
        assert place == self.size
        starts = {start for start, _ in self.holes}
        assert not starts & {start + length for start, length in self.holes}, "two holes touch"
        assert self.num_free == sum(length for _, length in self.holes)
