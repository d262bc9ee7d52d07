"""All blocks of K/V memory: who may have one, how many owners it has, which one goes next.

Invariant: every block but the scratch block is either *free* (no owner, once in the free list) or
*used* (one owner or more, not in the list). A free block may still be *cached*: the prefix cache
knows what is in it, and until somebody else gets it a new owner may take it back as it is.

    free list, in the order in which blocks are handed out:

        front                                                                      back
        9    4    7                      2    5    8    6
        nothing worth keeping:           cached: least recently used first
        last freed, first out

So a block whose content nobody wants goes first, the one that was used a moment ago before the
others; content that might be asked for again stays as long as it can.

The list is doubly linked and lies in two arrays, ``_next`` and ``_previous``, indexed by block. The
scratch block is never handed out, so its two entries hold the ends of the list, and no operation
has a special case at either end.

Cost: nothing is allocated after the start; every method but ``check`` takes a constant number of
steps, however many blocks there are. After vLLM's FreeKVCacheBlockQueue (Kwon et al., 2023).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from mie.errors import ConfigError

INVALID_BLOCK = -1  # what ``allocate`` returns when there is no free block
SCRATCH_BLOCK = 0  # belongs to nobody: padded rows of a batch may write here, nothing is read
_USED = -1  # stands in ``_next`` and ``_previous`` of a block that is not in the free list


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """How many blocks hold ``num_tokens`` tokens: the quotient, rounded up."""
    return (num_tokens + block_size - 1) // block_size


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` slots, of which block 0 is scratch.

    ``on_evict`` is called with each cached block that is handed out again, before anybody can write
    into it. The prefix cache puts itself there; there is one at most.

    Raises ConfigError for sizes that leave no block to hand out.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"a pool of {num_blocks} blocks has none to hand out: block 0 is scratch"
            )
        if block_size < 1:
            raise ConfigError(f"a block of {block_size} slots holds no token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks - 1
        self.on_evict: Callable[[int], None] = lambda block: None
        self._ref_counts = [0] * num_blocks
        self._cached = [False] * num_blocks
        # All blocks in their order, in a ring that begins and ends at the scratch block.
        self._next = [*range(1, num_blocks), SCRATCH_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free

    def ref_count(self, block: int) -> int:
        """How many owners ``block`` has."""
        assert 0 <= block < self.num_blocks, f"there is no block {block}"
        return self._ref_counts[block]

    def is_cached(self, block: int) -> bool:
        """Whether the prefix cache knows what is in ``block``, so that nobody may change it."""
        assert 0 <= block < self.num_blocks, f"there is no block {block}"
        return self._cached[block]

    def allocate(self) -> int:
        """The first block of the free list, with one owner; INVALID_BLOCK if there is none."""
        block = self._next[SCRATCH_BLOCK]
        if block == SCRATCH_BLOCK:
            return INVALID_BLOCK
        self._unlink(block)
        self._ref_counts[block] = 1
        if self._cached[block]:
            self._cached[block] = False
            self.on_evict(block)
        return block

    def incref(self, block: int) -> None:
        """One more owner. A free block gains one only while it is cached: a prefix hit."""
        assert SCRATCH_BLOCK < block < self.num_blocks, f"there is no block {block} to own"
        if self._ref_counts[block] == 0:
            assert self._cached[block], f"block {block} is free and its content is gone"
            self._unlink(block)
        self._ref_counts[block] += 1

    def decref(self, block: int) -> None:
        """One owner less. Without any it is free: at the back if cached, else in front."""
        assert SCRATCH_BLOCK < block < self.num_blocks, f"there is no block {block} to free"
        assert self._ref_counts[block] > 0, f"block {block} has no owner to give it back"
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            if self._cached[block]:
                self._link(block, after=self._previous[SCRATCH_BLOCK])
            else:
                self._link(block, after=SCRATCH_BLOCK)

    def mark_cached(self, block: int) -> None:
        """The prefix cache knows from now on what is in ``block``, which is in use."""
        assert SCRATCH_BLOCK < block < self.num_blocks, f"there is no block {block} to know"
        assert self._ref_counts[block] > 0, f"block {block} is free: it may be overwritten"
        assert not self._cached[block], f"the content of block {block} is known already"
        self._cached[block] = True

    def unmark_cached(self, block: int) -> None:
        """The prefix cache has forgotten what is in ``block``."""
        assert SCRATCH_BLOCK < block < self.num_blocks, f"there is no block {block} to forget"
        assert self._cached[block], f"the content of block {block} is not known"
        self._cached[block] = False
        if self._ref_counts[block] == 0:
            self._unlink(block)
            self._link(block, after=SCRATCH_BLOCK)

    def free_blocks(self) -> Iterator[int]:
        """The free blocks in the order in which ``allocate`` would hand them out."""
        block = self._next[SCRATCH_BLOCK]
        while block != SCRATCH_BLOCK:
            yield block
            block = self._next[block]

    def check(self, owners: Iterable[Iterable[int]] | None = None) -> None:
        """Prove that the pool is whole; with ``owners``, each one's blocks, the counts as well.

        Walks over every block: for tests, and for an engine that has nothing else to do.
        """
        free = list(self.free_blocks())
        is_free = set(free)
        assert len(free) == len(is_free) == self.num_free, f"{self.num_free} free: {free}"
        backwards = [self._previous[self._next[block]] for block in (SCRATCH_BLOCK, *free)]
        assert backwards == [SCRATCH_BLOCK, *free], "the two directions of the free list differ"
        for block in range(1, self.num_blocks):
            listed = self._next[block] != _USED
            assert listed == (self._previous[block] != _USED) == (block in is_free)
            assert listed == (self._ref_counts[block] == 0), f"block {block} is free and used"
        cached = [self._cached[block] for block in free]
        assert cached == sorted(cached), "a block worth keeping stands before one that is not"
        assert self._ref_counts[SCRATCH_BLOCK] == 0 and not self._cached[SCRATCH_BLOCK]
        if owners is not None:
            counts = Counter(block for blocks in owners for block in blocks)
            for block in range(self.num_blocks):
                assert self._ref_counts[block] == counts[block], (
                    f"block {block} counts {self._ref_counts[block]} owners and has {counts[block]}"
                )

    def _link(self, block: int, after: int) -> None:
        """Put ``block`` into the free list, behind ``after``."""
        following = self._next[after]
        self._next[after] = self._previous[following] = block
        self._previous[block], self._next[block] = after, following
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        """Take ``block`` out of the free list, wherever it stands."""
        before, following = self._previous[block], self._next[block]
        self._next[before], self._previous[following] = following, before
        self._next[block] = self._previous[block] = _USED
        self.num_free -= 1
