"""Bugs that engines of this kind have had: one test for each, under its number, and its mutant.

Invariant: every test here fails on a memory without the rule that it is about. That is tested too:
``support/memory_mutants.py`` drops one rule each, and the last tests here watch the tests fail.

The numbers are those of a collection from public trackers. Here are the rows about memory; those
about scheduling, admission and preemption (S1 to S15) are in ``test_known_bugs_scheduling.py``.
That a text is the same with and without a hit (S27) has its second half in
``test_engine_paged.py``: token by token in float32, and in bfloat16 log-probabilities within what
rounding may do.

The device is that of the specs. A slot holds the beginning of the text up to its token, because K
and V depend on all of it.
"""

from __future__ import annotations

import itertools
import re
from functools import partial

import memory_mutants as mutants
import pytest

from mie.bench.pool import CountingPool
from mie.memory.block_copies import BlockCopies
from mie.memory.block_pool import INVALID_BLOCK, SCRATCH_BLOCK, BlockPool, blocks_needed
from mie.memory.block_table import BlockTable
from mie.memory.prefix_cache import HashPrefixCache
from mie.memory.radix_tree import RadixTree
from mie.spec import device

SIZE = device.SIZE
ON_BOTH = pytest.mark.parametrize("cache_class", [HashPrefixCache, RadixTree])


class Engine(device.Engine):
    """Steps of one token stream each; admitting and writing are two things here."""

    def __init__(self, cache_class=HashPrefixCache, num_blocks: int = 12, **options) -> None:
        super().__init__(partial(cache_class, **options), num_blocks)
        self.copies = self.device.copies

    def admit(self, tokens, salt: str = "") -> BlockTable:
        table = self.device.table(self.cache.match(tokens, salt))
        assert table.num_tokens < len(tokens), "nothing is left to compute: there are no logits"
        self.cache.hits.add(len(tokens), table.num_tokens)
        self.hit = table.num_tokens
        assert table.append(len(tokens) - table.num_tokens), "out of blocks"
        return table

    def step(self, table: BlockTable, tokens, begin: int, salt: str = "") -> None:
        """Write positions ``begin`` to the end, then register."""
        text = written(tokens, salt)
        self.device.step((table, position, text[position]) for position in range(begin, len(text)))
        self.cache.insert(table, tokens, len(tokens), salt)

    def run(self, tokens, salt: str = "") -> BlockTable:
        table = self.admit(tokens, salt)
        self.step(table, tokens, self.hit, salt)
        self.reads(table, tokens, salt)
        return table

    def reads(self, table: BlockTable, tokens, salt: str = "") -> None:
        """What attention sees is the K and V of exactly these tokens."""
        assert self.device.read(table)[: len(tokens)] == written(tokens, salt)

    def is_whole(self, *tables: BlockTable) -> None:
        self.pool.check([*(table.blocks for table in tables), self.copies.pinned()])
        self.cache.check()


def written(tokens, salt: str = "") -> list[tuple]:
    """What the slots of a text hold: the beginning up to their token."""
    return [(salt, *tokens[: position + 1]) for position in range(len(tokens))]


def text(*letters: int) -> list[int]:
    """A block of each letter."""
    return [letter for letter in letters for _ in range(SIZE)]


# -- the tests ----------------------------------------------------------------------------------


@ON_BOTH
def test_s17_a_hit_leaves_a_token_to_compute(cache_class):
    """A prompt that is known to its last token was taken whole, and no step gave its logits."""
    for length in range(1, 3 * SIZE + 2):
        engine = Engine(cache_class)
        prompt = text(1, 2, 3, 4)[:length]
        engine.run(prompt)
        table = engine.admit(prompt)
        assert table.num_tokens - engine.hit == len(prompt) - (length - 1) // SIZE * SIZE


@ON_BOTH
def test_s18_equal_prompts_of_one_step_end_up_with_one_known_copy(cache_class):
    """Two equal prompts in a step: one entry overwrote the other, and a block stayed known to
    nobody or twice. And what is not written yet must not be found."""
    engine = Engine(cache_class)
    prompt = text(1, 2, 3)
    first, second = engine.admit(prompt), engine.admit(prompt)
    assert engine.hit == 0, "nothing has been written"
    engine.cache.insert(first, prompt, 0)
    assert engine.cache.match(prompt) == [], "still nothing has been written"
    for table in (first, second):
        engine.step(table, prompt, 0)
        engine.is_whole(first, second)
    assert first.blocks == second.blocks and engine.pool.num_used == 3
    first.release()
    engine.is_whole(second)
    engine.reads(engine.run([*prompt, 9]), prompt)


def test_s19_equal_keys_show_nobody_another_text():
    """Two texts with the same key: the second was answered from the first one's K and V."""
    prompts = text(1, 3, 9), text(2, 3, 9), text(3, 1, 9)
    for key in (lambda parent, tokens: 1, lambda parent, tokens: hash(tokens)):
        for first, second in itertools.permutations(prompts, 2):
            engine = Engine(hash_block=key)
            engine.run(first)
            engine.run(second)
            engine.run(first)


@ON_BOTH
def test_s19_tenants_with_different_salts_share_nothing(cache_class):
    """One tenant could find out by a faster answer what another one had asked."""
    engine = Engine(cache_class, num_blocks=20)
    prompt = text(1, 2, 3)
    tables = [engine.run(prompt, salt) for salt in ("", "one", "two")]
    assert engine.cache.hits.hit == 0
    assert len({block for table in tables for block in table.blocks}) == 9
    engine.run(prompt, "one")
    assert engine.hit == 2 * SIZE


@ON_BOTH
def test_s20_a_found_block_is_not_evicted(cache_class):
    """The free blocks that a prompt hit were handed out again for its own remaining tokens."""
    engine = Engine(cache_class, num_blocks=6)
    engine.run(text(1, 2, 3)).release()
    table = engine.run([*text(1, 2), *text(7, 8, 9)])
    assert engine.hit == 2 * SIZE and len(set(table.blocks)) == 5
    assert engine.pool.allocate() == INVALID_BLOCK, "all that is left is in use"
    engine.reads(table, [*text(1, 2), *text(7, 8, 9)])
    engine.is_whole(table)


@ON_BOTH
def test_s21_a_block_that_was_handed_out_again_is_not_found(cache_class):
    """The map kept a block after eviction, and a hit read what somebody else had written."""
    engine = Engine(cache_class, num_blocks=4)
    engine.run(text(1, 2, 3)).release()
    engine.run(text(7, 8)).release()
    engine.run(text(1, 2, 3))
    assert engine.hit == SIZE, "the first block was not needed by the other text"


def test_s22_giving_back_twice_is_caught():
    """A block that was given back twice went to two sequences."""
    pool = BlockPool(4)
    block = pool.allocate()
    pool.decref(block)
    with pytest.raises(AssertionError, match="no owner"):
        pool.decref(block)
    table = BlockTable(pool, BlockCopies(pool))
    table.append(20)
    for _ in range(2):
        table.release()
    pool.check([])


def test_s22_forks_end_in_any_order():
    """Forks shared one list, or blocks that only one of them had counted."""
    for order in itertools.permutations(range(3)):
        engine = Engine()
        tokens = [1, 2, 3, 4, 5, 6]
        first = engine.run(tokens)
        tables = [first, first.fork(), first.fork()]
        texts = [[*tokens, 10 + each] for each in range(3)]
        for table in tables:
            assert table.append(1)
        for table, words in zip(tables, texts, strict=True):
            engine.step(table, words, len(tokens))
        alive = dict(enumerate(tables))
        for each in order:
            for other in alive:
                engine.reads(tables[other], texts[other])
            engine.is_whole(*alive.values())
            alive.pop(each).release()
        engine.is_whole()
        assert engine.pool.num_free == 11


def test_s22_a_split_reads_its_source_first():
    """The shared block was given back first, and was the very block that the copy went to."""
    engine = Engine(num_blocks=4)
    tokens = text(1)
    known = engine.run(tokens)
    source = known.blocks[0]
    known.truncate(SIZE - 1)
    assert known.append(1), "nobody else has it, but the cache knows it: it has to be split"
    (copy,) = engine.copies.take()
    assert copy == (source, known.blocks[0]) and source not in engine.pool.free_blocks()
    engine.is_whole(known)


@ON_BOTH
def test_s23_ends_are_evicted_before_beginnings(cache_class):
    """Blocks came back first one first, and eviction cut the root of a text off."""
    engine = Engine(cache_class, num_blocks=6)
    engine.run(text(1, 2, 3, 4, 5)).release()
    for left in (4, 3, 2, 1):
        other = BlockTable(engine.pool, engine.copies)
        assert other.append((5 - left) * SIZE)
        other.release()
        engine.is_whole()
        found = engine.cache.match(text(1, 2, 3, 4, 5, 6))
        assert len(found) == left
        for block in reversed(found):
            engine.pool.decref(block)


def test_s24_the_free_list_takes_the_same_steps_in_any_pool():
    """Finding the block to evict meant looking at all of them: seconds in a large pool."""
    seen = set()
    for num_blocks in (10, 1_000, 100_000):
        pool = CountingPool(num_blocks)
        cached, other = pool.allocate(), pool.allocate()
        pool.mark_cached(cached)
        before = pool.steps
        pool.decref(cached)  # to the back
        pool.incref(cached)  # and out again: a hit
        pool.decref(other)
        pool.allocate()
        seen.add(pool.steps - before)
    assert len(seen) == 1, f"steps for pools of 10, 1,000 and 100,000 blocks: {seen}"


@ON_BOTH
def test_s25_lengths_around_a_full_block(cache_class):
    """With the last block exactly full, the next token fell into a block that was not there."""
    for blocks, around in itertools.product((1, 2, 3), (-1, 0, 1)):
        length = blocks * SIZE + around
        engine = Engine(cache_class, num_blocks=16)
        tokens = list(range(1, length + 3))
        table = engine.run(tokens[:length])
        twin = table.fork()
        assert len(table.blocks) == blocks + (around > 0)
        assert all(engine.pool.ref_count(block) == 2 for block in table.blocks)
        for grown in range(length, length + 2):
            assert table.append(1)
            engine.step(table, tokens[: grown + 1], grown)
            engine.reads(table, tokens[: grown + 1])
            assert len(table.blocks) == len({p // SIZE for p in range(grown + 1)})
        engine.reads(twin, tokens[:length])
        table.truncate(length)
        assert len(table.blocks) == blocks + (around > 0)
        assert engine.cache.match(tokens[:length]) == twin.blocks[: (length - 1) // SIZE]
        assert SCRATCH_BLOCK not in table.blocks


@ON_BOTH
def test_s27_a_hit_reads_what_computing_would_have_written(cache_class):
    """The answer changed when the beginning was found instead of computed."""
    prompts = [text(1, 3, 4), text(2, 3, 4), text(1, 3, 5), [*text(1, 3), 7]]
    for order in itertools.permutations(prompts):
        engine = Engine(cache_class, num_blocks=7)
        for prompt in (*order, *order):
            table = engine.run(prompt)
            engine.is_whole(table)
            table.release()
        assert engine.cache.hits.hit > 0


def test_s29_a_table_has_exactly_the_blocks_it_needs():
    """Whether ``length % size == 1`` was right had to be asked eight times; it was not for 1."""
    for size, step in itertools.product((1, 2, 3, 16), (1, 2, 5)):
        pool = BlockPool(100, size)
        table = BlockTable(pool, BlockCopies(pool))
        for total in range(step, 40, step):
            assert table.append(step)
            assert len(table.blocks) == len({position // size for position in range(total)})
            assert len(table.blocks) == blocks_needed(total, size)


# -- the tests of the tests ---------------------------------------------------------------------

BOTH = (HashPrefixCache, RadixTree)
MUTANTS = [
    (test_s17_a_hit_leaves_a_token_to_compute, mutants.without_cap, BOTH),
    (
        test_s18_equal_prompts_of_one_step_end_up_with_one_known_copy,
        mutants.registers_before_writing,
        BOTH,
    ),
    (
        test_s18_equal_prompts_of_one_step_end_up_with_one_known_copy,
        mutants.keeps_its_own_duplicate,
        BOTH,
    ),
    (test_s19_equal_keys_show_nobody_another_text, mutants.without_verification, ()),
    (
        test_s19_equal_keys_show_nobody_another_text,
        mutants.compares_tokens_but_not_what_stands_before,
        (),
    ),
    (
        test_s19_tenants_with_different_salts_share_nothing,
        mutants.without_salt,
        (HashPrefixCache,),
    ),
    (
        test_s19_tenants_with_different_salts_share_nothing,
        mutants.one_root_for_all_salts,
        (RadixTree,),
    ),
    (test_s20_a_found_block_is_not_evicted, mutants.found_without_a_reference, BOTH),
    (test_s20_a_found_block_is_not_evicted, mutants.hit_stays_in_the_free_list, BOTH),
    (test_s21_a_block_that_was_handed_out_again_is_not_found, mutants.does_not_forget, BOTH),
    (test_s22_giving_back_twice_is_caught, mutants.gives_back_without_asking, ()),
    (test_s22_giving_back_twice_is_caught, mutants.release_keeps_its_list, ()),
    (test_s22_forks_end_in_any_order, mutants.forks_without_counting, ()),
    (test_s22_forks_end_in_any_order, mutants.forks_share_one_list, ()),
    (test_s22_forks_end_in_any_order, mutants.writes_into_shared_blocks, ()),
    (test_s22_a_split_reads_its_source_first, mutants.decref_before_copy, ()),
    (test_s22_a_split_reads_its_source_first, mutants.copies_hold_nothing, ()),
    (test_s23_ends_are_evicted_before_beginnings, mutants.head_first, BOTH),
    (test_s24_the_free_list_takes_the_same_steps_in_any_pool, mutants.walks_to_the_back, ()),
    (test_s25_lengths_around_a_full_block, mutants.one_block_more, BOTH),
    (test_s25_lengths_around_a_full_block, mutants.one_block_less, BOTH),
    (test_s25_lengths_around_a_full_block, mutants.fork_resets_the_count, BOTH),
    (
        test_s27_a_hit_reads_what_computing_would_have_written,
        mutants.without_what_stands_before,
        BOTH,
    ),
    (test_s29_a_table_has_exactly_the_blocks_it_needs, mutants.by_the_rest, ()),
]
CALLS = [
    pytest.param(
        test, mutant, arguments, id="-".join([test.__name__[5:8], mutant.__name__, *names])
    )
    for test, mutant, caches in MUTANTS
    for arguments, names in [((each,), [each.__name__]) for each in caches] or [((), [])]
]


@pytest.mark.parametrize(("test", "mutant", "arguments"), CALLS)
def test_it_fails_without_its_rule(test, mutant, arguments, monkeypatch):
    test(*arguments)
    mutant(monkeypatch)
    with pytest.raises((AssertionError, LookupError, pytest.fail.Exception)):
        test(*arguments)


def test_every_row_has_a_test_and_every_test_a_mutant():
    tests = {name for name in globals() if re.match(r"test_s\d\d_", name)}
    rows = ["s17", "s18", "s19", "s20", "s21", "s22", "s23", "s24", "s25", "s27", "s29"]
    assert {name[5:8] for name in tests} == set(rows)
    assert {test.__name__ for test, _, _ in MUTANTS} == tests
    dropped = {name for name, each in vars(mutants).items() if "patch" in arguments_of(each)}
    assert {mutant.__name__ for _, mutant, _ in MUTANTS} == dropped


def arguments_of(each) -> tuple[str, ...]:
    return each.__code__.co_varnames if hasattr(each, "__code__") else ()
