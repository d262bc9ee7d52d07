"""A block table that is replaced rather than changed, and the ways to get a table wrong.

The mutants are the engine's table with one piece exchanged.
"""

from typing import NamedTuple

from mie.memory.block_pool import INVALID_BLOCK, blocks_needed
from mie.memory.block_table import BlockTable


class Content(NamedTuple):
    """All that a table knows, at one moment. ``owned`` maps an index to a block."""

    owned: dict
    num_tokens: int
    num_registered: int


class ReplacedTable:
    """Each change makes a new ``Content`` and takes up or gives back what the two differ in."""

    def __init__(self, pool, copies, blocks=()):
        self.pool, self.copies = pool, copies
        owned = dict(enumerate(blocks))
        self.content = Content(owned, len(owned) * pool.block_size, len(owned))

    blocks = property(lambda self: tuple(self.content.owned.values()))
    num_tokens = property(lambda self: self.content.num_tokens)
    num_registered = property(lambda self: self.content.num_registered)

    def _shared(self, block):
        owners = self.pool.ref_count(block) - self.copies.pins(block)
        return owners > 1 or self.pool.is_cached(block)

    def _touched(self, num_tokens):
        """The indices of the blocks that so many more tokens are written to."""
        size, first = self.pool.block_size, self.num_tokens
        return sorted({p // size for p in range(first, first + num_tokens)})

    def _missing(self, indices):
        owned = self.content.owned
        return [i for i in indices if i not in owned or self._shared(owned[i])]

    def _with_own(self, indices):
        """The blocks with new ones at ``indices``, or None if there are too few."""
        if len(indices) > self.pool.num_free:
            return None
        new = {i: self.pool.allocate() for i in indices}
        assert INVALID_BLOCK not in new.values()
        for i in indices:
            if i in self.content.owned:
                self.copies.add(self.content.owned[i], new[i])
                self.pool.decref(self.content.owned[i])
        return self.content.owned | new

    def blocks_to_append(self, num_tokens):
        return len(self._missing(self._touched(num_tokens)))

    def append(self, num_tokens):
        if num_tokens < 0:
            raise ValueError(num_tokens)
        missing = self._missing(self._touched(num_tokens))
        owned = self._with_own(missing)
        if owned is None:
            return False
        known = min([self.num_registered, *missing])
        self.content = Content(owned, self.num_tokens + num_tokens, known)
        return True

    def writable(self, position):
        index = position // self.pool.block_size
        if self.num_registered > index + 1:
            raise ValueError(f"{self.num_registered} blocks are registered")
        missing = self._missing([index])
        owned = self._with_own(missing)
        if owned is None:
            return False
        self.content = Content(owned, self.num_tokens, min([self.num_registered, *missing]))
        return True

    def fork(self):
        for block in self.blocks:
            self.pool.incref(block)
        twin = ReplacedTable(self.pool, self.copies)
        twin.content = self.content
        return twin

    def register(self, block):
        at = self.num_registered
        own = self.content.owned[at]
        if self.num_tokens // self.pool.block_size <= at or self.copies.fills(own):
            raise ValueError(f"block {own} is not written")
        if own != block:
            self.pool.incref(block)
            self.pool.decref(own)
        owned = self.content.owned | {at: block}
        self.content = Content(owned, self.num_tokens, at + 1)

    def truncate(self, num_tokens):
        if num_tokens not in range(self.num_tokens + 1):
            raise ValueError(num_tokens)
        keep = blocks_needed(num_tokens, self.pool.block_size)
        for index in reversed(range(keep, len(self.content.owned))):
            block = self.content.owned[index]
            if self.pool.ref_count(block) == 1 + self.copies.pins(block):
                self.copies.cancel(block)
            self.pool.decref(block)
        owned = {i: block for i, block in self.content.owned.items() if i < keep}
        self.content = Content(owned, num_tokens, min(keep, self.num_registered))

    def release(self):
        self.truncate(0)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.release()

    def __reduce_ex__(self, protocol):  # what copy and pickle ask for
        raise TypeError("a table has one owner")

    def slot(self, position):
        if not 0 <= position < self.num_tokens:
            raise IndexError(position)
        index, offset = divmod(position, self.pool.block_size)
        return self.content.owned[index] * self.pool.block_size + offset

    def slots(self, begin, end):
        return tuple(map(self.slot, range(begin, end)))


class OneStretchOfMemory(BlockTable):
    def slot(self, position):
        self._index(position)
        return self.blocks[0] * self.pool.block_size + position


class EndIncluded(BlockTable):
    def slots(self, begin, end):
        return [self.slot(p) for p in range(begin, min(end + 1, self.num_tokens))]


class CountsFromTheEnd(BlockTable):
    def _index(self, position):
        return position // self.pool.block_size


class StretchesFromAnywhere(BlockTable):
    """Each position by itself would be refused, but the stretch is computed from its two ends."""

    def slots(self, begin, end):
        size = self.pool.block_size
        inside = [b * size + offset for b in self.blocks for offset in range(size)]
        return inside[begin:end]


class OneBlockAhead(BlockTable):
    """S25: n // size + 1 blocks hold n tokens."""

    def blocks_to_append(self, num_tokens):
        wanted = (self.num_tokens + num_tokens) // self.pool.block_size + 1
        return wanted - len(self.blocks) + self._must_split_tail(num_tokens)


class RoundsEachAppendUp(BlockTable):
    def blocks_to_append(self, num_tokens):
        new = blocks_needed(num_tokens, self.pool.block_size)
        return new + self._must_split_tail(num_tokens)


class SplitsForNothing(BlockTable):
    def _must_split_tail(self, num_tokens):
        return super()._must_split_tail(1)


class AppendTakesAway(BlockTable):
    """A negative number is added like any other."""

    def append(self, num_tokens):
        if num_tokens >= 0:
            return super().append(num_tokens)
        self.num_tokens += num_tokens
        return True


class SaysNothingOfTheSplit(BlockTable):
    def blocks_to_append(self, num_tokens):
        return super().blocks_to_append(num_tokens) - self._must_split_tail(num_tokens)

    def append(self, num_tokens):
        needed = super().blocks_to_append(num_tokens)
        if needed > self.pool.num_free:
            return False
        if self._must_split_tail(num_tokens):
            self._split(len(self.blocks) - 1)
            needed -= 1
        self.blocks += [self.pool.allocate() for _ in range(needed)]
        self.num_tokens += num_tokens
        return True


class TakesWhatThereIs(BlockTable):
    def append(self, num_tokens):
        return all(super(TakesWhatThereIs, self).append(1) for _ in range(num_tokens))


class TriesAndGivesBack(BlockTable):
    """Nothing is lost but what the prefix cache knew."""

    def append(self, num_tokens):
        if self.blocks_to_append(num_tokens) > self.pool.num_free and self.pool.num_free:
            tried = [self.pool.allocate() for _ in range(self.pool.num_free)]
            for block in reversed(tried):
                self.pool.decref(block)
        return super().append(num_tokens)


class SplitsBeforeItLooks(BlockTable):
    def append(self, num_tokens):
        if self._must_split_tail(num_tokens) and self.pool.num_free:
            self._split(len(self.blocks) - 1)
        return super().append(num_tokens)


class LeavesOneInThePool(BlockTable):
    def append(self, num_tokens):
        if self.blocks_to_append(num_tokens) >= self.pool.num_free > 0:
            return False
        return super().append(num_tokens)


class ReferencesHitsAgain(BlockTable):
    def __init__(self, pool, copies, blocks=()):
        super().__init__(pool, copies, blocks)
        for block in self.blocks:
            pool.incref(block)

    def fork(self):
        twin = super().fork()
        for block in self.blocks:
            self.pool.decref(block)
        return twin


class HitsAreNotRegistered(BlockTable):
    def __init__(self, pool, copies, blocks=()):
        super().__init__(pool, copies, blocks)
        self.num_registered = 0


class KeepsTheCallersList(BlockTable):
    def __init__(self, pool, copies, blocks=()):
        super().__init__(pool, copies, blocks)
        self.blocks = blocks if isinstance(blocks, list) else list(blocks)

    def fork(self):
        twin = super().fork()
        twin.blocks = list(self.blocks)
        return twin


class ForkCopiesAll(BlockTable):
    def fork(self):
        twin = super().fork()
        for index in range(len(twin.blocks)):
            if self.pool.num_free:
                twin._split(index)
        return twin


class ForkForgetsToCount(BlockTable):
    """S22."""

    def fork(self):
        twin = super().fork()
        for block in self.blocks:
            self.pool.decref(block)
        return twin


class ForkForgetsWhatIsKnown(BlockTable):
    def fork(self):
        twin = super().fork()
        twin.num_registered = 0
        return twin


class OneListForBoth(BlockTable):
    def fork(self):
        twin = super().fork()
        twin.blocks = self.blocks
        return twin


class WritesInPlace(BlockTable):
    def writable(self, position):
        return True


class SplitsWithoutACopy(BlockTable):
    def _split(self, index):
        shared, self.blocks[index] = self.blocks[index], self.pool.allocate()
        self.pool.decref(shared)


class AppendsInPlace(BlockTable):
    def _must_split_tail(self, num_tokens):
        return False


class SplitsFullBlocksToo(BlockTable):
    def _must_split_tail(self, num_tokens):
        return num_tokens > 0 and bool(self.blocks) and self.is_shared(len(self.blocks) - 1)


class DecrefsFirst(BlockTable):
    def _split(self, index):
        shared = self.blocks[index]
        self.pool.decref(shared)
        own = self.pool.allocate()
        self.copies.add(shared, own)
        self.blocks[index] = own
        self.num_registered = min(self.num_registered, index)


class SwapsFirst(BlockTable):
    def _split(self, index):
        own = self.pool.allocate()
        self.copies.add(self.blocks[index], own)
        self.blocks[index] = own
        self.pool.decref(self.blocks[index])
        self.num_registered = min(self.num_registered, index)


class NeverDecrefs(BlockTable):
    def _split(self, index):
        self.pool.incref(self.blocks[index])
        super()._split(index)


class CountsEveryPin(BlockTable):
    def is_shared(self, index):
        block = self.blocks[index]
        return self.pool.ref_count(block) > 1 or self.pool.is_cached(block)


class CountsPinsOfSources(BlockTable):
    def is_shared(self, index):
        block = self.blocks[index]
        is_target = block in self.copies._waiting
        others = self.pool.ref_count(block) - 1 - self.copies.pins(block) * is_target
        return others > 0 or self.pool.is_cached(block)


class OnceSharedAlwaysShared(BlockTable):
    shared_once = frozenset()

    def fork(self):
        twin = super().fork()
        self.shared_once = twin.shared_once = {*self.shared_once, *self.blocks}
        return twin

    def is_shared(self, index):
        return super().is_shared(index) or self.blocks[index] in self.shared_once


class LooksAtOwnersOnly(BlockTable):
    def is_shared(self, index):
        block = self.blocks[index]
        return self.pool.ref_count(block) - self.copies.pins(block) > 1


class CopyStaysRegistered(BlockTable):
    def _split(self, index):
        registered = self.num_registered
        super()._split(index)
        self.num_registered = registered


class SaysTrueAnyway(BlockTable):
    def writable(self, position):
        return super().writable(position) or True


class GivesUpFirst(BlockTable):
    def writable(self, position):
        index = self._index(position)
        if self.is_shared(index) and self.pool.num_free == 0:
            self.pool.decref(self.blocks[index])
            return False
        return super().writable(position)


class ListsWhatIsNotThere(BlockTable):
    def writable(self, position):
        index = self._index(position)
        if self.is_shared(index) and self.pool.num_free == 0:
            self.blocks[index] = INVALID_BLOCK
            return True
        return super().writable(position)


class WritesBeforeWhatIsKnown(BlockTable):
    """The block before is split, the registered ones behind it stay listed."""

    def writable(self, position):
        index, registered = self._index(position), self.num_registered
        self.num_registered = min(registered, index + 1)
        done = super().writable(position)
        if not self.is_shared(index):
            self.num_registered = registered
        return done


class WritesBeforeWhatIsShared(BlockTable):
    """Refuses where it would split, and not where a block is this table's alone."""

    def writable(self, position):
        return not self.is_shared(self._index(position)) or super().writable(position)


class RegistersHalfBlocks(BlockTable):
    """S18."""

    def register(self, block):
        own = self.blocks[self.num_registered]
        assert not self.copies.fills(own)
        if block != own:
            self.pool.incref(block)
            self.blocks[self.num_registered] = block
            self.pool.decref(own)
        self.num_registered += 1


class RegistersWhatIsNotCopied(BlockTable):
    """S18: full, as far as its table knows."""

    def register(self, block):
        fills, self.copies.fills = self.copies.fills, lambda own: False
        try:
            super().register(block)
        finally:
            self.copies.fills = fills


class KeepsItsOwn(BlockTable):
    """S18."""

    def register(self, block):
        self.num_registered += 1


class AdoptsWithoutCounting(BlockTable):
    def register(self, block):
        own = self.blocks[self.num_registered]
        if block != own:
            self.pool.decref(own)
            self.blocks[self.num_registered] = block
        self.num_registered += 1


class KeepsBoth(BlockTable):
    def register(self, block):
        self.pool.incref(self.blocks[self.num_registered])
        super().register(block)


class TruncatesTooLittle(BlockTable):
    """S53: the block behind a full one stays."""

    def truncate(self, num_tokens):
        whole = (num_tokens // self.pool.block_size + 1) * self.pool.block_size
        super().truncate(min(whole, self.num_tokens) if num_tokens else 0)
        self.num_tokens = num_tokens


class TruncatesTooMuch(BlockTable):
    def truncate(self, num_tokens):
        super().truncate(num_tokens)
        while len(self.blocks) > num_tokens // self.pool.block_size:
            self.pool.decref(self.blocks.pop())


class StaysRegistered(BlockTable):
    def truncate(self, num_tokens):
        registered = self.num_registered
        super().truncate(num_tokens)
        self.num_registered = registered if num_tokens else 0


class TruncateAddsTokens(BlockTable):
    """Nobody has taken slots for them."""

    def truncate(self, num_tokens):
        super().truncate(min(num_tokens, self.num_tokens))
        self.num_tokens = num_tokens


class TruncatesFromTheEnd(BlockTable):
    """As a slice would: -1 drops the last token."""

    def truncate(self, num_tokens):
        super().truncate(range(self.num_tokens + 1)[num_tokens - (num_tokens < 0)])


class ForgetsBeforeItRefuses(BlockTable):
    def truncate(self, num_tokens):
        keep = blocks_needed(num_tokens, self.pool.block_size)
        self.num_registered = min(self.num_registered, max(keep, 0))
        super().truncate(num_tokens)


class FirstBlockFirst(BlockTable):
    """S23."""

    def truncate(self, num_tokens):
        keep = blocks_needed(num_tokens, self.pool.block_size)
        self.blocks[keep:] = self.blocks[keep:][::-1]
        super().truncate(num_tokens)


class NeverCallsOff(BlockTable):
    def truncate(self, num_tokens):
        cancel, self.copies.cancel = self.copies.cancel, lambda target: None
        super().truncate(num_tokens)
        self.copies.cancel = cancel


class CallsOffWhatOthersRead(BlockTable):
    def truncate(self, num_tokens):
        for block in self.blocks[blocks_needed(num_tokens, self.pool.block_size) :]:
            self.copies.cancel(block)
        super().truncate(num_tokens)


class ReleasesTwice(BlockTable):
    """S36."""

    def release(self):
        for block in reversed(self.blocks):
            self.pool.decref(block)


class ReleaseEndsIt(BlockTable):
    def release(self):
        super().release()
        self.pool = None


class SwallowsErrors(BlockTable):
    def __exit__(self, kind, error, where):
        self.release()
        return True


class ReleasesOnSuccess(BlockTable):
    def __exit__(self, kind, error, where):
        if error is None:
            self.release()


class CanBeCopied(BlockTable):
    def __copy__(self):
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin


class CanBeCopiedDeep(BlockTable):
    def __copy__(self):
        raise TypeError("shallow only")

    def __deepcopy__(self, memo):
        return BlockTable(self.pool, self.copies, self.blocks)


class RemembersSlots(BlockTable):
    """Works each slot out once, and goes on with it after a split or a truncate."""

    def slot(self, position):
        remembered = vars(self).setdefault("remembered", {})
        if position not in remembered:
            remembered[position] = super().slot(position)
        return remembered[position]


ALTERNATIVES = [ReplacedTable]
KILLED_BY = {
    OneStretchOfMemory: "slot",
    EndIncluded: "slot",
    CountsFromTheEnd: "slot_of_a_token",
    StretchesFromAnywhere: "slot_of_a_token",
    OneBlockAhead: "whole_blocks",
    RoundsEachAppendUp: "whole_blocks",
    SplitsForNothing: "append_nothing",
    AppendTakesAway: "append_nothing",
    SaysNothingOfTheSplit: "blocks_to_append",
    TakesWhatThereIs: "all_or_nothing",
    TriesAndGivesBack: "all_or_nothing",
    SplitsBeforeItLooks: "all_or_nothing",
    LeavesOneInThePool: "all_or_nothing",
    ReferencesHitsAgain: "starts_with_hits",
    HitsAreNotRegistered: "starts_with_hits",
    KeepsTheCallersList: "starts_with_hits",
    ForkCopiesAll: "fork_shares",
    ForkForgetsToCount: "fork_shares",
    ForkForgetsWhatIsKnown: "fork_shares",
    OneListForBoth: "forks_apart",
    WritesInPlace: "write_splits",
    SplitsWithoutACopy: "write_splits",
    AppendsInPlace: "append_splits",
    SplitsFullBlocksToo: "append_splits",
    DecrefsFirst: "copy_then_decref_then_swap",
    SwapsFirst: "copy_then_decref_then_swap",
    NeverDecrefs: "write_splits",
    CountsEveryPin: "copied_once",
    CountsPinsOfSources: "copies_are_no_readers",
    OnceSharedAlwaysShared: "last_owner_in_place",
    LooksAtOwnersOnly: "known_content_splits",
    CopyStaysRegistered: "known_content_splits",
    SaysTrueAnyway: "failed_split",
    GivesUpFirst: "failed_split",
    ListsWhatIsNotThere: "failed_split",
    WritesBeforeWhatIsKnown: "registered_behind",
    WritesBeforeWhatIsShared: "registered_behind",
    RegistersHalfBlocks: "register_what_is_written",
    RegistersWhatIsNotCopied: "register_what_is_written",
    KeepsItsOwn: "register_adopts",
    AdoptsWithoutCounting: "register_adopts",
    KeepsBoth: "register_adopts",
    TruncatesTooLittle: "truncate",
    TruncatesTooMuch: "truncate",
    StaysRegistered: "truncate",
    TruncateAddsTokens: "truncate",
    TruncatesFromTheEnd: "truncate",
    ForgetsBeforeItRefuses: "truncate",
    FirstBlockFirst: "last_block_first",
    NeverCallsOff: "copy_called_off",
    CallsOffWhatOthersRead: "copy_called_off",
    ReleasesTwice: "release_again",
    ReleaseEndsIt: "release_again",
    SwallowsErrors: "with",
    ReleasesOnSuccess: "with",
    CanBeCopied: "not_copied",
    CanBeCopiedDeep: "not_copied",
    RemembersSlots: "random_trace",
}
