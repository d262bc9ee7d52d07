"""Attention of new tokens over blocks of K and V: decodes and chunks of prompts in one launch.

Invariant: every query sees the cached positions of its sequence and the new ones up to its own, and
nothing else. A slot behind the last position that a tile of queries sees is not read at all; what
stands there, NaN or infinity, reaches no result. Rows of ``q`` that no sequence owns come out as 0.

The query heads of one key/value head read the same K and V. They are rows of the same tile: with
``J`` heads a group, a tile of ``BLOCK_M`` rows holds ``BLOCK_Q = BLOCK_M // J`` queries. One
program computes one tile of one group. It knows its number only, so sequence ``s`` begins at tile
``starts[s] // BLOCK_Q + s``, which leaves room for every query, and at times for a tile too many::

    BLOCK_Q = 4      starts 0 6 7 12          sequence 0   queries 0 - 5     tiles 0 1
                     begins 0 2 3 6           sequence 1   query   6         tile  2
                     grid   12 // 4 + 4       sequence 2   queries 7 - 11    tiles 3 4 (5 is empty)
                                              padding      rows from 12 on   tile  6
    begin of the padding: the sequence behind the last one

The host needs no length for that: the grid depends on the shapes alone. What a tile of queries
reads, with the four queries of tile 3 and tiles of ``BLOCK_N = 4`` positions::

    position      0 1 2 3   4 5 6 7   8 9 . .        length 11, the last 5 are new: 6 ... 10
    query 7       x x x x   x x x .   . . . .        the tile has 6, 7, 8, 9
    query 8       x x x x   x x x x   . . . .
    query 9       x x x x   x x x x   x . . .        left:   below the diagonal, no mask
    query 10      x x x x   x x x x   x x . .        others: causal mask; positions from 10 on
                  no mask   mask      mask           are not loaded, their V counts as 0

Cost: a query with ``p`` visible positions takes ``4·H·D·p`` flops. K and V are read once a tile
of queries: ``2·D·p`` elements a group, from the L2 cache when the tiles of a sequence run together.
The softmax is summed as it goes, in float32 (Milakov and Gimelshein, 2018; Dao et al., 2022; Dao,
2023). The numbering of tiles is that of vLLM's unified attention (Ringlein et al., 2025), blocks
after Kwon et al., 2023.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mie.kernels.launch import INTERPRETED, next_power_of_2

SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)
STARTS_AT_ONCE = 256  # entries of starts_S1 that a program compares at a time


@dataclass(frozen=True)
class PrefillConfig:
    """How a launch divides its work.

    ``block_m`` rows (query, head of the group) a tile, ``block_n`` positions at a time. Sequences
    whose queries fill ``small_m`` rows or fewer take a tile of that size in the same launch; 0
    leaves that path out. ``max_registers`` a thread lets more programs share a multiprocessor.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    small_m: int = 0
    max_registers: int | None = None


@functools.cache
def prefill_config(
    group: int, head_dim: int, dtype: torch.dtype, max_new: int, capability: int = 90
) -> PrefillConfig:
    """The configuration for groups of ``group`` query heads and at most ``max_new`` queries.

    ``capability``: 90 for Hopper, whose matrix units want 64 rows for every 4 warps.
    """
    least = max(16, next_power_of_2(group))
    rows = next_power_of_2(max_new * group)
    if dtype == torch.float32 and not INTERPRETED:  # no matrix units: products take registers
        return PrefillConfig(max(least, min(rows, 32)), 32, 8, 1)
    if rows <= least:
        return PrefillConfig(least, 64, 4, 3)
    if capability < 90:
        return PrefillConfig(max(least, 64), 32, 4, 3, least if least < 64 else 0)
    if rows <= 64:
        return PrefillConfig(max(least, 64), 64, 4, 2, least if least < 64 else 0)
    # Two programs share a multiprocessor: on an H200 that is worth 1.4 times, and more than the few
    # registers that then wait in memory.
    return PrefillConfig(max(least, 128), 64, 8, 3, least if least < 128 else 0, 128)


def paged_prefill_torch(
    q_THD: Tensor,
    k_NBGD: Tensor,
    v_NBGD: Tensor,
    tables_RM: Tensor,
    rows_S: Tensor,
    starts_S1: Tensor,
    lengths_S: Tensor,
    scale: float,
) -> Tensor:
    """What ``paged_prefill`` computes, one sequence after the other, rounded once at the end."""
    out_THD = torch.zeros_like(q_THD)
    group = q_THD.shape[1] // k_NBGD.shape[2]
    starts = starts_S1.tolist()
    for row, start, end, length in zip(
        rows_S.tolist(), starts[:-1], starts[1:], lengths_S.tolist(), strict=True
    ):
        table_M = tables_RM[row].long()
        k_LHD, v_LHD = (
            x[table_M].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
            for x in (k_NBGD, v_NBGD)
        )
        scores_HTL = torch.einsum("thd,lhd->htl", q_THD[start:end].float(), k_LHD) * scale
        positions_L = torch.arange(length, device=q_THD.device)
        future_TL = positions_L > positions_L[length - (end - start) :].unsqueeze(1)
        weights_HTL = scores_HTL.masked_fill(future_TL, float("-inf")).softmax(dim=-1)
        out_THD[start:end] = torch.einsum("htl,lhd->thd", weights_HTL, v_LHD).to(q_THD.dtype)
    return out_THD


@triton.jit
def _attend(
    q_MD: tl.tensor,
    last_M: tl.tensor,
    acc_MD: tl.tensor,
    total_M: tl.tensor,
    peak_M: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    table_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    stride_N: tl.tensor,
    stride_B: tl.tensor,
    scale_log2: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add the positions ``begin ... end`` to the sums of a tile. ``MASKED``: row ``m`` sees those
    up to ``last_M[m]``, and ``end`` need not be a multiple of ``BLOCK_N``."""
    offsets_D = tl.arange(0, q_MD.shape[1])
    for first in range(begin, end, BLOCK_N):
        positions_N = first + tl.arange(0, BLOCK_N)
        entries_N = table_ptr + positions_N // BLOCK_SIZE
        loaded_ND = (offsets_D < HEAD_DIM)[None, :]
        if MASKED:
            blocks_N = tl.load(entries_N, mask=positions_N < end, other=0).to(tl.int64)
            loaded_ND = loaded_ND & (positions_N < end)[:, None]
        else:
            blocks_N = tl.load(entries_N).to(tl.int64)
        places_N = blocks_N * stride_N + positions_N % BLOCK_SIZE * stride_B
        places_ND = places_N[:, None] + offsets_D[None, :]
        if MASKED or q_MD.shape[1] > HEAD_DIM:
            k_ND = tl.load(k_ptr + places_ND, mask=loaded_ND, other=0.0)
            v_ND = tl.load(v_ptr + places_ND, mask=loaded_ND, other=0.0)
        else:
            k_ND = tl.load(k_ptr + places_ND)
            v_ND = tl.load(v_ptr + places_ND)
        if UPCAST:
            k_ND = k_ND.to(tl.float32)
            v_ND = v_ND.to(tl.float32)

        scores_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        if MASKED:
            visible_MN = positions_N[None, :] <= last_M[:, None]
            scores_MN = tl.where(visible_MN, scores_MN, float("-inf"))
        # Position 0 is in the first tile and visible to all: the peak is finite from then on.
        new_peak_M = tl.maximum(peak_M, tl.max(scores_MN, axis=1) * scale_log2)
        weights_MN = tl.exp2(scores_MN * scale_log2 - new_peak_M[:, None])
        shrink_M = tl.exp2(peak_M - new_peak_M)
        total_M = total_M * shrink_M + tl.sum(weights_MN, axis=1)
        acc_MD = acc_MD * shrink_M[:, None]
        acc_MD = tl.dot(weights_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision="ieee")
        peak_M = new_peak_M
    return acc_MD, total_M, peak_M


@triton.jit
def _tile(
    q_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    q_stride_T: tl.tensor,
    out_stride_T: tl.tensor,
    stride_N: tl.tensor,
    stride_B: tl.tensor,
    first_query: tl.tensor,
    num_queries: tl.tensor,
    length: tl.tensor,
    scale_log2: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """The queries of one sequence from ``first_query`` on, as many as ``BLOCK_M`` rows hold."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    rows_M = tl.arange(0, BLOCK_M)
    queries_M = first_query + rows_M // GROUP
    offsets_D = tl.arange(0, PADDED_DIM)
    end_query = tl.minimum(first_query + BLOCK_Q, num_queries)
    stored_MD = (queries_M < end_query)[:, None] & (offsets_D < HEAD_DIM)[None, :]
    heads_MD = (rows_M % GROUP)[:, None] * HEAD_DIM + offsets_D[None, :]
    q_MD = tl.load(q_ptr + queries_M[:, None] * q_stride_T + heads_MD, mask=stored_MD, other=0.0)
    if UPCAST:
        q_MD = q_MD.to(tl.float32)

    num_cached = length - num_queries
    last_M = num_cached + queries_M
    seen_by_all = tl.maximum(num_cached + first_query + 1, 0) // BLOCK_N * BLOCK_N
    seen_by_some = num_cached + end_query

    acc_MD = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    peak_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc_MD, total_M, peak_M = _attend(
        q_MD, last_M, acc_MD, total_M, peak_M, 0, seen_by_all,
        table_ptr, k_ptr, v_ptr, stride_N, stride_B, scale_log2,
        BLOCK_SIZE, BLOCK_N, HEAD_DIM, False, UPCAST,
    )  # fmt: skip
    acc_MD, total_M, peak_M = _attend(
        q_MD, last_M, acc_MD, total_M, peak_M, seen_by_all, seen_by_some,
        table_ptr, k_ptr, v_ptr, stride_N, stride_B, scale_log2,
        BLOCK_SIZE, BLOCK_N, HEAD_DIM, True, UPCAST,
    )  # fmt: skip
    out_MD = acc_MD / tl.where(total_M == 0.0, 1.0, total_M)[:, None]
    out_places_MD = out_ptr + queries_M[:, None] * out_stride_T + heads_MD
    tl.store(out_places_MD, out_MD.to(out_ptr.dtype.element_ty), mask=stored_MD)


@triton.jit(do_not_specialize=["num_sequences", "num_rows", "tables_stride_R"])
def _paged_prefill_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_sequences: tl.tensor,
    num_rows: tl.tensor,
    q_stride_T: tl.tensor,
    out_stride_T: tl.tensor,
    stride_N: tl.tensor,
    stride_B: tl.tensor,
    stride_G: tl.tensor,
    tables_stride_R: tl.tensor,
    scale_log2: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SMALL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STARTS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # The last tiles of a sequence have the most to read: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)

    # The begins ascend, so the sequence of this tile is the number of begins up to it, less one.
    num_begun = 0
    for first in range(0, num_sequences + 1, STARTS):
        sequences = first + tl.arange(0, STARTS)
        exists = sequences <= num_sequences
        begins = tl.load(starts_ptr + sequences, mask=exists, other=0) // BLOCK_Q + sequences
        num_begun += tl.sum((exists & (begins <= tile)).to(tl.int32))
    sequence = num_begun - 1
    is_one = sequence < num_sequences  # else it is the padding: no positions, so zeros come out

    start = tl.load(starts_ptr + sequence)
    end = tl.load(starts_ptr + sequence + 1, mask=is_one, other=num_rows)
    num_queries = end - start
    first_query = (tile - (start // BLOCK_Q + sequence)) * BLOCK_Q
    if first_query >= num_queries:
        return

    first_head = head * GROUP * HEAD_DIM
    q_ptr += start.to(tl.int64) * q_stride_T + first_head
    out_ptr += start.to(tl.int64) * out_stride_T + first_head
    length = tl.load(lengths_ptr + sequence, mask=is_one, other=0)
    row = tl.load(rows_ptr + sequence, mask=is_one, other=0)
    table_ptr = tables_ptr + row.to(tl.int64) * tables_stride_R
    k_ptr += head.to(tl.int64) * stride_G
    v_ptr += head.to(tl.int64) * stride_G
    if SMALL_M > 0:  # noqa: SIM102 - decided when compiled, the next one when run
        if num_queries * GROUP <= SMALL_M:
            _tile(
                q_ptr, out_ptr, table_ptr, k_ptr, v_ptr, q_stride_T, out_stride_T,
                stride_N, stride_B,
                first_query, num_queries, length, scale_log2,
                GROUP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, SMALL_M, BLOCK_N, UPCAST,
            )  # fmt: skip
            return
    _tile(
        q_ptr, out_ptr, table_ptr, k_ptr, v_ptr, q_stride_T, out_stride_T,
        stride_N, stride_B,
        first_query, num_queries, length, scale_log2,
        GROUP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, BLOCK_M, BLOCK_N, UPCAST,
    )  # fmt: skip


def paged_prefill(
    q_THD: Tensor,
    k_NBGD: Tensor,
    v_NBGD: Tensor,
    tables_RM: Tensor,
    rows_S: Tensor,
    starts_S1: Tensor,
    lengths_S: Tensor,
    scale: float,
    max_new: int,
    *,
    config: PrefillConfig | None = None,
    out_THD: Tensor | None = None,
) -> Tensor:
    """Causal attention of the new tokens of S sequences; returns ``out_THD``.

    Sequence ``s`` brings the queries ``starts_S1[s] ... starts_S1[s + 1]``: the last of its
    ``lengths_S[s]`` positions, whose K and V have been written. It may bring none. Its blocks are
    row ``rows_S[s]`` of ``tables_RM``. Rows of ``q_THD`` from ``starts_S1[S]`` on are of nobody:
    they come out as 0. Tables, rows, starts and lengths are int32. ``max_new``: no sequence brings
    more queries; it chooses the configuration and changes no result.

    Raises ValueError for shapes, dtypes or layouts that do not fit.
    """
    T, H, D = q_THD.shape
    _, B, G, _ = k_NBGD.shape
    S = rows_S.shape[0]
    _check(q_THD, k_NBGD, v_NBGD, scale, tables_RM, rows_S, starts_S1, lengths_S)
    if out_THD is None:
        out_THD = torch.empty(T, H, D, dtype=q_THD.dtype, device=q_THD.device)
    if config is None:
        config = prefill_config(H // G, D, q_THD.dtype, max_new, _capability(q_THD.device))
    if config.block_m < H // G:
        raise ValueError(f"a tile of {config.block_m} rows for groups of {H // G} heads")
    if T == 0:
        return out_THD
    grid = (T // (config.block_m // (H // G)) + S + 1, G)
    _paged_prefill_kernel[grid](
        q_THD,
        k_NBGD,
        v_NBGD,
        tables_RM,
        rows_S,
        starts_S1,
        lengths_S,
        out_THD,
        S,
        T,
        q_THD.stride(0),
        out_THD.stride(0),
        *k_NBGD.stride()[:3],
        tables_RM.stride(0),
        scale * math.log2(math.e),
        GROUP=H // G,
        BLOCK_SIZE=B,
        HEAD_DIM=D,
        PADDED_DIM=max(16, next_power_of_2(D)),
        BLOCK_M=config.block_m,
        SMALL_M=config.small_m,
        BLOCK_N=config.block_n,
        STARTS=STARTS_AT_ONCE,
        UPCAST=INTERPRETED and q_THD.dtype == torch.bfloat16,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
    )
    return out_THD


def _check(q_THD: Tensor, k_NBGD: Tensor, v_NBGD: Tensor, scale: float, *others: Tensor) -> None:
    _, H, D = q_THD.shape
    G = k_NBGD.shape[2]
    if k_NBGD.shape[3] != D:
        raise ValueError(f"queries of head size {D}, K of {k_NBGD.shape[3]}")
    if H % G:
        raise ValueError(f"{H} query heads do not share {G} key/value heads evenly")
    if q_THD.dtype not in SUPPORTED or not q_THD.dtype == k_NBGD.dtype == v_NBGD.dtype:
        raise ValueError(f"queries of {q_THD.dtype}, K of {k_NBGD.dtype}, V of {v_NBGD.dtype}")
    if k_NBGD.shape != v_NBGD.shape or k_NBGD.stride() != v_NBGD.stride():
        k, v = ((tuple(x.shape), x.stride()) for x in (k_NBGD, v_NBGD))
        raise ValueError(f"K of shape and strides {k}, V of {v}: one place must serve for both")
    if q_THD.stride()[1:] != (D, 1) or k_NBGD.stride(3) != 1:
        given = f"q {q_THD.stride()}, K {k_NBGD.stride()}"
        raise ValueError(f"strides of {given}: those of q end in {D}, 1, those of K in 1")
    _, rows_S, starts_S1, lengths_S = others
    counts = len(rows_S), len(starts_S1) - 1, len(lengths_S)
    if len({*counts}) > 1:
        raise ValueError(f"sequences by rows, starts less one, lengths: {counts}")
    if any(x.dtype != torch.int32 or x.stride(-1) != 1 for x in others):
        dtypes = [x.dtype for x in others]
        raise ValueError(f"tables, rows, starts, lengths are {dtypes}, not contiguous int32")
    if scale <= 0:
        raise ValueError(f"scale {scale} is not positive: a peak of scores would be none")


@functools.cache
def _capability(device: torch.device) -> int:
    """The compute capability as one number; 90 where there is none to ask."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor
