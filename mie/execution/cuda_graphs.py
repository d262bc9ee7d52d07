"""A decode step recorded once for each size of batch, and replayed with one launch.

Invariant: a replay does what the recorded calls would do now, at the same addresses. So everything
that changes from step to step stands in memory that stays where it is, and a recording holds no
number that the host has computed. A batch between two sizes is filled up with rows of nobody.

    sizes        1  2  4  8  16  24 ... 256  272 ... 512  544 ... 1024
    batch 19     replays 24: five rows of padding, which read nothing and write nothing

Small steps below 256, since there a row more costs about as much as it is; above, less than a
sixteenth is padding. The largest is recorded first, and all use its memory: only one runs at a
time. The recordings are given up in ``close``, before the memory that they point to.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch


def batch_sizes(most: int) -> list[int]:
    """The sizes that are recorded for at most ``most`` sequences, ``most`` among them."""
    assert most >= 1, f"at most {most} sequences"
    fine = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    coarse = range(544, most + 32, 32)
    return sorted({min(size, most) for size in (*fine, *coarse)})


class DecodeGraphs:
    """``body(size)`` is a decode step of ``size`` rows; it is called here and nowhere else.

    Until ``capture``, and on a device without graphs, a replay calls it.
    """

    def __init__(self, body: Callable[[int], None], sizes: Sequence[int]) -> None:
        self.body = body
        self.sizes = sorted(sizes)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def size_for(self, count: int) -> int | None:
        """The smallest size that holds ``count`` rows; None if all are too small."""
        at = bisect_left(self.sizes, count)
        return self.sizes[at] if at < len(self.sizes) else None

    def capture(self, tell: Callable[[int], None] = lambda size: None) -> None:
        """Record all sizes. ``tell`` is given each before it is recorded.

        ``body`` runs once for each size before, so that kernels are compiled and products chosen.
        """
        pool = None
        for size in reversed(self.sizes):
            tell(size)
            self.body(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.body(size)
            pool = pool or graph.pool()
            self.graphs[size] = graph

    def replay(self, size: int) -> None:
        """One step of ``size`` rows."""
        graph = self.graphs.get(size)
        if graph is None:
            self.body(size)
        else:
            graph.replay()

    def close(self) -> None:
        """Give the recordings up, none of which still runs then; a replay calls ``body`` again."""
        if self.graphs:
            torch.cuda.synchronize()
        for graph in self.graphs.values():
            graph.reset()
        self.graphs.clear()
