"""Pool, tables, copies and both prefix caches under random traces, against memory that copies all.

After every operation: the slot of each written token holds what its whole beginning says, the pool
counts exactly the owners there are, the cache finds exactly what was registered and not evicted,
and what failed has changed nothing. At the end nothing is missing. ``support/naive_memory.py`` is
the model.

    operations, at least, counted below        short       long (MIE_PROFILE=long)
    both caches on one trace                   2,000    100,000
    hash with five keys for all texts          1,000     60,000
    no cache                                     500     20,000
    the pool against two lists                   500     20,000

A trace on both caches at once counts each operation once. Pools are small, so eviction is constant.
Each machine can be run alone: ``pytest -k BothCaches -s``.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from naive_memory import NaivePool, World

from mie.memory.block_pool import BlockPool
from mie.memory.prefix_cache import HashPrefixCache, NoPrefixCache, Tokens
from mie.memory.radix_tree import RadixTree

LONG = settings.get_current_profile_name() == "long"
OPERATIONS: Counter[type] = Counter()

WHICH = st.integers(0, 31)  # of the sequences there are, counted round
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=13)
FEW_TOKENS = st.lists(st.integers(0, 1), min_size=0, max_size=5)


def terrible_hash(parent_key: int, tokens: Tokens) -> int:
    """Five keys for all texts: different blocks collide all the time."""
    return (3 * parent_key + sum(tokens)) % 5


class Colliding(HashPrefixCache):
    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool, terrible_hash)


def some_sequence(self: Traces) -> bool:
    return bool(self.worlds[0].sequences)


def between_steps(self: Traces) -> bool:
    return self.worlds[0].after_step is None


def a_step_is_planned(self: Traces) -> bool:
    return not between_steps(self)


class Traces(RuleBasedStateMachine):
    """One trace on the worlds of all ``caches``, which must then be in the same state."""

    caches: tuple[type, ...]
    exact = True

    @initialize(num_blocks=st.sampled_from([3, 5, 9, 24]), block_size=st.integers(1, 4))
    def begin(self, num_blocks, block_size):
        self.worlds = [World(each, num_blocks, block_size, self.exact) for each in self.caches]

    def everywhere(self, operation: str, *arguments) -> None:
        """Do it in every world; they must agree about what came of it."""
        answers = [getattr(world, operation)(*arguments) for world in self.worlds]
        assert all(answer == answers[0] for answer in answers), f"{operation}: {answers}"
        OPERATIONS[type(self)] += 1

    def pick(self, which: int) -> int:
        return which % len(self.worlds[0].sequences)

    @precondition(between_steps)
    @rule(tokens=TOKENS, salt=st.sampled_from(["", "", "another tenant"]))
    def arrive(self, tokens, salt):
        self.everywhere("arrive", tokens, salt)

    @precondition(some_sequence)
    @rule(which=WHICH, tokens=FEW_TOKENS)
    def append(self, which, tokens):
        self.everywhere("append", self.pick(which), tokens)

    @precondition(some_sequence)
    @rule(which=WHICH)
    def fork(self, which):
        """Only what has been written: otherwise the copy would be made before the writing."""
        which = self.pick(which)
        if self.worlds[0].may_fork(which):
            self.everywhere("fork", which)

    @precondition(lambda self: some_sequence(self) and between_steps(self))
    @rule(which=WHICH, back=st.integers(0, 5), token=st.integers(0, 1))
    def overwrite(self, which, back, token):
        self.everywhere("overwrite", self.pick(which), back, token)

    @precondition(lambda self: some_sequence(self) and between_steps(self))
    @rule(which=WHICH, length=st.integers(0, 12))
    def truncate(self, which, length):
        self.everywhere("truncate", self.pick(which), length)

    @precondition(lambda self: some_sequence(self) and between_steps(self))
    @rule(which=WHICH)
    def release(self, which):
        self.everywhere("release", self.pick(which))

    @precondition(lambda self: some_sequence(self) and between_steps(self))
    @rule(which=WHICH)
    def insert(self, which):
        self.everywhere("insert", self.pick(which))

    @precondition(lambda self: some_sequence(self) and between_steps(self))
    @rule()
    def step_and_insert(self):
        for operation in ("plan", "launch"):
            self.everywhere(operation)
        for which in range(len(self.worlds[0].sequences)):
            self.everywhere("insert", which)

    @precondition(between_steps)
    @rule()
    def plan(self):
        self.everywhere("plan")

    @precondition(a_step_is_planned)
    @rule()
    def launch(self):
        self.everywhere("launch")

    @precondition(between_steps)
    @rule(num_blocks=st.integers(1, 8))
    def evict(self, num_blocks):
        self.everywhere("evict", num_blocks)

    @precondition(between_steps)
    @rule()
    def clear(self):
        self.everywhere("clear")

    @invariant()
    def nothing_is_wrong(self):
        for world in self.worlds:
            world.check()
            assert world.state() == self.worlds[0].state()

    def teardown(self):
        for world in self.worlds:
            if world.after_step is not None:
                world.launch()
            world.end()


class BothCaches(Traces):
    """The hash and the tree on the same trace: the same hits, the same blocks, the same order."""

    caches = (HashPrefixCache, RadixTree)


class CollidingHash(Traces):
    """A hit may be missed for a collision, but is never wrong."""

    caches = (Colliding,)
    exact = False


class Nothing(NoPrefixCache):
    def check(self) -> None:
        pass


class WithoutCache(Traces):
    """Nothing is ever known: what is left is forking and splitting."""

    caches = (Nothing,)
    exact = False


class Pool(RuleBasedStateMachine):
    """The pool alone: each answer, and the order of the free list, as two plain lists have it."""

    @initialize(num_blocks=st.integers(2, 9))
    def begin(self, num_blocks):
        self.pool, self.naive = BlockPool(num_blocks, 4), NaivePool(num_blocks)
        self.evicted: list[int] = []
        self.pool.on_evict = self.evicted.append

    def used(self) -> list[int]:
        return [block for block, owners in self.naive.owners.items() if owners]

    def to_mark(self) -> list[int]:
        return [block for block in self.used() if block not in self.naive.cached]

    def with_content(self) -> list[int]:
        return sorted({*self.used(), *self.naive.cached})

    def both(self, operation: str, blocks: list[int], which: int) -> None:
        block = blocks[which % len(blocks)]
        for pool in (self.pool, self.naive):
            getattr(pool, operation)(block)
        OPERATIONS[Pool] += 1

    @rule()
    def allocate(self):
        OPERATIONS[Pool] += 1
        assert self.pool.allocate() == self.naive.allocate()

    @precondition(with_content)
    @rule(which=WHICH)
    def incref(self, which):
        self.both("incref", self.with_content(), which)

    @precondition(used)
    @rule(which=WHICH)
    def decref(self, which):
        self.both("decref", self.used(), which)

    @precondition(to_mark)
    @rule(which=WHICH)
    def mark_cached(self, which):
        self.both("mark_cached", self.to_mark(), which)

    @precondition(lambda self: self.naive.cached)
    @rule(which=WHICH)
    def unmark_cached(self, which):
        self.both("unmark_cached", sorted(self.naive.cached), which)

    @invariant()
    def nothing_differs(self):
        pool, naive = self.pool, self.naive
        pool.check([[block] * owners for block, owners in naive.owners.items()])
        assert list(pool.free_blocks()) == naive.free
        assert pool.num_free == len(naive.free) and pool.num_used == len(self.used())
        assert {block for block in naive.owners if pool.is_cached(block)} == naive.cached
        assert self.evicted == naive.evicted

    def teardown(self):
        for block in self.used():
            for _ in range(self.naive.owners[block]):
                self.pool.decref(block)
        assert self.pool.num_free == self.pool.num_blocks - 1


@pytest.mark.parametrize(
    ("machine", "short", "long"),
    [
        (BothCaches, 2_000, 100_000),
        (CollidingHash, 1_000, 60_000),
        (WithoutCache, 500, 20_000),
        (Pool, 500, 20_000),
    ],
)
def test_no_trace_finds_a_difference(machine, short, long):
    operations = long if LONG else short
    OPERATIONS[machine] = 0
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=operations // 25,  # of 50 steps; some of them find nothing to do
            stateful_step_count=50,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"{machine.__name__}: {OPERATIONS[machine]:,} operations")
    assert OPERATIONS[machine] >= operations
