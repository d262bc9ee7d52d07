"""Prefix caches: what is found, what never is, and when a block is forgotten.

Hash and tree keep the same contract and are tested side by side; what only one has is in the
second half, and in ``test_radix_tree.py``. Random traces are in ``test_memory_properties.py``.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mie.memory.block_copies import BlockCopies
from mie.memory.block_pool import BlockPool
from mie.memory.block_table import BlockTable
from mie.memory.prefix_cache import (
    HashPrefixCache,
    HitCounter,
    NoPrefixCache,
    full_blocks,
    hash_block,
    hash_salt,
    may_be_cached,
)
from mie.memory.radix_tree import RadixTree

SIZE = 4
BOTH = pytest.mark.parametrize("cache_class", [HashPrefixCache, RadixTree])
TEXT = list(range(100, 112))  # three blocks


class Memory:
    """A pool with a cache, and texts that are computed in one step each."""

    def __init__(self, cache_class=HashPrefixCache, num_blocks: int = 12, **options) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.copies = BlockCopies(self.pool)
        self.cache = cache_class(self.pool, **options)
        self.tables: list[BlockTable] = []

    def start(self, tokens, salt: str = "") -> BlockTable:
        """A table with the known beginning and room for the rest, not yet computed."""
        table = BlockTable(self.pool, self.copies, self.cache.match(tokens, salt))
        self.tables.append(table)
        assert table.append(len(tokens) - table.num_tokens)
        return table

    def compute(self, tokens, salt: str = "") -> BlockTable:
        table = self.start(tokens, salt)
        self.cache.insert(table, tokens, len(tokens), salt)
        self.check()
        return table

    def hit(self, tokens, salt: str = "") -> int:
        """How many blocks of ``tokens`` are found; they go back at once."""
        found = self.cache.match(tokens, salt)
        self.check(found)
        for block in reversed(found):
            self.pool.decref(block)
        return len(found)

    def check(self, *more) -> None:
        self.pool.check([*(table.blocks for table in self.tables), self.copies.pinned(), *more])
        self.cache.check()


# -- what is found ------------------------------------------------------------------------------


@BOTH
def test_a_known_beginning_is_found_and_referenced(cache_class):
    memory = Memory(cache_class)
    table = memory.compute([*TEXT, 1])
    assert table.num_registered == 3
    found = memory.cache.match([*TEXT[:8], 5, 6, 7, 8, 9])
    assert found == table.blocks[:2]
    assert [memory.pool.ref_count(block) for block in table.blocks] == [2, 2, 1, 1]
    memory.check(found)


@BOTH
def test_it_is_found_after_its_table_has_gone(cache_class):
    memory = Memory(cache_class)
    table = memory.compute([*TEXT, 1])
    blocks = list(table.blocks)
    table.release()
    assert memory.pool.num_used == 0
    found = memory.cache.match([*TEXT, 1])
    assert found == blocks[:3]
    assert all(memory.pool.ref_count(block) == 1 for block in found)
    memory.check(found)


@BOTH
@pytest.mark.parametrize("length", range(14))
def test_a_token_is_always_left_to_compute(cache_class, length):
    memory = Memory(cache_class)
    memory.compute([*TEXT, 1])
    text = [*TEXT, 1][:length]
    blocks = memory.hit(text)
    assert blocks == may_be_cached(length, SIZE) == max(0, (length - 1) // SIZE)
    assert blocks * SIZE < max(length, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_the_cap_is_the_last_full_block_before_the_last_token(size):
    assert may_be_cached(0, size) == 0
    for length in range(1, 3 * size + 2):
        fits = [count for count in range(length + 1) if count * size < length]
        assert may_be_cached(length, size) == fits[-1]


@BOTH
def test_an_empty_cache_and_an_empty_text_have_nothing(cache_class):
    memory = Memory(cache_class)
    assert memory.cache.match(TEXT) == [] == memory.cache.match([])
    memory.check()


@BOTH
def test_the_same_tokens_after_another_beginning_are_another_text(cache_class):
    memory = Memory(cache_class)
    memory.compute([*TEXT, 1])
    assert memory.hit([*TEXT[4:], 1]) == 0
    assert memory.hit([9, 9, 9, 9, *TEXT[4:], 1]) == 0
    assert memory.hit([*TEXT[:4], 9, 9, 9, 9, *TEXT[8:], 1]) == 1


@BOTH
def test_a_salt_keeps_texts_apart(cache_class):
    memory = Memory(cache_class)
    one = memory.compute([*TEXT, 1], salt="one")
    assert memory.hit([*TEXT, 1]) == memory.hit([*TEXT, 1], salt="two") == 0
    two = memory.compute([*TEXT, 1], salt="two")
    assert not set(one.blocks) & set(two.blocks)
    assert memory.hit([*TEXT, 1], salt="one") == memory.hit([*TEXT, 1], salt="two") == 3


# -- what is registered -------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("num_computed", [0, 3, 4, 7, 8, 11, 12])
def test_only_full_blocks_of_computed_tokens_are_registered(cache_class, num_computed):
    memory = Memory(cache_class)
    table = memory.start([*TEXT, 1])
    memory.cache.insert(table, [*TEXT, 1], num_computed)
    memory.check()
    assert table.num_registered == num_computed // SIZE == memory.hit([*TEXT, 1])


@BOTH
@pytest.mark.parametrize(
    ("given", "computed"),
    [(7, 8), (3, 8), (0, 1), (12, 13), (15, 14), (13, 16)],
)
def test_what_was_computed_must_be_in_the_table_and_in_the_text(cache_class, given, computed):
    """Otherwise a block would be known by tokens that are not all there, or not in it."""
    memory = Memory(cache_class)
    text = [*TEXT, 1, 2, 3]
    table = memory.start([*TEXT, 1])
    message = f"{computed} tokens computed, 13 in the table, {given} given"
    with pytest.raises(AssertionError, match=message):
        memory.cache.insert(table, text[:given], computed)
    assert table.num_registered == 0 and memory.hit(text) == 0
    memory.cache.insert(table, text, 13)  # a text that goes on is none the worse
    assert table.num_registered == 3
    memory.check()


@BOTH
def test_registering_goes_on_where_it_stopped(cache_class):
    memory = Memory(cache_class)
    table = memory.start([*TEXT, 1])
    for num_computed in (2, 4, 4, 9, 13):
        memory.cache.insert(table, [*TEXT, 1], num_computed)
        memory.check()
    assert table.num_registered == 3


@BOTH
def test_whoever_computes_a_known_text_takes_the_known_blocks(cache_class):
    memory = Memory(cache_class)
    text = [*TEXT, 1]
    first, second = memory.start(text), memory.start(text)
    assert not set(first.blocks) & set(second.blocks)
    memory.cache.insert(first, text, 13)
    used = memory.pool.num_used
    memory.cache.insert(second, text, 13)
    assert second.blocks[:3] == first.blocks[:3] and second.blocks[3] != first.blocks[3]
    assert memory.pool.num_used == used - 3
    memory.check()


@BOTH
def test_a_text_that_goes_on_differently_branches(cache_class):
    memory = Memory(cache_class)
    other = [*TEXT[:4], 7, 7, 7, 7, 7]
    first, second = memory.compute([*TEXT, 1]), memory.compute(other)
    assert first.blocks[0] == second.blocks[0] and first.blocks[1] != second.blocks[1]
    assert memory.hit([*TEXT, 1]) == 3 and memory.hit(other) == 2


# -- what is forgotten --------------------------------------------------------------------------


@BOTH
def test_the_end_of_a_text_is_evicted_before_its_beginning(cache_class):
    memory = Memory(cache_class, num_blocks=5)
    memory.compute([*TEXT, 1]).release()
    for left in (3, 2, 1, 0):
        taken = memory.start([0] * SIZE * (4 - left))
        memory.check()
        taken.release()
        assert memory.hit([*TEXT, 1]) == left


@BOTH
def test_the_least_recently_used_text_is_evicted_first(cache_class):
    memory = Memory(cache_class, num_blocks=4)
    texts = [[letter] * SIZE + [0] for letter in (1, 2)]
    for text in texts:
        memory.compute(text).release()
    assert memory.hit(texts[0]) == 1  # used again
    memory.start([0] * 2 * SIZE)
    assert [memory.hit(text) for text in texts] == [1, 0]
    memory.check()


@BOTH
def test_what_is_in_use_is_never_evicted(cache_class):
    memory = Memory(cache_class, num_blocks=5)
    table = memory.compute([*TEXT, 1])
    assert memory.pool.allocate() == -1
    assert memory.hit([*TEXT, 1]) == 3
    twin = table.fork()
    memory.tables.append(twin)
    table.release()
    assert memory.pool.allocate() == -1
    memory.check()


@BOTH
def test_a_match_is_safe_from_the_allocation_for_the_rest_of_its_text(cache_class):
    memory = Memory(cache_class, num_blocks=5)
    table = memory.compute(TEXT)
    blocks = list(table.blocks)
    table.release()
    again = memory.start([*TEXT[:8], 7, 7, 7, 7, 7])
    assert again.blocks[:2] == blocks[:2] and len(set(again.blocks)) == 4
    memory.check()


@BOTH
def test_clearing_forgets_everything_that_nobody_uses(cache_class):
    memory = Memory(cache_class)
    table = memory.compute([*TEXT, 1])
    assert not memory.cache.clear()
    assert memory.hit([*TEXT, 1]) == 3
    table.release()
    assert memory.cache.clear()
    assert memory.hit([*TEXT, 1]) == 0
    assert not any(memory.pool.is_cached(block) for block in range(12))
    assert memory.cache.clear()
    memory.check()
    assert memory.compute([*TEXT, 1]).num_registered == 3


@BOTH
def test_a_block_that_a_copy_still_reads_keeps_the_cache_from_clearing(cache_class):
    memory = Memory(cache_class)
    table = memory.compute(TEXT)
    assert table.writable(11)
    table.truncate(9)
    memory.tables[0].truncate(8)
    assert not memory.cache.clear()


# -- the counter --------------------------------------------------------------------------------


@BOTH
def test_hits_are_counted_by_whoever_admits_and_not_by_asking(cache_class):
    memory = Memory(cache_class)
    memory.compute([*TEXT, 1])
    memory.hit([*TEXT, 1])
    assert memory.cache.hits == HitCounter(0, 0)


@given(counted=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), max_size=5))
def test_the_counter_adds_tokens(counted):
    counter = HitCounter()
    assert counter.rate == 0.0
    for queried, hit in counted:
        counter.add(queried, hit)
    assert counter.queried == sum(queried for queried, _ in counted)
    assert counter.hit == sum(hit for _, hit in counted)
    if counted:
        assert counter.rate == counter.hit / counter.queried


def test_without_a_cache_nothing_is_found_kept_or_counted():
    pool = BlockPool(6, SIZE)
    cache = NoPrefixCache(pool)
    with BlockTable(pool, BlockCopies(pool), cache.match(TEXT)) as table:
        assert table.append(len(TEXT)) and table.blocks == [1, 2, 3]
        cache.insert(table, TEXT, len(TEXT))
        assert table.num_registered == 0 and cache.match(TEXT, "salt") == []
        assert cache.clear()
    assert cache.hits == HitCounter() and not any(pool.is_cached(block) for block in range(6))


# -- the hash alone -----------------------------------------------------------------------------


@given(tokens=st.lists(st.integers(0, 9), max_size=30), size=st.integers(1, 5))
def test_a_text_falls_into_blocks(tokens, size):
    count = len(tokens) // size
    blocks = full_blocks(tokens, count, size)
    assert len(blocks) == count and all(len(block) == size for block in blocks)
    assert [token for block in blocks for token in block] == tokens[: count * size]


def test_a_key_depends_on_the_tokens_their_order_and_what_stands_before():
    keys = [
        hash_block(1, (1, 2)),
        hash_block(1, (2, 1)),
        hash_block(2, (1, 2)),
        hash_block(1, (1,)),
    ]
    assert len(set(keys)) == len(keys)
    assert len({hash_salt(salt) for salt in ("", "a", "b", "ab", "ba")}) == 5


def test_keys_are_the_same_in_every_process():
    code = "from mie.memory.prefix_cache import *; print(hash_block(hash_salt('a'), (1, 2)))"
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True
    )
    assert run.stdout.strip() == str(hash_block(hash_salt("a"), (1, 2))), run.stderr


def one_key(parent_key: int, tokens) -> int:
    return 1


def test_texts_whose_keys_are_equal_are_not_confused():
    memory = Memory(hash_block=one_key)
    first = memory.compute([1] * SIZE + [0])
    other = memory.compute([2] * SIZE + [0])
    assert first.num_registered == 1 and other.num_registered == 0
    assert memory.hit([2] * SIZE + [0]) == 0 and memory.hit([1] * SIZE + [0]) == 1
    assert memory.hit([1] * SIZE + [0], salt="other") == 0


def by_tokens_alone(parent_key: int, tokens) -> int:
    return hash(tokens)


def test_equal_tokens_after_different_beginnings_are_not_confused_by_equal_keys():
    memory = Memory(hash_block=by_tokens_alone)
    table = memory.compute([1] * SIZE + [3] * SIZE + [0])
    assert table.num_registered == 2
    other = memory.compute([2] * SIZE + [3] * SIZE + [0])
    assert other.num_registered == 1, "its second block has the key of a block of another text"
    assert other.blocks[1] != table.blocks[1]
    assert memory.hit([2] * SIZE + [3] * SIZE + [0]) == 1
    assert memory.hit([1] * SIZE + [3] * SIZE + [0]) == 2


def test_registering_stops_at_a_taken_key_and_goes_on_when_it_is_free():
    memory = Memory(num_blocks=5, hash_block=one_key)
    memory.compute([1] * SIZE + [0]).release()
    table = memory.compute([2] * SIZE + [0])
    assert table.num_registered == 0
    memory.start([0] * 2 * SIZE)  # evicts the first text
    memory.cache.insert(table, [2] * SIZE + [0], SIZE)
    assert table.num_registered == 1 and memory.hit([2] * SIZE + [0]) == 1


def test_forgetting_a_block_whose_key_has_become_anothers_is_an_error():
    memory = Memory(num_blocks=20)
    one, other = memory.compute([*TEXT, 1]), memory.compute([*TEXT, 1], salt="other")
    known = memory.cache._by_block
    memory.cache._by_key[known[one.blocks[2]].key] = known[other.blocks[2]]
    with pytest.raises(AssertionError, match="share a key"):
        memory.cache._forget(one.blocks[2])


def test_check_finds_a_cache_that_disagrees_with_the_pool():
    memory = Memory()
    table = memory.compute([*TEXT, 1])
    memory.pool.unmark_cached(table.blocks[2])
    with pytest.raises(AssertionError, match="know different blocks"):
        memory.cache.check()


def test_check_finds_a_block_that_outlived_its_beginning():
    memory = Memory()
    table = memory.compute([*TEXT, 1])
    first = table.blocks[0]
    known = memory.cache._by_block.pop(first)
    del memory.cache._by_key[known.key]
    memory.pool.unmark_cached(first)
    with pytest.raises(AssertionError, match=f"outlived {first}"):
        memory.cache.check()


@BOTH
@pytest.mark.parametrize("evicted", [0, 1, 2])
def test_a_block_that_is_evicted_takes_along_what_continues_it(cache_class, evicted):
    """Also on another branch; what stands before it stays."""
    memory = Memory(cache_class)
    pool = memory.pool
    one = memory.compute([*TEXT, 1])
    other = memory.compute([*TEXT[:8], 7, 7, 7, 7, 1])
    blocks, branch = list(one.blocks), other.blocks[2]
    one.release()
    other.release()
    for block in (*blocks[:evicted], *blocks[evicted + 1 : 3], branch):  # the evicted one first
        pool.incref(block)
        pool.decref(block)
    taken = []
    while blocks[evicted] not in taken:
        taken.append(pool.allocate())
    kept = {*blocks[:evicted], *([branch] if evicted == 2 else [])}
    assert {block for block in range(pool.num_blocks) if pool.is_cached(block)} == kept
    pool.check([taken])
    memory.cache.check()
