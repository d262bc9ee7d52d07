"""What any RMSNorm must do.

    rms_norm(x_TE, weight_E, eps) -> y_TE        y = x / sqrt(mean(x²) + eps) · weight

``x_TE`` holds one row for each of the step's T tokens; further leading axes are allowed. Zhang and
Sennrich, 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mie.spec.tensors import close, has_dtype, normal, untouched

RMSNorm = Callable[[Tensor, Tensor, float], Tensor]

EPS = 1e-6


def normed(x_TE: Tensor, weight_E: Tensor, eps: float = EPS) -> list[list[float]]:
    """The formula, row by row in Python's float64."""
    out = []
    for row in x_TE.tolist():
        root = math.sqrt(math.fsum(x * x for x in row) / len(row) + eps)
        out.append([x / root * w for x, w in zip(row, weight_E.tolist(), strict=True)])
    return out


def case_formula(rms_norm: RMSNorm) -> None:
    """Each row is divided by the root of its mean square, and nothing is subtracted first.
    Otherwise: every layer reads numbers of another size than it was trained on."""
    for T, E in ((1, 1), (3, 7), (5, 64)):
        x_TE, weight_E = normal(T, E, seed=E) + 1.0, normal(E, seed=E + 1)
        expected = normed(x_TE, weight_E)
        close(rms_norm(x_TE, weight_E, EPS), expected, 1e-5, f"rms_norm of a ({T}, {E}) tensor")


def case_eps_inside_root(rms_norm: RMSNorm) -> None:
    """`eps` is added to the mean square, under the root. Otherwise: quiet tokens, whose mean square
    is about `eps`, come out several times too large or too small."""
    x_TE, weight_E, eps = torch.full((1, 4), 1e-3), torch.ones(4), 1e-5
    expected = normed(x_TE, weight_E, eps)
    got = rms_norm(x_TE, weight_E, eps)
    close(got, expected, 1e-4, "rms_norm of a row of 0.001, eps=1e-5")


def case_zero_row(rms_norm: RMSNorm) -> None:
    """A row of zeros gives zeros. Otherwise: a padded row turns into NaN, and NaN spreads to every
    number that it is ever added to."""
    got = rms_norm(torch.zeros(2, 8), torch.ones(8), EPS)
    close(got, [[0.0] * 8] * 2, 0.0, "rms_norm of zeros")


def case_scale_invariance(rms_norm: RMSNorm) -> None:
    """A row multiplied by a number gives the same result. Otherwise: the residual stream, which
    grows from layer to layer, drowns the layers near the end."""
    x_TE, weight_E = normal(2, 16, seed=3), normal(16, seed=4)
    expected = normed(x_TE, weight_E, eps=0.0)
    for factor in (2.0**10, 2.0**40):
        got = rms_norm(x_TE * factor, weight_E, EPS)
        close(got, expected, 1e-5, f"rms_norm(x · {factor:g})")


def case_weight_per_channel(rms_norm: RMSNorm) -> None:
    """Channel e is multiplied by `weight[e]`. Otherwise: wherever the number of tokens happens to
    equal the width, tokens are weighted instead of channels and no shape complains."""
    weight_E = torch.tensor([1.0, 2.0, 3.0, 4.0])
    got = rms_norm(torch.ones(4, 4), weight_E, 0.0)
    close(got, [weight_E.tolist()] * 4, 1e-5, "rms_norm of ones, weight [1, 2, 3, 4]")


def case_row_alone(rms_norm: RMSNorm) -> None:
    """A row's result does not depend on the rows beside it. Otherwise: a request's answer changes
    with the requests it is batched with."""
    quiet, loud = normal(8, seed=5), 1000.0 * normal(8, seed=6)
    x_TE, weight_E = torch.stack((quiet, loud)), torch.ones(8)
    expected = normed(x_TE, weight_E)
    got = rms_norm(x_TE, weight_E, EPS)
    close(got, expected, 1e-5, "rms_norm of a quiet row above a loud one")


def case_last_axis(rms_norm: RMSNorm) -> None:
    """Only the last axis is normalised, however many stand before it. Otherwise: Qwen3, which norms
    every head of its queries and keys, mixes the heads of a token."""
    x_THD, weight_D = normal(2, 3, 8, seed=7), normal(8, seed=8)
    expected = [normed(heads, weight_D) for heads in x_THD]
    close(rms_norm(x_THD, weight_D, EPS), expected, 1e-5, "rms_norm of a (2, 3, 8) tensor")


def case_float32_inside(rms_norm: RMSNorm) -> None:
    """bfloat16 input is squared and averaged in float32. Otherwise: whole rows are off by a step of
    bfloat16 after each norm, and a model has dozens of them in a row."""
    x_TE = (1.0 + torch.arange(128) / 128).unsqueeze(1).expand(128, 16).to(torch.bfloat16)
    got = rms_norm(x_TE, torch.ones(16, dtype=torch.bfloat16), EPS)
    close(got, torch.ones(128, 16), 0.0, "rms_norm of rows that are constant, in bfloat16")


def case_half_does_not_overflow(rms_norm: RMSNorm) -> None:
    """A float16 row of 300 gives ones, though 300² is past float16's largest number. Otherwise: the
    mean square is infinite and the token's row becomes zero."""
    got = rms_norm(torch.full((1, 8), 300.0).half(), torch.ones(8).half(), EPS)
    close(got, [[1.0] * 8], 1e-3, "rms_norm of a row of 300, in float16")


def case_dtype_kept(rms_norm: RMSNorm) -> None:
    """The result has the input's dtype. Otherwise: the next matrix product refuses, or the whole
    model quietly runs at twice the bytes."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = rms_norm(normal(2, 8, seed=9).to(dtype), torch.ones(8).to(dtype), EPS)
        has_dtype(got, dtype, f"rms_norm of {dtype}")


def case_input_untouched(rms_norm: RMSNorm) -> None:
    """`x` and `weight` are only read. Otherwise: the residual connection adds a stream that the
    norm has already overwritten."""
    x_TE, weight_E = normal(2, 8, seed=10), normal(8, seed=11)
    with untouched(x=x_TE, weight=weight_E):
        rms_norm(x_TE, weight_E, EPS)
