"""Requests that come and go: holes, and requests that fit into none of them.

Invariant: both memories see the same trace, have the same size, and give a request what it needs at
its end, at once. So the one difference between them is whether that has to lie in one piece.

    time      0    1    2    3    4 ...      one request arrives at each moment
    request   a    b    c    d    e
              ├──────────┤                   a lives 1 + its answer / 16 moments: a long answer
                   ├────────────────...      keeps its place long, a long prompt does not

A request that finds no place is turned away and does not come back. The contiguous memory is told
the exact length, which no engine knows: what goes wrong there is the doing of the holes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from mie.bench.first_fit import NO_HOLE, FirstFit
from mie.bench.generous_pool import BLOCK_SIZE
from mie.bench.result import Result
from mie.bench.workloads import BYTES_PER_TOKEN, Request, shuffle
from mie.memory.block_copies import BlockCopies
from mie.memory.block_pool import BlockPool
from mie.memory.block_table import BlockTable

BUDGET_BYTES = 5 * 2**28  # 1.25 GiB: a little less than the trace would like
ROUNDS = 8  # how often every request comes
STEPS_PER_ARRIVAL = 16  # so many tokens of its answer a request gets between two arrivals
SAMPLE_EVERY = 32  # arrivals


@dataclass(frozen=True)
class Refusal(Result):
    """A request that was turned away, and what was free at that moment, in tokens."""

    request_tokens: int
    free_tokens: int
    largest_hole: int


@dataclass(frozen=True)
class Outcome(Result):
    """What one memory made of the trace. ``samples`` are pairs: free tokens in all, and how long
    the longest request is that would still fit; taken after every 32nd arrival."""

    memory: str
    admitted: int
    refused_full: int  # there was too little in all
    refused_by_holes: int  # there was enough in all, but not in one piece
    in_memory: int  # requests in memory, summed over all arrivals
    worst_refusal: Refusal | None  # of those by holes, the one with the most to spare
    samples: tuple[tuple[int, int], ...]

    @property
    def arrivals(self) -> int:
        return self.admitted + self.refused_full + self.refused_by_holes

    @property
    def mean_in_memory(self) -> float:
        return self.in_memory / self.arrivals

    @property
    def refused_by_holes_share(self) -> float:
        return self.refused_by_holes / self.arrivals


@dataclass(frozen=True)
class Churn(Result):
    """Both memories on one trace."""

    budget_tokens: int
    arrivals: int
    sample_every: int
    contiguous: Outcome
    paged: Outcome

    @property
    def budget_bytes(self) -> int:
        return self.budget_tokens * BYTES_PER_TOKEN


class Memory(Protocol):
    """What the trace asks of either memory. ``number`` says which request."""

    def admit(self, number: int, num_tokens: int) -> bool: ...
    def leave(self, number: int) -> None: ...

    @property
    def free_tokens(self) -> int:
        """Free slots in all, wherever they lie."""
        ...

    @property
    def largest_hole(self) -> int:
        """The longest request that would fit now."""
        ...

    def check(self) -> None: ...


class Contiguous:
    """Each request in one piece."""

    def __init__(self, num_tokens: int) -> None:
        self.memory = FirstFit(num_tokens)
        self.starts: dict[int, int] = {}

    def admit(self, number: int, num_tokens: int) -> bool:
        start = self.memory.allocate(num_tokens)
        if start != NO_HOLE:
            self.starts[number] = start
        return start != NO_HOLE

    def leave(self, number: int) -> None:
        self.memory.free(self.starts.pop(number))

    @property
    def free_tokens(self) -> int:
        return self.memory.num_free

    @property
    def largest_hole(self) -> int:
        return self.memory.largest_hole

    def check(self) -> None:
        self.memory.check()


class Paged:
    """Each request in blocks, wherever they lie. One more block is scratch: both memories have the
    same number of slots to give away."""

    def __init__(self, num_tokens: int) -> None:
        self.pool = BlockPool(1 + num_tokens // BLOCK_SIZE, BLOCK_SIZE)
        self.copies = BlockCopies(self.pool)
        self.tables: dict[int, BlockTable] = {}

    def admit(self, number: int, num_tokens: int) -> bool:
        table = BlockTable(self.pool, self.copies)
        if table.append(num_tokens):
            self.tables[number] = table
        return number in self.tables

    def leave(self, number: int) -> None:
        self.tables.pop(number).release()

    @property
    def free_tokens(self) -> int:
        return self.pool.num_free * BLOCK_SIZE

    @property
    def largest_hole(self) -> int:
        """Free blocks fit any request: all of them together are one hole."""
        return self.free_tokens

    def check(self) -> None:
        self.pool.check([table.blocks for table in self.tables.values()])


def churn(
    requests: Sequence[Request],
    seed: int = 0,
    budget_bytes: int = BUDGET_BYTES,
    rounds: int = ROUNDS,
) -> Churn:
    """Let ``requests`` come ``rounds`` times, each time in another order, to both memories."""
    trace = arrivals(requests, seed, rounds)
    budget_tokens = budget_bytes // BYTES_PER_TOKEN // BLOCK_SIZE * BLOCK_SIZE
    return Churn(
        budget_tokens=budget_tokens,
        arrivals=len(trace),
        sample_every=SAMPLE_EVERY,
        contiguous=run("contiguous", Contiguous(budget_tokens), trace),
        paged=run("paged", Paged(budget_tokens), trace),
    )


def arrivals(requests: Sequence[Request], seed: int = 0, rounds: int = ROUNDS) -> list[Request]:
    """The request that arrives at each moment: all of them ``rounds`` times, in drawn orders."""
    rng = Random(seed)
    trace: list[Request] = []
    for _ in range(rounds):
        order = list(requests)
        shuffle(rng, order)
        trace += order
    return trace


def run(name: str, memory: Memory, trace: Sequence[Request]) -> Outcome:
    """Let the requests of ``trace`` come to ``memory``, stay and leave."""
    leaving: dict[int, list[int]] = {}  # moment -> the requests that end there
    admitted = refused_full = in_memory = present = 0
    by_holes: list[Refusal] = []
    samples = []
    for now, request in enumerate(trace):
        for number in leaving.pop(now, []):
            memory.leave(number)
            present -= 1
        if memory.admit(now, request.num_tokens):
            admitted += 1
            present += 1
            end = now + 1 + request.answer_tokens // STEPS_PER_ARRIVAL
            leaving.setdefault(end, []).append(now)
        elif request.num_tokens <= memory.free_tokens:
            refusal = Refusal(request.num_tokens, memory.free_tokens, memory.largest_hole)
            by_holes.append(refusal)
        else:
            refused_full += 1
        in_memory += present
        if (now + 1) % SAMPLE_EVERY == 0:
            memory.check()
            samples.append((memory.free_tokens, memory.largest_hole))
    for numbers in leaving.values():
        for number in numbers:
            memory.leave(number)
    memory.check()
    worst = max(by_holes, key=lambda each: each.free_tokens - each.request_tokens, default=None)
    return Outcome(name, admitted, refused_full, len(by_holes), in_memory, worst, tuple(samples))
