"""Prefix caches built differently, and the ways to get one wrong.

The mutants are the engine's cache, or the plainer one below, with one piece exchanged.
"""

from mie.memory.prefix_cache import (
    HashPrefixCache,
    HitCounter,
    block_tokens,
    may_be_cached,
)
from mie.memory.radix_tree import RadixTree


class BlockTrie:
    """One dictionary: (the block before it, or a salt) and tokens, to block.

    A block's number is the name of all the text up to its end, and stays so while it is known:
    what continues a block is forgotten with it.
    """

    def __init__(self, pool):
        self.pool, self.hits = pool, HitCounter()
        self.after, self.place = {}, {}
        pool.on_evict = self.forget

    def count(self, num_tokens):
        return may_be_cached(num_tokens, self.pool.block_size)

    def step(self, before, token_ids, index):
        return before, block_tokens(token_ids, index, self.pool.block_size)

    def match(self, token_ids, salt=""):
        found, before = [], salt
        for index in range(self.count(len(token_ids))):
            before = self.after.get(self.step(before, token_ids, index))
            if before is None:
                break
            found.append(before)
        for block in found:
            self.pool.incref(block)
        return found

    def insert(self, table, token_ids, num_computed, salt=""):
        for index in range(table.num_registered, num_computed // self.pool.block_size):
            before = table.blocks[index - 1] if index else salt
            if index and before not in self.place:
                return
            step = self.step(before, token_ids, index)
            if step not in self.after:
                block = table.blocks[index]
                self.after[step], self.place[block] = block, step
                self.pool.mark_cached(block)
            table.register(self.after[step])

    def clear(self):
        if any(self.pool.ref_count(block) for block in self.place):
            return False
        for block in self.place:
            self.pool.unmark_cached(block)
        self.after, self.place = {}, {}
        return True

    def forget(self, block):
        del self.after[self.place.pop(block)]
        for before, tokens in [*self.after]:
            if before == block and (block, tokens) in self.after:
                child = self.after[before, tokens]
                self.forget(child)
                self.pool.unmark_cached(child)


class NamesOutliveTheirBlocks(BlockTrie):
    """The number of an evicted block still names the old text for what continued it."""

    def forget(self, block):
        del self.after[self.place.pop(block)]


class FirstBlockOnly(BlockTrie):
    def match(self, token_ids, salt=""):
        return super().match(token_ids[: self.pool.block_size + 1], salt)


class HalfBlocksToo(BlockTrie):
    """A block is found by its first half."""

    def step(self, before, token_ids, index):
        before, tokens = super().step(before, token_ids, index)
        return before, tokens[: len(tokens) // 2]


class LastFirst(BlockTrie):
    def match(self, token_ids, salt=""):
        return super().match(token_ids, salt)[::-1]


class OneContinuation(BlockTrie):
    """After each block at most one other is known, the newest."""

    def insert(self, table, token_ids, num_computed, salt=""):
        super().insert(table, token_ids, num_computed, salt)
        newest = {step[0]: step for step in self.after}
        for step in list(self.after):
            if newest[step[0]] != step:
                block = self.after.pop(step)
                del self.place[block]
                self.pool.unmark_cached(block)


class CoversTheWholeText(BlockTrie):
    """S17."""

    def count(self, num_tokens):
        return num_tokens // self.pool.block_size


class LeavesAWholeBlock(BlockTrie):
    def count(self, num_tokens):
        return max(num_tokens // self.pool.block_size - 1, 0)


class BlocksByThemselves(BlockTrie):
    """S19: the key of a block says nothing of what stands before it."""

    def step(self, before, token_ids, index):
        return "", super().step(before, token_ids, index)[1]


class BlocksAtTheirIndex(BlockTrie):
    def step(self, before, token_ids, index):
        return index, super().step(before, token_ids, index)[1]


class HashesBelieved(BlockTrie):
    """S19: equal hashes pass for equal tokens."""

    def step(self, before, token_ids, index):
        return before, hash(super().step(before, token_ids, index)[1])


class SaltIgnored(BlockTrie):
    def match(self, token_ids, salt=""):
        return super().match(token_ids)

    def insert(self, table, token_ids, num_computed, salt=""):
        super().insert(table, token_ids, num_computed)


class NoSaltMatchesAny(BlockTrie):
    def match(self, token_ids, salt=""):
        return super().match(token_ids, salt) or super().match(token_ids)


class InsertsAllThereIs(BlockTrie):
    """S18: slots are there, K and V are not."""

    def insert(self, table, token_ids, num_computed, salt=""):
        super().insert(table, token_ids, len(token_ids), salt)


class RoundsUp(BlockTrie):
    def insert(self, table, token_ids, num_computed, salt=""):
        size = self.pool.block_size
        whole = min((num_computed + size - 1) // size * size, len(token_ids) // size * size)
        super().insert(table, token_ids, whole, salt)


class InsertsOnce(BlockTrie):
    """What comes after the first insert of a table is not registered."""

    def insert(self, table, token_ids, num_computed, salt=""):
        if table.num_registered == 0:
            super().insert(table, token_ids, num_computed, salt)


class LearnsFromQuestions(BlockTrie):
    """S18: the block that will hold it is reserved at once."""

    def match(self, token_ids, salt=""):
        found = super().match(token_ids, salt)
        before = found[-1] if found else salt
        for index in range(len(found), self.count(len(token_ids))):
            block = self.pool.allocate()
            step = self.step(before, token_ids, index)
            self.after[step], self.place[block] = block, step
            self.pool.mark_cached(block)
            before = block
        return found


class KnownWhileOwned(BlockTrie):
    """Never marks a block as cached, so that it goes as soon as its owner does."""

    def match(self, token_ids, salt=""):
        for block in [block for block in self.place if not self.pool.ref_count(block)]:
            self.forget(block)
        return super().match(token_ids, salt)


class OwnsWhatItKnows(BlockTrie):
    def insert(self, table, token_ids, num_computed, salt=""):
        before = set(self.place)
        super().insert(table, token_ids, num_computed, salt)
        for block in set(self.place) - before:
            self.pool.incref(block)


class LeavesOwningToTheCaller(BlockTrie):
    """S20."""

    def match(self, token_ids, salt=""):
        found = super().match(token_ids, salt)
        for block in reversed(found):
            self.pool.decref(block)
        return found


class OwnsFreeBlocksOnly(BlockTrie):
    def match(self, token_ids, salt=""):
        found = super().match(token_ids, salt)
        for block in found:
            if self.pool.ref_count(block) > 1:
                self.pool.decref(block)
        return found


class KeepsDuplicates(BlockTrie):
    """S18: what is known already isn't registered again, and its table keeps its own block."""

    def insert(self, table, token_ids, num_computed, salt=""):
        before = salt
        for index in range(num_computed // self.pool.block_size):
            step = self.step(before, token_ids, index)
            if step not in self.after:
                block = table.blocks[index]
                self.after[step], self.place[block] = block, step
                self.pool.mark_cached(block)
            before = self.after[step]
            if index >= table.num_registered:
                table.register(table.blocks[index])

    def forget(self, block):
        self.after.pop(self.place.pop(block), None)


class NewestDuplicateWins(KeepsDuplicates):
    def insert(self, table, token_ids, num_computed, salt=""):
        before = salt
        for index in range(num_computed // self.pool.block_size):
            block = table.blocks[index]
            step = self.step(before, token_ids, index)
            if index >= table.num_registered:
                self.after[step], self.place[block] = block, step
                self.pool.mark_cached(block)
                table.register(block)
            before = self.after.get(step, block)


class NeverForgets(BlockTrie):
    """S21: nobody listens to the pool."""

    def __init__(self, pool):
        super().__init__(pool)
        pool.on_evict = lambda block: None

    def match(self, token_ids, salt=""):
        found, before = [], salt
        for index in range(self.count(len(token_ids))):
            before = self.after.get(self.step(before, token_ids, index))
            if before is None or not (self.pool.ref_count(before) or self.pool.is_cached(before)):
                break
            self.pool.incref(before)
            found.append(before)
        return found


class ForgetsHalf(HashPrefixCache):
    """S21: the block is forgotten, and the key that leads to it is not."""

    def _forget(self, block):
        del self._by_block[block]


class TouchesWhatItSees(BlockTrie):
    """A look-up that finds nothing still counts as a use of all that was looked at."""

    def match(self, token_ids, salt=""):
        for block in sorted(self.place):
            if not self.pool.ref_count(block):
                self.pool.incref(block)
                self.pool.decref(block)
        return super().match(token_ids, salt)


class ClearsWhatIsInUse(BlockTrie):
    def clear(self):
        for block in self.place:
            self.pool.unmark_cached(block)
        self.after, self.place = {}, {}
        return True


class ClearsWhatIsFree(BlockTrie):
    def clear(self):
        free = [block for block in self.place if not self.pool.ref_count(block)]
        for block in free:
            self.forget(block)
            self.pool.unmark_cached(block)
        return not self.place


class LeavesTheMarks(BlockTrie):
    def clear(self):
        if any(self.pool.ref_count(block) for block in self.place):
            return False
        self.after, self.place = {}, {}
        return True


class RemembersItsTables(BlockTrie):
    """Counts itself how much of a table it has seen, and doesn't hear of it when that changes."""

    def __init__(self, pool):
        super().__init__(pool)
        self.seen = {}

    def insert(self, table, token_ids, num_computed, salt=""):
        if num_computed > self.seen.get(id(table), (None, 0))[1]:
            super().insert(table, token_ids, num_computed, salt)
            self.seen[id(table)] = table, num_computed


class CountsQuestions(BlockTrie):
    def match(self, token_ids, salt=""):
        found = super().match(token_ids, salt)
        self.hits.add(len(token_ids), len(found) * self.pool.block_size)
        return found


class OneCounterForAll(BlockTrie):
    shared = HitCounter()

    def __init__(self, pool):
        super().__init__(pool)
        self.hits = self.shared


class OrderIgnored(HashPrefixCache):
    """A hash that only adds up: no hit is wrong, since tokens are compared, but many are missed."""

    def __init__(self, pool):
        super().__init__(pool, lambda key, tokens: key + sum(tokens))


ALTERNATIVES = [RadixTree, BlockTrie]
KILLED_BY = {
    FirstBlockOnly: "longest_beginning",
    HalfBlocksToo: "longest_beginning",
    LastFirst: "longest_beginning",
    OneContinuation: "several_texts",
    CoversTheWholeText: "never_the_whole_text",
    LeavesAWholeBlock: "never_the_whole_text",
    BlocksByThemselves: "after_the_same_beginning",
    BlocksAtTheirIndex: "after_the_same_beginning",
    HashesBelieved: "equal_hashes",
    SaltIgnored: "salt",
    NoSaltMatchesAny: "salt",
    InsertsAllThereIs: "only_what_was_computed",
    RoundsUp: "only_what_was_computed",
    InsertsOnce: "only_what_was_computed",
    LearnsFromQuestions: "asking_teaches_nothing",
    KnownWhileOwned: "outlives_its_sequence",
    OwnsWhatItKnows: "outlives_its_sequence",
    LeavesOwningToTheCaller: "owned_at_once",
    OwnsFreeBlocksOnly: "owned_at_once",
    KeepsDuplicates: "one_copy",
    NewestDuplicateWins: "ends_go_first",
    NeverForgets: "evicted_is_gone",
    ForgetsHalf: "evicted_is_gone",
    NamesOutliveTheirBlocks: "beginning_evicted",
    TouchesWhatItSees: "oldest_use_first",
    ClearsWhatIsInUse: "clear",
    ClearsWhatIsFree: "clear",
    LeavesTheMarks: "clear",
    RemembersItsTables: "rewritten",
    CountsQuestions: "counts_what_it_is_told",
    OneCounterForAll: "counts_what_it_is_told",
    OrderIgnored: "random_trace",
}
