"""The kernel for chunks and decodes against the reference, one sequence after the other."""

from __future__ import annotations

import random

import kernel_data
import pytest
import torch
from kernel_data import DEVICE, DTYPES

from mie.kernels.paged_prefill import (
    PrefillConfig,
    paged_prefill,
    paged_prefill_torch,
    prefill_config,
)
from mie.ops import reference


class Batch:
    """Sequences of ``lengths`` tokens, of which the last ``new`` are queries, in random blocks.

    Row ``rows_S[s]`` of the tables is that of sequence ``s``; one row of the tables is of nobody.
    """

    def __init__(self, new, lengths, heads=(4, 2, 64), block_size=16, dtype=torch.float32, **more):
        self.num_heads, self.num_kv_heads, self.head_dim = heads
        self.new, self.lengths, self.dtype = new, lengths, dtype
        seed, padding = more.pop("seed", 0), more.pop("padding", 0)
        self.data = kernel_data.paged(
            lengths,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
            seed=seed,
            **more,
        )
        generator = torch.Generator().manual_seed(seed)
        shape = sum(new) + padding, self.num_heads, self.head_dim
        self.q_THD = torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
        self.q_THD[sum(new) :] = float("nan")
        rows = torch.randperm(len(new) + 1, generator=generator)[: len(new)].to(DEVICE)
        own = self.data.tables_RM
        self.tables_RM = torch.zeros(len(new) + 1, own.shape[1], dtype=torch.int32, device=DEVICE)
        self.tables_RM[rows] = own
        self.rows_S = rows.int()
        starts = [sum(new[:s]) for s in range(len(new) + 1)]
        self.starts_S1 = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        self.scale = self.head_dim**-0.5

    def arguments(self):
        data = self.data
        where = self.tables_RM, self.rows_S, self.starts_S1, data.lengths_S
        return self.q_THD, data.k_NBGD, data.v_NBGD, *where, self.scale

    def run(self, config=None):
        """Every row of the output must be written, so it starts as NaN."""
        out_THD = torch.full_like(self.q_THD, float("nan"))
        most = max(self.new)
        assert paged_prefill(*self.arguments(), most, config=config, out_THD=out_THD) is out_THD
        return out_THD

    def expected(self):
        out_THD = torch.zeros_like(self.q_THD)
        start = 0
        for sequence, (new, length) in enumerate(zip(self.new, self.lengths, strict=True)):
            q_THD = self.q_THD[start : start + new]
            table_M = self.data.blocks(sequence).long()
            if new:
                out_THD[start : start + new] = reference.paged_attention(
                    q_THD, self.data.k_NBGD, self.data.v_NBGD, table_M, length, self.scale
                )
            start += new
        return out_THD

    def check(self, config=None):
        kernel_data.assert_close(self.run(config), self.expected(), self.dtype, max(self.lengths))


HEADS_AND_BLOCKS = [  # query heads, key/value heads, head size; block size
    ((4, 2, 64), 16),
    ((14, 2, 128), 16),
    ((9, 3, 64), 8),
    ((2, 2, 80), 32),
    ((6, 2, 96), 64),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, block_size", HEADS_AND_BLOCKS, ids=str)
def test_a_mix_of_decodes_and_chunks(heads, block_size, dtype):
    """With a cached prefix and without, in the configuration that the wrapper chooses."""
    new, lengths = [1, 70, 1, 9, 33], [40, 70, 1, 150, 64]
    Batch(new, lengths, heads, block_size, dtype, padding=3).check()


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed):
    draw = random.Random(seed)
    new = [draw.choice([1, 1, draw.randint(2, 30)]) for _ in range(draw.randint(1, 5))]
    lengths = [count + draw.choice([0, draw.randint(1, 70)]) for count in new]
    heads, block_size = draw.choice(HEADS_AND_BLOCKS)
    padding = draw.choice([0, draw.randint(1, 40)])
    Batch(new, lengths, heads, block_size, torch.float16, seed=seed, padding=padding).check()


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_lengths_around_multiples_of_the_block_size(block_size):
    """Decodes, and chunks that are the whole sequence."""
    lengths = [blocks * block_size + off for blocks in (1, 2) for off in (-1, 0, 1)]
    Batch([1] * 6, lengths, (2, 1, 64), block_size).check()
    Batch(lengths, lengths, (2, 1, 64), block_size).check(PrefillConfig(64, 32, 4, 1))


@pytest.mark.parametrize("new", [7, 8, 9])
@pytest.mark.parametrize("cached", [0, 24, 31, 32, 33])
def test_a_chunk_around_the_edges_of_its_tiles(new, cached):
    """Tiles of 8 queries and of 32 positions: full, one short, one over."""
    lengths = [cached + new, cached + new + 8]
    Batch([new, new + 8], lengths, (2, 1, 64)).check(PrefillConfig(16, 32, 4, 1))


@pytest.mark.parametrize(
    "config",
    [
        PrefillConfig(16, 16, 1, 1),
        PrefillConfig(32, 128, 4, 2, small_m=16),
        PrefillConfig(64, 64, 4, 2),
        PrefillConfig(128, 32, 8, 3, small_m=16),
        PrefillConfig(128, 64, 8, 2, small_m=64),
    ],
    ids=str,
)
def test_no_configuration_changes_the_result(config):
    """3 heads a group: no tile is filled exactly."""
    Batch([1, 50, 5, 1], [30, 90, 5, 129], (6, 2, 64), dtype=torch.float16).check(config)


def test_one_token_of_one_sequence():
    batch = Batch([1], [1], (4, 2, 64))
    batch.check()
    v_GD = batch.data.v_NBGD.flatten(0, 1)[batch.data.slots(0)][0]
    torch.testing.assert_close(batch.run()[0], v_GD.repeat_interleave(2, dim=0))


def test_a_tile_reads_no_further_than_its_last_query_sees():
    """Tiles of 8 queries: the last V is NaN, which 0 times would still be, and the first tile has
    not met it."""
    batch = Batch([16], [16], (2, 1, 64))
    batch.data.v_NBGD.flatten(0, 1)[batch.data.slots(0)[15]] = float("nan")
    assert batch.run(PrefillConfig(16, 16, 4, 1))[:8].isfinite().all()


@pytest.mark.parametrize("padding", [1, 100])
def test_rows_behind_the_last_start_come_out_as_zero(padding):
    batch = Batch([1, 12], [20, 12], padding=padding)
    assert not batch.run()[13:].any()
    batch.check()


def test_a_sequence_without_queries_takes_no_row():
    """Also first and last, and with no blocks at all: rows of a graph that nobody fills."""
    Batch([0, 5, 0, 1, 0], [0, 5, 30, 17, 0], padding=2).check()


def test_a_batch_of_padding_alone():
    assert not Batch([0, 0], [0, 0], padding=5).run().any()


def test_more_sequences_than_starts_are_compared_at_once(monkeypatch):
    monkeypatch.setattr("mie.kernels.paged_prefill.STARTS_AT_ONCE", 4)
    new = [1, 3, 1, 1, 20, 1, 0, 1, 1]
    Batch(new, [count + 10 for count in new], (2, 1, 64), padding=4).check()


def test_two_sequences_may_share_blocks():
    """The same prefix, read by a decode and by a chunk: two rows name the same blocks."""
    batch = Batch([1, 4], [32, 32], block_size=16)
    batch.tables_RM[batch.rows_S[1]] = batch.tables_RM[batch.rows_S[0]]
    batch.data.tables_RM[1] = batch.data.tables_RM[0]
    batch.check()


def test_keys_and_values_with_the_heads_outside_of_the_slots():
    batch = Batch([1, 20], [35, 40], (6, 3, 64), heads_outside=True)
    assert not batch.data.k_NBGD.is_contiguous()
    batch.check()


def test_queries_that_are_a_slice_of_a_wider_row():
    batch = Batch([1, 20], [35, 40])
    wide = torch.randn(21, 3 * 4 * 64, device=DEVICE)
    wide[:, : 4 * 64] = batch.q_THD.flatten(1)
    batch.q_THD = wide[:, : 4 * 64].view(21, 4, 64)
    assert not batch.q_THD.is_contiguous()
    batch.check()


def test_large_scores_neither_overflow_nor_vanish():
    """A score that is 100 times as large is off by 100 times as much."""
    batch = Batch([1, 9], [70, 73])
    batch.q_THD *= 100
    atol, rtol = (100 * x for x in kernel_data.tolerance(batch.dtype, 73))
    torch.testing.assert_close(batch.run(), batch.expected(), atol=atol, rtol=rtol)


@pytest.mark.parametrize("heads, block_size", HEADS_AND_BLOCKS[:2], ids=str)
def test_the_torch_function_is_the_reference(heads, block_size):
    batch = Batch([1, 20, 0], [35, 40, 3], heads, block_size, padding=2)
    got = paged_prefill_torch(*batch.arguments())
    kernel_data.assert_close(got, batch.expected(), batch.dtype, 40)


def test_small_steps_get_small_tiles():
    def rows(max_new, dtype=torch.bfloat16, capability=90):
        return prefill_config(7, 128, dtype, max_new, capability).block_m

    assert [rows(1), rows(2), rows(9), rows(512)] == [16, 16, 64, 128]
    assert rows(512, capability=80) == 64
    assert prefill_config(100, 64, torch.bfloat16, 1).block_m == 128


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("q_THD", lambda q: q[..., :32], "head size 32, K of 64"),
        ("q_THD", lambda q: q[:, :3], "3 query heads"),
        ("q_THD", lambda q: q.half(), "float16"),
        ("q_THD", lambda q: q.transpose(1, 2).contiguous().transpose(1, 2), "strides"),
        ("k_NBGD", lambda k: k[:-1], "one place must serve for both"),
        ("rows_S", lambda rows: rows[:-1], r"\(1, 2, 2\)"),
        ("rows_S", lambda rows: rows.long(), "int64"),
        ("scale", lambda scale: -scale, "not positive"),
    ],
)
def test_what_does_not_fit_is_refused(name, change, message):
    batch = Batch([1, 3], [5, 6])
    names = ["q_THD", "k_NBGD", "v_NBGD", "tables_RM", "rows_S", "starts_S1", "lengths_S", "scale"]
    arguments = dict(zip(names, batch.arguments(), strict=True))
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        paged_prefill(**arguments, max_new=3)


def test_a_tile_must_hold_the_heads_of_a_group():
    batch = Batch([1], [5], (32, 1, 64))
    with pytest.raises(ValueError, match="16 rows for groups of 32 heads"):
        batch.run(PrefillConfig(16, 32, 4, 1))


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
def test_a_graph_follows_the_starts_and_lengths_it_is_given():
    """Captured once; the same launch serves another division of the same rows."""
    batch = Batch([1, 30, 1], [50, 40, 1], dtype=torch.bfloat16, padding=8)
    other = Batch([20, 1, 9], [20, 17, 60], dtype=torch.bfloat16, padding=10)
    room = torch.zeros(len(batch.tables_RM), 8, dtype=torch.int32, device=DEVICE)
    room[:, : batch.tables_RM.shape[1]] = batch.tables_RM
    batch.tables_RM = room
    out_THD = torch.empty_like(batch.q_THD)
    paged_prefill(*batch.arguments(), 40, out_THD=out_THD)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_prefill(*batch.arguments(), 40, out_THD=out_THD)
    graph.replay()
    kernel_data.assert_close(out_THD, batch.expected(), batch.dtype, 50)

    num_blocks = min(len(batch.data.k_NBGD), len(other.data.k_NBGD))
    assert int(other.tables_RM.max()) < num_blocks, "the other sequences fit into this cache"
    batch.data.kv_2NBGD[:, :num_blocks] = other.data.kv_2NBGD[:, :num_blocks]
    room.zero_()
    room[:, : other.tables_RM.shape[1]] = other.tables_RM
    batch.q_THD.copy_(other.q_THD)
    batch.rows_S.copy_(other.rows_S)
    batch.starts_S1.copy_(other.starts_S1)
    batch.data.lengths_S.copy_(other.data.lengths_S)
    graph.replay()
    kernel_data.assert_close(out_THD, other.expected(), batch.dtype, 60)
