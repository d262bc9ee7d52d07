"""A device for the memory specs: K and V are whatever a case says they are.

Invariant: a step makes the copies that wait and writes then, as the engine's steps do. Nothing here
knows more of a table or a cache than their public protocol; the pool and the list of copies are the
engine's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from mie.memory.block_copies import BlockCopies
from mie.memory.block_pool import BlockPool
from mie.memory.block_table import BlockTable
from mie.memory.prefix_cache import PrefixCache
from mie.spec.expect import equal, refuses

TableClass = Callable[..., BlockTable]
CacheClass = Callable[[BlockPool], PrefixCache]
Text = Sequence[int]
SIZE = 4  # slots of a block


def pool_state(pool: BlockPool) -> dict[str, object]:
    """All that a pool says about its blocks."""
    blocks = range(1, pool.num_blocks)
    return {
        "num_free": pool.num_free,
        "owners": {block: pool.ref_count(block) for block in blocks},
        "cached": [block for block in blocks if pool.is_cached(block)],
    }


def pool_refuses(pool: BlockPool, what: str, call: Callable[[int], object], block: int) -> None:
    """The call of a method of ``pool`` raises, and leaves the pool as it was."""
    before = pool_state(pool)
    refuses(what, call, block)
    equal(pool_state(pool), before, f"the pool after a refused {what}")


def taken(pool: BlockPool, count: int) -> list[int]:
    """``count`` blocks, as they are handed out."""
    return [pool.allocate() for _ in range(count)]


def cached(pool: BlockPool, count: int) -> list[int]:
    """``count`` free blocks whose content a prefix cache knows, the least recently used first."""
    blocks = taken(pool, count)
    for block in blocks:
        pool.mark_cached(block)
    for block in blocks:
        pool.decref(block)
    return blocks


class Device:
    """A pool, its copies, and what stands in every slot."""

    def __init__(self, Table: TableClass, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.copies = BlockCopies(self.pool)
        self.slots: dict[int, object] = {}
        self._table = Table

    def table(self, blocks: Iterable[int] = ()) -> BlockTable:
        return self._table(self.pool, self.copies, blocks)

    def holding(self, tokens: Sequence[object]) -> BlockTable:
        """A table with ``tokens``, written."""
        table = self.table()
        self.append(table, tokens)
        return table

    def append(self, table: BlockTable, tokens: Sequence[object]) -> None:
        begin = table.num_tokens
        equal(table.append(len(tokens)), True, f"append({len(tokens)}) with enough free blocks")
        self.step((table, begin + index, token) for index, token in enumerate(tokens))

    def write(self, table: BlockTable, position: int, token: object) -> None:
        equal(table.writable(position), True, f"writable({position}) with enough free blocks")
        self.step([(table, position, token)])

    def step(self, writes: Iterable[tuple[BlockTable, int, object]]) -> None:
        """Make the copies that wait, then write."""
        for source, target in self.copies.take():
            for offset in range(SIZE):
                self.slots[target * SIZE + offset] = self.slots.get(source * SIZE + offset)
        for table, position, token in writes:
            self.slots[table.slot(position)] = token
        self.copies.launched()

    def read(self, table: BlockTable) -> list[object]:
        return [self.slots.get(slot) for slot in table.slots(0, table.num_tokens)]

    def holds(self, table: BlockTable, tokens: Sequence[object], what: str) -> None:
        """The table's slots hold these tokens."""
        equal(table.num_tokens, len(tokens), f"number of tokens of {what}")
        for position, token in enumerate(tokens):
            slot = table.slot(position)
            equal(self.slots.get(slot), token, f"slot {slot}, position {position} of {what}")

    def state(self, *tables: BlockTable) -> dict[str, object]:
        """Whatever a call that fails has to leave as it was."""
        return {
            "num_free": self.pool.num_free,
            "cached": pool_state(self.pool)["cached"],
            "copies": len(self.copies),
            "tables": [(list(t.blocks), t.num_tokens, t.num_registered) for t in tables],
        }

    def refuses(
        self, what: str, call: Callable[[int], object], number: int, *tables: BlockTable
    ) -> None:
        """The call raises, and leaves ``tables`` as they were."""
        before = self.state(*tables)
        refuses(what, call, number)
        equal(self.state(*tables), before, f"the tables after a refused {what}")

    def owned_by(self, *tables: BlockTable, what: str) -> None:
        """Each block has exactly the owners that list it, ``tables`` and the copies that wait."""
        owners = Counter(block for table in tables for block in table.blocks)
        owners.update(self.copies.pinned())
        got = {block: self.pool.ref_count(block) for block in range(self.pool.num_blocks)}
        equal(
            {block: count for block, count in got.items() if count},
            {block: owners[block] for block in sorted(owners)},
            f"owners of each used block {what}",
        )


def forked(
    Table: TableClass, tokens: Sequence[object], num_blocks: int = 8
) -> tuple[Device, BlockTable, BlockTable]:
    """A device, a table of ``tokens``, written, and its fork."""
    device = Device(Table, num_blocks)
    table = device.holding(tokens)
    return device, table, table.fork()


def register_full(table: BlockTable) -> list[int]:
    """The full blocks of ``table``, registered under their own names and no others."""
    full = list(table.blocks)[: table.num_tokens // SIZE]
    for block in full:
        table.register(block)
    return full


class Recording(BlockPool):
    """A pool that writes down who gave up which block."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, SIZE)
        self.calls: list[tuple[str, int]] = []

    def decref(self, block: int) -> None:
        self.calls.append(("decref", block))
        super().decref(block)


class RecordingCopies(BlockCopies):
    """Copies of a recording pool, which end up in the same list of calls."""

    def add(self, source: int, target: int) -> None:
        assert isinstance(self.pool, Recording)
        self.pool.calls.append(("copy", source))
        super().add(source, target)


def recorded(Table: TableClass, num_tokens: int) -> tuple[BlockTable, list[tuple[str, int]]]:
    """A table of so many tokens, and a list that grows with each copy and each block given up."""
    pool = Recording(8)
    table = Table(pool, RecordingCopies(pool), ())
    table.append(num_tokens)
    pool.calls.clear()
    return table, pool.calls


class Engine:
    """A device and a prefix cache, and sequences one step at a time."""

    def __init__(self, Cache: CacheClass, num_blocks: int = 16) -> None:
        self.device = Device(BlockTable, num_blocks)
        self.pool = self.device.pool
        self.cache = Cache(self.pool)

    def admitted(self, text: Text, salt: str = "") -> BlockTable:
        """A table that begins with whatever is known of ``text``. That must be right."""
        found = self.cache.match(text, salt)
        table = self.device.table(found)
        self.holds(table, text, salt)
        return table

    def compute(self, table: BlockTable, text: Text, salt: str = "") -> None:
        """The tokens of ``text`` that the table doesn't hold yet."""
        begin = table.num_tokens
        written = [(salt, *text[: position + 1]) for position in range(begin, len(text))]
        self.device.append(table, written)

    def known(self, text: Text, salt: str = "") -> BlockTable:
        """A table of ``text``, computed and inserted."""
        table = self.admitted(text, salt)
        self.compute(table, text, salt)
        self.cache.insert(table, text, len(text), salt)
        return table

    def found(self, text: Text, salt: str = "") -> int:
        """How many blocks of ``text`` are known; nobody owns them for it afterwards."""
        with self.admitted([*text, -1], salt) as table:
            return len(table.blocks)

    def holds(self, table: BlockTable, text: Text, salt: str = "") -> None:
        """The table's slots hold what the computation of ``text`` writes."""
        written = [(salt, *text[: position + 1]) for position in range(table.num_tokens)]
        self.device.holds(table, written, f"{list(text)}, salt {salt!r}: what was computed there")

    def evict(self, count: int) -> None:
        """Somebody needs all free blocks that no cache knows, and ``count`` that one does."""
        free = [block for block in range(1, self.pool.num_blocks) if not self.pool.ref_count(block)]
        blank = sum(not self.pool.is_cached(block) for block in free)
        taken = [self.pool.allocate() for _ in range(blank + count)]
        for block in taken:
            for offset in range(SIZE):
                self.device.slots[block * SIZE + offset] = "overwritten"
        for block in taken:
            self.pool.decref(block)
