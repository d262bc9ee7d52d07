"""How large should a block be? Small ones leave less empty, large ones make tables short.

Invariant: each size is run on a pool and tables of that size, all requests at their final length.

    16 slots    ████████████████ ████████████████ ████░░░░░░░░░░░░      3 entries, 12 slots empty
    32 slots    ████████████████████████████████ ████░░░░░░░░░░░░░…     2 entries, 28 slots empty
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mie.bench.generous_pool import generous_pool, release
from mie.bench.result import Result
from mie.bench.workloads import BYTES_PER_TOKEN, Request
from mie.memory.block_copies import BlockCopies
from mie.memory.block_table import BlockTable

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BYTES_PER_ENTRY = 4  # of a block table on the device: a block number as an int32


@dataclass(frozen=True)
class BlockSize(Result):
    """One block size, all requests in memory at their final length."""

    block_size: int
    table_entries: int
    used_tokens: int
    num_requests: int

    @property
    def waste_share(self) -> float:
        """Empty slots among those of all blocks: internal fragmentation."""
        return 1 - self.used_tokens / (self.table_entries * self.block_size)

    @property
    def empty_bytes(self) -> int:
        return (self.table_entries * self.block_size - self.used_tokens) * BYTES_PER_TOKEN

    @property
    def table_bytes(self) -> int:
        return self.table_entries * BYTES_PER_ENTRY

    @property
    def entries_per_request(self) -> float:
        return self.table_entries / self.num_requests


@dataclass(frozen=True)
class BlockSizes(Result):
    """All block sizes on one workload."""

    sizes: tuple[BlockSize, ...]


def block_sizes(requests: Sequence[Request], sizes: Iterable[int] = BLOCK_SIZES) -> BlockSizes:
    """What stays empty in the last block of each request, and what smaller blocks cost instead."""
    return BlockSizes(tuple(_block_size(requests, size) for size in sizes))


def _block_size(requests: Sequence[Request], size: int) -> BlockSize:
    pool = generous_pool(requests, size=size)
    copies = BlockCopies(pool)
    tables = [BlockTable(pool, copies) for _ in requests]
    for table, request in zip(tables, requests, strict=True):
        assert table.append(request.prompt_tokens) and table.append(request.answer_tokens)
    entries = sum(len(table.blocks) for table in tables)
    assert entries == pool.num_used, "a block is shared"
    used = sum(table.num_tokens for table in tables)
    release(pool, tables)
    return BlockSize(size, entries, used, len(tables))
