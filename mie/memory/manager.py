"""Everything about block ownership that a schedule needs, in one place: device, host, prefixes.

Invariant: integers only. What a step has to do with bytes (copy blocks, swap them out and in) is
written down here by tables and the host pool, leaves with the plan of the step, and counts as done
when the step has been launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mie.memory.block_copies import BlockCopies
from mie.memory.block_pool import BlockPool
from mie.memory.block_table import BlockTable
from mie.memory.prefix_cache import HashPrefixCache, PrefixCache
from mie.memory.swap import HostPool


class BlockManager:
    """A pool of ``num_blocks`` blocks, and ``num_host_blocks`` blocks to swap to."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        num_host_blocks: int = 0,
        *,
        block_pool: Callable[[int, int], BlockPool] = BlockPool,
        block_table: Callable[..., BlockTable] = BlockTable,
        prefix_cache: Callable[[BlockPool], PrefixCache] = HashPrefixCache,
    ) -> None:
        self.pool = block_pool(num_blocks, block_size)
        self.copies = BlockCopies(self.pool)
        self.prefix_cache = prefix_cache(self.pool)
        self.host = HostPool(num_host_blocks)
        self._new_table = block_table

    @property
    def num_usable_blocks(self) -> int:
        """All but scratch."""
        return self.pool.num_blocks - 1

    @property
    def num_tokens(self) -> int:
        """How many tokens all blocks together hold."""
        return self.num_usable_blocks * self.pool.block_size

    def table(self, token_ids: Sequence[int], salt: str = "") -> BlockTable:
        """A table with the blocks that hold the known beginning of ``token_ids``."""
        return self._new_table(self.pool, self.copies, self.prefix_cache.match(token_ids, salt))

    def empty_table(self) -> BlockTable:
        return self._new_table(self.pool, self.copies)

    def swap_out(self, table: BlockTable) -> list[int] | None:
        """Host blocks for all of ``table``, which the caller gives back; None without room.

        A block whose copy has not been made holds nothing yet: what moves is the copy's source.
        """
        return self.host.swap_out([self.copies.holder(block) for block in table.blocks])

    def release(self, table: BlockTable) -> None:
        """``table`` gives everything back, what is still to come from the host as well."""
        self.host.cancel(table.blocks)
        table.release()

    def launched(self) -> None:
        """The planned step has been launched, or never will be."""
        self.copies.launched()
        self.host.launched()

    def check(
        self, tables: Iterable[BlockTable], host_owners: Sequence[Sequence[int]] = ()
    ) -> None:
        """Prove that nothing leaks, on the device and on the host. For tests and idle engines."""
        self.pool.check([*(table.blocks for table in tables), [*self.copies.pinned()]])
        self.host.check(host_owners)
