"""What any SwiGLU must do.

    swiglu(gate_TF, up_TF) -> y_TF        y = silu(gate) · up,   silu(g) = g / (1 + exp(-g))

Every element by itself: the gate decides how much of a feature passes. Shazeer, 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mie.spec.tensors import BFLOAT16_STEP, close, has_dtype, normal, untouched

SwiGLU = Callable[[Tensor, Tensor], Tensor]


def gated(gate_TF: Tensor, up_TF: Tensor) -> list[list[float]]:
    """The formula, element by element in Python's float64; for gates above -700."""
    rows = zip(gate_TF.tolist(), up_TF.tolist(), strict=True)
    return [[silu(g) * u for g, u in zip(gates, ups, strict=True)] for gates, ups in rows]


def silu(g: float) -> float:
    return g / (1.0 + math.exp(-g))


def case_formula(swiglu: SwiGLU) -> None:
    """Each feature is `silu(gate) · up`. Otherwise: a network trained with this curve runs with
    another one, close enough to stay fluent and to be wrong."""
    for T, F in ((1, 1), (3, 5), (4, 33)):
        gate_TF, up_TF = 3.0 * normal(T, F, seed=F), normal(T, F, seed=F + 1)
        expected = gated(gate_TF, up_TF)
        got = swiglu(gate_TF, up_TF)
        close(got, expected, 1e-5, f"swiglu of ({T}, {F}) tensors")


def case_gate_and_up_differ(swiglu: SwiGLU) -> None:
    """The first argument goes through silu and the second does not. Otherwise: the two halves of
    the MLP's first product are exchanged; shapes and sizes look right and the text is noise."""
    got = swiglu(torch.tensor([[4.0, -4.0]]), torch.tensor([[-4.0, 4.0]]))
    expected = [[silu(4.0) * -4.0, silu(-4.0) * 4.0]]
    close(got, expected, 1e-5, "swiglu(gate=[4, -4], up=[-4, 4])")


def case_linear_in_up(swiglu: SwiGLU) -> None:
    """Twice the `up` gives twice the result, without a limit. Otherwise: the few very large
    features that language models rely on are cut off."""
    gate_TF, up_TF = torch.ones(1, 5), torch.tensor([[-30_000.0, -1.0, 0.0, 1.0, 30_000.0]])
    expected = gated(gate_TF, up_TF)
    got = swiglu(gate_TF, up_TF)
    close(got, expected, 1e-5, "swiglu(gate=1, up=[-30000, -1, 0, 1, 30000])")


def case_extreme_gates(swiglu: SwiGLU) -> None:
    """A gate far below zero passes nothing and one far above passes itself, without NaN. Otherwise:
    `exp` overflows, infinity divides infinity, and the rest of the answer is NaN."""
    gate_TF = torch.tensor([[-10_000.0, -100.0, 100.0, 10_000.0]])
    got = swiglu(gate_TF, torch.ones(1, 4))
    close(got, [[0.0, 0.0, 100.0, 10_000.0]], 1e-5, "swiglu(gate=[-10000, -100, 100, 10000], up=1)")


def case_float32_inside(swiglu: SwiGLU) -> None:
    """bfloat16 input is gated in float32, so that at most two roundings show. Otherwise: the
    rounded exponential and its reciprocal cost a further bit in every layer."""
    gate_TF = torch.arange(-8, 8, 1 / 32).unsqueeze(0).to(torch.bfloat16)
    up_TF = torch.full_like(gate_TF, 300.0)
    expected = gated(gate_TF, up_TF)
    got = swiglu(gate_TF, up_TF)
    close(got, expected, BFLOAT16_STEP, "swiglu(gate=-8 … 8, up=300), in bfloat16")


def case_halves_of_one_tensor(swiglu: SwiGLU) -> None:
    """Gate and up may be two halves of one tensor, with strides. Otherwise: the fused product that
    makes both must be copied first, or neighbours in memory are taken for neighbours in the row."""
    both = normal(3, 8, seed=12)
    gate_TF, up_TF = both.chunk(2, dim=-1)
    expected = gated(gate_TF, up_TF)
    got = swiglu(gate_TF, up_TF)
    close(got, expected, 1e-5, "swiglu of the halves of a (3, 8) tensor")


def case_dtype_kept(swiglu: SwiGLU) -> None:
    """The result has the input's dtype. Otherwise: the next matrix product refuses, or the whole
    model quietly runs at twice the bytes."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = swiglu(normal(2, 4, seed=13).to(dtype), normal(2, 4, seed=14).to(dtype))
        has_dtype(got, dtype, f"swiglu of {dtype}")


def case_input_untouched(swiglu: SwiGLU) -> None:
    """`gate` and `up` are only read. Otherwise: where they are views of a buffer that is used
    again, the next reader finds this result in it."""
    gate_TF, up_TF = normal(2, 4, seed=15), normal(2, 4, seed=16)
    with untouched(gate=gate_TF, up=up_TF):
        swiglu(gate_TF, up_TF)
