"""Memory that copies everything: what the tests of ``mie.memory`` are compared with.

Invariant: a sequence is its list of tokens and nothing else. The K and V of token p depend on all
tokens up to p, so the slot of token p must hold exactly ``tuple(tokens[: p + 1])``. ``World`` keeps
real pool, tables, copies and prefix cache beside such lists, plays the device as a dictionary from
block to slot contents, and compares after every operation. It knows who shares what by looking at
the lists, never at a count.

    plan      the copies are taken; the writes of the step are written down
    launch    the device makes the copies, then the writes; only then have tokens been written
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mie.memory.block_copies import BlockCopies, BlockCopy
from mie.memory.block_pool import SCRATCH_BLOCK, BlockPool
from mie.memory.block_table import BlockTable
from mie.spec.traces import NaivePool as ListPool

Text = tuple[int, ...]


class NaivePool(ListPool):
    """The list of free blocks that the spec compares with, for a pool that hands out 1, 2, 3 …"""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(list(range(1, num_blocks)))


@dataclass(eq=False)
class Sequence:
    """``tokens`` is the whole truth; the first ``num_computed`` are written by a planned step."""

    table: BlockTable
    tokens: list[int]
    num_computed: int
    salt: str

    def until(self, position: int) -> Text:
        """What the slot of the token at ``position`` must hold."""
        return tuple(self.tokens[: position + 1])


@dataclass
class World:
    """``cache_class`` on a pool of its own. ``exact``: it finds whatever is there to be found."""

    cache_class: type
    num_blocks: int
    block_size: int
    exact: bool = True
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, self.block_size)
        self.copies = BlockCopies(self.pool)
        self.cache = self.cache_class(self.pool)
        self.device: dict[int, dict[int, Text]] = {block: {} for block in range(self.num_blocks)}
        self.known: dict[int, tuple[str, Text]] = {}  # registered block -> the text up to its end
        self.after_step: dict[int, dict[int, Text]] | None = None  # the device, between the two
        self.taken: list[BlockCopy] = []  # by the step that is planned
        self._cache_forgets, self.pool.on_evict = self.pool.on_evict, self._evicted

    def _evicted(self, block: int) -> None:
        assert not self._owners_of(block), f"block {block} was evicted while in use"
        salt, text = self.known[block]
        self.known = {
            other: (its_salt, its_text)
            for other, (its_salt, its_text) in self.known.items()
            if its_salt != salt or its_text[: len(text)] != text  # what continues it goes too
        }
        self._cache_forgets(block)

    # -- what everybody sees by looking at the lists -------------------------------------------

    def _owners_of(self, block: int) -> list[Sequence]:
        return [each for each in self.sequences if block in each.table.blocks]

    def _shared(self, block: int) -> bool:
        return block in self.known or len(self._owners_of(block)) > 1

    def _prefix(self, tokens: list[int], index: int) -> Text:
        return tuple(tokens[: (index + 1) * self.block_size])

    def _waiting(self) -> dict[int, int]:
        return {copy.target: copy.source for copy in self.copies.waiting}

    def _held(self, block: int, position: int) -> Text | None:
        """What the slot holds after the step that is planned and the copies that wait."""
        block = self._waiting().get(block, block)
        return (self.after_step or self.device)[block].get(position % self.block_size)

    def state(self) -> tuple:
        """Everything that an operation without success must leave as it was."""
        pool = self.pool
        return (
            [(pool.ref_count(block), pool.is_cached(block)) for block in range(pool.num_blocks)],
            list(pool.free_blocks()),
            [
                (list(each.table.blocks), each.table.num_tokens, each.table.num_registered)
                for each in self.sequences
            ],
            self._waiting(),
            sorted(self.copies.pinned()),
        )

    def _only_if(self, done: bool, possible: bool, before: tuple) -> bool:
        assert done == possible, f"said {done} where {possible} is true"
        assert done or self.state() == before, "an operation failed and changed something"
        return done

    # -- operations ------------------------------------------------------------------------------

    def arrive(self, tokens: list[int], salt: str) -> int:
        """A new text: the known beginning and blocks for the rest, or nothing. Tokens hit."""
        expected: list[int] = []
        for index in range((len(tokens) - 1) // self.block_size):
            text = salt, self._prefix(tokens, index)
            block = next((block for block, known in self.known.items() if known == text), None)
            if block is None:
                break
            expected.append(block)
        found = self.cache.match(tokens, salt)
        assert found == (expected if self.exact else expected[: len(found)])
        table = BlockTable(self.pool, self.copies, found)
        hit = table.num_tokens
        self.sequences.append(Sequence(table, list(tokens[:hit]), hit, salt))
        self._check_contents(self.sequences[-1])
        if not self.append(-1, tokens[hit:]):
            self.sequences.pop().table.release()
        return hit

    def append(self, which: int, tokens: list[int]) -> bool:
        each = self.sequences[which]
        table, size = each.table, self.block_size
        before = self.state()
        length = len(each.tokens)
        touched = {position // size for position in range(length, length + len(tokens))}
        needed = sum(
            index >= len(table.blocks) or self._shared(table.blocks[index]) for index in touched
        )
        assert table.blocks_to_append(len(tokens)) == needed
        done = table.append(len(tokens))
        if done:
            each.tokens += tokens
            assert not any(self._shared(table.blocks[index]) for index in touched)
        return self._only_if(done, needed <= len(before[1]), before)

    def may_fork(self, which: int) -> bool:
        return self.sequences[which].num_computed == len(self.sequences[which].tokens)

    def fork(self, which: int) -> None:
        each = self.sequences[which]
        free = self.pool.num_free
        twin = Sequence(each.table.fork(), list(each.tokens), each.num_computed, each.salt)
        assert twin.table.blocks == each.table.blocks and self.pool.num_free == free
        self.sequences.append(twin)

    def overwrite(self, which: int, back: int, token: int) -> bool:
        """Other tokens from ``back`` before the end on: each block concerned is made its own."""
        each = self.sequences[which]
        table, size = each.table, self.block_size
        first = max(len(each.tokens) - 1 - back, (table.num_registered - 1) * size, 0)
        for index in range(first // size, len(table.blocks)):
            before = self.state()
            possible = not self._shared(table.blocks[index]) or bool(before[1])
            assert table.is_shared(index) == self._shared(table.blocks[index])
            if not self._only_if(table.writable(index * size), possible, before):
                return False
            assert not self._shared(table.blocks[index])
        each.tokens[first:] = [token, *each.tokens[first + 1 :]] if each.tokens else []
        each.num_computed = min(each.num_computed, first)
        return True

    def truncate(self, which: int, length: int) -> None:
        each = self.sequences[which]
        length = min(length, len(each.tokens))
        each.table.truncate(length)
        del each.tokens[length:]
        each.num_computed = min(each.num_computed, length)

    def release(self, which: int) -> None:
        table = self.sequences.pop(which).table
        table.release()
        table.release()
        assert not table.blocks and table.num_tokens == 0

    def insert(self, which: int) -> None:
        """Register what has been written: what the device holds now, not what it will hold."""
        each = self.sequences[which]
        table = each.table
        written = 0
        for position in range(each.num_computed):
            slots = self.device[table.blocks[position // self.block_size]]
            if slots.get(position % self.block_size) != each.until(position):
                break
            written = position + 1
        before, first = list(table.blocks), table.num_registered
        self.cache.insert(table, each.tokens, written, each.salt)
        if self.exact and (first == 0 or before[first - 1] in self.known):
            assert table.num_registered >= written // self.block_size
        full = table.num_registered
        for index in range(first, full):
            text = each.salt, self._prefix(each.tokens, index)
            known = next((block for block, other in self.known.items() if other == text), None)
            assert table.blocks[index] == (before[index] if known is None else known)
            assert self.known.setdefault(table.blocks[index], text) == text
        assert table.blocks[full:] == before[full:]

    def plan(self) -> None:
        waiting = self._waiting()
        self.taken = taken = self.copies.take()
        assert {copy.target: copy.source for copy in taken} == waiting and not len(self.copies)
        after = dict(self.device)
        for copy in taken:
            after[copy.target] = self.device[copy.source]
        for each in self.sequences:
            for position in range(each.num_computed, len(each.tokens)):
                block = each.table.blocks[position // self.block_size]
                written = {position % self.block_size: each.until(position)}
                after[block] = {**after[block], **written}
            each.num_computed = len(each.tokens)
        self.after_step = after

    def launch(self) -> None:
        self.device, self.after_step, self.taken = self.after_step, None, []
        self.copies.launched()

    def evict(self, num_blocks: int) -> None:
        """Somebody uses ``num_blocks`` blocks for a moment."""
        table = BlockTable(self.pool, self.copies)
        if table.append(min(num_blocks, self.pool.num_free) * self.block_size):
            for block in table.blocks:
                self.device[block] = {}
        table.release()

    def clear(self) -> None:
        before = self.state()
        pinned = set(self.copies.pinned())
        in_use = any(block in pinned or self._owners_of(block) for block in self.known)
        if self._only_if(self.cache.clear(), not in_use, before):
            self.known = {}

    def end(self) -> None:
        """Give everything back: nothing may be missing."""
        while self.sequences:
            self.release(-1)
        self.plan()
        self.launch()
        self.check()
        assert self.pool.num_free == self.pool.num_blocks - 1, "blocks have leaked"

    # -- the comparison --------------------------------------------------------------------------

    def check(self) -> None:
        pool = self.pool
        tables = [each.table for each in self.sequences]
        pool.check([*(table.blocks for table in tables), self.copies.pinned()])
        self.cache.check()
        assert {block for block in range(self.num_blocks) if pool.is_cached(block)} == set(
            self.known
        )
        waiting = self._waiting()
        listed = {block for table in tables for block in table.blocks}
        assert SCRATCH_BLOCK not in listed
        assert not set(waiting) & set(waiting.values()), "a copy reads what another one writes"
        assert set(waiting) <= listed, "a copy is made for nobody"
        named = [block for pair in (*waiting.items(), *self.taken) for block in pair]
        assert sorted(self.copies.pinned()) == sorted(named)
        for each in self.sequences:
            self._check_contents(each)

    def _check_contents(self, each: Sequence) -> None:
        table = each.table
        assert table.num_tokens == len(each.tokens)
        assert all(block in self.known for block in table.blocks[: table.num_registered])
        assert len(table.blocks) == len({p // self.block_size for p in range(table.num_tokens)})
        for position in range(each.num_computed):
            block = table.blocks[position // self.block_size]
            assert table.slot(position) == block * self.block_size + position % self.block_size
            assert self._held(block, position) == each.until(position), (
                f"position {position} of {each.tokens} is not what was written there"
            )
