"""RMSNorm in another way that is right, and in the ways that people get it wrong."""

import torch
from torch.nn.functional import layer_norm
from torch.nn.functional import rms_norm as torch_rms_norm


def through_torch_in_float64(x, weight, eps):
    return torch_rms_norm(x.double(), weight.shape, weight.double(), eps).to(x.dtype)


def normalised(x, eps):
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def is_layer_norm(x, weight, eps):
    return layer_norm(x.float(), weight.shape, weight.float(), None, eps).to(x.dtype)


def sum_of_squares(x, weight, eps):
    return (x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + eps) * weight).to(x.dtype)


def weight_plus_one(x, weight, eps):
    return (normalised(x, eps) * (1 + weight)).to(x.dtype)


def eps_outside_root(x, weight, eps):
    return (x / (x.float().square().mean(-1, keepdim=True).sqrt() + eps) * weight).to(x.dtype)


def eps_forgotten(x, weight, eps):
    return (normalised(x, 0.0) * weight).to(x.dtype)


def clamped(x, weight, eps):
    return (normalised(x.float().clamp(-1e6, 1e6), eps) * weight).to(x.dtype)


def weight_per_row(x, weight, eps):
    y = normalised(x, eps)
    square = y.shape[0] == weight.shape[0] and y.dim() == 2
    return (y * (weight.unsqueeze(1) if square else weight)).to(x.dtype)


def mean_over_everything(x, weight, eps):
    return (x * torch.rsqrt(x.float().square().mean() + eps) * weight).to(x.dtype)


def second_axis(x, weight, eps):
    return (x * torch.rsqrt(x.float().square().mean(1, keepdim=True) + eps) * weight).to(x.dtype)


def in_the_input_dtype(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def float32_for_bfloat16_only(x, weight, eps):
    inside = x.float() if x.dtype == torch.bfloat16 else x
    return (inside * torch.rsqrt(inside.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def stays_float32(x, weight, eps):
    return normalised(x, eps) * weight.float()


def in_place(x, weight, eps):
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return x.copy_(x * scale * weight)


ALTERNATIVES = [through_torch_in_float64]
KILLED_BY = {
    is_layer_norm: "formula",
    sum_of_squares: "formula",
    weight_plus_one: "formula",
    eps_outside_root: "eps_inside_root",
    eps_forgotten: "zero_row",
    clamped: "scale_invariance",
    weight_per_row: "weight_per_channel",
    mean_over_everything: "row_alone",
    second_axis: "last_axis",
    in_the_input_dtype: "float32_inside",
    float32_for_bfloat16_only: "half_does_not_overflow",
    stays_float32: "dtype_kept",
    in_place: "input_untouched",
}
