"""From the fused projection to attention in one launch: norm and turn Q and K, write K and V.

Invariant: each head is read once and written once. Norm and rotation are float32 and rounded once,
at the end. K and V of a token go to its slot and nowhere else; a negative slot writes neither, and
the token's query heads come out all the same.

A row of ``qkv`` holds H query heads, then G keys, then G values. One program takes one token and a
tile of heads; those behind the query heads take keys and the values that go with them::

    qkv    q q q q q q | k k | v v              H = 6, G = 2, tiles of 4 heads
           program 0    1       2               of token 0: queries, queries (half masked), K and V
                                                programs 3, 4, 5 are those of token 1
    q_THD  q q q q q q          slot s = slots_T[t]:  block s // B, place s % B
    cache  k k and v v  ──────► k_slots_NBGD[s // B, s % B], v_slots_NBGD[s // B, s % B]

Cost: ``2·(H + 2·G)·D`` elements a token. Step by step (two norms, two rotations, two indexed
copies) it is twice that, in six launches. Head norms are those of Qwen3 (2025), the rotation is
that of Su et al. (2021), slots after Kwon et al. (2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mie.kernels.kv_write import check_slots, kv_write_torch
from mie.kernels.launch import begins_early, cdiv, wait_for_kernels_before
from mie.kernels.rms_norm import rms_norm_torch
from mie.kernels.rope import check_angles, head_tile, rope_torch


def qk_norm_rope_write_torch(
    qkv_TX: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cos_PR: Tensor,
    sin_PR: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    k_slots_NBGD: Tensor,
    v_slots_NBGD: Tensor,
    num_heads: int,
) -> Tensor:
    """What ``qk_norm_rope_write`` must equal, writes included."""
    G, D = k_slots_NBGD.shape[2:]
    heads_TXD = qkv_TX.unflatten(-1, (num_heads + 2 * G, D)).float()
    q, k, v_TGD = heads_TXD.split((num_heads, G, G), dim=1)
    if q_norm_D is not None:
        q = rms_norm_torch(q, q_norm_D, eps)
    if k_norm_D is not None:
        k = rms_norm_torch(k, k_norm_D, eps)
    cos_TR, sin_TR = cos_PR[positions_T.long()], sin_PR[positions_T.long()]
    k = rope_torch(k, cos_TR, sin_TR)
    kv_write_torch(k.to(qkv_TX.dtype), v_TGD.to(qkv_TX.dtype), slots_T, k_slots_NBGD, v_slots_NBGD)
    return rope_torch(q, cos_TR, sin_TR).to(qkv_TX.dtype)


@triton.jit
def _turned(
    a: tl.tensor,
    b: tl.tensor,
    norm_ptr: tl.tensor | None,
    cos_HR: tl.tensor,
    sin_HR: tl.tensor,
    pairs_HR: tl.tensor,
    eps: tl.tensor,
    R: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves of a tile of heads after the norm, if there is one, and the rotation."""
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    if norm_ptr is not None:
        exists = pairs_HR < R
        norm_a = tl.load(norm_ptr + pairs_HR, mask=exists, other=0).to(tl.float32)
        norm_b = tl.load(norm_ptr + R + pairs_HR, mask=exists, other=0).to(tl.float32)
        mean_square = tl.sum(a * a + b * b, axis=1, keep_dims=True) / (2 * R)
        scale = tl.rsqrt(mean_square + eps)
        a = a * scale * norm_a
        b = b * scale * norm_b
    return a * cos_HR - b * sin_HR, a * sin_HR + b * cos_HR


@triton.jit
def _qk_rope_write_kernel(
    qkv_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_norm_ptr: tl.tensor | None,
    k_norm_ptr: tl.tensor | None,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    qkv_stride_T: tl.tensor,
    cos_stride_P: tl.tensor,
    sin_stride_P: tl.tensor,
    k_stride_N: tl.tensor,
    k_stride_B: tl.tensor,
    k_stride_G: tl.tensor,
    v_stride_N: tl.tensor,
    v_stride_B: tl.tensor,
    v_stride_G: tl.tensor,
    eps: tl.tensor,
    B: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    Q_TILES: tl.constexpr,
    TILES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    wait_for_kernels_before(EARLY)
    D: tl.constexpr = 2 * R
    token = (tl.program_id(0) // TILES).to(tl.int64)
    tile = tl.program_id(0) % TILES
    row_ptr = qkv_ptr + token * qkv_stride_T
    position = tl.load(positions_ptr + token).to(tl.int64)
    pairs_HR = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], [HEADS, BLOCK])
    is_pair = pairs_HR < R
    cos_at = cos_ptr + position * cos_stride_P + pairs_HR
    sin_at = sin_ptr + position * sin_stride_P + pairs_HR

    if tile < Q_TILES:
        heads_H1 = tile * HEADS + tl.arange(0, HEADS)[:, None]
        exists = (heads_H1 < H) & is_pair
        places = heads_H1 * D + pairs_HR
        a = tl.load(row_ptr + places, mask=exists, other=0)
        b = tl.load(row_ptr + places + R, mask=exists, other=0)
        cos_HR = tl.load(cos_at, mask=is_pair, other=0)
        sin_HR = tl.load(sin_at, mask=is_pair, other=0)
        a, b = _turned(a, b, q_norm_ptr, cos_HR, sin_HR, pairs_HR, eps, R)
        q_ptr += token * (H * D)
        tl.store(q_ptr + places, a, mask=exists)
        tl.store(q_ptr + places + R, b, mask=exists)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            heads_G1 = (tile - Q_TILES) * HEADS + tl.arange(0, HEADS)[:, None]
            exists = (heads_G1 < G) & is_pair
            places = heads_G1 * D + pairs_HR
            a = tl.load(row_ptr + H * D + places, mask=exists, other=0)
            b = tl.load(row_ptr + H * D + places + R, mask=exists, other=0)
            v_a = tl.load(row_ptr + (H + G) * D + places, mask=exists, other=0)
            v_b = tl.load(row_ptr + (H + G) * D + places + R, mask=exists, other=0)
            cos_HR = tl.load(cos_at, mask=is_pair, other=0)
            sin_HR = tl.load(sin_at, mask=is_pair, other=0)
            v_at = v_ptr + slot // B * v_stride_N + slot % B * v_stride_B
            v_at += heads_G1 * v_stride_G + pairs_HR
            tl.store(v_at, v_a, mask=exists)
            tl.store(v_at + R, v_b, mask=exists)
            a, b = _turned(a, b, k_norm_ptr, cos_HR, sin_HR, pairs_HR, eps, R)
            k_at = k_ptr + slot // B * k_stride_N + slot % B * k_stride_B
            k_at += heads_G1 * k_stride_G + pairs_HR
            tl.store(k_at, a, mask=exists)
            tl.store(k_at + R, b, mask=exists)


def qk_norm_rope_write(
    qkv_TX: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    cos_PR: Tensor,
    sin_PR: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    k_slots_NBGD: Tensor,
    v_slots_NBGD: Tensor,
    num_heads: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``q_THD``: normed, turned query heads. K, treated alike, and V are in their slots after it.

    ``qkv_TX`` has ``(H + 2·G)·D`` columns; its rows may stand apart. Row ``positions_T[t]`` of the
    float32 tables ``cos_PR`` and ``sin_PR`` turns token t, padding too: a position below P. No
    two tokens have the same slot; ``slots_T[t] < 0`` writes nothing. The caches have any strides as
    long as the elements of a head lie together. A norm that is None is left out. ``out`` is
    contiguous and shares no memory with ``qkv_TX``.

    Raises ValueError for shapes, strides and dtypes that disagree; positions and slots are on the
    device and not looked at.
    """
    T, X = qkv_TX.shape
    check_slots(slots_T, T, k_slots_NBGD, v_slots_NBGD, qkv_TX.dtype)
    B, G, D = k_slots_NBGD.shape[1:]
    if (num_heads + 2 * G) * D != X:
        raise ValueError(f"{X} columns, not ({num_heads} + 2 x {G}) heads of {D}")
    if qkv_TX.stride(1) != 1:
        raise ValueError(f"columns of qkv are {qkv_TX.stride(1)} apart, not 1")
    if positions_T.shape != (T,) or not positions_T.is_contiguous():
        raise ValueError(f"{T} tokens, positions of shape {tuple(positions_T.shape)}")
    for name, angles in (("cos", cos_PR), ("sin", sin_PR)):
        check_angles(name, angles, D)
    for name, norm in (("q_norm", q_norm_D), ("k_norm", k_norm_D)):
        if norm is not None and (norm.shape != (D,) or not norm.is_contiguous()):
            raise ValueError(f"{name} is {tuple(norm.shape)}, a head {D} wide")
    shape = (T, num_heads, D)
    if out is None:
        out = torch.empty(shape, dtype=qkv_TX.dtype, device=qkv_TX.device)
    if out.shape != shape or out.dtype != qkv_TX.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} with strides {out.stride()}, "
            f"not contiguous {shape} {qkv_TX.dtype}"
        )
    if T:
        heads, block, num_warps = head_tile(num_heads, D // 2)
        q_tiles = cdiv(num_heads, heads)
        tiles = q_tiles + cdiv(G, heads)
        early = begins_early(qkv_TX.device)
        _qk_rope_write_kernel[(T * tiles,)](
            qkv_TX, positions_T, slots_T, cos_PR, sin_PR, q_norm_D, k_norm_D,
            out, k_slots_NBGD, v_slots_NBGD,
            qkv_TX.stride(0), cos_PR.stride(0), sin_PR.stride(0),
            *k_slots_NBGD.stride()[:3], *v_slots_NBGD.stride()[:3],
            eps, B, num_heads, G, D // 2, q_tiles, tiles, heads, block, early,
            num_warps=num_warps, launch_pdl=early,
        )  # fmt: skip
    return out
