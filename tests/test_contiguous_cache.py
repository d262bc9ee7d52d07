"""The contiguous cache: remembering must give what computing again gives."""

from __future__ import annotations

import pytest
import torch
from cache_shape import LAYERS, D, G, H, config
from hypothesis import given
from hypothesis import strategies as st

from mie.errors import ContextLengthError
from mie.execution.contiguous_cache import ContiguousCache
from mie.model.kv_cache import NoCache
from mie.ops import reference


def qkv(length: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(length, H, D, generator=generator),
        torch.randn(length, G, D, generator=generator),
        torch.randn(length, G, D, generator=generator),
    )


@given(steps=st.lists(st.integers(1, 4), min_size=1, max_size=6), spare=st.integers(0, 3))
def test_any_steps_equal_all_at_once(steps, spare):
    total = sum(steps)
    cache = ContiguousCache(config(), total + spare)
    cache.k_LSGD.fill_(float("nan"))  # what lies behind the length must never be read
    cache.v_LSGD.fill_(float("nan"))
    whole = [qkv(total, seed=layer) for layer in range(LAYERS)]
    for step in steps:
        now = slice(cache.length, cache.length + step)
        for layer, (q, k, v) in enumerate(whole):
            out = cache.attend(layer, q[now], k[now], v[now], 0.5)
            expected = NoCache().attend(layer, q[: now.stop], k[: now.stop], v[: now.stop], 0.5)
            torch.testing.assert_close(out, expected[now])
        cache.advance(step)
    assert cache.length == total


def test_a_step_that_does_not_fit_is_refused_and_changes_nothing():
    cache = ContiguousCache(config(), 3)
    q, k, v = qkv(2, seed=0)
    cache.attend(0, q, k, v, 0.5)
    cache.advance(2)
    before = cache.k_LSGD.clone(), cache.v_LSGD.clone()
    with pytest.raises(ContextLengthError, match="4 tokens in a cache with room for 3"):
        cache.attend(0, q, k, v, 0.5)
    assert torch.equal(cache.k_LSGD, before[0])
    assert torch.equal(cache.v_LSGD, before[1])
    assert cache.length == 2


def test_its_memory_is_what_the_configuration_says():
    cache = ContiguousCache(config(), 10, torch.bfloat16)
    assert cache.nbytes == config().kv_bytes_per_token(torch.bfloat16) * 10


@given(
    length=st.integers(1, 12),
    block_size=st.sampled_from([1, 2, 4, 8]),
    new=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_paged_attention_equals_contiguous_for_any_block_table(length, block_size, new, seed):
    """The gather through a block table finds each position, whatever stands in unused slots."""
    new = min(new, length)
    q, k, v = qkv(length, seed)
    used = -(-length // block_size)
    table = torch.randperm(used + 3, generator=torch.Generator().manual_seed(seed))[:used]
    k_NBGD = torch.full((used + 3, block_size, G, D), float("nan"))
    v_NBGD = torch.full((used + 3, block_size, G, D), float("nan"))
    for position in range(length):
        block, slot = table[position // block_size], position % block_size
        k_NBGD[block, slot], v_NBGD[block, slot] = k[position], v[position]
    paged = reference.paged_attention(q[-new:], k_NBGD, v_NBGD, table, length, 0.5)
    torch.testing.assert_close(paged, reference.attention(q[-new:], k, v, 0.5))
