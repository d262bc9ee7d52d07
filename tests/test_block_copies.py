"""Copies that wait for a step: all of them can be made at once, and no block goes before its copy.

They are driven together with tables in ``test_memory_properties.py``.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mie.memory.block_copies import BlockCopies, BlockCopy
from mie.memory.block_pool import BlockPool


def some_copies(num_blocks: int = 8) -> tuple[BlockPool, BlockCopies, list[int]]:
    """A pool with all blocks in use, its copies, and the blocks."""
    pool = BlockPool(num_blocks)
    return pool, BlockCopies(pool), [pool.allocate() for _ in range(num_blocks - 1)]


def test_without_a_copy_there_is_nothing_to_take():
    pool, copies, _ = some_copies()
    assert len(copies) == 0 and copies.take() == [] and list(copies.pinned()) == []
    copies.launched()
    assert copies.take() == []
    assert pool.num_free == 0


def test_a_copy_waits_is_taken_once_and_holds_both_blocks_until_it_is_launched():
    pool, copies, (source, target, *_) = some_copies()
    copies.add(source, target)
    pool.decref(source)  # the table that split
    pool.decref(target)
    for waiting in (1, 0):
        assert len(copies) == waiting
        assert sorted(copies.pinned()) == [source, target]
        assert copies.pins(source) == copies.pins(target) == 1
        assert pool.ref_count(source) == pool.ref_count(target) == 1
        if waiting:
            assert copies.take() == [BlockCopy(source, target)] == [(source, target)]
    copies.launched()
    assert list(copies.pinned()) == [] and copies.pins(source) == 0
    assert pool.num_free == 2
    copies.launched()  # nothing is given back twice
    assert pool.num_free == 2


def test_a_source_is_pinned_once_for_each_of_its_copies():
    pool, copies, (source, one, two, *_) = some_copies()
    copies.add(source, one)
    copies.add(source, two)
    assert copies.pins(source) == 2 and pool.ref_count(source) == 3
    copies.take()
    copies.launched()
    assert pool.ref_count(source) == 1


def test_the_copy_of_a_copy_reads_the_first_source():
    _, copies, (source, one, two, *_) = some_copies()
    copies.add(source, one)
    copies.add(one, two)
    assert copies.pins(one) == 1 and copies.pins(source) == 2
    assert copies.take() == [BlockCopy(source, one), BlockCopy(source, two)]


def test_a_copy_of_what_has_been_taken_reads_the_target():
    """The step before has made it by then."""
    _, copies, (source, one, two, *_) = some_copies()
    copies.add(source, one)
    copies.take()
    copies.add(one, two)
    copies.launched()
    assert copies.pins(one) == 1
    assert copies.take() == [BlockCopy(one, two)]


def test_what_is_asked_for_between_taking_and_launching_waits_for_the_next_step():
    pool, copies, (source, one, two, *_) = some_copies()
    copies.add(source, one)
    taken = copies.take()
    copies.add(source, two)
    assert taken == [BlockCopy(source, one)]
    copies.launched()
    assert len(copies) == 1 and sorted(copies.pinned()) == [source, two]
    assert pool.ref_count(one) == 1


def test_what_waits_and_what_is_being_launched_can_be_seen():
    _, copies, (source, one, two, *_) = some_copies()
    assert copies.waiting == copies.launching == [] and not copies.is_launching
    copies.add(source, one)
    assert not copies.is_launching
    assert (copies.waiting, copies.launching) == ([BlockCopy(source, one)], [])
    copies.waiting.clear()  # a list of one's own
    copies.take().clear()
    copies.launching.clear()
    assert copies.is_launching
    copies.add(source, two)
    assert copies.waiting == [BlockCopy(source, two)]
    assert copies.launching == [BlockCopy(source, one)]
    copies.launched()
    assert (copies.waiting, copies.launching) == ([BlockCopy(source, two)], [])
    assert not copies.is_launching


def test_taking_twice_without_launching_is_an_error():
    _, copies, (source, target, *_) = some_copies()
    copies.add(source, target)
    copies.take()
    with pytest.raises(AssertionError, match="never launched"):
        copies.take()


def test_a_cancelled_copy_holds_nothing():
    pool, copies, (source, target, *_) = some_copies()
    copies.add(source, target)
    copies.cancel(target)
    assert len(copies) == 0 and list(copies.pinned()) == []
    assert pool.ref_count(source) == pool.ref_count(target) == 1
    copies.cancel(target)
    assert pool.ref_count(source) == 1
    assert copies.take() == []


def test_cancelling_goes_by_the_target_alone_and_not_for_what_was_taken():
    _, copies, (source, one, two, *_) = some_copies()
    copies.add(source, one)
    copies.cancel(source)
    copies.cancel(two)
    assert len(copies) == 1
    copies.take()
    copies.cancel(one)
    assert copies.pins(one) == 1


@given(
    asked=st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=12),
    contents=st.permutations(range(14)),
)
def test_all_copies_at_once_in_any_order_are_what_one_after_the_other_would_be(asked, contents):
    """Each new copy reads any block filled so far, the target of a waiting copy as well."""
    pool, copies, blocks = some_copies(15)
    expected = dict(zip(blocks, contents, strict=True))
    device = dict(expected)
    filled = blocks[:2]
    for which, cancel in asked:
        source, target = filled[which % len(filled)], blocks[len(filled)]
        copies.add(source, target)
        if cancel:
            copies.cancel(target)
            blocks.remove(target)
            blocks.append(target)
        else:
            expected[target] = expected[source]
            filled.append(target)
        pool.check([blocks, copies.pinned()])
    taken = copies.take()
    sources = {copy.source for copy in taken}
    targets = [copy.target for copy in taken]
    assert len(set(targets)) == len(targets) and not sources & set(targets)
    for copy in reversed(taken):
        device[copy.target] = device[copy.source]
    assert device == expected
    copies.launched()
    pool.check([blocks])
