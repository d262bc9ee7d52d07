"""Products of few rows, with norm, activation and addition, equal their torch functions."""

from __future__ import annotations

import pytest
import torch
from kernel_data import DEVICE, DTYPES, assert_close

from mie.kernels.skinny_linear import (
    SkinnyConfig,
    linear_residual,
    linear_residual_torch,
    norm_linear,
    norm_linear_swiglu,
    norm_linear_swiglu_torch,
    norm_linear_torch,
    skinny_config,
)

EPS = 1e-5
SHAPES = [(1, 64, 48), (3, 100, 72), (2, 576, 40), (1, 1536, 24), (4, 2050, 9)]  # T, K, N
CONFIG = SkinnyConfig(8, 1024, 4)


def normal(*shape: int, seed: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def data(T, K, N, dtype):
    """Outputs near 1: the weights are scaled by the square root of the row."""
    x_TK, norm_K = normal(T, K, seed=1, dtype=dtype), normal(K, seed=2, dtype=dtype)
    weight_NK = normal(N, K, seed=3, dtype=dtype, scale=K**-0.5)
    return x_TK, norm_K, weight_NK


def oracle(function, *arguments):
    """In float64, rounded nowhere: the kernel may round where torch does between two calls."""
    return function(*[a.double() if isinstance(a, torch.Tensor) else a for a in arguments])


def close(got, expected, dtype, K):
    """Three roundings to the dtype one after another, and a sum over K."""
    assert got.dtype == dtype
    eps = torch.finfo(dtype).eps
    bound = 4 * eps if dtype != torch.float32 else 16 * eps * K**0.5
    scale = expected.abs().max().clamp(min=1.0)
    assert (got.double() - expected).abs().max() <= bound * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "K", "N"), SHAPES)
def test_norm_linear(T, K, N, dtype):
    x_TK, norm_K, weight_NK = data(T, K, N, dtype)
    bias_N = normal(N, seed=4, dtype=dtype)
    for bias in (None, bias_N):
        got = norm_linear(x_TK, norm_K, EPS, weight_NK, bias, config=CONFIG)
        arguments = (x_TK, norm_K, EPS, weight_NK, bias)
        close(got, oracle(exact_norm_linear, *arguments), dtype, K)
        if dtype == torch.float32:
            assert_close(got, norm_linear_torch(*arguments), dtype, K)


def exact_norm_linear(x_TK, norm_K, eps, weight_NK, bias_N=None):
    normed = x_TK * (x_TK.square().mean(-1, keepdim=True) + eps).rsqrt() * norm_K
    return torch.nn.functional.linear(normed, weight_NK, bias_N)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "K", "N"), SHAPES)
def test_linear_residual(T, K, N, dtype):
    x_TK, _, weight_NK = data(T, K, N, dtype)
    residual_TN = normal(T, N, seed=5, dtype=dtype)
    before = residual_TN.clone()
    got = linear_residual(x_TK, weight_NK, residual_TN, config=CONFIG)
    close(got, oracle(linear_residual_torch, x_TK, weight_NK, residual_TN), dtype, K)
    assert torch.equal(residual_TN, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "K", "N"), [shape for shape in SHAPES if shape[2] % 2 == 0])
def test_norm_linear_swiglu(T, K, N, dtype):
    x_TK, norm_K, weight_NK = data(T, K, N, dtype)
    config = SkinnyConfig(4, 1024, 4)
    got = norm_linear_swiglu(x_TK, norm_K, EPS, weight_NK, config=config)
    gate, up = exact_norm_linear(x_TK.double(), norm_K.double(), EPS, weight_NK.double()).chunk(
        2, dim=-1
    )
    close(got, torch.nn.functional.silu(gate) * up, dtype, K)
    if dtype == torch.float32:
        assert_close(got, norm_linear_swiglu_torch(x_TK, norm_K, EPS, weight_NK), dtype, K)


def test_nothing_is_written_behind_the_rows():
    """An N that no tile divides: the last program has rows that are none."""
    x_TK, _, weight_NK = data(2, 64, 9, torch.float32)
    storage = torch.cat((weight_NK, torch.full((7, 64), float("nan"), device=DEVICE)))
    residual_TN = torch.zeros(2, 9, device=DEVICE)
    got = linear_residual(x_TK, storage[:9], residual_TN, config=CONFIG)
    assert_close(got, linear_residual_torch(x_TK, weight_NK, residual_TN), torch.float32, 64)


@pytest.mark.parametrize(
    ("N", "K"), [(4096, 1024), (1024, 2048), (1024, 3072), (4608, 3584), (3584, 18944), (6, 8)]
)
def test_configurations_fill_a_gpu(N, K):
    config = skinny_config(N, K)
    assert config.columns <= max(1024, K) and config.rows >= 1
    assert N // config.rows >= min(256, N // 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_NK": torch.zeros(8, 63)}, "64 columns, the weight 63"),
        ({"norm_K": torch.zeros(65)}, "64 columns, the norm"),
        ({"x_TK": torch.zeros(64, 2).T}, "strides"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    given = {"x_TK": torch.zeros(2, 64), "norm_K": torch.zeros(64), "weight_NK": torch.zeros(8, 64)}
    given |= change
    with pytest.raises(ValueError, match=words):
        norm_linear(given["x_TK"], given["norm_K"], EPS, given["weight_NK"])
