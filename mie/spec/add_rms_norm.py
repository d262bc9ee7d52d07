"""What any fused addition and RMSNorm must do.

    add_rms_norm(x_TE, residual_TE, weight_E, eps) -> (y_TE, sum_TE)

    sum = x + residual, rounded to their dtype        y = sum / sqrt(mean(sum²) + eps) · weight

The residual stream comes in as ``residual_TE``, what a branch has computed as ``x_TE``; the stream
goes on as ``sum_TE``, and the next branch reads ``y_TE``. What the norm alone must do is in
``mie.spec.rms_norm``; here is what is new when both are one. No case needs more than 16 channels,
and none rounds to bfloat16, so a kernel in Triton's interpreter can be held to them as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mie.spec.expect import CounterExample
from mie.spec.rms_norm import EPS, normed
from mie.spec.tensors import close, has_dtype, normal, same_bits, untouched

AddRMSNorm = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]

FLOAT16_HALF_STEP = 2.0**-11  # relative: how far rounding to 11 significant bits may go


def pair(got: Any, what: str) -> tuple[Any, Any]:
    """``got``, if it is two results at all."""
    if not isinstance(got, (tuple, list)) or len(got) != 2:
        raise CounterExample(f"{what}: expected two results, (y, sum), got {type(got).__name__}")
    return got[0], got[1]


def case_formula(add_rms_norm: AddRMSNorm) -> None:
    """The first result is the RMSNorm of `x + residual`, row by row. Otherwise: each branch reads
    numbers of another size than it was trained on, or misses what the branch before it found."""
    for T, E in ((1, 1), (3, 7), (2, 16)):
        x_TE, residual_TE = normal(T, E, seed=E), normal(T, E, seed=E + 1) + 1.0
        weight_E = normal(E, seed=E + 2)
        what = f"add_rms_norm of ({T}, {E}) tensors"
        y_TE, _ = pair(add_rms_norm(x_TE, residual_TE, weight_E, EPS), what)
        close(y_TE, normed(x_TE + residual_TE, weight_E), 1e-5, f"{what}, y")


def case_sum(add_rms_norm: AddRMSNorm) -> None:
    """The second result is `x + residual`, neither normed nor weighted. Otherwise: the stream that
    the layers add to is lost at the first norm, and each layer starts from the last one alone."""
    for dtype in (torch.float32, torch.float16):
        x_TE, residual_TE = normal(3, 6, seed=1).to(dtype), (9 * normal(3, 6, seed=2)).to(dtype)
        what = f"add_rms_norm in {dtype}"
        _, sum_TE = pair(add_rms_norm(x_TE, residual_TE, torch.ones(6).to(dtype), EPS), what)
        same_bits(sum_TE, x_TE + residual_TE, f"{what}, sum")


def case_norm_of_the_rounded_sum(add_rms_norm: AddRMSNorm) -> None:
    """The norm reads the sum as it was rounded to the dtype. Otherwise: what is normed is not the
    stream that goes on, and the tokens differ from those of an engine that adds first."""
    x_TE, residual_TE = normal(4, 16, seed=3).half(), (30 + normal(4, 16, seed=4)).half()
    weight_E = torch.full((16,), 8.0).half()  # all results lie above 1, where rounding is relative
    what = "add_rms_norm of 4 rows near 30, in float16"
    y_TE, _ = pair(add_rms_norm(x_TE, residual_TE, weight_E, EPS), what)
    expected = normed(x_TE + residual_TE, weight_E)
    close(y_TE, expected, 1.02 * FLOAT16_HALF_STEP, f"{what}, y, to half a step")


def case_row_alone(add_rms_norm: AddRMSNorm) -> None:
    """A row's result does not depend on the rows beside it, though 6 channels fill no tile.
    Otherwise: a request's answer changes with the requests it is batched with."""
    x_TE = torch.stack((normal(6, seed=5), 1000.0 * normal(6, seed=6), normal(6, seed=7)))
    residual_TE, weight_E = normal(3, 6, seed=8), torch.ones(6)
    what = "add_rms_norm of a loud row between two quiet ones"
    y_TE, sum_TE = pair(add_rms_norm(x_TE, residual_TE, weight_E, EPS), what)
    close(sum_TE, x_TE + residual_TE, 1e-6, f"{what}, sum")
    close(y_TE, normed(x_TE + residual_TE, weight_E), 1e-5, f"{what}, y")


def case_cancelled_row(add_rms_norm: AddRMSNorm) -> None:
    """Where `x` takes away all of the residual, both results are zeros. Otherwise: zero divided by
    zero is NaN, and NaN spreads to every number that it is ever added to."""
    x_TE = normal(2, 8, seed=9)
    what = "add_rms_norm of x and -x"
    y_TE, sum_TE = pair(add_rms_norm(x_TE, -x_TE, torch.ones(8), EPS), what)
    close(sum_TE, [[0.0] * 8] * 2, 0.0, f"{what}, sum")
    close(y_TE, [[0.0] * 8] * 2, 0.0, f"{what}, y")


def case_half_does_not_overflow(add_rms_norm: AddRMSNorm) -> None:
    """A float16 row of 200 + 100 is normed to ones, though 300² is past float16's largest number.
    Otherwise: the mean square is infinite and the token's row becomes zero."""
    x_TE, residual_TE = torch.full((1, 8), 200.0).half(), torch.full((1, 8), 100.0).half()
    what = "add_rms_norm of rows of 200 and 100, in float16"
    y_TE, _ = pair(add_rms_norm(x_TE, residual_TE, torch.ones(8).half(), EPS), what)
    close(y_TE, [[1.0] * 8], 1e-3, f"{what}, y")


def case_dtype_kept(add_rms_norm: AddRMSNorm) -> None:
    """Both results have the inputs' dtype. Otherwise: the next matrix product refuses, or the
    stream grows to float32 and every layer moves twice the bytes."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x_TE, residual_TE = normal(2, 8, seed=10).to(dtype), normal(2, 8, seed=11).to(dtype)
        what = f"add_rms_norm of {dtype}"
        y_TE, sum_TE = pair(add_rms_norm(x_TE, residual_TE, torch.ones(8).to(dtype), EPS), what)
        has_dtype(y_TE, dtype, f"{what}, y")
        has_dtype(sum_TE, dtype, f"{what}, sum")


def case_input_untouched(add_rms_norm: AddRMSNorm) -> None:
    """`x`, `residual` and `weight` are only read. Otherwise: whoever still holds the old stream, a
    test or a layer that is computed twice, finds the new one in it."""
    x_TE, residual_TE, weight_E = normal(2, 8, seed=12), normal(2, 8, seed=13), normal(8, seed=14)
    with untouched(x=x_TE, residual=residual_TE, weight=weight_E):
        add_rms_norm(x_TE, residual_TE, weight_E, EPS)
