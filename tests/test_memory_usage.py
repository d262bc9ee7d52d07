"""What the memory is used for, against counting slot by slot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mie.memory.block_copies import BlockCopies
from mie.memory.block_pool import BlockPool
from mie.memory.block_table import BlockTable
from mie.memory.usage import MemoryUsage, memory_usage


@given(
    lengths=st.lists(st.integers(0, 9), max_size=4),
    forks=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 5)), max_size=4),
    size=st.integers(1, 4),
)
def test_the_figures_are_those_of_counting_every_slot(lengths, forks, size):
    pool = BlockPool(200, size)
    copies = BlockCopies(pool)
    tables = []
    for length in lengths:
        tables.append(BlockTable(pool, copies))
        assert tables[-1].append(length)
    for which, more, cut in forks:
        if tables:
            tables.append(tables[which % len(tables)].fork())
            tables[-1].truncate(max(0, tables[-1].num_tokens - cut))
            assert tables[-1].append(more)

    slots = {slot for table in tables for slot in table.slots(0, table.num_tokens)}
    different = {block for table in tables for block in table.blocks}
    listed = [block for table in tables for block in table.blocks]
    usage = memory_usage(pool, iter(tables))
    assert usage == MemoryUsage(size, 199, len(different), len(listed), len(slots))
    assert usage.utilization == len(different) / 199
    empty = len(different) * size - len(slots)
    assert usage.internal_fragmentation * len(different) * size == pytest.approx(empty)
    assert usage.saved_by_sharing * len(listed) == pytest.approx(len(listed) - len(different))


def test_an_empty_memory_wastes_and_saves_nothing():
    usage = memory_usage(BlockPool(5), [])
    assert usage == MemoryUsage(16, 4, 0, 0, 0)
    assert (usage.utilization, usage.internal_fragmentation, usage.saved_by_sharing) == (0, 0, 0)


def test_by_hand():
    """17 tokens in two blocks of 16, and a fork of them: 15 empty slots of 32, half is saved."""
    pool = BlockPool(9)
    table = BlockTable(pool, BlockCopies(pool))
    table.append(17)
    usage = memory_usage(pool, [table, table.fork()])
    assert usage == MemoryUsage(16, 8, 2, 4, 17)
    assert usage.utilization == 2 / 8
    assert usage.internal_fragmentation == 15 / 32
    assert usage.saved_by_sharing == 1 / 2
