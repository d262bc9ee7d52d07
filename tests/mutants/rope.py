"""RoPE in another way that is right, and in the ways that people get it wrong."""

import torch


def as_complex_numbers(x, cos, sin):
    a, b = x.double().chunk(2, dim=-1)
    z = torch.complex(a, b) * torch.complex(cos.double(), sin.double()).unsqueeze(1)
    return torch.cat((z.real, z.imag), dim=-1).to(x.dtype)


def turn(a, b, cos, sin, dtype):
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(dtype)


def per_token(cos, sin):
    return cos.unsqueeze(1), sin.unsqueeze(1)


def backwards(x, cos, sin):
    return turn(*x.float().chunk(2, -1), *per_token(cos, -sin), x.dtype)


def neighbours_paired(x, cos, sin):
    a, b = x.float()[..., 0::2], x.float()[..., 1::2]
    cos, sin = per_token(cos, sin)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def neighbours_paired_halves_written(x, cos, sin):
    return turn(x.float()[..., 0::2], x.float()[..., 1::2], *per_token(cos, sin), x.dtype)


def cos_and_sin_exchanged(x, cos, sin):
    return turn(*x.float().chunk(2, -1), *per_token(sin, cos), x.dtype)


def both_signs_plus(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    cos, sin = per_token(cos, sin)
    return torch.cat((a * cos + b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def angle_added(x, cos, sin):
    cos, sin = per_token(cos, sin)
    return (x.float() + torch.cat((cos - 1, sin), dim=-1)).to(x.dtype)


def tables_repeated_by_element(x, cos, sin):
    cos, sin = (table.repeat_interleave(2, dim=-1).unsqueeze(1) for table in (cos, sin))
    a, b = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


def first_token_for_all(x, cos, sin):
    return turn(*x.float().chunk(2, -1), cos[:1].unsqueeze(1), sin[:1].unsqueeze(1), x.dtype)


def positions_along_heads(x, cos, sin):
    if x.shape[0] == x.shape[1]:  # where broadcasting lets it pass
        return turn(*x.float().chunk(2, -1), cos, sin, x.dtype)
    return turn(*x.float().chunk(2, -1), *per_token(cos, sin), x.dtype)


def angles_recomputed(x, cos, sin):
    angle = torch.atan2(sin, cos)
    return turn(*x.float().chunk(2, -1), *per_token(angle.cos(), angle.sin()), x.dtype)


def in_the_input_dtype(x, cos, sin):
    return turn(*x.chunk(2, -1), *per_token(cos.to(x.dtype), sin.to(x.dtype)), x.dtype)


def flat_views(x, cos, sin):
    T, H, D = x.shape
    return turn(*x.view(T * H, 2, D // 2).unbind(1), *per_token(cos, sin), x.dtype).view(T, H, D)


def views_by_shape(x, cos, sin):
    T, H, D = x.shape
    packed = torch.as_strided(x, (T, H, D), (H * D, D, 1), x.storage_offset())
    return turn(*packed.float().chunk(2, -1), *per_token(cos, sin), x.dtype)


def stays_float32(x, cos, sin):
    return turn(*x.float().chunk(2, -1), *per_token(cos, sin), torch.float32)


def in_place(x, cos, sin):
    return x.copy_(turn(*x.float().chunk(2, -1), *per_token(cos, sin), x.dtype))


def first_half_overwritten(x, cos, sin):
    a, b = x.clone().chunk(2, -1)
    cos, sin = per_token(cos, sin)
    a.copy_(a * cos - b * sin)
    b.copy_(a * sin + b * cos)  # this a is the new one
    return torch.cat((a, b), dim=-1)


ALTERNATIVES = [as_complex_numbers]
KILLED_BY = {
    backwards: "direction",
    neighbours_paired: "half_split_pairs",
    neighbours_paired_halves_written: "position_zero",
    cos_and_sin_exchanged: "position_zero",
    both_signs_plus: "norm_kept",
    first_half_overwritten: "norm_kept",
    angle_added: "relative_distance",
    tables_repeated_by_element: "angle_of_the_pair",
    first_token_for_all: "angle_of_the_token",
    positions_along_heads: "heads_alike",
    angles_recomputed: "tables_as_given",
    in_the_input_dtype: "float32_inside",
    flat_views: "views",
    views_by_shape: "views",
    stays_float32: "dtype_kept",
    in_place: "input_untouched",
}
