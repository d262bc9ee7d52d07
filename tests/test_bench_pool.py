"""The cost of the block pool: steps are counted, the same in every pool; times are only shown."""

from __future__ import annotations

from importlib import import_module
from random import Random

import pytest
from typer.testing import CliRunner

from mie import cli
from mie.bench import pool as bench_pool
from mie.bench.pool import (
    COUNTED,
    KINDS,
    CountingPool,
    cached_cycle,
    count_steps,
    cycle,
    pool_costs,
    scatter,
    scatter_known,
)
from mie.memory.block_pool import SCRATCH_BLOCK, BlockPool

MOST_STEPS = 14


def test_no_operation_takes_more_steps_in_a_larger_pool():
    small, large = count_steps(1_000, 3_000), count_steps(100_000, 3_000)
    assert small == large
    assert list(small) == list(KINDS)
    assert all(0 < fewest == most <= MOST_STEPS for fewest, most in small.values()), small


class Walking(CountingPool):
    """Finds the block before another by walking: right, and slower the longer the list is."""

    def _unlink(self, block: int) -> None:
        before = SCRATCH_BLOCK
        while self._next[before] != block:
            before = self._next[before]
        super()._unlink(block)


def test_a_pool_that_walks_along_its_list_is_found_out(monkeypatch):
    monkeypatch.setattr(bench_pool, "CountingPool", Walking)
    small, large = count_steps(50, 40), count_steps(500, 40)
    assert small["hit"][1] > MOST_STEPS and large["hit"][1] > small["hit"][1] + 400


def test_every_list_of_the_pool_counts():
    pool = CountingPool(10)
    plain = [name for name, value in vars(pool).items() if type(value) is list and name != "lists"]
    assert plain == [] and len(pool.lists) >= 3
    before = pool.steps
    pool.ref_count(3)
    assert pool.steps == before + 1


def test_a_counting_pool_hands_out_the_same_blocks():
    def blocks(pool: BlockPool) -> list[int]:
        seen: list[int] = []

        def run(kind, operation, arguments):
            results = [operation(*each) for each in arguments]
            seen.extend(
                each[0] if each else result for each, result in zip(arguments, results, strict=True)
            )
            return results

        scatter(pool, Random(1))
        cycle(pool, 7, [3, 1, 6, 0, 5, 2, 4], run)
        scatter_known(pool, Random(2))
        cached_cycle(pool, 7, [3, 1, 6, 0, 5, 2, 4], run)
        return [*seen, *pool.free_blocks()]

    assert blocks(CountingPool(20)) == blocks(BlockPool(20))


@pytest.mark.parametrize("operations", [1, 9, 10, 25])
def test_as_many_operations_as_were_asked_for_and_a_whole_pool(operations):
    called = dict.fromkeys(KINDS, 0)
    pool = BlockPool(11)

    def run(kind, operation, arguments):
        called[kind] += len(arguments)
        return [operation(*each) for each in arguments]

    bench_pool._cycles(pool, operations, 0, run)
    assert called == dict.fromkeys(KINDS, operations)
    pool.check(owners=[])
    assert pool.num_used == 0 and all(map(pool.is_cached, pool.free_blocks()))


def test_operations_on_cached_blocks_are_what_their_names_say():
    """Evictions are told one by one, and what is forgotten is free, as when a cache is cleared."""
    told = []
    pool = BlockPool(200)
    pool.on_evict = told.append

    def run(kind, operation, arguments):
        results = []
        for each in arguments:
            if kind == "evict":
                first = next(pool.free_blocks())
                assert pool.is_cached(first)
                results.append(operation())
                assert told[-1] == results[-1] == first
                continue
            (block,) = each or (next(pool.free_blocks()),)
            before = pool.ref_count(block), pool.is_cached(block)
            results.append(operation(*each))
            after = pool.ref_count(block), pool.is_cached(block)
            assert (before, after) == {
                "allocate": ((0, False), (1, False)),
                "add an owner": ((1, False), (2, False)),
                "take an owner": ((2, False), (1, False)),
                "free to the front": ((1, False), (0, False)),
                "mark": ((1, False), (1, True)),
                "free to the back": ((1, True), (0, True)),
                "hit": ((0, True), (1, True)),
                "unmark": ((0, True), (0, False)),
            }[kind], kind
        return results

    bench_pool._cycles(pool, 100, 0, run)
    assert len(told) == 100


def test_hits_come_from_inside_the_free_list():
    """Every cached block but the last one freed has neighbours on both sides."""
    places = []

    def run(kind, operation, arguments):
        results = []
        for each in arguments:
            if kind == "hit":
                free = list(pool.free_blocks())
                places.append((free.index(each[0]), len(free)))
            results.append(operation(*each))
        return results

    pool = BlockPool(200)
    bench_pool._cycles(pool, 100, 0, run)
    inside = [place for place, length in places if 0 < place < length - 1]
    assert len(places) == 100 and len(inside) > 80


def test_costs_name_pool_kind_and_counts():
    costs = pool_costs(100, operations=250)
    assert [cost.kind for cost in costs] == list(KINDS)
    for cost in costs:
        assert cost.num_blocks == 100 and cost.operations == 250 and cost.nanoseconds > 0
        assert cost.as_dict()["most_steps"] <= MOST_STEPS


def test_the_command_shows_every_operation_on_every_pool(monkeypatch):
    monkeypatch.setattr(import_module("mie.bench.pool"), "POOL_SIZES", (10, 50))
    result = CliRunner().invoke(cli.app, ["bench", "pool", "--operations", "30"])
    assert result.exit_code == 0, result.stderr
    shown = " ".join(result.stdout.split())
    assert all(kind in shown for kind in KINDS)
    assert "10 blocks" in shown and "50 blocks" in shown and "30 of each" in shown
    assert "call, the same in all pools; 30 calls of each were counted" in shown
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_help_says_how_many_calls_are_counted():
    shown = " ".join(CliRunner().invoke(cli.app, ["bench", "pool", "--help"]).stdout.split())
    assert f"the first {COUNTED:,} at most" in shown
