"""Put K and V of a step's tokens where they belong, in one launch.

Invariant: the K and V of token t are in slot ``slots_T[t]`` afterwards, bit for bit, and every
other slot is as it was. A token with a negative slot is written nowhere: it is padding.

A slot is a place in a block: ``block = slot // B``, ``place = slot % B``. One program takes a tile
of heads of one token, K and V::

    slots_T   6  -1   9              B = 4
    program   0   1   2

    block     0            1            2              K, and V alike
    slot      . . . .      . . 0 .      . 2 . .

Cost: ``4·G·D`` elements a token. torch would need two indexed copies, and a mask before them for
the padding. Blocks and slots after Kwon et al., 2023.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mie.kernels.launch import cdiv
from mie.kernels.rope import head_tile


def kv_write_torch(
    k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor, k_NBGD: Tensor, v_NBGD: Tensor
) -> None:
    """What ``kv_write`` must do."""
    B = k_NBGD.shape[1]
    written = slots_T >= 0
    slots = slots_T[written].long()
    k_NBGD[slots // B, slots % B] = k_TGD[written]
    v_NBGD[slots // B, slots % B] = v_TGD[written]


@triton.jit
def _kv_write_kernel(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    k_stride_T: tl.tensor,
    k_stride_G: tl.tensor,
    v_stride_T: tl.tensor,
    v_stride_G: tl.tensor,
    k_cache_stride_N: tl.tensor,
    k_cache_stride_B: tl.tensor,
    k_cache_stride_G: tl.tensor,
    v_cache_stride_N: tl.tensor,
    v_cache_stride_B: tl.tensor,
    v_cache_stride_G: tl.tensor,
    B: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    TILES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = (tl.program_id(0) // TILES).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    heads_G1 = (tl.program_id(0) % TILES * HEADS + tl.arange(0, HEADS))[:, None]
    elements_1D = tl.arange(0, BLOCK)[None, :]
    exists = (heads_G1 < G) & (elements_1D < D)
    # All three loads are under way at once: whether the slot is one matters for the stores alone.
    k_ptr += token * k_stride_T
    v_ptr += token * v_stride_T
    k = tl.load(k_ptr + heads_G1 * k_stride_G + elements_1D, mask=exists)
    v = tl.load(v_ptr + heads_G1 * v_stride_G + elements_1D, mask=exists)
    k_cache_ptr += slot // B * k_cache_stride_N + slot % B * k_cache_stride_B
    v_cache_ptr += slot // B * v_cache_stride_N + slot % B * v_cache_stride_B
    written = exists & (slot >= 0)
    tl.store(k_cache_ptr + heads_G1 * k_cache_stride_G + elements_1D, k, mask=written)
    tl.store(v_cache_ptr + heads_G1 * v_cache_stride_G + elements_1D, v, mask=written)


def kv_write(k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor, k_NBGD: Tensor, v_NBGD: Tensor) -> None:
    """Write ``k_TGD[t]`` and ``v_TGD[t]`` to slot ``slots_T[t]`` of the caches, or nowhere below 0.

    No two tokens have the same slot. All strides are free as long as the elements of a head lie
    together. Raises ValueError for shapes, strides and dtypes that disagree; the slots are on the
    device and not looked at.
    """
    T = len(k_TGD)
    check_slots(slots_T, T, k_NBGD, v_NBGD, k_TGD.dtype)
    B, G, D = k_NBGD.shape[1:]
    for name, given in (("k", k_TGD), ("v", v_TGD)):
        if given.shape != (T, G, D) or given.dtype != k_NBGD.dtype:
            raise ValueError(
                f"{name} is {tuple(given.shape)} {given.dtype}, not {(T, G, D)} {k_NBGD.dtype}"
            )
        if given.stride(2) != 1:
            raise ValueError(f"elements of a head of {name} are {given.stride(2)} apart, not 1")
    if T:
        heads, block, num_warps = head_tile(G, D)
        tiles = cdiv(G, heads)
        _kv_write_kernel[(T * tiles,)](
            k_TGD, v_TGD, slots_T, k_NBGD, v_NBGD,
            *k_TGD.stride()[:2], *v_TGD.stride()[:2], *k_NBGD.stride()[:3], *v_NBGD.stride()[:3],
            B, G, D, tiles, heads, block, num_warps=num_warps,
        )  # fmt: skip


def check_slots(
    slots_T: Tensor, num_tokens: int, k_NBGD: Tensor, v_NBGD: Tensor, dtype: torch.dtype
) -> None:
    """One slot a token; caches of one shape, in ``dtype``, with the elements of a head together."""
    if slots_T.shape != (num_tokens,) or not slots_T.is_contiguous():
        raise ValueError(f"{num_tokens} tokens, slots of shape {tuple(slots_T.shape)}")
    if k_NBGD.shape != v_NBGD.shape:
        raise ValueError(f"K's slots are {tuple(k_NBGD.shape)}, V's {tuple(v_NBGD.shape)}")
    for name, cache in (("K", k_NBGD), ("V", v_NBGD)):
        if cache.dtype != dtype:
            raise ValueError(f"the cache of {name} is {cache.dtype}, the tokens {dtype}")
        if cache.stride(3) != 1:
            raise ValueError(f"elements of a head of {name} are {cache.stride(3)} apart, not 1")
