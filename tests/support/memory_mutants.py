"""Memory with one rule dropped: what the tests of known bugs must fail on.

Invariant: each function here takes pytest's ``monkeypatch`` and changes ``mie.memory`` so that one
sentence of its docstrings is no longer true, and nothing else that the test needs.
"""

from __future__ import annotations

from mie.memory import block_table, prefix_cache, radix_tree
from mie.memory.block_copies import BlockCopies
from mie.memory.block_pool import SCRATCH_BLOCK, BlockPool
from mie.memory.block_table import BlockTable
from mie.memory.prefix_cache import CachedBlock, HashPrefixCache
from mie.memory.radix_tree import Node, RadixTree

CACHES = (HashPrefixCache, RadixTree)


def without_cap(patch):
    for module in (prefix_cache, radix_tree):
        patch.setattr(module, "may_be_cached", lambda num_tokens, size: num_tokens // size)


def registers_before_writing(patch):
    for each in CACHES:
        right = each.insert
        patch.setattr(
            each,
            "insert",
            lambda self, table, tokens, computed, salt="", right=right: right(
                self, table, tokens, table.num_tokens, salt
            ),
        )


def keeps_its_own_duplicate(patch):
    def register(self, block):
        self.num_registered += 1

    patch.setattr(BlockTable, "register", register)


def without_verification(patch):
    patch.setattr(CachedBlock, "continues", lambda self, parent, tokens: True)


def compares_tokens_but_not_what_stands_before(patch):
    patch.setattr(CachedBlock, "continues", lambda self, parent, tokens: self.tokens == tokens)


def without_salt(patch):
    patch.setattr(prefix_cache, "hash_salt", lambda salt: 0)
    compares_tokens_but_not_what_stands_before(patch)


def one_root_for_all_salts(patch):
    def one_root(self, salt):
        return self.roots.setdefault("", Node("", None)), 0

    match = RadixTree.match
    patch.setattr(RadixTree, "_root", one_root)
    patch.setattr(RadixTree, "match", lambda self, tokens, salt="": match(self, tokens))


def found_without_a_reference(patch):
    for each in CACHES:
        match = each.match

        def without(self, tokens, salt="", match=match):
            found = match(self, tokens, salt)
            for block in reversed(found):
                self.pool.decref(block)
            return found

        patch.setattr(each, "match", without)
    patch.setattr(BlockTable, "__init__", late_reference)


def late_reference(self, pool, copies, blocks=()):
    """The blocks that were found get their owner after the ones for the rest of the text."""
    self.pool, self.copies, self.blocks = pool, copies, list(blocks)
    self.num_tokens, self.num_registered = len(self.blocks) * pool.block_size, len(self.blocks)


def hit_stays_in_the_free_list(patch):
    def incref(self, block):
        self._ref_counts[block] += 1

    patch.setattr(BlockPool, "incref", incref)


def does_not_forget(patch):
    for each in CACHES:
        patch.setattr(each, "_forget", lambda self, block: None)


def gives_back_without_asking(patch):
    right = BlockPool.decref
    patch.setattr(
        BlockPool, "decref", lambda self, block: self.ref_count(block) and right(self, block)
    )


def release_keeps_its_list(patch):
    def release(self):
        for block in reversed(self.blocks):
            self.pool.decref(block)

    patch.setattr(BlockTable, "release", release)


def forks_without_counting(patch):
    def fork(self):
        twin = BlockTable(self.pool, self.copies, self.blocks)
        twin.num_tokens, twin.num_registered = self.num_tokens, self.num_registered
        return twin

    patch.setattr(BlockTable, "fork", fork)


def forks_share_one_list(patch):
    right = BlockTable.fork

    def fork(self):
        twin = right(self)
        twin.blocks = self.blocks
        return twin

    patch.setattr(BlockTable, "fork", fork)


def writes_into_shared_blocks(patch):
    patch.setattr(BlockTable, "is_shared", lambda self, index: False)


def decref_before_copy(patch):
    def split(self, index):
        shared = self.blocks[index]
        self.pool.decref(shared)
        self.blocks[index] = self.pool.allocate()
        self.copies._waiting[self.blocks[index]] = shared

    patch.setattr(BlockTable, "_split", split)


def copies_hold_nothing(patch):
    def add(self, source, target):
        self._waiting[target] = source

    patch.setattr(BlockCopies, "add", add)
    patch.setattr(BlockCopies, "_unpin", lambda self, block: None)


def head_first(patch):
    def release(self):
        for block in self.blocks:
            self.pool.decref(block)
        self.blocks, self.num_tokens, self.num_registered = [], 0, 0

    patch.setattr(BlockTable, "release", release)


def walks_to_the_back(patch):
    right = BlockPool._link

    def link(self, block, after):
        at = SCRATCH_BLOCK
        while at != after:
            at = self._next[at]
        right(self, block, after)

    patch.setattr(BlockPool, "_link", link)


def one_block_more(patch):
    patch.setattr(block_table, "blocks_needed", lambda tokens, size: tokens // size + 1)


def one_block_less(patch):
    patch.setattr(block_table, "blocks_needed", lambda tokens, size: max(1, tokens // size))


def fork_resets_the_count(patch):
    right = BlockTable.fork

    def fork(self):
        twin = right(self)
        self.pool._ref_counts[self.blocks[-1]] = 1
        return twin

    patch.setattr(BlockTable, "fork", fork)


def by_the_rest(patch):
    """A new block whenever the new length leaves a rest of one."""
    patch.setattr(
        BlockTable,
        "blocks_to_append",
        lambda self, new: int((self.num_tokens + new) % self.pool.block_size == 1),
    )


def without_what_stands_before(patch):
    """A block is known by its own tokens alone."""
    init = HashPrefixCache.__init__
    patch.setattr(
        HashPrefixCache,
        "__init__",
        lambda self, pool: init(self, pool, lambda parent, tokens: hash(tokens)),
    )
    compares_tokens_but_not_what_stands_before(patch)

    def follow(self, place, tokens):
        for node in self.nodes():
            if tokens in node.tokens:
                return node, node.tokens.index(tokens) + 1
        return None

    patch.setattr(RadixTree, "_follow", follow)
