"""The one way in which the book takes time.

Invariant: the clock stops only after the device has finished. On a GPU a call returns when the
work has been *queued*; a loop that doesn't wait measures how fast Python can queue. Nothing
else in the chapters reads a clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mie.book.units import duration_range

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Timing(Generic[T]):
    """The times of ``n`` equal runs in seconds: the median, the fastest, the slowest.

    ``result`` is what the last run returned, so that an expensive call need not be made again.
    """

    median: float
    low: float
    high: float
    n: int
    result: T = field(compare=False)

    @property
    def ms(self) -> float:
        """The median in milliseconds."""
        return self.median * 1e3

    def per_second(self, count: float) -> float:
        """How many per second, if one run handles ``count`` of them (tokens, bytes, operations)."""
        return count / self.median

    def __repr__(self) -> str:
        return f"{duration_range(self.median, self.low, self.high)[:-1]}, n={self.n})"


def measure(fn: Callable[[], T], n: int = 5, warmup: int = 1) -> Timing[T]:
    """Call ``fn`` ``warmup`` times, then ``n`` times with a clock.

    The first calls pay for what later ones find done: pages of a file, compiled kernels, grown
    allocators. Each result stays alive until its clock has stopped, and goes before the next
    one starts: giving memory back is never part of the time.
    """
    if n < 1:
        raise ValueError(f"n is {n}: a median needs at least one run")
    for _ in range(warmup):
        fn()
    seconds: list[float] = []
    kept: list[T] = []
    for _ in range(n):
        kept.clear()
        synchronize()
        start = clock()
        kept.append(fn())
        synchronize()
        seconds.append(clock() - start)
    return Timing(statistics.median(seconds), min(seconds), max(seconds), n, kept[0])


clock = time.perf_counter


def synchronize() -> None:
    """Wait until the accelerator, if there is one, has done everything it was given."""
    import torch  # here, so that pages without tensors don't pay for the import

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
