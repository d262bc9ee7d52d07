"""What an operation of the block pool costs: nanoseconds, and steps in its lists.

Invariant: every operation is one that the engine does, on a whole pool, and after each cycle all
blocks are free again. Times are reported and never judged. Steps are counted on a pool whose four
lists count each read and each write of an element; they do not depend on the machine.

    first, no block is cached; the free list is in a drawn order

    allocate            from the front of the free list
    add an owner        to a block in use
    take an owner       from a block that has another
    free to the front   the last owner goes

    then all are, as in a pool that has worked for a while

    evict               a cached block is allocated, and the prefix cache is told
    mark                the prefix cache knows a block in use
    free to the back    its last owner goes
    hit                 it is taken out of the middle of the free list
    unmark              the prefix cache forgets a free block, which moves to the front

Being told of an eviction is counted, and what a prefix cache then does is not: nobody listens here.

A cycle touches 999 blocks from all over the pool, in small pools and in large ones. So the work is
the same and what differs is the length of the lists. More blocks in turn also ask more of the
processor's caches, which is not what is measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import starmap
from random import Random
from statistics import median
from time import perf_counter_ns
from typing import Any

from mie.bench.result import Result
from mie.bench.workloads import shuffle
from mie.memory.block_pool import INVALID_BLOCK, BlockPool

POOL_SIZES = (1_000, 10_000, 100_000)
OPERATIONS = 1_000_000  # of each kind
COUNTED = 10_000  # of each kind, at most: every call takes the same steps, and counting is slow
BLOCKS_A_CYCLE = 999  # the same in every pool
KINDS = (
    "allocate",
    "add an owner",
    "take an owner",
    "free to the front",
    "evict",
    "mark",
    "free to the back",
    "hit",
    "unmark",
)


@dataclass(frozen=True)
class OperationCost(Result):
    """One kind of operation on a pool of one size. Steps: the fewest and the most of any call."""

    kind: str
    num_blocks: int
    operations: int
    nanoseconds: float
    fewest_steps: int
    most_steps: int


class CountingList(list[Any]):
    """A list that counts reads and writes of its elements, each as one step."""

    steps = 0

    def __getitem__(self, index: Any) -> Any:
        self.steps += 1
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.steps += 1
        super().__setitem__(index, value)


class CountingPool(BlockPool):
    """The engine's pool, with lists that count."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        super().__init__(num_blocks, block_size)
        self.lists: list[CountingList] = []
        for name, value in vars(self).items():
            if type(value) is list and value is not self.lists:
                counting = CountingList(value)
                setattr(self, name, counting)
                self.lists.append(counting)

    @property
    def steps(self) -> int:
        """Reads and writes in all lists since the start."""
        return sum(each.steps for each in self.lists)


# Does the operation with each of the arguments, and returns what it returned.
Run = Callable[[str, Callable[..., Any], list[tuple[int, ...]]], list[Any]]


def scatter(pool: BlockPool, rng: Random) -> None:
    """Bring the free list into a drawn order, as a pool has that has worked for a while."""
    blocks = [pool.allocate() for _ in range(pool.num_free)]
    shuffle(rng, blocks)
    for block in blocks:
        pool.decref(block)


def scatter_known(pool: BlockPool, rng: Random) -> None:
    """The same with every block cached."""
    scatter(pool, rng)
    know(pool, pool.num_free)


def know(pool: BlockPool, count: int) -> None:
    """Make the first ``count`` free blocks cached ones, which go to the back in their order."""
    blocks = [pool.allocate() for _ in range(count)]
    for block in blocks:
        pool.mark_cached(block)
        pool.decref(block)


def cycle(pool: BlockPool, count: int, order: Sequence[int], run: Run) -> None:
    """``count`` operations of each kind without a cache, by ``run(kind, operation, arguments)``.

    ``order`` are the numbers below ``count`` in a drawn order: between two kinds, the blocks change
    their places according to it.
    """
    taken = run("allocate", pool.allocate, [()] * count)
    assert INVALID_BLOCK not in taken
    for kind, operation in (
        ("add an owner", pool.incref),
        ("take an owner", pool.decref),
        ("free to the front", pool.decref),
    ):
        taken = [taken[place] for place in order]
        run(kind, operation, [(block,) for block in taken])


def cached_cycle(pool: BlockPool, count: int, order: Sequence[int], run: Run) -> None:
    """The same for the other kinds, in a pool whose free blocks are cached, before and after."""
    taken = run("evict", pool.allocate, [()] * count)
    assert INVALID_BLOCK not in taken
    for kind, operation in (
        ("mark", pool.mark_cached),
        ("free to the back", pool.decref),
        ("hit", pool.incref),
    ):
        taken = [taken[place] for place in order]
        run(kind, operation, [(block,) for block in taken])
    for block in taken:
        pool.decref(block)
    run("unmark", pool.unmark_cached, [(taken[place],) for place in order])
    know(pool, count)


def time_operations(num_blocks: int, operations: int, seed: int = 0) -> dict[str, float]:
    """Nanoseconds of one operation of each kind: of each cycle the mean, and of those the median,
    so that a cycle in which the machine did something else does not count."""
    means: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def run(
        kind: str, operation: Callable[..., Any], arguments: list[tuple[int, ...]]
    ) -> list[Any]:
        begin = perf_counter_ns()
        results = list(starmap(operation, arguments))  # no loop in Python around the calls
        means[kind].append((perf_counter_ns() - begin) / len(arguments))
        return results

    _cycles(BlockPool(num_blocks), operations, seed, run)
    return {kind: median(each) for kind, each in means.items()}


def count_steps(num_blocks: int, operations: int, seed: int = 0) -> dict[str, tuple[int, int]]:
    """The fewest and the most list steps that any of ``operations`` calls of each kind takes."""
    pool = CountingPool(num_blocks)
    seen: dict[str, set[int]] = {kind: set() for kind in KINDS}

    def run(
        kind: str, operation: Callable[..., Any], arguments: list[tuple[int, ...]]
    ) -> list[Any]:
        results = []
        for each in arguments:
            before = pool.steps
            results.append(operation(*each))
            seen[kind].add(pool.steps - before)
        return results

    _cycles(pool, operations, seed, run)
    return {kind: (min(steps), max(steps)) for kind, steps in seen.items()}


def _cycles(pool: BlockPool, operations: int, seed: int, run: Run) -> None:
    """So many operations of each kind, in cycles of at most BLOCKS_A_CYCLE."""
    rng = Random(seed)
    for prepare, each_cycle in ((scatter, cycle), (scatter_known, cached_cycle)):
        prepare(pool, rng)
        left = operations
        while left:
            count = min(left, BLOCKS_A_CYCLE, pool.num_free)
            order = list(range(count))
            shuffle(rng, order)
            for _ in range(left // count):
                each_cycle(pool, count, order, run)
                left -= count
        pool.check(owners=[])


def pool_costs(num_blocks: int, operations: int = OPERATIONS, seed: int = 0) -> list[OperationCost]:
    """Time ``operations`` of each kind, and count the list steps of up to COUNTED of them."""
    steps = count_steps(num_blocks, min(operations, COUNTED), seed)
    times = time_operations(num_blocks, operations, seed)
    return [
        OperationCost(kind, num_blocks, operations, times[kind], *steps[kind]) for kind in KINDS
    ]
