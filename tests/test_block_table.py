"""Block tables: growing, sharing, splitting in the one right order, giving back exactly once.

Random traces against lists that copy everything are in ``test_memory_properties.py``.
"""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mie.memory.block_copies import BlockCopies, BlockCopy
from mie.memory.block_pool import BlockPool
from mie.memory.block_table import BlockTable

SIZE = 4


class Memory:
    """A pool, its copies, and every table that was made on them."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.copies = BlockCopies(self.pool)
        self.tables: list[BlockTable] = []

    def table(self, num_tokens: int = 0) -> BlockTable:
        table = BlockTable(self.pool, self.copies)
        assert table.append(num_tokens)
        self.tables.append(table)
        return table

    def registered(self, num_tokens: int) -> BlockTable:
        """A table whose full blocks are known to a prefix cache."""
        table = self.table(num_tokens)
        for block in table.blocks[: num_tokens // SIZE]:
            self.pool.mark_cached(block)
            table.register(block)
        return table

    def fork(self, table: BlockTable) -> BlockTable:
        self.tables.append(table.fork())
        return self.tables[-1]

    def check(self) -> None:
        self.pool.check([*(table.blocks for table in self.tables), self.copies.pinned()])

    def state(self) -> tuple:
        self.check()
        return (
            list(self.pool.free_blocks()),
            [self.pool.ref_count(block) for block in range(self.pool.num_blocks)],
            [(list(t.blocks), t.num_tokens, t.num_registered) for t in self.tables],
            self.copies.waiting,
        )


# -- growing ------------------------------------------------------------------------------------


@given(steps=st.lists(st.integers(0, 11), max_size=8), size=st.integers(1, 5))
def test_a_table_has_a_slot_for_each_token_and_no_block_more(steps, size):
    pool = BlockPool(100, size)
    table = BlockTable(pool, BlockCopies(pool))
    for step in steps:
        assert table.append(step)
    total = sum(steps)
    assert table.num_tokens == total
    assert len(table.blocks) == len({position // size for position in range(total)})
    slots = table.slots(0, total)
    assert slots == [table.blocks[p // size] * size + p % size for p in range(total)]
    assert slots == [table.slot(position) for position in range(total)]
    assert len(set(slots)) == total and all(slot >= size for slot in slots), "block 0 is scratch"


@given(first=st.integers(0, 9), second=st.integers(0, 9))
def test_what_an_append_takes_is_what_it_said(first, second):
    memory = Memory()
    table = memory.table(first)
    expected = table.blocks_to_append(second)
    before = memory.pool.num_free
    assert table.append(second)
    assert before - memory.pool.num_free == expected
    memory.check()


def test_an_append_that_does_not_fit_changes_nothing():
    memory = Memory(4)
    table = memory.table(SIZE)
    before = memory.state()
    assert not table.append(2 * SIZE + 1)
    assert memory.state() == before
    assert table.append(2 * SIZE)


def test_an_append_whose_split_does_not_fit_changes_nothing():
    memory = Memory(3)
    table = memory.table(2)
    memory.fork(table)
    assert table.blocks_to_append(SIZE) == 2
    before = memory.state()
    assert not table.append(SIZE)
    assert memory.state() == before
    assert table.append(2), "the split alone does fit"
    memory.check()


def test_no_token_needs_no_split():
    memory = Memory()
    table = memory.table(2)
    memory.fork(table)
    assert table.blocks_to_append(0) == 0
    before = memory.state()
    assert table.append(0)
    assert memory.state() == before


@pytest.mark.parametrize("position", [-1, 3, 4])
def test_a_position_without_a_token_is_an_error(position):
    table = Memory().table(3)
    for ask in (table.slot, table.writable):
        with pytest.raises(AssertionError, match=f"position {position} of 3"):
            ask(position)


@pytest.mark.parametrize(("begin", "end"), [(-1, 0), (-1, -1), (2, 1), (3, 4), (4, 4)])
def test_slots_of_what_is_no_stretch_of_tokens_are_an_error(begin, end):
    table = Memory().table(3)
    with pytest.raises(AssertionError, match=f"{begin} to {end} of 3"):
        table.slots(begin, end)
    assert table.slots(3, 3) == [], "nothing, at the end"


@pytest.mark.parametrize("ask", [BlockTable.append, BlockTable.blocks_to_append])
def test_a_count_below_zero_is_an_error(ask):
    """It would take tokens away and keep their block."""
    memory = Memory()
    table = memory.table(SIZE + 1)
    before = memory.state()
    with pytest.raises(AssertionError, match=r"-1 more tokens; truncate\(\)"):
        ask(table, -1)
    assert memory.state() == before


def test_a_table_prints_what_it_has():
    assert repr(Memory().table(5)) == "BlockTable(5 tokens in [1, 2])"


def test_a_table_begins_with_the_blocks_that_were_found():
    memory = Memory()
    found = list(memory.registered(2 * SIZE).blocks)
    for block in found:
        memory.pool.incref(block)
    table = BlockTable(memory.pool, memory.copies, found)
    memory.tables.append(table)
    assert (table.blocks, table.num_tokens, table.num_registered) == (found, 2 * SIZE, 2)
    assert table.append(1)
    assert found == table.blocks[:2] and len(found) == 2
    memory.check()


# -- sharing and splitting ----------------------------------------------------------------------


def test_a_fork_takes_no_block_and_has_its_own_list():
    memory = Memory()
    table = memory.registered(SIZE + 2)
    free = memory.pool.num_free
    twin = memory.fork(table)
    assert memory.pool.num_free == free and len(memory.copies) == 0
    assert twin.blocks == table.blocks and twin.blocks is not table.blocks
    assert (twin.num_tokens, twin.num_registered) == (SIZE + 2, 1)
    assert all(memory.pool.ref_count(block) == 2 for block in table.blocks)
    assert type(twin) is BlockTable
    memory.check()


def test_a_fork_is_of_the_same_class():
    class Mine(BlockTable):
        pass

    memory = Memory()
    assert type(Mine(memory.pool, memory.copies).fork()) is Mine


def test_only_the_block_of_the_first_new_token_is_split():
    memory = Memory()
    table = memory.table(SIZE + 2)
    twin = memory.fork(table)
    first, shared = table.blocks
    assert twin.blocks_to_append(3) == 2
    assert twin.append(3)
    assert twin.blocks[0] == first and shared not in twin.blocks and len(twin.blocks) == 3
    assert memory.copies.take() == [BlockCopy(shared, twin.blocks[1])]
    assert table.blocks == [first, shared]
    memory.check()


def test_after_full_blocks_nothing_is_split():
    memory = Memory()
    twin = memory.fork(memory.table(2 * SIZE))
    assert twin.append(1)
    assert len(memory.copies) == 0


def test_the_last_one_in_a_shared_block_keeps_it():
    """The waiting copy of the first to leave holds the block, but is no reader any more."""
    memory = Memory()
    table = memory.table(2)
    twin = memory.fork(table)
    shared = table.blocks[0]
    assert twin.append(1)
    assert memory.pool.ref_count(shared) == 2 and not table.is_shared(0)
    assert table.blocks_to_append(1) == 0 and table.append(1)
    assert table.blocks == [shared] and len(memory.copies) == 1


def test_the_copy_of_a_block_that_waits_for_its_own_copy_reads_the_first():
    memory = Memory()
    table = memory.table(2)
    twin = memory.fork(table)
    assert twin.writable(0)
    third = memory.fork(twin)
    assert third.is_shared(0) and third.append(1)
    assert memory.copies.take() == [
        BlockCopy(table.blocks[0], twin.blocks[0]),
        BlockCopy(table.blocks[0], third.blocks[0]),
    ]


class Recorder:
    """Passes everything on and writes down the names and arguments of what it is asked for."""

    def __init__(self, wrapped, log: list, table=None) -> None:
        self._wrapped, self._log, self.table = wrapped, log, table

    def __getattr__(self, name):
        found = getattr(self._wrapped, name)
        if name not in ("allocate", "add", "decref"):
            return found

        def recorded(*arguments):
            self._log.append((name, *arguments, list(self.table.blocks)))
            return found(*arguments)

        return recorded


def test_a_split_copies_then_gives_back_then_swaps():
    memory = Memory()
    table = memory.table(2)
    memory.fork(table)
    shared = table.blocks[0]
    log = []
    table.pool = Recorder(memory.pool, log, table)
    table.copies = Recorder(memory.copies, log, table)
    assert table.writable(1)
    own = table.blocks[0]
    assert log == [
        ("allocate", [shared]),
        ("add", shared, own, [shared]),
        ("decref", shared, [shared]),
    ]
    assert own != shared


def test_writing_into_the_middle_splits_that_block_alone():
    memory = Memory()
    table = memory.table(3 * SIZE)
    twin = memory.fork(table)
    assert twin.writable(SIZE)
    assert [a == b for a, b in zip(table.blocks, twin.blocks, strict=True)] == [True, False, True]
    before = memory.state()
    assert twin.writable(2 * SIZE - 1), "the same block again"
    assert memory.state() == before


def test_without_a_block_for_the_copy_nothing_has_changed():
    memory = Memory(2)
    table = memory.table(2)
    twin = memory.fork(table)
    before = memory.state()
    assert not twin.writable(0)
    assert memory.state() == before
    table.release()
    assert twin.writable(0) and len(memory.copies) == 0, "alone now"


def test_a_split_without_a_free_block_is_an_error_before_it_changes_anything():
    memory = Memory(2)
    table = memory.table(2)
    memory.fork(table)
    before = memory.state()
    with pytest.raises(AssertionError, match="the caller has looked"):
        table._split(0)
    assert memory.state() == before


def test_a_known_block_is_not_written_into_even_by_its_only_owner():
    memory = Memory()
    table = memory.registered(SIZE)
    known = table.blocks[0]
    assert table.is_shared(0) and table.writable(SIZE - 1)
    assert table.blocks[0] != known and memory.pool.is_cached(known)
    assert table.num_registered == 0 and not table.is_shared(0)
    assert memory.pool.ref_count(known) == 1, "the copy still has to read it"
    memory.copies.take()
    memory.copies.launched()
    assert memory.pool.ref_count(known) == 0
    memory.check()


def test_growing_behind_a_cut_in_a_known_block_splits_it():
    memory = Memory()
    table = memory.registered(2 * SIZE)
    table.truncate(SIZE + 1)
    known = table.blocks[1]
    assert table.num_registered == 2
    assert table.blocks_to_append(1) == 1 and table.append(1)
    assert table.blocks[1] != known and table.num_registered == 1
    memory.check()


def test_a_write_before_registered_blocks_is_an_error():
    table = Memory().registered(2 * SIZE)
    with pytest.raises(AssertionError, match="position 3 is followed by registered blocks"):
        table.writable(SIZE - 1)
    assert table.writable(SIZE)


# -- registering --------------------------------------------------------------------------------


def test_registering_its_own_block_changes_no_owner():
    memory = Memory()
    table = memory.table(2 * SIZE)
    blocks = list(table.blocks)
    table.register(blocks[0])
    assert (table.blocks, table.num_registered) == (blocks, 1)
    memory.check()


def test_registering_an_equal_block_gives_its_own_back():
    memory = Memory()
    known = memory.registered(SIZE).blocks[0]
    table = memory.table(2 * SIZE)
    own, rest = table.blocks
    table.register(known)
    assert (table.blocks, table.num_registered) == ([known, rest], 1)
    assert memory.pool.ref_count(known) == 2 and next(memory.pool.free_blocks()) == own
    memory.check()


@pytest.mark.parametrize("num_tokens", [0, SIZE - 1, SIZE, 2 * SIZE - 1])
def test_only_full_blocks_can_be_registered(num_tokens):
    memory = Memory()
    table = memory.registered(num_tokens)
    before = memory.state()
    full = num_tokens // SIZE
    for block in (table.blocks or [1])[-1], (table.blocks or [1])[0]:
        with pytest.raises(AssertionError, match=f"{full} of {full} full blocks are known"):
            table.register(block)
    assert memory.state() == before


def test_what_waits_for_its_copy_cannot_be_registered():
    memory = Memory()
    table = memory.table(SIZE)
    twin = memory.fork(table)
    assert twin.writable(0)
    with pytest.raises(AssertionError, match="waits for its copy: nothing is written"):
        twin.register(twin.blocks[0])
    memory.copies.take()
    memory.copies.launched()
    twin.register(twin.blocks[0])


# -- giving back --------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2)])
def test_a_cut_keeps_the_blocks_of_what_is_left(keep, blocks):
    memory = Memory()
    table = memory.registered(2 * SIZE)
    before = list(table.blocks)
    table.truncate(keep)
    assert table.num_tokens == keep and table.blocks == before[:blocks]
    assert table.num_registered == blocks
    memory.check()


@pytest.mark.parametrize("length", [-1, 4])
def test_a_cut_to_what_is_not_there_is_an_error(length):
    memory = Memory()
    table = memory.table(3)
    with pytest.raises(AssertionError, match=f"{length} of 3 tokens"):
        table.truncate(length)
    memory.check()


def test_the_tail_goes_back_first_so_that_the_beginning_stays_longest():
    memory = Memory()
    table = memory.registered(3 * SIZE)
    blocks = list(table.blocks)
    table.release()
    assert list(memory.pool.free_blocks())[-3:] == blocks[::-1]


def test_a_second_release_finds_nothing():
    memory = Memory()
    table = memory.table(SIZE + 1)
    other = memory.table(1)
    for _ in range(2):
        table.release()
        assert table.blocks == [] and table.num_tokens == table.num_registered == 0
        memory.check()
    assert other.blocks and memory.pool.num_used == 1
    assert table.append(1), "an empty table can grow again"


def test_leaving_the_context_gives_everything_back_also_after_an_error():
    memory = Memory()
    with memory.table(SIZE + 1) as table:
        assert memory.pool.num_used == 2
    assert memory.pool.num_used == 0 and table.blocks == []
    with pytest.raises(ValueError, match="from inside"), memory.table(5):
        raise ValueError("from inside")
    assert memory.pool.num_used == 0


def test_a_copy_without_a_reader_is_not_made():
    memory = Memory()
    table = memory.table(2)
    twin = memory.fork(table)
    assert twin.append(1)
    third = memory.fork(twin)
    twin.release()
    assert len(memory.copies) == 1, "the third table reads it"
    third.release()
    assert len(memory.copies) == 0 and memory.pool.num_used == 1
    memory.check()


def test_the_copy_is_kept_when_its_source_goes():
    memory = Memory()
    table = memory.table(2)
    twin = memory.fork(table)
    source = table.blocks[0]
    assert twin.append(1)
    table.release()
    assert memory.pool.ref_count(source) == 1 and source not in memory.pool.free_blocks()
    assert memory.copies.take() == [BlockCopy(source, twin.blocks[0])]
    memory.copies.launched()
    assert source in memory.pool.free_blocks()


@pytest.mark.parametrize("give_back", [BlockTable.release, lambda table: table.truncate(1)])
def test_nothing_goes_back_between_taking_copies_and_launching_the_step(give_back):
    """The target of a copy that is being made would be free while the step writes into it."""
    memory = Memory()
    table = memory.table(2)
    twin = memory.fork(table)
    assert twin.append(1)
    memory.copies.take()
    before = memory.state()
    for each in (table, twin):
        with pytest.raises(AssertionError, match="not launched yet"):
            give_back(each)
    assert memory.state() == before
    memory.copies.launched()
    for each in (table, twin):
        give_back(each)
    memory.check()


def test_a_step_without_copies_keeps_nobody_from_giving_back():
    memory = Memory()
    table = memory.table(2)
    assert memory.copies.take() == []
    table.release()
    memory.check()


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
def test_copying_a_table_as_an_object_is_refused(way):
    with pytest.raises(TypeError, match=r"fork\(\) shares"):
        way(Memory().table(1))
