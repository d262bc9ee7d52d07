"""Memory set aside for requests, paged and in one piece: what of it is never used, who fits.

Invariant: reservations in one piece are added up; blocks are counted on the engine's own pool and
tables, which grow as they would in a batch.

    whole context   32,768 tokens for each, as for a tensor of the model's largest shape
    power of two    the limit that the request comes with (prompt + max_tokens), rounded up
    exact length    what it turns out to need: an oracle, because nobody knows that in time
    paged           blocks of 16, one more whenever the last is full

All are looked at when each request has come to its end: the best moment for a reservation, which
is emptier at every moment before. After the comparison in Kwon et al., 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mie.bench.generous_pool import BLOCK_SIZE, generous_pool, release
from mie.bench.result import Result
from mie.bench.workloads import BYTES_PER_TOKEN, CONTEXT_LENGTH, Request
from mie.memory.block_copies import BlockCopies
from mie.memory.block_pool import BlockPool
from mie.memory.block_table import BlockTable
from mie.memory.usage import memory_usage

BUDGET_BYTES = 8 * 2**30  # what a GPU of 24 GB may well have left for K and V


@dataclass(frozen=True)
class Reservation(Result):
    """One way to set memory aside for a request. ``fit``: how many fit into the budget at once."""

    policy: str
    reserved_tokens: int
    used_tokens: int
    fit: int

    @property
    def reserved_bytes(self) -> int:
        return self.reserved_tokens * BYTES_PER_TOKEN

    @property
    def used_bytes(self) -> int:
        return self.used_tokens * BYTES_PER_TOKEN

    @property
    def waste_share(self) -> float:
        """Reserved and never used, among what is reserved."""
        return 1 - self.used_tokens / self.reserved_tokens


@dataclass(frozen=True)
class Reservations(Result):
    """All policies on one workload and one budget."""

    num_requests: int
    budget_bytes: int
    block_size: int
    policies: tuple[Reservation, ...]


def power_of_two(number: int) -> int:
    """The smallest power of two that is ``number`` or more."""
    return 1 << (number - 1).bit_length()


CONTIGUOUS: dict[str, Callable[[Request], int]] = {
    "whole context": lambda request: CONTEXT_LENGTH,
    "power of two": lambda request: power_of_two(request.limit),
    "exact length": lambda request: request.num_tokens,  # an oracle: nobody knows it in time
}


def paged_against_contiguous(
    requests: Sequence[Request], budget_bytes: int = BUDGET_BYTES
) -> Reservations:
    """What is reserved for ``requests`` when each has come to its end, and how many of them, in
    the order of arrival and up to the first that doesn't fit, the budget holds all at once."""
    used = sum(request.num_tokens for request in requests)
    budget_tokens = budget_bytes // BYTES_PER_TOKEN
    policies = []
    for name, length in CONTIGUOUS.items():
        lengths = [length(request) for request in requests]
        fit = _fit_contiguous(lengths, budget_tokens)
        policies.append(Reservation(name, sum(lengths), used, fit))
    policies.append(_paged(requests, budget_tokens))
    return Reservations(len(requests), budget_bytes, BLOCK_SIZE, tuple(policies))


def _fit_contiguous(lengths: Iterable[int], budget_tokens: int) -> int:
    fit = 0
    for length in lengths:
        budget_tokens -= length
        if budget_tokens < 0:
            break
        fit += 1
    return fit


def _paged(requests: Sequence[Request], budget_tokens: int) -> Reservation:
    pool = generous_pool(requests)
    copies = BlockCopies(pool)
    tables = [BlockTable(pool, copies) for _ in requests]
    _grow_together(tables, requests)
    pool.check([table.blocks for table in tables])
    usage = memory_usage(pool, tables)
    release(pool, tables)
    return Reservation(
        "paged",
        reserved_tokens=usage.used_blocks * BLOCK_SIZE,
        used_tokens=usage.filled_slots,
        fit=_fit_paged(requests, BlockPool(budget_tokens // BLOCK_SIZE, BLOCK_SIZE)),
    )


def _grow_together(tables: Sequence[BlockTable], requests: Sequence[Request]) -> None:
    """All prompts, then step by step a token for each request that has not ended."""
    for table, request in zip(tables, requests, strict=True):
        assert table.append(request.prompt_tokens)
    for step in range(max(request.answer_tokens for request in requests)):
        for table, request in zip(tables, requests, strict=True):
            if step < request.answer_tokens:
                assert table.append(1)


def _fit_paged(requests: Iterable[Request], pool: BlockPool) -> int:
    """The scratch block comes out of the budget too."""
    copies = BlockCopies(pool)
    tables: list[BlockTable] = []
    fit = 0
    for request in requests:
        tables.append(BlockTable(pool, copies))
        steps = (request.prompt_tokens, *[1] * request.answer_tokens)
        if not all(map(tables[-1].append, steps)):
            break
        fit += 1
    release(pool, tables)
    return fit
