"""Attention in other ways that are right, and in the ways that people get it wrong."""

import math

import torch
from torch.nn.functional import scaled_dot_product_attention


def through_torch(q, k, v, scale):
    T, S = q.shape[0], k.shape[0]
    visible = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = scaled_dot_product_attention(*heads_first, visible, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def one_key_after_another(q, k, v, scale):
    """The online softmax: a running maximum, total and mean, and never a row of scores."""
    (T, H, D), (S, G, _) = q.shape, k.shape
    out = torch.zeros_like(q)
    q, k, v = q.tolist(), k.tolist(), v.tolist()
    for t in range(T):
        for h in range(H):
            g, best, total, mean = h // (H // G), -math.inf, 0.0, [0.0] * D
            for s in range(S - T + t + 1):
                score = scale * sum(a * b for a, b in zip(q[t][h], k[s][g], strict=True))
                shrink = math.exp(best - max(best, score))
                weight = math.exp(score - max(best, score))
                best, total = max(best, score), total * shrink + weight
                mean = [m * shrink + weight * x for m, x in zip(mean, v[s][g], strict=True)]
            out[t, h] = torch.tensor([m / total for m in mean])
    return out


def last_positions(T, S):
    return torch.ones(T, S, dtype=torch.bool).tril(S - T)


def attend(q, k, v, scale, visible=last_positions, softmax=torch.softmax, grouped=None):
    """Right as it stands; each mutant exchanges one piece of it."""
    H, G = q.shape[1], k.shape[1]
    kv_head = grouped(H, G) if grouped else torch.arange(H) // (H // G)
    k, v = k[:, kv_head], v[:, kv_head]
    scores = torch.einsum("thd,shd->hts", q.float(), k.float()) * scale
    scores = scores.masked_fill(~visible(q.shape[0], k.shape[0]), -float("inf"))
    return torch.einsum("hts,shd->thd", softmax(scores, -1), v.float()).to(q.dtype)


def no_mask(q, k, v, scale):
    return attend(q, k, v, scale, visible=lambda T, S: torch.ones(T, S, dtype=torch.bool))


def sees_one_ahead(q, k, v, scale):
    return attend(q, k, v, scale, visible=lambda T, S: torch.ones(T, S).tril(S - T + 1).bool())


def misses_itself(q, k, v, scale):
    return attend(q, k, v, scale, visible=lambda T, S: torch.ones(T, S).tril(S - T - 1).bool())


def queries_are_the_first(q, k, v, scale):
    return attend(q, k, v, scale, visible=lambda T, S: torch.ones(T, S).tril().bool())


def masked_after_softmax(q, k, v, scale):
    seen = last_positions(q.shape[0], k.shape[0])
    everything = torch.ones_like(seen)
    softmax = lambda scores, axis: scores.softmax(axis) * seen  # noqa: E731
    return attend(q, k, v, scale, visible=lambda T, S: everything, softmax=softmax)


def mask_too_small(q, k, v, scale):
    H, G = q.shape[1], k.shape[1]
    k, v = k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1)
    scores = torch.einsum("thd,shd->hts", q.float(), k.float()) * scale
    scores = scores - 1e4 * ~last_positions(q.shape[0], k.shape[0])
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v.float()).to(q.dtype)


def mask_fills_in_ten_thousand_below(q, k, v, scale):
    softmax = lambda scores, axis: scores.clamp(min=-1e4).softmax(axis)  # noqa: E731
    return attend(q, k, v, scale, softmax=softmax)


def heads_repeated_in_turn(q, k, v, scale):
    return attend(q, k, v, scale, grouped=lambda H, G: torch.arange(H) % G)


def one_head_for_all(q, k, v, scale):
    return attend(q, k, v, scale, grouped=lambda H, G: torch.zeros(H, dtype=torch.long))


def own_scale(q, k, v, scale):
    return attend(q, k, v, q.shape[-1] ** -0.5)


def scale_forgotten(q, k, v, scale):
    return attend(q, k, v, 1.0)


def exp_without_maximum(q, k, v, scale):
    softmax = lambda scores, axis: scores.exp() / scores.exp().sum(axis, keepdim=True)  # noqa: E731
    return attend(q, k, v, scale, softmax=softmax)


def extra_one_below(q, k, v, scale):
    def softmax(scores, axis):
        weights = (scores - scores.amax(axis, keepdim=True)).exp()
        return weights / (1 + weights.sum(axis, keepdim=True))

    return attend(q, k, v, scale, softmax=softmax)


def linear_weights(q, k, v, scale):
    def softmax(scores, axis):
        weights = torch.where(scores.isinf(), 0.0, 1 + scores.abs())
        return weights / weights.sum(axis, keepdim=True)

    return attend(q, k, v, scale, softmax=softmax)


def chunk_attends_to_itself(q, k, v, scale):
    T = q.shape[0]
    return attend(q, k[-T:], v[-T:], scale)


def whole_tiles_only(q, k, v, scale):
    def visible(T, S):
        seen = last_positions(T, S)
        if S > 16:
            seen[:, S // 16 * 16 :] = False
        return seen

    return attend(q, k, v, scale, visible=visible)


def scores_in_the_input_dtype(q, k, v, scale):
    H, G = q.shape[1], k.shape[1]
    k, v = k.repeat_interleave(H // G, 1), v.repeat_interleave(H // G, 1)
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    scores = scores.masked_fill(~last_positions(q.shape[0], k.shape[0]), -float("inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v)


def reads_the_whole_buffer(q, k, v, scale):
    S, G, D = k.shape
    k, v = (torch.as_strided(x, (S, G, D), (G * D, D, 1), x.storage_offset()) for x in (k, v))
    return attend(q, k, v, scale)


def stays_float32(q, k, v, scale):
    return attend(q.float(), k, v, scale)


def scales_in_place(q, k, v, scale):
    return attend(q.mul_(scale), k, v, 1.0)


ALTERNATIVES = [through_torch, one_key_after_another]
KILLED_BY = {
    linear_weights: "softmax_average",
    extra_one_below: "one_key",
    misses_itself: "sees_itself",
    no_mask: "never_sees_ahead",
    sees_one_ahead: "never_sees_ahead",
    masked_after_softmax: "never_sees_ahead",
    mask_too_small: "never_sees_ahead",
    queries_are_the_first: "queries_are_the_last",
    heads_repeated_in_turn: "grouped_heads",
    one_head_for_all: "grouped_heads",
    own_scale: "scale_used",
    scale_forgotten: "scale_used",
    exp_without_maximum: "large_scores",
    mask_fills_in_ten_thousand_below: "large_scores",
    chunk_attends_to_itself: "chunks_equal_whole",
    whole_tiles_only: "odd_sizes",
    scores_in_the_input_dtype: "float32_inside",
    reads_the_whole_buffer: "views",
    stays_float32: "dtype_kept",
    scales_in_place: "input_untouched",
}
