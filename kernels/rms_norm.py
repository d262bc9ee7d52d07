"""Root mean square norm of rows, alone or with the residual added first: one read, one write.

Invariant: a row is read once into registers. Squares are summed and scaled in float32, the result
is rounded once. ``add_rms_norm`` norms the sum *as it was rounded*, so whoever reads that sum
later sees what was normed.

One program computes one row::

    program 0    x x x x x x x x x . . .      E = 9 channels in a tile of 16, the next power
    program 1    x x x x x x x x x . . .      of two; ``.`` is masked and counts as 0

    x ──┬─ square, sum over the row ─ 1/sqrt ─┐
        └───────────── times ─────────────────┴─ times weight ── y
    weight ────────────────────────────────────────┘     read before the sum, which waits

Cost: ``rms_norm`` moves ``2·E`` elements a row and ``add_rms_norm`` ``4·E``, beside the weight,
which stays in the cache. Apart they would be ``3·E`` for the sum and ``2·E`` for the norm, in two
launches. The formula is Zhang and Sennrich's (2019); that a row stays in registers between its two
uses is the fused softmax of the Triton tutorials.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mie.kernels.launch import next_power_of_2

MOST_CHANNELS = 32_768  # of a row in registers: 32 for each of 1,024 threads


def rms_norm_torch(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """What ``rms_norm`` must equal: ``y = x / sqrt(mean(x²) + eps) · weight``."""
    x = x_TE.float()
    scale_T1 = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return (x * scale_T1 * weight_E.float()).to(x_TE.dtype)


def add_rms_norm_torch(
    x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """What ``add_rms_norm`` must equal: the norm of the rounded sum, and that sum."""
    sum_TE = (x_TE.float() + residual_TE.float()).to(x_TE.dtype)
    return rms_norm_torch(sum_TE, weight_E, eps), sum_TE


@triton.jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride_T: tl.tensor,
    eps: tl.tensor,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BLOCK)
    exists = channels < E
    x = tl.load(x_ptr + row * x_stride_T + channels, mask=exists, other=0).to(tl.float32)
    weight = tl.load(weight_ptr + channels, mask=exists, other=0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / E + eps) * weight
    tl.store(y_ptr + row * E + channels, y, mask=exists)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    x_stride_T: tl.tensor,
    residual_stride_T: tl.tensor,
    eps: tl.tensor,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BLOCK)
    exists = channels < E
    x = tl.load(x_ptr + row * x_stride_T + channels, mask=exists, other=0)
    residual = tl.load(residual_ptr + row * residual_stride_T + channels, mask=exists, other=0)
    weight = tl.load(weight_ptr + channels, mask=exists, other=0).to(tl.float32)
    rounded = (x.to(tl.float32) + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * E + channels, rounded, mask=exists)
    total = rounded.to(tl.float32)
    y = total * tl.rsqrt(tl.sum(total * total) / E + eps) * weight
    tl.store(y_ptr + row * E + channels, y, mask=exists)


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """``y_TE``, the norm of each row of ``x_TE``, which may have any number of leading dimensions.

    Rows may stand apart from each other, at one distance: a slice of columns of a matrix will do.
    ``out`` is contiguous and may be ``x_TE``. Zhang and Sennrich, 2019.

    Raises ValueError for a weight of another width, and for rows that no single distance reaches.
    """
    E = _width(x_TE, weight_E)
    stride_T = _row_stride(x_TE, "x")
    y_TE = _output(out, x_TE)
    num_rows = x_TE.numel() // E
    if num_rows:
        block = next_power_of_2(E)
        _rms_norm_kernel[(num_rows,)](
            x_TE, weight_E, y_TE, stride_T, eps, E, block, num_warps=num_warps(block)
        )
    return y_TE


def add_rms_norm(
    x_TE: Tensor,
    residual_TE: Tensor,
    weight_E: Tensor,
    eps: float,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """``(y_TE, sum_TE)``: the sum of both rounded to their dtype, and the norm of that sum.

    ``out`` is ``(y_TE, sum_TE)``, contiguous; the sum may take the place of ``residual_TE``, and
    ``y`` that of ``x_TE``. Raises ValueError as ``rms_norm``, and for summands that differ.
    """
    E = _width(x_TE, weight_E)
    if x_TE.shape != residual_TE.shape or x_TE.dtype != residual_TE.dtype:
        raise ValueError(
            f"x is {tuple(x_TE.shape)} {x_TE.dtype}, "
            f"residual {tuple(residual_TE.shape)} {residual_TE.dtype}"
        )
    strides = _row_stride(x_TE, "x"), _row_stride(residual_TE, "residual")
    y_TE, sum_TE = (_output(given, x_TE) for given in out or (None, None))
    num_rows = x_TE.numel() // E
    if num_rows:
        block = next_power_of_2(E)
        _add_rms_norm_kernel[(num_rows,)](
            x_TE, residual_TE, weight_E, y_TE, sum_TE, *strides, eps, E, block,
            num_warps=num_warps(block),
        )  # fmt: skip
    return y_TE, sum_TE


def num_warps(block: int) -> int:
    """Warps for a row of ``block`` elements: each thread takes 16 of them, in 16 bytes at a time.

    Fewer warps have less to wait for in the sum over the row; more have more bytes in flight.
    """
    return min(max(block // 512, 1), 32)


def _width(x_TE: Tensor, weight_E: Tensor) -> int:
    E = x_TE.shape[-1]
    if weight_E.shape != (E,):
        raise ValueError(f"rows of {E} channels, a weight of {tuple(weight_E.shape)}")
    if not weight_E.is_contiguous():
        raise ValueError(f"the weight's channels are {weight_E.stride(0)} apart, not 1")
    if not 0 < E <= MOST_CHANNELS:
        raise ValueError(f"rows of {E} channels; 1 to {MOST_CHANNELS} are possible")
    return E


def _row_stride(x_TE: Tensor, name: str) -> int:
    """The one distance between rows, in elements."""
    E = x_TE.shape[-1]
    if E > 1 and x_TE.stride(-1) != 1:
        raise ValueError(f"channels of {name} are {x_TE.stride(-1)} apart, not 1")
    try:
        return x_TE.view(-1, E).stride(0)
    except RuntimeError:
        raise ValueError(
            f"rows of {name} lie at several distances: "
            f"shape {tuple(x_TE.shape)}, strides {x_TE.stride()}"
        ) from None


def _output(given: Tensor | None, like: Tensor) -> Tensor:
    if given is None:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if given.shape != like.shape or given.dtype != like.dtype:
        raise ValueError(
            f"out is {tuple(given.shape)} {given.dtype}, x {tuple(like.shape)} {like.dtype}"
        )
    if not given.is_contiguous():
        raise ValueError(f"out has strides {given.stride()}, not those of {tuple(given.shape)}")
    return given
