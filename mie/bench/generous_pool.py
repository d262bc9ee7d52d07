"""Pools for the benchmarks.

Invariant: a pool is large enough for all requests at once, and proved whole at the end.
"""

from __future__ import annotations

from collections.abc import Iterable

from mie.bench.workloads import Request
from mie.memory.block_pool import BlockPool, blocks_needed
from mie.memory.block_table import BlockTable

BLOCK_SIZE = 16


def generous_pool(requests: Iterable[Request], extra: int = 0, size: int = BLOCK_SIZE) -> BlockPool:
    """Enough for every request at its limit, each ``extra`` tokens longer, and scratch."""
    blocks = sum(blocks_needed(extra + request.limit, size) for request in requests)
    return BlockPool(1 + blocks, size)


def release(pool: BlockPool, tables: Iterable[BlockTable]) -> None:
    """Give everything back, and prove that it is back."""
    for table in tables:
        table.release()
    pool.check(owners=[])
