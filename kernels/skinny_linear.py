"""Products of one or a few rows with a weight matrix, and what stands before and behind them.

Invariant: a weight is read once, by one program, whatever the number of rows; all else is small
and read again wherever it is needed. So a product costs what its weights cost to read, and norm,
activation and addition cost nothing besides: no launch, and no trip of the row through memory.

::

    norm_linear             rms_norm(x) · Wᵀ + b             query, key and value
    linear_residual         residual + x · Wᵀ                behind attention, and behind the MLP
    norm_linear_swiglu      silu(g) · u,  g, u = halves of rms_norm(x) · Wᵀ

    program n     reads rows of W     | K numbers in one piece |
                  x, once more        | K                      |   from the L2 cache
                  writes              ROWS numbers

A tensor core would multiply 16 rows or more at a time; here there are few, and the time is that of
the memory, so plain products and a sum over the row do. A large matrix is many programs, and a
small one is one wave of them that asks for all of its bytes at once: what decides at 2 to 12 MB is
how early the last byte is asked for. Each result is rounded where torch would round it between two
calls, so the numbers are the same but for the order of the sum.

Cost: ``N·K`` weights for each row of x, of which all but the first read comes from the L2 cache.
After the matrix-vector kernels of "Look Ma, No Bubbles" (Hazy Research, 2025) and of llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from mie.kernels.launch import begins_early, cdiv, next_power_of_2, wait_for_kernels_before
from mie.kernels.rms_norm import rms_norm_torch
from mie.kernels.swiglu import swiglu_torch

WIDEST = 8192  # of a norm: a program holds the row


def norm_linear_torch(
    x_TK: Tensor, norm_K: Tensor, eps: float, weight_NK: Tensor, bias_N: Tensor | None = None
) -> Tensor:
    """What ``norm_linear`` must equal."""
    return functional.linear(rms_norm_torch(x_TK, norm_K, eps), weight_NK, bias_N)


def linear_residual_torch(x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor) -> Tensor:
    """What ``linear_residual`` must equal."""
    return residual_TN + functional.linear(x_TK, weight_NK)


def norm_linear_swiglu_torch(x_TK: Tensor, norm_K: Tensor, eps: float, weight_NK: Tensor) -> Tensor:
    """What ``norm_linear_swiglu`` must equal."""
    return swiglu_torch(norm_linear_torch(x_TK, norm_K, eps, weight_NK))


@dataclass(frozen=True)
class SkinnyConfig:
    """``rows`` of the weight a program, ``columns`` of them at a time, by ``warps`` warps."""

    rows: int
    columns: int
    warps: int


def skinny_config(N: int, K: int, halves: int = 1) -> SkinnyConfig:
    """What was fastest on an H200: 4 KiB a program, and where the matrix is small, more threads for
    fewer rows, so that all of it is asked for in one wave."""
    if halves == 2 or N * K > 8 << 20:
        return SkinnyConfig(4, min(512, next_power_of_2(K)), 2 if halves == 2 or N > K else 4)
    return SkinnyConfig(2, min(1024, next_power_of_2(K)), 2 if N > K else 4)


@triton.jit
def _scale(x_ptr: tl.tensor, eps: tl.tensor, K: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """What the row of x is multiplied by before its weights."""
    k = tl.arange(0, WIDTH)
    x_K = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x_K * x_K, 0) / K + eps)


@triton.jit
def _weights(
    w_ptr: tl.tensor,
    n: tl.tensor,
    at: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Columns ``at`` to ``at + COLUMNS`` of rows n, each read once and not kept."""
    k = at + tl.arange(0, COLUMNS)
    w_ptr += n.to(tl.int64)[:, None] * K + k[None, :]
    if N % ROWS == 0 and K % COLUMNS == 0:
        return tl.load(w_ptr, eviction_policy="evict_first")
    inside = (n < N)[:, None] & (k < K)[None, :]
    return tl.load(w_ptr, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _column(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor | None,
    scale: tl.tensor,
    at: tl.tensor,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Numbers ``at`` to ``at + COLUMNS`` of x, normed if there is a norm."""
    k = at + tl.arange(0, COLUMNS)
    x_K = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        norm_K = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        x_K = (x_K * scale * norm_K).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x_K


@triton.jit
def _skinny_kernel(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor | None,
    w_ptr: tl.tensor,
    bias_ptr: tl.tensor | None,
    residual_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    t = tl.program_id(0)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x_ptr += t * K
    w_NK = _weights(w_ptr, n, 0, N, K, ROWS, COLUMNS)
    wait_for_kernels_before(EARLY)
    scale = 1.0
    if norm_ptr is not None:
        scale = _scale(x_ptr, eps, K, WIDTH)
    x_K = _column(x_ptr, norm_ptr, scale, 0, K, COLUMNS)
    sum_NK = w_NK.to(tl.float32) * x_K[None, :]
    for at in range(COLUMNS, K, COLUMNS):
        w_NK = _weights(w_ptr, n, at, N, K, ROWS, COLUMNS)
        x_K = _column(x_ptr, norm_ptr, scale, at, K, COLUMNS)
        sum_NK += w_NK.to(tl.float32) * x_K[None, :]
    y_N = tl.sum(sum_NK, 1)
    inside = n < N
    if bias_ptr is not None:
        y_N += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    y_N = y_N.to(out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        residual_N = tl.load(residual_ptr + t * N + n, mask=inside, other=0.0)
        y_N = (residual_N.to(tl.float32) + y_N.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + t * N + n, y_N, mask=inside)


@triton.jit
def _skinny_swiglu_kernel(
    x_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    w_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    F: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    t = tl.program_id(0)
    f = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x_ptr += t * K
    up_ptr = w_ptr + F * K
    gate_FK = _weights(w_ptr, f, 0, F, K, ROWS, COLUMNS)
    up_FK = _weights(up_ptr, f, 0, F, K, ROWS, COLUMNS)
    wait_for_kernels_before(EARLY)
    scale = _scale(x_ptr, eps, K, WIDTH)
    x_K = _column(x_ptr, norm_ptr, scale, 0, K, COLUMNS)
    gates_FK = gate_FK.to(tl.float32) * x_K[None, :]
    ups_FK = up_FK.to(tl.float32) * x_K[None, :]
    for at in range(COLUMNS, K, COLUMNS):
        gate_FK = _weights(w_ptr, f, at, F, K, ROWS, COLUMNS)
        up_FK = _weights(up_ptr, f, at, F, K, ROWS, COLUMNS)
        x_K = _column(x_ptr, norm_ptr, scale, at, K, COLUMNS)
        gates_FK += gate_FK.to(tl.float32) * x_K[None, :]
        ups_FK += up_FK.to(tl.float32) * x_K[None, :]
    dtype = out_ptr.dtype.element_ty
    gate_F = tl.sum(gates_FK, 1).to(dtype).to(tl.float32)
    up_F = tl.sum(ups_FK, 1).to(dtype).to(tl.float32)
    y_F = gate_F / (1.0 + tl.exp(-gate_F)) * up_F
    tl.store(out_ptr + t * F + f, y_F.to(dtype), mask=f < F)


def norm_linear(
    x_TK: Tensor,
    norm_K: Tensor,
    eps: float,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    config: SkinnyConfig | None = None,
) -> Tensor:
    """``rms_norm(x) · Wᵀ + b``: ``y_TN``. All contiguous, of one dtype; few rows T.

    Raises ValueError for shapes that disagree, and for rows wider than 8,192.
    """
    return _launch(x_TK, norm_K, eps, weight_NK, bias_N, None, config)


def linear_residual(
    x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor, *, config: SkinnyConfig | None = None
) -> Tensor:
    """``residual + x · Wᵀ``, the product rounded before it is added: ``y_TN``."""
    return _launch(x_TK, None, 0.0, weight_NK, None, residual_TN, config)


def norm_linear_swiglu(
    x_TK: Tensor,
    norm_K: Tensor,
    eps: float,
    weight_NK: Tensor,
    *,
    config: SkinnyConfig | None = None,
) -> Tensor:
    """``swiglu`` of both halves of ``rms_norm(x) · Wᵀ``: ``y_TF`` with F = N / 2."""
    T, K, N = _check(x_TK, norm_K, weight_NK)
    config = config or skinny_config(N, K, halves=2)
    early = begins_early(x_TK.device)
    out_TF = torch.empty(T, N // 2, dtype=x_TK.dtype, device=x_TK.device)
    _skinny_swiglu_kernel[(T, cdiv(N // 2, config.rows))](
        x_TK,
        norm_K,
        weight_NK,
        out_TF,
        eps,
        F=N // 2,
        K=K,
        ROWS=config.rows,
        COLUMNS=config.columns,
        WIDTH=next_power_of_2(K),
        EARLY=early,
        num_warps=config.warps,
        launch_pdl=early,
    )
    return out_TF


def _launch(
    x_TK: Tensor,
    norm_K: Tensor | None,
    eps: float,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    residual_TN: Tensor | None,
    config: SkinnyConfig | None,
) -> Tensor:
    T, K, N = _check(x_TK, norm_K, weight_NK)
    config = config or skinny_config(N, K)
    early = begins_early(x_TK.device)
    out_TN = torch.empty(T, N, dtype=x_TK.dtype, device=x_TK.device)
    if residual_TN is not None and (residual_TN.shape != (T, N) or not residual_TN.is_contiguous()):
        shape, strides = tuple(residual_TN.shape), residual_TN.stride()
        raise ValueError(f"residual is {shape} with strides {strides}, not contiguous {(T, N)}")
    if bias_N is not None and (bias_N.shape != (N,) or not bias_N.is_contiguous()):
        raise ValueError(f"bias is {tuple(bias_N.shape)}, the product {(T, N)}")
    _skinny_kernel[(T, cdiv(N, config.rows))](
        x_TK,
        norm_K,
        weight_NK,
        bias_N,
        residual_TN,
        out_TN,
        eps,
        N=N,
        K=K,
        ROWS=config.rows,
        COLUMNS=config.columns,
        WIDTH=next_power_of_2(K),
        EARLY=early,
        num_warps=config.warps,
        launch_pdl=early,
    )
    return out_TN


def _check(x_TK: Tensor, norm_K: Tensor | None, weight_NK: Tensor) -> tuple[int, int, int]:
    (T, K), (N, columns) = x_TK.shape, weight_NK.shape
    if x_TK.dtype != weight_NK.dtype:
        raise ValueError(f"x is {x_TK.dtype}, the weight {weight_NK.dtype}")
    if columns != K:
        raise ValueError(f"x has {K} columns, the weight {columns}")
    if norm_K is not None and norm_K.shape != (K,):
        raise ValueError(f"x has {K} columns, the norm {tuple(norm_K.shape)}")
    if norm_K is not None and K > WIDEST:
        raise ValueError(f"a norm over {K} numbers; at most {WIDEST} fit a program")
    if not (x_TK.is_contiguous() and weight_NK.is_contiguous()):
        raise ValueError(f"x has strides {x_TK.stride()}, the weight {weight_NK.stride()}")
    return T, K, N
