"""The fused operations against the reference, and a batch of decodes against each one alone.

Whatever no sequence owns is NaN or infinite here: free blocks, the scratch block, and every slot
behind the last token of a sequence. One that reached a result would show.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mie.ops import dispatch, fused, reference
from mie.spec.checker import check

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Relative to the largest number of a result: sums in another order, and one rounding more.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
POISONS = (float("nan"), float("inf"), float("-inf"))

dtypes = st.sampled_from(list(DTYPES.values()))
seeds = st.integers(0, 999)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    largest = max([1.0, *expected.abs().float().flatten().tolist()])
    torch.testing.assert_close(got, expected, atol=ROUNDING[got.dtype] * largest, rtol=0)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("name", ["rms_norm", "rope", "swiglu", "attention"])
def test_they_keep_every_rule_of_the_specs(name):
    check(name, getattr(fused, name)).require()


@given(rows=st.integers(0, 5), width=st.integers(1, 70), seed=seeds, dtype=dtypes)
def test_rms_norm_and_swiglu(rows, width, seed, dtype):
    x, weight = normal(rows, width, seed=seed, dtype=dtype), normal(width, seed=1, dtype=dtype)
    close(fused.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    both = normal(rows, 2 * width, seed=seed, dtype=dtype)
    before = both.clone()
    gate, up = both.chunk(2, dim=-1)  # views, as the decoder hands them over
    close(fused.swiglu(gate, up), reference.swiglu(gate, up))
    assert torch.equal(both, before)


@given(T=st.integers(1, 5), H=st.integers(1, 4), R=st.integers(1, 33), seed=seeds, dtype=dtypes)
def test_rope(T, H, R, seed, dtype):
    x = normal(T, H, 2 * R, seed=seed, dtype=dtype)
    angles = normal(T, R, seed=seed + 1) * 100
    before = x.clone()
    close(fused.rope(x, angles.cos(), angles.sin()), reference.rope(x, angles.cos(), angles.sin()))
    assert torch.equal(x, before)


@given(
    S=st.integers(1, 40),
    new=st.integers(1, 40),
    G=st.integers(1, 3),
    J=st.integers(1, 3),
    D=st.sampled_from([1, 4, 20, 64]),
    seed=seeds,
    dtype=dtypes,
)
def test_attention_of_the_last_tokens_of_any_context(S, new, G, J, D, seed, dtype):
    T = min(new, S)
    q = normal(T, G * J, D, seed=seed, dtype=dtype)
    k, v = (normal(S, G, D, seed=seed + more, dtype=dtype) for more in (1, 2))
    close(fused.attention(q, k, v, 0.3), reference.attention(q, k, v, 0.3))


# -- decodes on blocks, all together --------------------------------------------------------------


def decode_in_a_batch(lengths, B, G, J, D, seed, dtype, poison) -> None:
    """X sequences in shuffled blocks of a poisoned memory: together as each alone."""
    counts = [-(-length // B) for length in lengths]
    N = 2 + sum(counts)
    order = (torch.randperm(N - 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    kv_2NBGD = torch.full((2, N, B, G, D), poison, dtype=dtype)
    tables = [[order.pop() for _ in range(count)] for count in counts]
    for index, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        for position in range(length):
            block, slot = table[position // B], position % B
            kv_2NBGD[:, block, slot] = normal(2, G, D, seed=seed + index + 97 * position).to(dtype)
    before = kv_2NBGD.clone()
    planned = fused.PagedDecode(tables, lengths, kv_2NBGD)
    for layer in range(2):  # the plan and its room are used again in every layer
        q_XHD = normal(len(lengths), G * J, D, seed=seed + layer, dtype=dtype)
        got = planned(q_XHD, kv_2NBGD, 0.4)
        alone = [
            reference.paged_attention(q_XHD[i : i + 1], *kv_2NBGD, torch.tensor(table), length, 0.4)
            for i, (table, length) in enumerate(zip(tables, lengths, strict=True))
        ]
        close(got, torch.cat(alone))
    assert torch.equal(kv_2NBGD.nan_to_num(7.0), before.nan_to_num(7.0)), "it wrote to the memory"


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    B=st.sampled_from([1, 4, 16]),
    G=st.integers(1, 3),
    J=st.integers(1, 3),
    D=st.sampled_from([1, 4, 20, 64]),
    seed=seeds,
    dtype=dtypes,
    poison=st.sampled_from(POISONS),
)
@example([16, 16], 16, 3, 3, 64, 0, torch.bfloat16, POISONS[0])
@example([15, 16, 17], 16, 3, 3, 64, 0, torch.float32, POISONS[0])
def test_decodes_together_equal_each_alone(lengths, B, G, J, D, seed, dtype, poison):
    decode_in_a_batch(lengths, B, G, J, D, seed, dtype, poison)


@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("B", [2, 16])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_around_a_full_last_block(off, blocks, B, dtype):
    length = blocks * B + off
    for poison in POISONS:
        decode_in_a_batch([length], B, 2, 2, 8, 0, dtype, poison)
        decode_in_a_batch([length, 1, 3 * B], B, 2, 2, 8, 1, dtype, poison)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_lengths_too_different_for_one_group(dtype):
    lengths = [1, 700, 3, 690, 300, 2]
    assert len(fused.group_by_length(lengths)) > 1
    decode_in_a_batch(lengths, 16, 1, 2, 4, 0, dtype, POISONS[0])


@given(lengths=st.lists(st.integers(1, 9_999), min_size=1, max_size=40))
def test_padding_is_bounded_whatever_the_lengths(lengths):
    groups = fused.group_by_length(lengths)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        those = [lengths[index] for index in group]
        assert group == sorted(group)
        assert max(those) * len(those) - sum(those) <= fused.MOST_PADDING["cpu"]
        assert len(those) == 1 or max(those) * len(those) <= fused.MOST_GATHERED["cpu"]


def test_equal_lengths_are_one_group():
    assert fused.group_by_length([64] * 32) == [list(range(32))]


# -- who computes what ----------------------------------------------------------------------------


def test_a_plain_ops_is_the_reference():
    ops = dispatch.Ops()
    for name in ("rms_norm", "rope", "swiglu", "attention"):
        assert getattr(ops, name) is getattr(reference, name)
    assert ops.paged_decode is None
    assert dispatch.for_device("cpu", fast=False) == ops


def test_fast_where_the_reader_has_replaced_nothing():
    def mine(*args):
        raise NotImplementedError

    assert dispatch.for_device("cpu") == dispatch.Ops(
        fused.rms_norm, fused.rope, fused.swiglu, fused.attention, fused.PagedDecode
    )
    rope = dispatch.for_device("cpu", {"rope": mine})
    assert rope.rope is mine
    assert rope.attention is fused.attention and rope.paged_decode is fused.PagedDecode
    attention = dispatch.for_device("cpu", {"attention": mine})
    assert attention.attention is mine and attention.paged_decode is None
    assert attention.rms_norm is fused.rms_norm
    slow = dispatch.for_device("cpu", {"swiglu": mine}, fast=False)
    assert slow == dispatch.Ops(swiglu=mine)
    with pytest.raises(KeyError, match="softmax"):
        dispatch.for_device("cpu", {"softmax": mine})
