"""SwiGLU in another way that is right, and in the ways that people get it wrong."""

import torch
from torch.nn.functional import gelu, silu


def through_tanh_in_float64(gate, up):
    half = gate.double() / 2
    return (half * (1 + torch.tanh(half)) * up.double()).to(up.dtype)


def is_geglu(gate, up):
    return (gelu(gate.float()) * up).to(up.dtype)


def is_plain_glu(gate, up):
    return (torch.sigmoid(gate.float()) * up).to(up.dtype)


def halves_exchanged(gate, up):
    return (gate.float() * silu(up.float())).to(up.dtype)


def silu_of_the_product(gate, up):
    return silu(gate.float() * up.float()).to(up.dtype)


def up_clamped(gate, up):
    return (silu(gate.float()) * up.float().clamp(-100, 100)).to(up.dtype)


def exp_of_the_gate(gate, up):
    e = torch.exp(gate.float())
    return (gate * e / (1 + e) * up).to(up.dtype)


def in_the_input_dtype(gate, up):
    return gate * (1 / (1 + torch.exp(-gate))) * up


def flat_views(gate, up):
    return (silu(gate.view(-1).float()) * up.view(-1)).to(up.dtype).view(gate.shape)


def neighbours_in_memory(gate, up):
    ups = torch.as_strided(up, up.shape, (up.shape[-1], 1), up.storage_offset())
    return (silu(gate.float()) * ups).to(up.dtype)


def stays_float32(gate, up):
    return silu(gate.float()) * up.float()


def in_place(gate, up):
    return silu(gate.float(), inplace=True).mul_(up).to(up.dtype)


ALTERNATIVES = [through_tanh_in_float64]
KILLED_BY = {
    is_geglu: "formula",
    is_plain_glu: "formula",
    halves_exchanged: "gate_and_up_differ",
    silu_of_the_product: "gate_and_up_differ",
    up_clamped: "linear_in_up",
    exp_of_the_gate: "extreme_gates",
    in_the_input_dtype: "float32_inside",
    flat_views: "halves_of_one_tensor",
    neighbours_in_memory: "halves_of_one_tensor",
    stays_float32: "dtype_kept",
    in_place: "input_untouched",
}
