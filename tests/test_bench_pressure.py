"""In every pool every request completes; what is lost is computed again or moved, never both."""

from __future__ import annotations

import pytest
from hash_seeds import outputs_of
from hypothesis import given
from hypothesis import strategies as st

from mie.bench.pressure import BLOCK_SIZE, KIND, POLICIES, pressure, shorter
from mie.bench.workloads import BYTES_PER_TOKEN, Request

REQUESTS = [Request(KIND, 100 + 40 * n, 400 + 350 * (n % 4), 4096) for n in range(10)]


@pytest.fixture(scope="module")
def result():
    return pressure(REQUESTS)


def test_every_pool_is_tried_in_four_ways(result):
    wanted = [
        (pool, preemption, policy)
        for pool in result.pools
        for preemption in ("recompute", "swap")
        for policy in POLICIES
    ]
    assert [(r.usable_blocks, r.preemption, r.victim_policy) for r in result.runs] == wanted
    assert [result.run(*way) for way in wanted] == list(result.runs)
    assert list(result.pools) == sorted(set(result.pools), reverse=True)
    assert (result.pools[0], result.pools[-1]) == (result.needed_blocks, result.longest_blocks)


def test_every_request_completes_in_every_pool(result):
    cut = [shorter(request) for request in REQUESTS]
    once = sum(request.num_tokens - 1 for request in cut)
    for run in result.runs:
        counts = run.counts
        assert counts.completed == result.num_requests == len(REQUESTS)
        assert counts.output_tokens == sum(request.answer_tokens for request in cut)
        assert counts.computed_tokens - counts.recomputed_tokens == once
        assert counts.padding_tokens == 0
        assert counts.most_blocks <= run.usable_blocks
        assert run.recomputed_share == counts.recomputed_tokens / once


def test_swap_recomputes_nothing_and_recompute_moves_nothing(result):
    assert any(run.counts.preemptions for run in result.runs)
    for run in result.runs:
        counts = run.counts
        if run.preemption == "swap":
            assert counts.recomputed_tokens == 0
            assert counts.blocks_swapped_out == counts.blocks_swapped_in
            assert (counts.blocks_swapped_out > 0) == (counts.preemptions > 0)
            moved = 2 * counts.blocks_swapped_out
            assert run.swapped_bytes == moved * BLOCK_SIZE * BYTES_PER_TOKEN
        else:
            assert counts.blocks_swapped_out == counts.blocks_swapped_in == run.swapped_bytes == 0


@given(st.integers(1, 9999), st.integers(1, 9999), st.integers(1, 50))
def test_shorter_rounds_up(prompt, answer, times):
    cut = shorter(Request("any", prompt, answer, answer), times)
    assert 0 <= cut.prompt_tokens * times - prompt < times
    assert 0 <= cut.answer_tokens * times - answer < times
    assert cut.max_tokens == cut.answer_tokens


def test_other_kinds_are_left_out(result):
    assert pressure([Request("chat", 5, 5, 5), *REQUESTS]) == result


def test_another_hash_seed_counts_the_same():
    one, other = outputs_of(
        "from mie.bench.pressure import *\n"
        "few = [Request(KIND, 100, 300 + 200 * (n % 4), 4096) for n in range(6)]\n"
        "print(pressure(few).as_dict())"
    )
    assert one == other != ""
