"""SwiGLU: the gate decides how much of each feature passes, in one launch.

Invariant: gate and up are read once, multiplied in float32, and rounded once.

A row of ``gate_up`` holds the gates of all F features, then their ups: the output of one linear
layer. Rows are cut into tiles, so that one row of a decode already keeps several programs busy::

    gate_up    g g g g g g g g g g | u u u u u u u u u u        F = 10, tiles of 4
               tile 0   1       2    tile 0  1       2          ``2`` is half masked
    y          y y y y y y y y y y
               program 0  1     2     of token 0; programs 3, 4, 5 are those of token 1

Cost: ``3·F`` elements a token: two read, one written. torch's ``silu(gate) * up`` moves ``5·F`` in
two launches and rounds in between. Shazeer, 2020.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mie.kernels.launch import cdiv, next_power_of_2

TILE = 1024  # features: 16 bytes of gate and of up for each of 128 threads, in half precision


def swiglu_torch(gate_up_T2F: Tensor) -> Tensor:
    """What ``swiglu`` must equal: ``y = silu(gate) · up``, ``silu(g) = g / (1 + exp(-g))``."""
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    return (gate_TF * torch.sigmoid(gate_TF) * up_TF).to(gate_up_T2F.dtype)


@triton.jit
def _swiglu_kernel(
    gate_up_ptr: tl.tensor,
    y_ptr: tl.tensor,
    gate_up_stride_T: tl.tensor,
    F: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = (tl.program_id(0) // TILES).to(tl.int64)
    features = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    exists = features < F
    gate_ptr = gate_up_ptr + token * gate_up_stride_T
    gate = tl.load(gate_ptr + features, mask=exists, other=0).to(tl.float32)
    up = tl.load(gate_ptr + F + features, mask=exists, other=0).to(tl.float32)
    tl.store(y_ptr + token * F + features, gate * tl.sigmoid(gate) * up, mask=exists)


def swiglu(gate_up_T2F: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``y_TF`` from ``gate_up_T2F``: gate in columns 0 … F - 1, up in F … 2F - 1.

    Rows may stand apart. ``out`` is contiguous and shares no memory with ``gate_up_T2F``.
    Raises ValueError for an odd number of columns and for an ``out`` of another shape.
    """
    T, columns = gate_up_T2F.shape
    F = columns // 2
    if columns % 2 or not columns:
        raise ValueError(f"{columns} columns are not a gate and an up of one width")
    if gate_up_T2F.stride(1) != 1:
        raise ValueError(f"columns of gate_up are {gate_up_T2F.stride(1)} apart, not 1")
    if out is None:
        out = torch.empty((T, F), dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    if out.shape != (T, F) or out.dtype != gate_up_T2F.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} with strides {out.stride()}, "
            f"not contiguous {(T, F)} {gate_up_T2F.dtype}"
        )
    if T:
        block = min(TILE, next_power_of_2(F))
        tiles = cdiv(F, block)
        _swiglu_kernel[(T * tiles,)](
            gate_up_T2F, out, gate_up_T2F.stride(0), F, tiles, block, num_warps=max(block // 256, 1)
        )
    return out
