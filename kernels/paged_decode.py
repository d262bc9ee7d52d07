"""Attention of sequences that bring one new token each, over K and V where their blocks lie.

Invariant: each K and V of each context is read once for each layer, and nothing else of the cache
is: not what stands behind the last token, nor a block that nobody owns. One launch, whatever the
lengths: the grid is fixed by the number of sequences, and the plan says on the device which program
reads what.

A program reads one item of the plan, a chunk of one context, for one key/value head::

    G = 2           item 0            item 1            item 2           item 3
    program (g, w)  (0, 0) (1, 0)     (0, 1) (1, 1)     (0, 2) (1, 2)    (0, 3) (1, 3)
    sequence 0      tokens 0 - 127    tokens 128 - 255                   exit at once
    sequence 1                                          tokens 0 - 90

    q of one group      K, V of one tile: its blocks are looked up while the tile before is read
    [ j=0  D ]          token  64  65 ... 79 | 80 ... 95 | 96 ...
    [ j=1  D ]          block        7       |     2     |   9
    [  0     ] to 16    slot   0   1  ... 15 | 0  ... 15 | 0  ...

The J query heads of a group read the same K and V, so they are rows of one tile of 16, the least
that a tensor core takes. Neighbouring programs read neighbouring heads of the same slots. While a
tile is computed, the next ones are on their way to shared memory: ``DecodeConfig.stages``.

The softmax is summed as it goes, in float32 under a running maximum (Milakov and Gimelshein, 2018;
Dao et al., 2022). A sequence of one item writes its output. If it has more, each leaves its sum
and counts itself, and whoever counts last merges them. So flash-decoding (Dao et al., 2023) takes
one launch; that the last to arrive finishes the work is the reduction of CUDA's programming guide.
The order of a merge is that of the items, whoever does it: the same launch gives the same bits.

Cost: K and V of all contexts, ``2·G·D`` elements a token, read once; ``4·H·D`` flops a token. An
item of a divided sequence writes and reads ``H·(D + 2)`` float32 more.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mie.kernels.decode_plan import MAX_GROUP, DecodeConfig, DecodePlan, decode_config
from mie.kernels.launch import (
    INTERPRETED,
    begins_early,
    next_power_of_2,
    wait_for_kernels_before,
)

__all__ = ["DecodeConfig", "DecodePlan", "decode_config", "paged_decode", "paged_decode_torch"]

MERGED_AT_ONCE = 4096  # elements of partial sums that a merge holds at a time


def paged_decode_torch(
    q_XHD: Tensor,
    k_NBGD: Tensor,
    v_NBGD: Tensor,
    tables_RM: Tensor,
    rows_X: Tensor | None,
    lengths_X: Tensor,
    scale: float,
) -> Tensor:
    """What the kernel must equal: each sequence gathered, in float32, rounded once at the end."""
    out_XHD = torch.zeros_like(q_XHD)
    J = q_XHD.shape[1] // k_NBGD.shape[2]
    rows = range(len(q_XHD)) if rows_X is None else rows_X.tolist()
    for x, (row, length) in enumerate(zip(rows, lengths_X.tolist(), strict=True)):
        if length == 0:
            continue
        blocks = tables_RM[row, : -(-length // k_NBGD.shape[1])]
        k_SHD, v_SHD = (
            cache[blocks].flatten(0, 1)[:length].float().repeat_interleave(J, dim=1)
            for cache in (k_NBGD, v_NBGD)
        )
        weights_HS = torch.einsum("hd,shd->hs", q_XHD[x].float(), k_SHD).mul(scale).softmax(-1)
        out_XHD[x] = torch.einsum("hs,shd->hd", weights_HS, v_SHD).to(q_XHD.dtype)
    return out_XHD


@triton.jit
def _merge(
    partial_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    head: tl.tensor,
    H: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    JP: tl.constexpr,
    DP: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Write the attention over all of a context from the sums over its ``count`` parts."""
    j = tl.arange(0, JP)
    d = tl.arange(0, DP)
    p = tl.arange(0, PARTS)
    inside_JD = (j < J)[:, None] & (d < D)[None, :]
    most_J = tl.full((JP,), float("-inf"), tl.float32)
    sum_J = tl.zeros((JP,), tl.float32)
    out_JD = tl.zeros((JP, DP), tl.float32)
    for begin in range(0, count, PARTS):
        row_P = (first + begin + p) * H + head
        inside_PJ = (begin + p < count)[:, None] & (j < J)[None, :]
        at_PJ = row_P[:, None] + j[None, :]
        most_PJ = tl.load(max_ptr + at_PJ, mask=inside_PJ, other=float("-inf"))
        sum_PJ = tl.load(sum_ptr + at_PJ, mask=inside_PJ, other=0.0)
        at_PJD = at_PJ.to(tl.int64)[:, :, None] * D + d[None, None, :]
        inside_PJD = inside_PJ[:, :, None] & inside_JD[None, :, :]
        partial_PJD = tl.load(partial_ptr + at_PJD, mask=inside_PJD, other=0.0)
        new_J = tl.maximum(most_J, tl.max(most_PJ, 0))
        new_J = tl.where(j < J, new_J, 0.0)  # no maximum in a row that is none
        weight_PJ = tl.exp2(most_PJ - new_J[None, :])
        fade_J = tl.exp2(most_J - new_J)
        sum_J = sum_J * fade_J + tl.sum(sum_PJ * weight_PJ, 0)
        out_JD = out_JD * fade_J[:, None] + tl.sum(partial_PJD * weight_PJ[:, :, None], 0)
        most_J = new_J
    out_JD = (out_JD / tl.where(j < J, sum_J, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + j[:, None] * D + d[None, :], out_JD, mask=inside_JD)


@triton.jit(do_not_specialize=["table_stride", "capacity"])
def _paged_decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    out_ptr: tl.tensor,
    items_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    max_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    scale_log2: tl.tensor,
    table_stride: tl.tensor,
    capacity: tl.tensor,
    q_stride_x: tl.tensor,
    q_stride_h: tl.tensor,
    stride_n: tl.tensor,
    stride_b: tl.tensor,
    stride_g: tl.tensor,
    H: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    LOG_B: tl.constexpr,
    JP: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    wait_for_kernels_before(EARLY)
    g = tl.program_id(0)
    w = tl.program_id(1)
    sequence = tl.load(items_ptr + w)
    begin = tl.load(items_ptr + capacity + w)
    end = tl.load(items_ptr + 2 * capacity + w)
    first = tl.load(items_ptr + 3 * capacity + w)
    count = tl.load(items_ptr + 4 * capacity + w)
    if count == 0:
        return
    row = sequence
    if rows_ptr is not None:
        row = tl.load(rows_ptr + sequence)
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride

    j = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    t = tl.arange(0, TILE)
    # Blocks are looked up a tile ahead: an address is known when the copy of its tile starts.
    position_T = begin + t
    block_T = tl.load(table_ptr + (position_T >> LOG_B), mask=position_T < end, other=0)
    real_JD = (j < J)[:, None]
    real_D = d < D
    if D < DP:
        real_JD = real_JD & real_D[None, :]
    head = g * J
    q_at = sequence.to(tl.int64) * q_stride_x + (head + j)[:, None] * q_stride_h + d[None, :]
    q_JD = tl.load(q_ptr + q_at, mask=real_JD, other=0.0)
    k_ptr += g.to(tl.int64) * stride_g
    v_ptr += g.to(tl.int64) * stride_g

    most_J = tl.full((ROWS,), float("-inf"), tl.float32)
    # Summed over tokens after the loop: within it, each sum would make the warps wait once more.
    sum_JT = tl.zeros((ROWS, TILE), tl.float32)
    out_JD = tl.zeros((ROWS, DP), tl.float32)
    if UPCAST:
        q_JD = q_JD.to(tl.float32)
    for start in range(begin, end, TILE):
        position_T = start + t
        inside_T = position_T < end
        slot_T = position_T & ((1 << LOG_B) - 1)
        read_TD = inside_T[:, None]
        if D < DP:
            read_TD = read_TD & real_D[None, :]
        at_TD = (block_T.to(tl.int64) * stride_n + slot_T * stride_b)[:, None] + d[None, :]
        k_TD = tl.load(k_ptr + at_TD, mask=read_TD, other=0.0)
        v_TD = tl.load(v_ptr + at_TD, mask=read_TD, other=0.0)
        position_T += TILE
        block_T = tl.load(table_ptr + (position_T >> LOG_B), mask=position_T < end, other=0)
        if UPCAST:
            k_TD, v_TD = k_TD.to(tl.float32), v_TD.to(tl.float32)
        score_JT = tl.dot(q_JD, tl.trans(k_TD), input_precision="ieee") * scale_log2
        score_JT = tl.where(inside_T[None, :], score_JT, float("-inf"))
        new_J = tl.maximum(most_J, tl.max(score_JT, 1))
        weight_JT = tl.exp2(score_JT - new_J[:, None])
        fade_J = tl.exp2(most_J - new_J)
        sum_JT = sum_JT * fade_J[:, None] + weight_JT
        out_JD = out_JD * fade_J[:, None]
        out_JD = tl.dot(weight_JT.to(v_TD.dtype), v_TD, out_JD, input_precision="ieee")
        most_J = new_J

    sum_J = tl.sum(sum_JT, 1)
    out_row = sequence.to(tl.int64) * H + head
    if count == 1:
        out_JD = out_JD / tl.where(sum_J == 0.0, 1.0, sum_J)[:, None]
        out_at = (out_row + j)[:, None] * D + d[None, :]
        tl.store(out_ptr + out_at, out_JD.to(out_ptr.dtype.element_ty), mask=real_JD)
        return
    part_J = w * H + head + j
    part_at = part_J.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(partial_ptr + part_at, out_JD, mask=real_JD)
    tl.store(max_ptr + part_J, most_J, mask=j < J)
    tl.store(sum_ptr + part_J, sum_J, mask=j < J)
    # All threads have stored before one of them counts: a barrier, then a release.
    tl.debug_barrier()
    arrived_ptr += sequence * (H // J) + g
    arrived = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
    if arrived == count - 1:
        tl.store(arrived_ptr, 0)
        out_ptr += out_row * D
        _merge(partial_ptr, max_ptr, sum_ptr, out_ptr, first, count, head, H, J, D, JP, DP, PARTS)


def paged_decode(
    q_XHD: Tensor,
    k_NBGD: Tensor,
    v_NBGD: Tensor,
    tables_RM: Tensor,
    rows_X: Tensor | None,
    lengths_X: Tensor,
    scale: float,
    plan: DecodePlan,
) -> Tensor:
    """``softmax(q · kᵀ · scale) · v`` for one query a sequence: ``out_XHD``.

    Row ``rows_X[x]`` of ``tables_RM`` (``x`` itself without rows) names the blocks of sequence
    ``x``, which has ``lengths_X[x]`` tokens; with 0 tokens its output is 0. All three are int32.
    K and V may have any strides, the same for both, with D contiguous. ``plan.update(lengths_X)``
    comes first, on the same stream. Raises ``ValueError`` where shapes, or plan and lengths,
    disagree.
    """
    X, H, D = q_XHD.shape
    _, B, G, _ = k_NBGD.shape
    plan.check(q_XHD, k_NBGD, v_NBGD, tables_RM, lengths_X)
    config = plan.config
    out_XHD = torch.empty((X, H, D), dtype=q_XHD.dtype, device=q_XHD.device)
    J, DP = H // G, max(16, next_power_of_2(D))
    JP = next_power_of_2(J)
    early = begins_early(q_XHD.device)
    _paged_decode_kernel[(G, plan.max_items(X))](
        q_XHD,
        k_NBGD,
        v_NBGD,
        tables_RM,
        rows_X,
        out_XHD,
        plan.items_5W,
        plan.partial_WHD,
        plan.max_WH,
        plan.sum_WH,
        plan.arrived_XG,
        scale / math.log(2),
        tables_RM.stride(0),
        plan.capacity,
        q_XHD.stride(0),
        q_XHD.stride(1),
        *k_NBGD.stride()[:3],
        H=H,
        J=J,
        D=D,
        LOG_B=B.bit_length() - 1,
        JP=JP,
        DP=DP,
        ROWS=MAX_GROUP,
        TILE=config.tile,
        PARTS=max(1, MERGED_AT_ONCE // (JP * DP)),
        UPCAST=INTERPRETED and q_XHD.dtype == torch.bfloat16,
        EARLY=early,
        num_warps=config.warps,
        num_stages=config.stages,
        launch_pdl=early,
    )
    return out_XHD
