"""What the memory is used for at one moment, in blocks and slots.

Invariant: everything is counted from the tables; nothing is kept that could disagree with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mie.memory.block_pool import BlockPool
from mie.memory.block_table import BlockTable


@dataclass(frozen=True)
class MemoryUsage:
    """Counts of blocks and slots. Properties are shares between 0 and 1."""

    block_size: int
    usable_blocks: int  # all but scratch
    used_blocks: int  # different blocks in tables
    listed_blocks: int  # blocks in tables, a shared one once for each table
    filled_slots: int  # slots of used blocks that hold a token

    @property
    def utilization(self) -> float:
        """Used blocks among all."""
        return self.used_blocks / self.usable_blocks

    @property
    def internal_fragmentation(self) -> float:
        """Empty slots among those of the used blocks."""
        slots = self.used_blocks * self.block_size
        return 1 - self.filled_slots / slots if slots else 0.0

    @property
    def saved_by_sharing(self) -> float:
        """Blocks that sharing saves, among those that tables would need without it."""
        return 1 - self.used_blocks / self.listed_blocks if self.listed_blocks else 0.0


def memory_usage(pool: BlockPool, tables: Iterable[BlockTable]) -> MemoryUsage:
    """Count what ``tables`` take of ``pool``. Only last blocks are looked at one by one."""
    size = pool.block_size
    full: set[int] = set()
    tails: dict[int, int] = {}  # filled slots of blocks that are the last of a table
    listed = 0
    for table in tables:
        listed += len(table.blocks)
        whole = table.num_tokens // size
        full.update(table.blocks[:whole])
        for index in range(whole, len(table.blocks)):
            block = table.blocks[index]
            filled = max(0, table.num_tokens - index * size)
            tails[block] = max(filled, tails.get(block, 0))
    partly = [filled for block, filled in tails.items() if block not in full]
    used, taken = len(full) + len(partly), len(full) * size + sum(partly)
    return MemoryUsage(size, pool.num_blocks - 1, used, listed, taken)
