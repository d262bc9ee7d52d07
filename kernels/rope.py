"""Rotary positions: each pair of a head turned by the angle of its position.

Invariant: angles and products are float32, the result is rounded once. All heads of a token turn by
the same row of cosines and sines.

A pair is ``(x[i], x[i + R])``, so the two halves of a head are two tiles of the same shape, and
turning them needs no shuffle::

                    R = 3          R = 3
    head 0      a a a .        b b b .         one program: HEADS = 4 heads of one token,
    head 1      a a a .        b b b .         two tiles [HEADS, next power of two of R]
    head 2      a a a .        b b b .         ``.`` is masked
      --        . . . .        . . . .
    cos, sin    c c c .        s s s .         one row for all heads

    a' = a · cos - b · sin         b' = a · sin + b · cos

Cost: ``2·H·D`` elements a token, and ``D`` float32 of angles for each program. Su et al., 2021; the
pairing of halves is that of GPT-NeoX and of every model in Hugging Face's format.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mie.kernels.launch import cdiv, next_power_of_2

PAIRS = 512  # of one program: 16 bytes of either half for each of 64 threads, in half precision


def rope_torch(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """What ``rope`` must equal."""
    a_THR, b_THR = x_THD.float().chunk(2, dim=-1)
    cos_T1R, sin_T1R = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    turned = (a_THR * cos_T1R - b_THR * sin_T1R, a_THR * sin_T1R + b_THR * cos_T1R)
    return torch.cat(turned, dim=-1).to(x_THD.dtype)


@triton.jit
def _rope_kernel(
    x_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride_T: tl.tensor,
    x_stride_H: tl.tensor,
    cos_stride_T: tl.tensor,
    sin_stride_T: tl.tensor,
    H: tl.constexpr,
    R: tl.constexpr,
    TILES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = (tl.program_id(0) // TILES).to(tl.int64)
    heads_H1 = (tl.program_id(0) % TILES * HEADS + tl.arange(0, HEADS))[:, None]
    pairs_HR = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], [HEADS, BLOCK])
    exists = (heads_H1 < H) & (pairs_HR < R)
    x = x_ptr + token * x_stride_T + heads_H1 * x_stride_H + pairs_HR
    a = tl.load(x, mask=exists, other=0).to(tl.float32)
    b = tl.load(x + R, mask=exists, other=0).to(tl.float32)
    cos_HR = tl.load(cos_ptr + token * cos_stride_T + pairs_HR, mask=pairs_HR < R, other=0)
    sin_HR = tl.load(sin_ptr + token * sin_stride_T + pairs_HR, mask=pairs_HR < R, other=0)
    y = y_ptr + (token * H + heads_H1) * (2 * R) + pairs_HR
    tl.store(y, a * cos_HR - b * sin_HR, mask=exists)
    tl.store(y + R, a * sin_HR + b * cos_HR, mask=exists)


def rope(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``y_THD``: pair i of every head of token t, turned by the angle of ``cos_TR[t, i]``.

    ``cos_TR`` and ``sin_TR`` are float32. Tokens and heads of ``x_THD`` may stand apart, so the
    query heads of a fused projection will do. ``out`` is contiguous and may be ``x_THD``.

    Raises ValueError for shapes and dtypes that disagree, and for elements of a head that do not
    lie together.
    """
    T, H, D = x_THD.shape
    R = D // 2
    for name, angles in (("cos", cos_TR), ("sin", sin_TR)):
        check_angles(name, angles, D)
        if len(angles) != T:
            raise ValueError(f"{T} tokens, {len(angles)} rows of {name}")
    if x_THD.stride(2) != 1:
        raise ValueError(f"elements of a head are {x_THD.stride(2)} apart, not 1")
    if out is None:
        out = torch.empty((T, H, D), dtype=x_THD.dtype, device=x_THD.device)
    if out.shape != x_THD.shape or out.dtype != x_THD.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} with strides {out.stride()}, "
            f"not contiguous {(T, H, D)} {x_THD.dtype}"
        )
    if T and H:
        heads, block, num_warps = head_tile(H, R)
        tiles = cdiv(H, heads)
        _rope_kernel[(T * tiles,)](
            x_THD, cos_TR, sin_TR, out, x_THD.stride(0), x_THD.stride(1),
            cos_TR.stride(0), sin_TR.stride(0), H, R, tiles, heads, block, num_warps=num_warps,
        )  # fmt: skip
    return out


def head_tile(num_heads: int, width: int) -> tuple[int, int, int]:
    """How one program covers heads of ``width`` elements: heads, elements a head, warps.

    Heads and elements are powers of two; what is beyond is masked.
    """
    block = next_power_of_2(width)
    heads = min(next_power_of_2(num_heads), max(PAIRS // block, 1))
    return heads, block, max(heads * block // 256, 1)


def check_angles(name: str, angles: Tensor, head_dim: int) -> None:
    """Rows of float32, one element for each pair of a head."""
    if head_dim % 2 or angles.shape[1:] != (head_dim // 2,):
        raise ValueError(f"{name} is {tuple(angles.shape)}, a head {head_dim} wide")
    if angles.dtype != torch.float32:
        raise ValueError(f"{name} is {angles.dtype}, not {torch.float32}")
    if angles.stride(1) != 1:
        raise ValueError(f"elements of {name} are {angles.stride(1)} apart, not 1")
