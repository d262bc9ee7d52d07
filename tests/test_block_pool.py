"""The block pool: who may have a block, in which order they go, and at what cost.

Random traces against two plain lists are in ``test_memory_properties.py``; here is one rule a test.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mie.bench.pool import CountingPool
from mie.errors import ConfigError
from mie.memory.block_pool import INVALID_BLOCK, SCRATCH_BLOCK, BlockPool, blocks_needed


def cached_block(pool: BlockPool) -> int:
    block = pool.allocate()
    pool.mark_cached(block)
    return block


# -- sizes --------------------------------------------------------------------------------------


@given(num_tokens=st.integers(0, 500), block_size=st.integers(1, 40))
def test_blocks_needed_is_what_filling_them_one_by_one_takes(num_tokens, block_size):
    blocks: list[list[int]] = []
    for token in range(num_tokens):
        if not blocks or len(blocks[-1]) == block_size:
            blocks.append([])
        blocks[-1].append(token)
    assert blocks_needed(num_tokens, block_size) == len(blocks)


@pytest.mark.parametrize("num_blocks", [1, 0, -3])
def test_a_pool_of_scratch_alone_is_refused(num_blocks):
    with pytest.raises(ConfigError, match=f"a pool of {num_blocks} blocks"):
        BlockPool(num_blocks)


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_without_a_slot_is_refused(block_size):
    with pytest.raises(ConfigError, match=f"a block of {block_size} slots"):
        BlockPool(4, block_size)


def test_the_smallest_pool_hands_out_one_block_of_one_slot():
    pool = BlockPool(2, 1)
    assert [pool.allocate(), pool.allocate()] == [1, INVALID_BLOCK]
    assert BlockPool(2).block_size == 16


# -- allocate and give back ---------------------------------------------------------------------


def test_a_new_pool_hands_out_every_block_but_scratch_once_and_in_order():
    pool = BlockPool(6)
    assert (pool.num_free, pool.num_used) == (5, 0)
    assert list(pool.free_blocks()) == [1, 2, 3, 4, 5]
    assert [pool.allocate() for _ in range(5)] == [1, 2, 3, 4, 5]
    assert (pool.num_free, pool.num_used) == (0, 5)
    assert SCRATCH_BLOCK == 0 and pool.ref_count(SCRATCH_BLOCK) == 0
    pool.check([[1, 2, 3, 4, 5]])


def test_an_empty_pool_answers_and_changes_nothing():
    pool = BlockPool(3)
    pool.allocate(), pool.allocate()
    for _ in range(2):
        assert pool.allocate() == INVALID_BLOCK
        pool.check([[1, 2]])


def test_a_block_is_free_after_its_last_owner_only():
    pool = BlockPool(3)
    block = pool.allocate()
    pool.incref(block)
    assert pool.ref_count(block) == 2
    pool.decref(block)
    assert pool.ref_count(block) == 1 and block not in pool.free_blocks()
    pool.decref(block)
    assert pool.ref_count(block) == 0 and block in pool.free_blocks()


def test_giving_back_what_nobody_owns_is_an_error():
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="block 1 has no owner"):
        pool.decref(1)
    pool.check([])


def test_giving_back_twice_is_an_error():
    pool = BlockPool(3)
    pool.decref(pool.allocate())
    with pytest.raises(AssertionError, match="block 1 has no owner"):
        pool.decref(1)
    pool.check([])


def test_a_free_block_whose_content_is_gone_gains_no_owner():
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="block 1 is free and its content is gone"):
        pool.incref(1)
    pool.check([])


@pytest.mark.parametrize("block", [INVALID_BLOCK, SCRATCH_BLOCK, 3])
@pytest.mark.parametrize("operation", ["incref", "decref", "mark_cached", "unmark_cached"])
def test_what_is_no_block_to_own_is_refused(operation, block):
    """-1 would be the last block, and block 0 would find its way into the free list."""
    pool = BlockPool(3)
    last = [pool.allocate() for _ in range(2)][-1]
    if operation == "unmark_cached":
        pool.mark_cached(last)
    with pytest.raises(AssertionError, match=f"there is no block {block} to"):
        getattr(pool, operation)(block)
    pool.check([[1, 2]])


@pytest.mark.parametrize("block", [INVALID_BLOCK, 3])
@pytest.mark.parametrize("question", ["ref_count", "is_cached"])
def test_nothing_is_said_of_a_block_that_is_not_there(question, block):
    with pytest.raises(AssertionError, match=f"there is no block {block}"):
        getattr(BlockPool(3), question)(block)
    assert not getattr(BlockPool(3), question)(SCRATCH_BLOCK), "scratch is there"


# -- cached blocks ------------------------------------------------------------------------------


def test_a_free_cached_block_is_taken_back_out_of_the_middle_of_the_list():
    pool = BlockPool(5)
    first, hit, last = (cached_block(pool) for _ in range(3))
    for block in (first, hit, last):
        pool.decref(block)
    pool.incref(hit)
    assert pool.ref_count(hit) == 1 and pool.is_cached(hit)
    assert list(pool.free_blocks()) == [4, first, last]
    pool.check([[hit]])


def test_only_a_block_in_use_can_become_known_and_only_once():
    pool = BlockPool(3)
    with pytest.raises(AssertionError, match="block 1 is free"):
        pool.mark_cached(1)
    block = cached_block(pool)
    with pytest.raises(AssertionError, match="known already"):
        pool.mark_cached(block)


def test_only_a_known_block_can_be_forgotten():
    """A free one would go to the front, before blocks that were given back after it."""
    pool = BlockPool(3)
    for block in (pool.allocate(), 2):
        with pytest.raises(AssertionError, match=f"content of block {block} is not known"):
            pool.unmark_cached(block)
    pool.check([[1]])


def test_the_cache_is_told_when_a_known_block_is_handed_out_again():
    pool = BlockPool(3)
    told = []

    def on_evict(block):
        told.append(block)
        assert pool.ref_count(block) == 1 and not pool.is_cached(block)

    pool.on_evict = on_evict
    pool.decref(cached_block(pool))
    assert pool.allocate() == 2 and told == []
    assert pool.allocate() == 1 and told == [1]
    pool.decref(1)
    assert pool.allocate() == 1 and told == [1], "it is not cached any more"


def test_a_block_in_use_that_is_forgotten_stays_where_it_is():
    pool = BlockPool(3)
    block = cached_block(pool)
    pool.unmark_cached(block)
    assert not pool.is_cached(block) and pool.ref_count(block) == 1
    pool.check([[block]])


def test_a_free_block_that_is_forgotten_goes_first():
    pool = BlockPool(5)
    blocks = [cached_block(pool) for _ in range(3)]
    for block in blocks:
        pool.decref(block)
    pool.unmark_cached(blocks[1])
    assert list(pool.free_blocks()) == [blocks[1], 4, blocks[0], blocks[2]]
    pool.check([])


# -- the order ----------------------------------------------------------------------------------


def test_blocks_without_content_worth_keeping_go_last_in_first_out():
    pool = BlockPool(5)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.decref(block)
    assert list(pool.free_blocks()) == [3, 2, 1, 4]


def test_known_blocks_go_after_all_others_and_least_recently_used_first():
    pool = BlockPool(6)
    blocks = [cached_block(pool) for _ in range(3)]
    other = pool.allocate()
    for block in (blocks[2], blocks[0], other, blocks[1]):
        pool.decref(block)
    assert list(pool.free_blocks()) == [other, 5, blocks[2], blocks[0], blocks[1]]
    pool.incref(blocks[2])  # a hit: used a moment ago
    pool.decref(blocks[2])
    assert list(pool.free_blocks()) == [other, 5, blocks[0], blocks[1], blocks[2]]
    assert [pool.allocate() for _ in range(5)] == [other, 5, blocks[0], blocks[1], blocks[2]]


# -- check finds what is broken -----------------------------------------------------------------


def break_count(pool):
    pool.num_free += 1


def break_forward(pool):
    pool._next[2] = 4


def break_backward(pool):
    pool._previous[3] = 4


def free_and_used(pool):
    pool._ref_counts[3] = 1


def lost(pool):
    pool._ref_counts[1] = 0


def half_listed(pool):
    pool._previous[1] = 2


def wrong_order(pool):
    pool._cached[2] = True


def scratch_in_use(pool):
    pool._ref_counts[SCRATCH_BLOCK] = 1


def scratch_cached(pool):
    pool._cached[SCRATCH_BLOCK] = True


@pytest.mark.parametrize(
    "damage",
    [
        break_count,
        break_forward,
        break_backward,
        free_and_used,
        lost,
        half_listed,
        wrong_order,
        scratch_in_use,
        scratch_cached,
    ],
)
def test_check_finds(damage):
    pool = BlockPool(5)
    pool.allocate()
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check()


@pytest.mark.parametrize("owners", [[], [[1]], [[1], [1], [1]], [[1, 2], [1]]])
def test_check_compares_the_counts_with_the_owners(owners):
    pool = BlockPool(4)
    pool.incref(pool.allocate())
    pool.check([[1], [1]])
    with pytest.raises(AssertionError, match=r"block \d counts \d owners and has \d"):
        pool.check(owners)


# -- the cost -----------------------------------------------------------------------------------


def steps_of_each_operation(num_blocks: int) -> dict[str, int]:
    """On a pool that is half used, in the middle of the list, with cached blocks at its back."""
    pool = CountingPool(num_blocks)
    cached = [cached_block(pool) for _ in range(num_blocks // 4)]
    plain = [pool.allocate() for _ in range(num_blocks // 4)]
    for block in cached:
        pool.decref(block)
    middle = cached[len(cached) // 2]
    operations = {
        "allocate": pool.allocate,
        "hit": lambda: pool.incref(middle),
        "incref": lambda: pool.incref(plain[0]),
        "decref, still owned": lambda: pool.decref(plain[0]),
        "decref, cached": lambda: pool.decref(middle),
        "decref, plain": lambda: pool.decref(plain[-1]),
        "mark": lambda: pool.mark_cached(plain[0]),
        "unmark, used": lambda: pool.unmark_cached(plain[0]),
        "unmark, free": lambda: pool.unmark_cached(middle),
        "ref_count": lambda: pool.ref_count(middle),
        "is_cached": lambda: pool.is_cached(middle),
    }
    counted = {}
    for name, operation in operations.items():
        before = pool.steps
        operation()
        counted[name] = pool.steps - before
    return counted


def test_no_operation_takes_more_steps_in_a_larger_pool():
    small = steps_of_each_operation(10)
    assert small == steps_of_each_operation(1_000) == steps_of_each_operation(100_000)
    assert min(small.values()) > 0 and max(small.values()) <= 20
