"""Attention over blocks in other ways that are right, and in the ways that it goes wrong."""

import math

import torch

from mie.kernels.launch import INTERPRETED
from mie.kernels.paged_decode import DecodePlan
from mie.kernels.paged_decode import paged_decode as triton_kernel


def through_a_plan(q, k, v, tables, lengths, scale):
    """The engine's own kernel."""
    X, H, D = q.shape
    _, B, G, _ = k.shape
    plan = DecodePlan(X, H, G, D, B, q.device, q.dtype)
    plan.update(lengths)
    return triton_kernel(q, k, v, tables, None, lengths, scale, plan)


def block_after_block(q, k, v, tables, lengths, scale, fade=lambda old, new: (old - new).exp()):
    """The online softmax: a running maximum, sum and mean, and one block at a time."""
    (_, H, D), (_, B, G, _) = q.shape, k.shape
    out = torch.zeros_like(q)
    heads = torch.arange(H) // (H // G)
    for x, length in enumerate(lengths.tolist()):
        best, total, mean = torch.full((H,), -math.inf), torch.zeros(H), torch.zeros(H, D)
        for begin in range(0, length, B):
            block, count = tables[x, begin // B], min(B, length - begin)
            keys, values = (cache[block, :count][:, heads].float() for cache in (k, v))
            scores = torch.einsum("hd,shd->hs", q[x].float(), keys) * scale
            new = torch.maximum(best, scores.amax(-1))
            weights, less = (scores - new[:, None]).exp(), fade(best, new)
            total = total * less + weights.sum(-1)
            mean = mean * less[:, None] + torch.einsum("hs,shd->hd", weights, values)
            best = new
        if length:
            out[x] = (mean / total[:, None]).to(q.dtype)
    return out


def needed(tables, lengths, B):
    """The tables with 0 behind the last block of each sequence."""
    unused = torch.arange(tables.shape[1]) * B >= lengths[:, None]
    return tables.long().masked_fill(unused, 0)


def before(positions, lengths):
    return positions < lengths


def grouped(H, G):
    return torch.arange(H) // (H // G)


def safe_softmax(scores):
    return scores.softmax(-1).nan_to_num(0.0)  # rows without a position


def all_together(
    q, k, v, tables, lengths, scale,
    follow=needed, visible=before, clean=True, heads=grouped, softmax=safe_softmax,
):  # fmt: skip
    """Padded to the longest. Right as it stands; each mutant exchanges one piece of it."""
    (_, H, _), (_, B, G, _) = q.shape, k.shape
    blocks = follow(tables, lengths, B)
    seen = visible(torch.arange(blocks.shape[1] * B), lengths[:, None])
    keys, values = (cache[blocks].flatten(1, 2)[:, :, heads(H, G)].float() for cache in (k, v))
    if clean:
        values = values.masked_fill(~seen[:, :, None, None], 0.0)
    scores = torch.einsum("xhd,xshd->xhs", q.float(), keys) * scale
    weights = softmax(scores.masked_fill(~seen[:, None], -math.inf))
    return torch.einsum("xhs,xshd->xhd", weights, values).to(q.dtype)


def scale_forgotten(q, k, v, tables, lengths, scale):
    return all_together(q, k, v, tables, lengths, 1.0)


def own_scale(q, k, v, tables, lengths, scale):
    return all_together(q, k, v, tables, lengths, q.shape[-1] ** -0.5)


def first_block_alone(q, k, v, tables, lengths, scale):
    return all_together(q, k, v, tables, lengths.clamp(max=k.shape[1]), scale)


def blocks_in_a_row(q, k, v, tables, lengths, scale):
    """Looks the first block up, and walks on from there."""

    def follow(tables, lengths, B):
        walked = needed(tables, lengths, B)[:, :1] + torch.arange(tables.shape[1])
        return walked.clamp(max=len(k) - 1)

    return all_together(q, k, v, tables, lengths, scale, follow)


def sees_one_behind(q, k, v, tables, lengths, scale):
    visible = lambda positions, lengths: (positions <= lengths) & (lengths > 0)  # noqa: E731
    return all_together(q, k, v, tables, lengths, scale, visible=visible)


def misses_the_last(q, k, v, tables, lengths, scale):
    visible = lambda positions, lengths: positions < lengths - 1  # noqa: E731
    return all_together(q, k, v, tables, lengths, scale, visible=visible)


def whole_blocks(q, k, v, tables, lengths, scale):
    B = k.shape[1]
    visible = lambda positions, lengths: positions < -(-lengths // B) * B  # noqa: E731
    return all_together(q, k, v, tables, lengths, scale, visible=visible)


def masked_by_a_weight_of_zero(q, k, v, tables, lengths, scale):
    return all_together(q, k, v, tables, lengths, scale, clean=False)


def follows_the_whole_table(q, k, v, tables, lengths, scale):
    k.index_select(0, tables.flatten())
    return all_together(q, k, v, tables, lengths, scale)


def heads_in_turn(q, k, v, tables, lengths, scale):
    heads = lambda H, G: torch.arange(H) % G  # noqa: E731
    return all_together(q, k, v, tables, lengths, scale, heads=heads)


def zero_divided_by_zero(q, k, v, tables, lengths, scale):
    softmax = lambda scores: scores.softmax(-1)  # noqa: E731
    return all_together(q, k, v, tables, lengths, scale, softmax=softmax)


def reads_one_token_at_least(q, k, v, tables, lengths, scale):
    return all_together(q, k, v, tables, lengths.clamp(min=1), scale)


def exp_without_maximum(q, k, v, tables, lengths, scale):
    def softmax(scores):
        weights = scores.exp()
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)

    return all_together(q, k, v, tables, lengths, scale, softmax=softmax)


def sums_are_never_faded(q, k, v, tables, lengths, scale):
    return block_after_block(q, k, v, tables, lengths, scale, lambda old, new: torch.ones_like(new))


def stays_float32(q, k, v, tables, lengths, scale):
    return all_together(q.float(), k, v, tables, lengths, scale)


def cleans_the_cache(q, k, v, tables, lengths, scale):
    """Writes zeros behind the last token, where a batch that grows will write anyway."""
    B = k.shape[1]
    for x, length in enumerate(lengths.tolist()):
        if length % B:
            k[tables[x, length // B], length % B :] = 0
            v[tables[x, length // B], length % B :] = 0
    return all_together(q, k, v, tables, lengths, scale)


def scales_in_place(q, k, v, tables, lengths, scale):
    return all_together(q.mul_(scale), k, v, tables, lengths, 1.0)


ALTERNATIVES = [block_after_block, all_together, *([through_a_plan] if INTERPRETED else [])]
KILLED_BY = {
    scale_forgotten: "formula",
    own_scale: "formula",
    first_block_alone: "formula",
    sums_are_never_faded: "large_scores",
    exp_without_maximum: "large_scores",
    blocks_in_a_row: "scattered_blocks",
    sees_one_behind: "ends_of_a_block",
    misses_the_last: "ends_of_a_block",
    whole_blocks: "ends_of_a_block",
    masked_by_a_weight_of_zero: "poison",
    follows_the_whole_table: "behind_the_table",
    heads_in_turn: "grouped_heads",
    zero_divided_by_zero: "length_zero",
    reads_one_token_at_least: "length_zero",
    stays_float32: "dtype_kept",
    cleans_the_cache: "input_untouched",
    scales_in_place: "input_untouched",
}
