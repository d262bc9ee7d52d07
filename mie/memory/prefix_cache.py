"""Beginnings of texts that are already in memory, found again by a chain of hashes.

Invariant: a hit is never wrong. The hash only finds a candidate; the tokens of the block and what
stands before it are then compared, and what stands before was compared in the same way one block
earlier. So two texts share a block exactly when they are equal up to its end and have one salt.

    text            [ You are a help ][ ful assistant. ][ What is the cap ][ ital
    key     H(salt) -> H( ·, tokens ) -> H( ·, tokens ) -> H( ·, tokens )
    block                  4                  9                  2

A block's K and V depend on every token before it, so its key contains the key of the block before.

A block is registered when its K and V have been written, full blocks only. Whoever computes a text
that another sequence has registered meanwhile takes the registered blocks for its own
(``BlockTable.register``), so as a rule all owners of a block also own the blocks before it. Tables
give their last block back first: in the pool's free list a block then stands before the one that it
continues, and the pool, which takes from the front, evicts an end and not a middle. A fork that has
split or adopted a block in the middle of what it shares can break that order. So a block is never
known longer than the one that it continues: when a middle is evicted, what continues it is
forgotten with it.

Cost: a dictionary access and a hash of ``block_size`` tokens for each block; eviction takes
constant time for each block that is forgotten. After vLLM's automatic prefix caching; the salt
after vLLM's ``cache_salt``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mie.memory.block_pool import BlockPool
from mie.memory.block_table import BlockTable

Tokens = tuple[int, ...]


@dataclass
class HitCounter:
    """How much was asked for and how much was found, in tokens."""

    queried: int = 0
    hit: int = 0

    def add(self, queried: int, hit: int) -> None:
        """Count one admitted sequence: once, however often its admission was tried."""
        self.queried += queried
        self.hit += hit

    @property
    def rate(self) -> float:
        return self.hit / self.queried if self.queried else 0.0


class PrefixCache(Protocol):
    """What the engine asks of a prefix cache. ``salt`` keeps texts apart that must not share:
    tenants, adapters."""

    hits: HitCounter

    def match(self, token_ids: Sequence[int], salt: str = "") -> list[int]:
        """The blocks of the longest known beginning, each referenced for the caller already.

        Never the whole text: at least one token is left to compute, because somebody has to produce
        the logits after the last one. Whole blocks only.
        """
        ...

    def insert(
        self, table: BlockTable, token_ids: Sequence[int], num_computed: int, salt: str = ""
    ) -> None:
        """Register the full blocks among the first ``num_computed`` tokens of ``table``.

        Their K and V must have been written, and the tokens be final: no draft among them.
        """
        ...

    def clear(self) -> bool:
        """Forget everything. False, and nothing has changed, while a known block is in use."""
        ...


class NoPrefixCache:
    """Finds nothing and keeps nothing: each sequence computes all of its tokens."""

    def __init__(self, pool: BlockPool) -> None:
        self.hits = HitCounter()

    def match(self, token_ids: Sequence[int], salt: str = "") -> list[int]:
        return []

    def insert(
        self, table: BlockTable, token_ids: Sequence[int], num_computed: int, salt: str = ""
    ) -> None:
        pass

    def clear(self) -> bool:
        return True


def full_blocks(token_ids: Sequence[int], count: int, block_size: int) -> list[Tokens]:
    """The tokens of the first ``count`` blocks."""
    return [block_tokens(token_ids, index, block_size) for index in range(count)]


def block_tokens(token_ids: Sequence[int], index: int, block_size: int) -> Tokens:
    """The tokens of block ``index`` of a text."""
    return tuple(token_ids[index * block_size : (index + 1) * block_size])


def may_be_cached(num_tokens: int, block_size: int) -> int:
    """How many blocks of a text a hit may cover: full ones, with a token left to compute."""
    return max(num_tokens - 1, 0) // block_size


def assert_computed(table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
    """What ``insert`` relies on: the table and the text have all tokens that were computed."""
    assert num_computed <= min(table.num_tokens, len(token_ids)), (
        f"{num_computed} tokens computed, {table.num_tokens} in the table, {len(token_ids)} given"
    )


def unmark_all(pool: BlockPool, blocks: Collection[int]) -> bool:
    """Tell the pool that none of ``blocks`` is known. False, and nothing has changed, while one of
    them is in use."""
    if any(pool.ref_count(block) for block in blocks):
        return False
    for block in blocks:
        pool.unmark_cached(block)
    return True


def hash_block(parent_key: int, tokens: Tokens) -> int:
    """The key of a block from that of the block before it. The same in every process."""
    return hash((parent_key, tokens))


def hash_salt(salt: str) -> int:
    """The key that stands before the first block."""
    return int.from_bytes(hashlib.sha256(salt.encode()).digest()[:7], "little")


@dataclass(frozen=True, eq=False)
class CachedBlock:
    """A block that is known. ``parent`` is the block before it, or the salt of the first one;
    ``children`` are the known blocks that continue it."""

    block: int
    key: int
    parent: CachedBlock | str
    tokens: Tokens
    children: set[CachedBlock] = field(default_factory=set)

    def continues(self, parent: CachedBlock | str, tokens: Tokens) -> bool:
        """Whether this block holds ``tokens`` after exactly what ``parent`` ends with."""
        return self.parent == parent and self.tokens == tokens


class HashPrefixCache:
    """A map from chained hashes to blocks. ``hash_block`` may be replaced: a bad one costs hits."""

    def __init__(
        self, pool: BlockPool, hash_block: Callable[[int, Tokens], int] = hash_block
    ) -> None:
        self.pool = pool
        self.hash_block = hash_block
        self.hits = HitCounter()
        self._by_key: dict[int, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        pool.on_evict = self._forget

    def match(self, token_ids: Sequence[int], salt: str = "") -> list[int]:
        """See ``PrefixCache``. The blocks are referenced before anything else is allocated,
        so none of them can be evicted to make room for the rest of the same text."""
        size = self.pool.block_size
        found: list[int] = []
        parent: CachedBlock | str = salt
        key = hash_salt(salt)
        for tokens in full_blocks(token_ids, may_be_cached(len(token_ids), size), size):
            key = self.hash_block(key, tokens)
            known = self._by_key.get(key)
            if known is None or not known.continues(parent, tokens):
                break
            found.append(known.block)
            parent = known
        for block in found:
            self.pool.incref(block)
        return found

    def insert(
        self, table: BlockTable, token_ids: Sequence[int], num_computed: int, salt: str = ""
    ) -> None:
        """See ``PrefixCache``. Stops at a block whose key belongs to another text, and where
        the block before has been forgotten."""
        size = self.pool.block_size
        assert_computed(table, token_ids, num_computed)
        for index in range(table.num_registered, num_computed // size):
            parent = salt if index == 0 else self._by_block.get(table.blocks[index - 1])
            if parent is None:
                return
            before = hash_salt(parent) if isinstance(parent, str) else parent.key
            tokens = block_tokens(token_ids, index, size)
            key = self.hash_block(before, tokens)
            known = self._by_key.get(key)
            if known is None:
                known = CachedBlock(table.blocks[index], key, parent, tokens)
                self._remember(known)
            elif not known.continues(parent, tokens):
                return
            table.register(known.block)

    def clear(self) -> bool:
        """See ``PrefixCache``."""
        if not unmark_all(self.pool, self._by_block):
            return False
        self._by_key.clear()
        self._by_block.clear()
        return True

    def check(self) -> None:
        """Prove that the two maps and the pool agree, and every beginning is known. For tests."""
        pool = self.pool
        assert len(self._by_key) == len(self._by_block)
        marked = {block for block in range(pool.num_blocks) if pool.is_cached(block)}
        assert marked == set(self._by_block), "the pool and the cache know different blocks"
        for block, known in self._by_block.items():
            assert known.block == block and self._by_key[known.key] is known
            assert all(child.parent is known for child in known.children)
            if isinstance(known.parent, CachedBlock):
                before = known.parent
                assert self._by_block.get(before.block) is before, (
                    f"{block} outlived {before.block}"
                )
                assert known in before.children

    def _remember(self, known: CachedBlock) -> None:
        self._by_key[known.key] = self._by_block[known.block] = known
        if isinstance(known.parent, CachedBlock):
            known.parent.children.add(known)
        self.pool.mark_cached(known.block)

    def _forget(self, block: int) -> None:
        """The pool hands ``block`` out again: nobody may find it, or what continues it."""
        evicted = self._by_block[block]
        if isinstance(evicted.parent, CachedBlock):
            evicted.parent.children.discard(evicted)
        going = [evicted]
        while going:
            known = going.pop()
            going += known.children
            del self._by_block[known.block]
            removed = self._by_key.pop(known.key)
            assert removed is known, f"blocks {known.block} and {removed.block} share a key"
            if known is not evicted:
                self.pool.unmark_cached(known.block)
