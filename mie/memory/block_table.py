"""One sequence's memory: which block holds its tokens 0 … 15, which the next sixteen, and so on.

Invariant: a table owns one reference to each block it lists and gives back exactly those. It never
writes into a block that another table can read or that the prefix cache knows.

    tokens      0 … 15     16 … 31    32 … 36            position 35 lies in
    blocks         7    |     2    |     9               slot 9 * 16 + 35 % 16

Forking copies the list and no K or V: every block gets one more owner. The first write into a
shared block splits it, in this order and no other:

    copy      into a new block, while the old one still has this owner
    decref    the old block
    swap      the new block into the list

Decref first, and the block may be somebody else's before it is copied. Swap first, and nobody knows
any longer which block to give back.

Cost: ``append`` and ``writable`` allocate at most the blocks that they say; ``fork``, ``truncate``
and ``release`` take a step for each block.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import NoReturn, Self

from mie.memory.block_copies import BlockCopies
from mie.memory.block_pool import INVALID_BLOCK, BlockPool, blocks_needed


class BlockTable:
    """The blocks of one sequence, ``num_tokens`` of whose slots are taken.

    ``blocks`` are full blocks that the prefix cache has found, each already referenced for this
    table. The first ``num_registered`` blocks are known to the prefix cache.
    """

    def __init__(self, pool: BlockPool, copies: BlockCopies, blocks: Iterable[int] = ()) -> None:
        self.pool = pool
        self.copies = copies
        self.blocks = list(blocks)
        self.num_tokens = len(self.blocks) * pool.block_size
        self.num_registered = len(self.blocks)

    def __repr__(self) -> str:
        return f"BlockTable({self.num_tokens} tokens in {self.blocks})"

    # -- growing ---------------------------------------------------------------------------------

    def blocks_to_append(self, num_tokens: int) -> int:
        """How many free blocks ``append(num_tokens)`` would take: new ones, and one for a split."""
        assert num_tokens >= 0, f"{num_tokens} more tokens; truncate() takes tokens away"
        size = self.pool.block_size
        new = blocks_needed(self.num_tokens + num_tokens, size) - len(self.blocks)
        return new + self._must_split_tail(num_tokens)

    def append(self, num_tokens: int) -> bool:
        """Take slots for ``num_tokens`` more tokens, in blocks that nobody else can see.

        False when the pool has too few blocks for all of them; then nothing has changed.
        """
        needed = self.blocks_to_append(num_tokens)
        if needed > self.pool.num_free:
            return False
        if needed:
            if self._must_split_tail(num_tokens):
                self._split(len(self.blocks) - 1)
                needed -= 1
            self.blocks += [self.pool.allocate() for _ in range(needed)]
        self.num_tokens += num_tokens
        return True

    def _must_split_tail(self, num_tokens: int) -> bool:
        """Whether the first of ``num_tokens`` new tokens falls into a block that is not our own."""
        last = len(self.blocks) - 1
        starts_inside = self.num_tokens < (last + 1) * self.pool.block_size
        return starts_inside and num_tokens > 0 and self.is_shared(last)

    # -- sharing and splitting -------------------------------------------------------------------

    def fork(self) -> Self:
        """A second table with the same tokens in the same blocks.

        Their K and V must have been written: copies are made before a step writes.
        """
        for block in self.blocks:
            self.pool.incref(block)
        twin = type(self)(self.pool, self.copies, self.blocks)
        twin.num_tokens = self.num_tokens
        twin.num_registered = self.num_registered
        return twin

    def is_shared(self, index: int) -> bool:
        """Whether somebody else may read the block at ``index``, now or by a later prefix hit.

        A copy that waits for its step holds the block too, but reads it before we can write.
        """
        block = self.blocks[index]
        others = self.pool.ref_count(block) - self.copies.pins(block) - 1
        return others > 0 or self.pool.is_cached(block)

    def writable(self, position: int) -> bool:
        """Make the block of ``position`` this table's own, by a copy where it is shared.

        False when the pool has no block for the copy; then nothing has changed. What stands behind
        a position in registered blocks would be wrong after a write: truncate first.
        """
        index = self._index(position)
        assert self.num_registered <= index + 1, (
            f"position {position} is followed by registered blocks"
        )
        if not self.is_shared(index):
            return True
        if self.pool.num_free == 0:
            return False
        self._split(index)
        return True

    def _split(self, index: int) -> None:
        shared = self.blocks[index]
        own = self.pool.allocate()
        assert own != INVALID_BLOCK, "the caller has looked"
        self.copies.add(shared, own)  # copy
        self.pool.decref(shared)  # then decref
        self.blocks[index] = own  # then swap
        self.num_registered = min(self.num_registered, index)

    def register(self, block: int) -> None:
        """The prefix cache knows the next of our blocks from now on, under the name ``block``.

        Either that is our own, or one with the same tokens was there first. Then we use that one
        from now on: the K and V are the same, and our own goes back.
        """
        full = self.num_tokens // self.pool.block_size
        assert self.num_registered < full, f"{self.num_registered} of {full} full blocks are known"
        own = self.blocks[self.num_registered]
        assert not self.copies.fills(own), f"block {own} waits for its copy: nothing is written"
        if block != own:
            self.pool.incref(block)
            self.blocks[self.num_registered] = block
            self.pool.decref(own)
        self.num_registered += 1

    # -- giving back -----------------------------------------------------------------------------

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens; blocks behind them go back, the last first."""
        assert 0 <= num_tokens <= self.num_tokens, f"{num_tokens} of {self.num_tokens} tokens"
        assert not self.copies.is_launching, "a step has taken copies and is not launched yet"
        size = self.pool.block_size
        keep = blocks_needed(num_tokens, size)
        while len(self.blocks) > keep:
            block = self.blocks.pop()
            if self.pool.ref_count(block) - self.copies.pins(block) == 1:
                self.copies.cancel(block)  # nobody is left who would read the copy
            self.pool.decref(block)
        self.num_tokens = num_tokens
        self.num_registered = min(self.num_registered, keep)

    def release(self) -> None:
        """Give every block back, the last one first, so that beginnings stay cached longest.

        A second call finds nothing to give back.
        """
        self.truncate(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.release()

    def __copy__(self) -> NoReturn:
        raise TypeError("a copied BlockTable would give its blocks back twice; fork() shares them")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    # -- where a token lies ----------------------------------------------------------------------

    def slot(self, position: int) -> int:
        """The slot of the token at ``position``: block number times block size, plus offset."""
        return self.blocks[self._index(position)] * self.pool.block_size + (
            position % self.pool.block_size
        )

    def slots(self, begin: int, end: int) -> list[int]:
        """The slots of positions ``begin`` to ``end`` (exclusive)."""
        assert 0 <= begin <= end <= self.num_tokens, f"{begin} to {end} of {self.num_tokens}"
        return [self.slot(position) for position in range(begin, end)]

    def _index(self, position: int) -> int:
        assert 0 <= position < self.num_tokens, f"position {position} of {self.num_tokens}"
        return position // self.pool.block_size
