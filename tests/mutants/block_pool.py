"""A block pool on a heap, written from the stub alone, and the ways to get a pool wrong.

The mutants are the engine's pool with one piece exchanged.
"""

import heapq

from mie.errors import ConfigError
from mie.memory.block_pool import INVALID_BLOCK, SCRATCH_BLOCK, BlockPool


class HeapPool:
    """Free blocks in a heap: (cached or not, when), so that the order of the heap is the order of
    handing out. A block that leaves the free ones otherwise leaves its entry behind, which is
    dropped when it comes to the top: it doesn't carry the block's last number any more."""

    def __init__(self, num_blocks, block_size):
        if num_blocks < 2 or block_size < 1:
            raise ConfigError(f"{num_blocks} blocks of {block_size} slots")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_free = 0
        self.on_evict = None
        self.owners = {}
        self.known = set()
        self.heap, self.entry_of, self.clock = [], {}, 0
        for block in range(1, num_blocks):
            self._free(block)

    def _free(self, block):
        self.clock += 1
        cached = block in self.known
        entry = (cached, self.clock if cached else -self.clock, block)
        self.entry_of[block] = entry
        heapq.heappush(self.heap, entry)
        self.num_free += 1

    def _use(self, block):
        del self.entry_of[block]
        self.num_free -= 1

    def allocate(self):
        while self.heap:
            entry = heapq.heappop(self.heap)
            block = entry[-1]
            if self.entry_of.get(block) != entry:
                continue
            self._use(block)
            self.owners[block] = 1
            if block in self.known:
                self.known.remove(block)
                if self.on_evict is not None:
                    self.on_evict(block)
            return block
        return INVALID_BLOCK

    def incref(self, block):
        if block in self.entry_of and block in self.known:
            self._use(block)
        elif block not in self.owners:
            raise ValueError(f"block {block} has no content to share")
        self.owners[block] = self.ref_count(block) + 1

    def decref(self, block):
        if block not in self.owners:
            raise ValueError(f"block {block} is free already")
        self.owners[block] -= 1
        if self.owners[block] == 0:
            del self.owners[block]
            self._free(block)

    def ref_count(self, block):
        return self.owners.get(block, 0)

    def mark_cached(self, block):
        if block not in self.owners:
            raise ValueError(f"block {block} is free")
        self.known.add(block)

    def unmark_cached(self, block):
        self.known.remove(block)  # a KeyError if it isn't there
        if block in self.entry_of:
            self._use(block)
            self._free(block)

    def is_cached(self, block):
        return block in self.known

    def free_blocks(self):
        return (block for _, _, block in sorted(self.entry_of.values()))


class CountsScratch(BlockPool):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.num_free = num_blocks


class AddsScratch(BlockPool):
    """As many blocks as were asked for, and scratch."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks + 1, block_size)


class TakesAnySize(BlockPool):
    def __init__(self, num_blocks, block_size):
        super().__init__(max(num_blocks, 2), max(block_size, 1))


class RefusesWithAssert(BlockPool):
    def __init__(self, num_blocks, block_size):
        assert num_blocks > 1 and block_size > 0
        super().__init__(num_blocks, block_size)


class NothingIsScratch(HeapPool):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self._free(SCRATCH_BLOCK)


class HandsOutTheFirstAgain(BlockPool):
    """Looks at the front of the list and forgets to take it away."""

    def allocate(self):
        block = super().allocate()
        if block != INVALID_BLOCK and self.num_free:
            self._link(block, after=SCRATCH_BLOCK)
        return block


class CountsOnFromBefore(BlockPool):
    """The count isn't set, it goes on; and freeing leaves one behind."""

    def decref(self, block):
        super().decref(block)
        if self._ref_counts[block] == 0:
            self.left_over = {*getattr(self, "left_over", ()), block}

    def allocate(self):
        block = super().allocate()
        if block in getattr(self, "left_over", ()):
            self._ref_counts[block] += 1
        return block


class RaisesWhenEmpty(BlockPool):
    def allocate(self):
        block = super().allocate()
        if block == INVALID_BLOCK:
            raise MemoryError("out of blocks")
        return block


class ScratchWhenEmpty(BlockPool):
    def allocate(self):
        return max(super().allocate(), SCRATCH_BLOCK)


class CountsFailures(BlockPool):
    def allocate(self):
        block = super().allocate()
        if block == INVALID_BLOCK:
            self.num_free -= 1
        return block


class OneListForAll(HeapPool):
    shared_heap, shared_entries = [], {}

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.shared_heap[:] = self.heap
        self.shared_entries.clear()
        self.shared_entries.update(self.entry_of)
        self.heap, self.entry_of = self.shared_heap, self.shared_entries


class FirstOwnerFrees(BlockPool):
    """S25: the count is reset, not lowered."""

    def decref(self, block):
        self._ref_counts[block] = min(self._ref_counts[block], 1)
        super().decref(block)


class NeverFreesShared(BlockPool):
    def decref(self, block):
        if self._ref_counts[block] == 1 and getattr(self, "shared", None) == block:
            self._ref_counts[block] = 0
            return
        super().decref(block)

    def incref(self, block):
        super().incref(block)
        self.shared = block


class FreesTwice(BlockPool):
    """S22: whoever gives back a block twice is believed."""

    def decref(self, block):
        if self._ref_counts[block] > 0:
            super().decref(block)
        else:
            self._link(block, after=SCRATCH_BLOCK)


class IgnoresSecondFree(BlockPool):
    def decref(self, block):
        if self._ref_counts[block] > 0:
            super().decref(block)


class CountsThenRefuses(BlockPool):
    def decref(self, block):
        self._ref_counts[block] -= 1
        if self._ref_counts[block] < 0:
            raise ValueError(f"block {block} is free already")
        self._ref_counts[block] += 1
        super().decref(block)


class AnyFreeBlockCanBeShared(BlockPool):
    def incref(self, block):
        if self._ref_counts[block] == 0:
            self._unlink(block)
        self._ref_counts[block] += 1


class NumbersUnchecked(BlockPool):
    """S22: -1 is Python's name for the last block."""

    def incref(self, block):
        super().incref(range(self.num_blocks)[block])

    def decref(self, block):
        super().decref(range(self.num_blocks)[block])


class MarksUnchecked(BlockPool):
    def mark_cached(self, block):
        super().mark_cached(range(self.num_blocks)[block])

    def unmark_cached(self, block):
        super().unmark_cached(range(self.num_blocks)[block])


class ScratchCanBeOwned(BlockPool):
    def incref(self, block):
        if block == SCRATCH_BLOCK:
            self._ref_counts[block] += 1
        else:
            super().incref(block)


class InvalidIsIgnored(BlockPool):
    """Forgives whoever didn't look at what ``allocate`` returned."""

    def decref(self, block):
        if block != INVALID_BLOCK:
            super().decref(block)


class FirstInFirstOut(BlockPool):
    def decref(self, block):
        super().decref(block)
        if self._ref_counts[block] == 0:
            self._unlink(block)
            self._link(block, after=self._previous[SCRATCH_BLOCK])


class LowestNumberFirst(HeapPool):
    def _free(self, block):
        super()._free(block)
        entry = (block in self.known, block, block)
        self.heap.remove(self.entry_of[block])
        heapq.heapify(self.heap)
        heapq.heappush(self.heap, entry)
        self.entry_of[block] = entry


class NewestCachedFirst(BlockPool):
    """S23: one stack for all."""

    def decref(self, block):
        super().decref(block)
        if self._ref_counts[block] == 0:
            self._unlink(block)
            self._link(block, after=SCRATCH_BLOCK)


class OneQueueForAll(BlockPool):
    """Cached or not, the block that has been free for longest goes."""

    def decref(self, block):
        super().decref(block)
        if self._ref_counts[block] == 0:
            self._unlink(block)
            self._link(block, after=self._previous[SCRATCH_BLOCK])


class OldestContentFirst(HeapPool):
    """Ordered by when the content was written, not by when it was used."""

    def __init__(self, num_blocks, block_size):
        self.marked = {}
        super().__init__(num_blocks, block_size)

    def mark_cached(self, block):
        super().mark_cached(block)
        self.marked[block] = self.clock = self.clock + 1

    def _free(self, block):
        super()._free(block)
        if block in self.known:
            self.heap.remove(self.entry_of[block])
            heapq.heapify(self.heap)
            self.entry_of[block] = (True, self.marked[block], block)
            heapq.heappush(self.heap, self.entry_of[block])


class StaleEntriesCount(HeapPool):
    """Lazy deletion that knows a stale entry by its block being used, and not by its number."""

    def allocate(self):
        while self.heap:
            entry = heapq.heappop(self.heap)
            if entry[-1] in self.entry_of:
                heapq.heappush(self.heap, entry)
                self.entry_of[entry[-1]] = entry
                return super().allocate()
        return INVALID_BLOCK


class FreeBlocksByNumber(BlockPool):
    def free_blocks(self):
        return iter(sorted(super().free_blocks()))


class FreeBlocksAsTheHeapHasThem(HeapPool):
    """Every entry, stale ones too, in the order of the array."""

    def free_blocks(self):
        return (entry[-1] for entry in self.heap)


class FreeBlocksWithoutCached(BlockPool):
    def free_blocks(self):
        return (block for block in super().free_blocks() if not self._cached[block])


class FreeBlocksAreTaken(BlockPool):
    """Asks itself, and gives all of them back."""

    def free_blocks(self):
        blocks = [self.allocate() for _ in range(self.num_free)]
        for block in reversed(blocks):
            self.decref(block)
        return iter(blocks)


class CachedOnlyWhileUsed(BlockPool):
    def is_cached(self, block):
        return self._cached[block] and self._ref_counts[block] > 0


class CachedOnlyWhileFree(BlockPool):
    def is_cached(self, block):
        return self._cached[block] and self._ref_counts[block] == 0


class MarksFreeBlocks(BlockPool):
    """S18: whoever is late to register a block marks it after it was given back."""

    def mark_cached(self, block):
        assert SCRATCH_BLOCK < block < self.num_blocks
        self._cached[block] = True


class UnmarksUsedBlocks(BlockPool):
    def unmark_cached(self, block):
        if self._cached[block] or not self._ref_counts[block]:
            super().unmark_cached(block)


class UnmarksFreeBlocks(BlockPool):
    """To the front with it, known or not."""

    def unmark_cached(self, block):
        if self._ref_counts[block] == 0:
            self._cached[block] = True
        super().unmark_cached(block)


class StaysInTheFreeList(BlockPool):
    """S20: a hit counts an owner and leaves the block where it may be evicted."""

    def incref(self, block):
        self._ref_counts[block] += 1


class SearchesTheFrontOnly(HeapPool):
    """Takes a block back only where it is the next to go."""

    def incref(self, block):
        entry = self.entry_of.get(block)
        if entry and self.heap[0] != entry:
            self.owners[block] = 1
            return
        super().incref(block)


class NeverTells(BlockPool):
    """S21."""

    def allocate(self):
        told, self.on_evict = self.on_evict, lambda block: None
        block = super().allocate()
        self.on_evict = told
        return block


class TellsOfEach(BlockPool):
    def allocate(self):
        block = self._next[SCRATCH_BLOCK]
        if block != SCRATCH_BLOCK and not self._cached[block]:
            self.on_evict(block)
        return super().allocate()


class TellsWhenFreed(BlockPool):
    def decref(self, block):
        super().decref(block)
        if self._ref_counts[block] == 0 and self._cached[block]:
            self.on_evict(block)


class TellsOneCallLate(BlockPool):
    """Keeps a list of what was evicted, and works on it next time."""

    late = None

    def allocate(self):
        told, late, evicted = self.on_evict, self.late, []
        self.on_evict = evicted.append
        block = super().allocate()
        self.on_evict, self.late = told, evicted[0] if evicted else None
        if late is not None:
            told(late)
        return block


class CachedForEver(BlockPool):
    def allocate(self):
        block = self._next[SCRATCH_BLOCK]
        was_cached = self._cached[block]
        super().allocate()
        self._cached[block] = was_cached
        return block or INVALID_BLOCK


class ForgottenStaysAtTheBack(BlockPool):
    def unmark_cached(self, block):
        self._cached[block] = False


class ForgottenIsEvicted(BlockPool):
    def unmark_cached(self, block):
        super().unmark_cached(block)
        self.on_evict(block)


class LosesTheBackOfTheList(BlockPool):
    """Forgets one of the four links: where the next block says that it follows."""

    def _unlink(self, block):
        before, following = self._previous[block], self._next[block]
        super()._unlink(block)
        if before != SCRATCH_BLOCK and following == SCRATCH_BLOCK:
            self._previous[following] = block


ALTERNATIVES = [HeapPool]
KILLED_BY = {
    CountsScratch: "sizes",
    AddsScratch: "sizes",
    TakesAnySize: "sizes_refused",
    RefusesWithAssert: "sizes_refused",
    NothingIsScratch: "scratch_kept",
    HandsOutTheFirstAgain: "each_once",
    CountsOnFromBefore: "one_owner",
    RaisesWhenEmpty: "empty",
    ScratchWhenEmpty: "empty",
    CountsFailures: "empty",
    OneListForAll: "pools_apart",
    FirstOwnerFrees: "last_owner",
    NeverFreesShared: "last_owner",
    FreesTwice: "given_back_once",
    IgnoresSecondFree: "given_back_once",
    CountsThenRefuses: "given_back_once",
    AnyFreeBlockCanBeShared: "incref_needs_content",
    NumbersUnchecked: "no_such_block",
    MarksUnchecked: "no_such_block",
    ScratchCanBeOwned: "no_such_block",
    InvalidIsIgnored: "no_such_block",
    FirstInFirstOut: "last_freed_first",
    LowestNumberFirst: "last_freed_first",
    NewestCachedFirst: "cached_oldest_first",
    OneQueueForAll: "cached_go_last",
    OldestContentFirst: "hit_is_a_use",
    StaleEntriesCount: "hit_is_a_use",
    FreeBlocksByNumber: "free_blocks",
    FreeBlocksAsTheHeapHasThem: "free_blocks",
    FreeBlocksWithoutCached: "free_blocks",
    FreeBlocksAreTaken: "free_blocks",
    CachedOnlyWhileUsed: "cached_flag",
    CachedOnlyWhileFree: "cached_flag",
    MarksFreeBlocks: "marks_refused",
    UnmarksUsedBlocks: "marks_refused",
    UnmarksFreeBlocks: "marks_refused",
    StaysInTheFreeList: "taken_back",
    SearchesTheFrontOnly: "taken_back",
    NeverTells: "eviction_told",
    TellsOfEach: "eviction_told",
    TellsWhenFreed: "eviction_told",
    TellsOneCallLate: "eviction_told",
    CachedForEver: "eviction_forgets",
    ForgottenStaysAtTheBack: "forgotten",
    ForgottenIsEvicted: "forgotten",
    LosesTheBackOfTheList: "random_trace",
}
