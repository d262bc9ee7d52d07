"""Attention of decoding sequences over blocks, and the plan that divides their contexts."""

from __future__ import annotations

import random

import kernel_data
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_data import DEVICE, DTYPES

from mie.kernels import decode_plan
from mie.kernels.decode_plan import (
    MAX_SEQUENCES,
    DecodeConfig,
    DecodePlan,
    chunks_torch,
    decode_config,
)
from mie.kernels.paged_decode import paged_decode, paged_decode_torch
from mie.ops import reference

# One tile of 32 tokens is enough to be a chunk of its own, so that short contexts are cut too.
CUT = DecodeConfig(tile=32, warps=4, stages=3, programs=4, min_chunk=32)
WHOLE = DecodeConfig(tile=32, warps=4, stages=2, programs=1, min_chunk=4096)


def make_plan(data, num_heads, max_sequences=None, config=CUT) -> DecodePlan:
    _, B, G, D = data.k_NBGD.shape
    X = max_sequences or len(data.lengths_S)
    return DecodePlan(X, num_heads, G, D, B, DEVICE, data.k_NBGD.dtype, config)


def queries(data, num_heads, seed=7):
    X, D = len(data.lengths_S), data.k_NBGD.shape[3]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(X, num_heads, D, generator=generator).to(data.k_NBGD.dtype).to(DEVICE)


def expected(q_XHD, data):
    """One sequence after another by the oracle; zeros where there is no context."""
    out_XHD = torch.zeros_like(q_XHD)
    scale = q_XHD.shape[2] ** -0.5
    for x, length in enumerate(data.lengths_S.tolist()):
        if length:
            out_XHD[x] = reference.paged_attention(
                q_XHD[x : x + 1], data.k_NBGD, data.v_NBGD, data.blocks(x), length, scale
            )
    return out_XHD


def decode(q_XHD, data, plan, rows=None, tables=None):
    plan.update(data.lengths_S)
    tables = data.tables_RM if tables is None else tables
    scale = q_XHD.shape[2] ** -0.5
    return paged_decode(q_XHD, data.k_NBGD, data.v_NBGD, tables, rows, data.lengths_S, scale, plan)


def check(data, num_heads, plan=None):
    """The result is the oracle's, and the counters are back at 0."""
    q_XHD = queries(data, num_heads)
    plan = plan or make_plan(data, num_heads)
    got = decode(q_XHD, data, plan)
    longest = int(data.lengths_S.max())
    kernel_data.assert_close(got, expected(q_XHD, data), q_XHD.dtype, longest)
    assert not plan.arrived_XG.any()
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        (2, 2, 64, 8),
        (4, 2, 128, 16),
        (3, 1, 80, 16),
        (4, 1, 96, 32),
        (5, 1, 64, 64),
        (6, 1, 128, 8),
        (14, 2, 128, 16),
        (8, 1, 96, 16),
        (16, 1, 80, 64),
    ],
)
def test_equals_the_reference(num_heads, num_kv_heads, head_dim, block_size, dtype):
    """Every group size, head size and block size; lengths around a block and over several tiles.
    Slots that nobody owns hold NaN."""
    B = block_size
    data = kernel_data.paged(
        [0, 1, B - 1, B, B + 1, 100],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=B,
        dtype=dtype,
        seed=B + num_heads,
    )
    plan = make_plan(data, num_heads)
    got = check(data, num_heads, plan)
    assert not got[0].any()
    assert len(plan.items()) > len(data.lengths_S)  # the longest has parts to merge


@pytest.mark.parametrize("length", [63, 64, 65, 129])
def test_lengths_around_a_tile_and_a_chunk(length):
    data = kernel_data.paged(
        [length], num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32, seed=length
    )
    check(data, 2)


def test_heads_before_slots_in_memory():
    data = kernel_data.paged(
        [37, 80],
        num_kv_heads=2,
        head_dim=64,
        block_size=16,
        dtype=torch.float32,
        seed=3,
        heads_outside=True,
    )
    check(data, 4)


def test_rows_name_the_lines_of_the_tables():
    data = kernel_data.paged(
        [40, 0, 75], num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32, seed=4
    )
    rows = torch.tensor([5, 1, 3], dtype=torch.int32, device=DEVICE)
    tables = torch.full((6, data.tables_RM.shape[1]), -1, dtype=torch.int32, device=DEVICE)
    tables[rows.long()] = data.tables_RM
    q_XHD = queries(data, 2)
    got = decode(q_XHD, data, make_plan(data, 2), rows, tables)
    kernel_data.assert_close(got, expected(q_XHD, data), torch.float32, 75)
    in_torch = paged_decode_torch(
        q_XHD, data.k_NBGD, data.v_NBGD, tables, rows, data.lengths_S, 64**-0.5
    )
    kernel_data.assert_close(got, in_torch, torch.float32, 75)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_parts_or_as_a_whole_is_the_same(dtype):
    data = kernel_data.paged(
        [200, 31], num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype, seed=5
    )
    q_XHD = queries(data, 4)
    cut, whole = make_plan(data, 4), make_plan(data, 4, config=WHOLE)
    parts, one = decode(q_XHD, data, cut), decode(q_XHD, data, whole)
    assert len(cut.items()) > len(whole.items()) == 2
    kernel_data.assert_close(parts, one, dtype, 200)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_parts_than_a_merge_holds_at_once(dtype):
    """16 heads of 128 leave room for 2 parts: 6 parts are merged in 3 rounds."""
    data = kernel_data.paged(
        [190], num_kv_heads=1, head_dim=128, block_size=16, dtype=dtype, seed=14
    )
    plan = make_plan(data, 16)
    check(data, 16, plan)
    assert len(plan.items()) == 6


def test_large_scores_neither_overflow_nor_lose_a_part():
    """Scores of about ±1000: the parts of a context have maxima far apart."""
    data = kernel_data.paged(
        [128], num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32, seed=6
    )
    q_XHD = queries(data, 2) * 1000
    got = decode(q_XHD, data, make_plan(data, 2))
    assert got.isfinite().all()
    # A score of 1000 is off by 1000 · eps, and its weight by as much.
    torch.testing.assert_close(got, expected(q_XHD, data), atol=1e-2, rtol=1e-2)


def test_one_plan_serves_other_lengths_and_fewer_sequences():
    made = dict(num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32)
    first = kernel_data.paged([100, 3, 0], **made, seed=8)
    second = kernel_data.paged([2, 150], **made, seed=9)
    plan = make_plan(first, 2, max_sequences=4)
    check(first, 2, plan)
    check(second, 2, plan)
    check(first, 2, plan)


def test_a_strided_query_is_read_where_it_lies():
    data = kernel_data.paged(
        [20, 50], num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32, seed=10
    )
    q_XHD = queries(data, 4)
    qkv = torch.full((2, 6 * 64), float("nan"), device=DEVICE)
    qkv[:, : 4 * 64] = q_XHD.flatten(1)
    got = decode(qkv[:, : 4 * 64].unflatten(1, (4, 64)), data, make_plan(data, 4))
    assert torch.equal(got, decode(q_XHD, data, make_plan(data, 4)))


# The plan


def planned(lengths, config, num_kv_heads=1, max_sequences=None):
    plan = DecodePlan(
        max_sequences or len(lengths), num_kv_heads, num_kv_heads, 64, 16, DEVICE, config=config
    )
    plan.update(torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
    return plan


def check_cover(lengths, items, tile):
    """Every token of every sequence in exactly one item, in order; an empty one has one item."""
    at = dict.fromkeys(range(len(lengths)), 0)
    for sequence, begin, end in items:
        assert begin == at[sequence] and begin % tile == 0
        assert begin < end or lengths[sequence] == 0
        at[sequence] = end
    assert at == dict(enumerate(lengths))
    assert [x for x, _, _ in items] == sorted(x for x, _, _ in items)
    assert {x for x, _, _ in items} == set(range(len(lengths)))
    # What the kernel reads of K and V: each token once.
    assert sum(end - begin for _, begin, end in items) == sum(lengths)


@given(
    st.lists(st.one_of(st.integers(0, 40), st.integers(0, 5000)), min_size=1, max_size=12),
    st.sampled_from([32, 64]),
    st.integers(1, 4),
    st.sampled_from([64, 128, 300]),
    st.integers(1, 3),
)
@settings(max_examples=20)
def test_items_cover_every_token_once(lengths, tile, programs, min_chunk, num_kv_heads):
    config = DecodeConfig(tile, 4, 2, programs, min_chunk)
    plan = planned(lengths, config, num_kv_heads)
    items = plan.items()
    check_cover(lengths, items, tile)
    assert len(items) <= plan.max_items(len(lengths)) <= plan.capacity
    assert items == chunks_torch(plan.planned, plan.splits, min_chunk, tile)
    for w, (_, begin, end) in enumerate(items):
        first, count = plan.items_5W[3:, w].tolist()
        assert first <= w < first + count
        assert items[first][0] == items[first + count - 1][0] == items[w][0]
        assert end - begin <= 2 * max(min_chunk, -(-sum(lengths) // plan.splits)) + tile


@given(
    st.lists(st.one_of(st.integers(0, 40), st.integers(0, 50_000)), min_size=1, max_size=1024),
    st.sampled_from([16, 32, 64, 128]),
    st.integers(1, 300),
    st.integers(128, 1000),
)
def test_no_lengths_make_more_items_than_the_grid_has(lengths, tile, splits, min_chunk):
    items = chunks_torch(torch.tensor(lengths), splits, min_chunk, tile)
    check_cover(lengths, items, tile)
    assert len(items) <= len(lengths) + splits


def test_a_plan_of_many_sequences():
    """More items than one program of the plan writes."""
    generator = random.Random(0)
    lengths = [generator.choice([0, 5, generator.randint(1, 2000)]) for _ in range(150)]
    config = DecodeConfig(tile=32, warps=4, stages=2, programs=40, min_chunk=32)
    plan = planned(lengths, config, max_sequences=200)
    items = plan.items()
    assert len(items) > 150
    assert items == chunks_torch(plan.planned, plan.splits, 32, 32)
    assert (plan.items_5W[4, len(items) : plan.max_items(150)] == 0).all()


def test_few_contexts_are_cut_and_many_are_not(monkeypatch):
    monkeypatch.setattr(decode_plan, "processors", lambda device: 4)
    config = DecodeConfig(tile=32, warps=4, stages=2, programs=2, min_chunk=64)
    assert len(planned([512], config).items()) == 8
    assert len(planned([512] * 16, config).items()) == 16


def test_config_of_each_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        config = decode_config(16, 8, 128, dtype)
        assert config.min_chunk % config.tile == 0


# What is refused


def test_bad_shapes_are_refused():
    with pytest.raises(ValueError, match="max_sequences 0"):
        DecodePlan(0, 2, 1, 64, 16, DEVICE)
    with pytest.raises(ValueError, match=f"{MAX_SEQUENCES + 1}"):
        DecodePlan(MAX_SEQUENCES + 1, 2, 1, 64, 16, DEVICE)
    with pytest.raises(ValueError, match="3 heads in groups of 2"):
        DecodePlan(1, 3, 2, 64, 16, DEVICE)
    with pytest.raises(ValueError, match="17 queries"):
        DecodePlan(1, 17, 1, 64, 16, DEVICE)
    with pytest.raises(ValueError, match="block_size 12"):
        DecodePlan(1, 2, 1, 64, 12, DEVICE)
    with pytest.raises(ValueError, match="tile 48"):
        DecodeConfig(48, 4, 2, 1, 64)
    with pytest.raises(ValueError, match="min_chunk 16"):
        DecodeConfig(32, 4, 2, 1, 16)
    with pytest.raises(ValueError, match="stages 0"):
        DecodeConfig(32, 4, 0, 1, 32)


def test_a_plan_for_something_else_is_refused():
    data = kernel_data.paged(
        [20, 50], num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32, seed=11
    )
    q_XHD = queries(data, 2)
    plan = make_plan(data, 2)
    rest = (data.k_NBGD, data.v_NBGD, data.tables_RM, None)
    with pytest.raises(ValueError, match="update"):
        paged_decode(q_XHD, *rest, data.lengths_S, 0.125, plan)
    plan.update(data.lengths_S)
    with pytest.raises(ValueError, match="other lengths"):
        paged_decode(q_XHD, *rest, data.lengths_S.clone(), 0.125, plan)
    with pytest.raises(ValueError, match="1 queries"):
        paged_decode(q_XHD[:1], *rest, data.lengths_S, 0.125, plan)
    with pytest.raises(ValueError, match=r"\(4, 1, 64, 16\)"):
        paged_decode(q_XHD.repeat(1, 2, 1), *rest, data.lengths_S, 0.125, plan)
    with pytest.raises(ValueError, match="float16"):
        paged_decode(q_XHD.half(), *rest, data.lengths_S, 0.125, plan)
    with pytest.raises(ValueError, match="strides"):
        sparse_NBGD = data.v_NBGD.repeat(2, 1, 1, 1)[::2]
        paged_decode(q_XHD, rest[0], sparse_NBGD, *rest[2:], data.lengths_S, 0.125, plan)
    with pytest.raises(ValueError, match="3 lengths"):
        plan.update(torch.zeros(3, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="int64"):
        plan.update(torch.zeros(2, dtype=torch.int64, device=DEVICE))


# On a GPU: what an interpreter, which runs programs one after another, cannot show


@pytest.mark.skipif(DEVICE != "cuda", reason="captures a CUDA graph")
def test_a_captured_graph_follows_the_lengths():
    made = dict(num_kv_heads=2, head_dim=128, block_size=16, dtype=torch.bfloat16)
    data = kernel_data.paged([3000, 900, 500, 1], **made, seed=12)
    config = DecodeConfig(tile=64, warps=4, stages=3, programs=4, min_chunk=64)
    plan = make_plan(data, 8, config=config)
    q_XHD = queries(data, 8)
    most = data.lengths_S.clone()

    def step():
        first = decode(q_XHD, data, plan)
        return first, paged_decode(  # another layer, by the same plan
            first, data.k_NBGD, data.v_NBGD, data.tables_RM, None, data.lengths_S, 0.1, plan
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = step()
    for lengths in ([3000, 900, 500, 1], [1, 0, 0, 0], [2999, 0, 17, 1], [64, 900, 500, 1]):
        data.lengths_S.copy_(torch.tensor(lengths, dtype=torch.int32))
        assert (data.lengths_S <= most).all()
        graph.replay()
        want = expected(q_XHD, data)
        kernel_data.assert_close(first, want, torch.bfloat16, 3000)
        again = paged_decode_torch(
            first, data.k_NBGD, data.v_NBGD, data.tables_RM, None, data.lengths_S, 0.1
        )
        kernel_data.assert_close(second, again, torch.bfloat16, 3000)
        assert not plan.arrived_XG.any()


@pytest.mark.skipif(DEVICE != "cuda", reason="programs run at the same time on a GPU alone")
def test_whoever_arrives_last_the_result_is_the_same():
    """Many parts, many launches: a merge that read a part too early would differ."""
    data = kernel_data.paged(
        [4096, 4000, 2000],
        num_kv_heads=4,
        head_dim=128,
        block_size=16,
        dtype=torch.bfloat16,
        seed=13,
    )
    config = DecodeConfig(tile=64, warps=4, stages=3, programs=8, min_chunk=64)
    plan = make_plan(data, 28, config=config)
    q_XHD = queries(data, 28)
    first = decode(q_XHD, data, plan)
    kernel_data.assert_close(first, expected(q_XHD, data), torch.bfloat16, 4096)
    for _ in range(300):
        plan.partial_WHD.fill_(float("nan"))
        assert torch.equal(decode(q_XHD, data, plan), first)
