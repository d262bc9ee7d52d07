"""The fused addition and norm in other ways that are right, and in the ways that it goes wrong."""

import torch
from torch.nn.functional import rms_norm as torch_rms_norm

from mie.kernels.launch import INTERPRETED, next_power_of_2
from mie.kernels.rms_norm import add_rms_norm as triton_kernel


def normed(total, weight, eps, dtype):
    scale = torch.rsqrt(total.float().square().mean(-1, keepdim=True) + eps)
    return (total.float() * scale * weight.float()).to(dtype)


def through_torch_in_float64(x, residual, weight, eps):
    total = (x.double() + residual.double()).to(x.dtype)
    y = torch_rms_norm(total.double(), weight.shape, weight.double(), eps)
    return y.to(x.dtype), total


def residual_forgotten(x, residual, weight, eps):
    return normed(x, weight, eps, x.dtype), x + residual


def alone(x, residual, weight, eps):
    return normed(x + residual, weight, eps, x.dtype)


def normed_before_the_sum(x, residual, weight, eps):
    y = normed(x, weight, eps, x.dtype) + residual
    return y, x + residual


def stream_is_normed(x, residual, weight, eps):
    y = normed(x + residual, weight, eps, x.dtype)
    return y, y


def stream_is_the_old_one(x, residual, weight, eps):
    return normed(x + residual, weight, eps, x.dtype), residual.clone()


def results_swapped(x, residual, weight, eps):
    return x + residual, normed(x + residual, weight, eps, x.dtype)


def normed_before_it_is_rounded(x, residual, weight, eps):
    total = x.float() + residual.float()
    return normed(total, weight, eps, x.dtype), total.to(x.dtype)


def reads_a_whole_tile(x, residual, weight, eps):
    """A kernel without its mask: behind a short row it finds the next one."""
    width, tile = x.shape[-1], next_power_of_2(x.shape[-1])
    total = x + residual
    memory = torch.cat((total.flatten(), torch.zeros(tile - width)))
    tiles = memory.as_strided((len(x), tile), (width, 1))
    scale = torch.rsqrt(tiles.float().square().sum(-1, keepdim=True) / width + eps)
    return (total.float() * scale * weight.float()).to(x.dtype), total


def eps_forgotten(x, residual, weight, eps):
    return normed(x + residual, weight, 0.0, x.dtype), x + residual


def squares_in_the_input_dtype(x, residual, weight, eps):
    total = x + residual
    return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * weight, total


def stream_stays_float32(x, residual, weight, eps):
    total = x.float() + residual.float()
    return normed(total.to(x.dtype), weight, eps, x.dtype), total


def sum_in_place_of_the_residual(x, residual, weight, eps):
    residual += x
    return normed(residual, weight, eps, x.dtype), residual


ALTERNATIVES = [through_torch_in_float64, *([triton_kernel] if INTERPRETED else [])]
KILLED_BY = {
    residual_forgotten: "formula",
    normed_before_the_sum: "formula",
    alone: "formula",
    results_swapped: "formula",
    stream_is_normed: "sum",
    stream_is_the_old_one: "sum",
    normed_before_it_is_rounded: "norm_of_the_rounded_sum",
    reads_a_whole_tile: "row_alone",
    eps_forgotten: "cancelled_row",
    squares_in_the_input_dtype: "half_does_not_overflow",
    stream_stays_float32: "dtype_kept",
    sum_in_place_of_the_residual: "input_untouched",
}
