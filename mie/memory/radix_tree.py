"""Beginnings of texts that are already in memory, as a tree: the same answers, without hashes.

Invariant: the blocks on the way from the root to a place hold the tokens on that way, in order. A
node holds a stretch of blocks without a branch; two children of one node differ in their first
block.

    insert  A B C D     then  A B X        a letter stands for the tokens of a block

        (A B C D)             (A B)        the node is split between two blocks, never inside one
                             /     \\
                         (C D)     (X)

A path in use is locked by the reference counts of its blocks: the pool hands out only what nobody
owns. Eviction follows the pool's free list, in which a block stands before the one that it
continues (``prefix_cache`` says why, and when not). So the block that goes is the last of a leaf,
and finding the leaf takes one look-up and no walk. A middle takes along what is behind it.

Cost: comparing the tokens on the path, and one dictionary access for each node; a split moves the
blocks behind it. After SGLang's RadixAttention (Zheng et al., 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mie.memory.block_pool import BlockPool
from mie.memory.block_table import BlockTable
from mie.memory.prefix_cache import (
    HitCounter,
    Tokens,
    assert_computed,
    block_tokens,
    full_blocks,
    may_be_cached,
    unmark_all,
)


class Node:
    """A stretch of blocks with one way through. The root of a salt has none, and no parent."""

    def __init__(self, salt: str, parent: Node | None) -> None:
        self.salt = salt
        self.parent = parent
        self.tokens: list[Tokens] = []  # of each block
        self.blocks: list[int] = []
        self.children: dict[Tokens, Node] = {}  # by the tokens of their first block

    def __repr__(self) -> str:
        return f"Node({self.blocks}, {len(self.children)} children)"


Place = tuple[Node, int]  # a node, and how many of its blocks lie before the place


class RadixTree:
    """A prefix cache that keeps texts as paths. See ``mie.memory.prefix_cache.PrefixCache``."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.hits = HitCounter()
        self.roots: dict[str, Node] = {}
        self._places: dict[int, Place] = {}  # of each block: the place right after it
        pool.on_evict = self._forget

    def match(self, token_ids: Sequence[int], salt: str = "") -> list[int]:
        """See ``PrefixCache``."""
        size = self.pool.block_size
        found: list[int] = []
        place: Place = self.roots.get(salt) or Node(salt, None), 0
        for tokens in full_blocks(token_ids, may_be_cached(len(token_ids), size), size):
            further = self._follow(place, tokens)
            if further is None:
                break
            node, passed = place = further
            found.append(node.blocks[passed - 1])
        for block in found:
            self.pool.incref(block)
        return found

    def insert(
        self, table: BlockTable, token_ids: Sequence[int], num_computed: int, salt: str = ""
    ) -> None:
        """See ``PrefixCache``."""
        size = self.pool.block_size
        assert_computed(table, token_ids, num_computed)
        for index in range(table.num_registered, num_computed // size):
            before = self._root(salt) if index == 0 else self._places.get(table.blocks[index - 1])
            if before is None:
                return  # forgotten meanwhile
            tokens = block_tokens(token_ids, index, size)
            place = self._follow(before, tokens)
            node, passed = place or self._grow(before, tokens, table.blocks[index])
            table.register(node.blocks[passed - 1])

    def clear(self) -> bool:
        """See ``PrefixCache``."""
        if not unmark_all(self.pool, self._places):
            return False
        self._places.clear()
        self.roots.clear()
        return True

    def nodes(self) -> Iterator[Node]:
        """Every node that holds blocks, each before its children."""
        waiting = list(self.roots.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            if node.parent is not None:
                yield node

    def check(self) -> None:
        """Prove that the tree and the pool agree, and every place is where it says. For tests."""
        pool = self.pool
        marked = {block for block in range(pool.num_blocks) if pool.is_cached(block)}
        assert marked == set(self._places), "the pool and the tree know different blocks"
        for salt, root in self.roots.items():
            assert root.salt == salt and root.children and not root.blocks
        seen = set()
        for node in self.nodes():
            assert node.parent is not None and node.blocks
            assert len(node.tokens) == len(node.blocks)
            assert node.parent.children[node.tokens[0]] is node and node.salt == node.parent.salt
            for index, block in enumerate(node.blocks):
                assert self._places[block] == (node, index + 1)
            seen.update(node.blocks)
        assert seen == set(self._places), "a block is known that no path leads to"

    def _root(self, salt: str) -> Place:
        return self.roots.setdefault(salt, Node(salt, None)), 0

    def _follow(self, place: Place, tokens: Tokens) -> Place | None:
        """From ``place`` one block further, if the next block there holds ``tokens``."""
        node, passed = place
        if passed < len(node.blocks):
            return (node, passed + 1) if node.tokens[passed] == tokens else None
        child = node.children.get(tokens)
        return (child, 1) if child else None

    def _grow(self, place: Place, tokens: Tokens, block: int) -> Place:
        """Put ``block`` behind ``place``, where nothing continues with its tokens yet."""
        node, passed = place
        if passed < len(node.blocks):
            self._split(node, passed)
        if node.children or node.parent is None:
            node.children[tokens] = node = Node(node.salt, parent=node)
        node.tokens.append(tokens)
        node.blocks.append(block)
        self._places[block] = node, len(node.blocks)
        self.pool.mark_cached(block)
        return self._places[block]

    def _split(self, node: Node, keep: int) -> None:
        """Cut ``node`` behind its first ``keep`` blocks; the rest becomes its only child."""
        rest = Node(node.salt, parent=node)
        rest.tokens, node.tokens = node.tokens[keep:], node.tokens[:keep]
        rest.blocks, node.blocks = node.blocks[keep:], node.blocks[:keep]
        rest.children, node.children = node.children, {rest.tokens[0]: rest}
        for child in rest.children.values():
            child.parent = rest
        for passed, block in enumerate(rest.blocks, start=1):
            self._places[block] = rest, passed

    def _forget(self, block: int) -> None:
        """The pool hands ``block`` out again: the node ends before it, and what is behind it goes.

        As a rule that is nothing: ``block`` is the last one of a leaf.
        """
        node, passed = self._places.pop(block)
        for behind in self._behind(node, passed):
            del self._places[behind]
            self.pool.unmark_cached(behind)
        first = node.tokens[0]
        del node.blocks[passed - 1 :], node.tokens[passed - 1 :]
        node.children = {}
        if not node.blocks and node.parent is not None:
            del node.parent.children[first]
            if node.parent.parent is None and not node.parent.children:
                del self.roots[node.salt]

    def _behind(self, node: Node, passed: int) -> list[int]:
        """Every block behind the first ``passed`` ones of ``node``."""
        found, waiting = node.blocks[passed:], list(node.children.values())
        while waiting:
            below = waiting.pop()
            found += below.blocks
            waiting += below.children.values()
        return found
