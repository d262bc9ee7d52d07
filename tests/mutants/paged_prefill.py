"""Attention of chunks and decodes in other ways that are right, and in the ways it goes wrong."""

import bisect
import math

import torch

from mie.kernels.launch import INTERPRETED
from mie.kernels.paged_prefill import paged_prefill as triton_kernel


def one_query_after_another(q, k, v, tables, starts, lengths, scale):
    """No tile and no loop over sequences: each row looks up whose it is, and reads slot by slot."""
    out, B = torch.zeros_like(q), k.shape[1]
    begins, group = starts.tolist(), q.shape[1] // k.shape[2]
    for t in range(begins[-1]):
        s = bisect.bisect_right(begins, t) - 1
        seen = torch.arange(int(lengths[s]) - (begins[s + 1] - t) + 1)
        blocks = tables[s].long()[seen // B]
        keys, values = (x[blocks, seen % B].double() for x in (k, v))
        for h in range(q.shape[1]):
            weights = (keys[:, h // group] @ q[t, h].double() * scale).softmax(0)
            out[t, h] = (weights @ values[:, h // group]).to(q.dtype)
    return out


def the_engines_kernel(q, k, v, tables, starts, lengths, scale):
    rows = torch.arange(len(tables), dtype=torch.int32)
    return triton_kernel(q, k, v, tables, rows, starts, lengths, scale, len(q))


def gathered(cache, table, length):
    return cache[table.long()].flatten(0, 1)[:length]


def softmax(scores):
    return scores.softmax(-1)


def prefill(
    q, k, v, tables, starts, lengths, scale, *,
    gather=gathered, last=lambda new, length: length - new, head=lambda h, group, G: h // group,
    begins=None, weigh=softmax, tail=0.0, dtype=None, ahead=0,
):  # fmt: skip
    """Right as it stands; each mutant exchanges one piece of it."""
    out = torch.full_like(q, tail, dtype=dtype)
    H, G = q.shape[1], k.shape[2]
    kv_head = torch.tensor([head(h, H // G, G) for h in range(H)])
    begins = begins or starts.tolist()
    for s, length in enumerate(lengths.tolist()):
        start, end = begins[s], begins[s + 1]
        keys, values = (gather(x, tables[s], length)[:, kv_head].float() for x in (k, v))
        scores = torch.einsum("thd,lhd->htl", q[start:end].float(), keys) * scale
        visible = last(end - start, length) + torch.arange(end - start) + ahead
        future = torch.arange(scores.shape[-1]) > visible.unsqueeze(1)
        scores = scores.masked_fill(future, -math.inf)
        out[start:end] = torch.einsum("htl,lhd->thd", weigh(scores), values)
    return out


def neighbouring_blocks(*given):
    """Reads on behind the first block, as if the sequence lay in one piece."""

    def gather(cache, table, length):
        slots = cache.flatten(0, 1).roll(-int(table[0]) * cache.shape[1], 0)
        return slots[:length]

    return prefill(*given, gather=gather)


def diagonal_at_the_start(*given):
    return prefill(*given, last=lambda new, length: 0)


def sees_one_ahead(*given):
    return prefill(*given, ahead=1)


def sees_the_whole_chunk(*given):
    return prefill(*given, last=lambda new, length: length)


def all_decodes_after_the_first(q, k, v, tables, starts, lengths, scale):
    """A tile of 8 queries belongs to whoever owns its first one."""
    begins = starts.tolist()
    right = prefill(q, k, v, tables, starts, lengths, scale)
    for first in range(0, begins[-1], 8):
        s = bisect.bisect_right(begins, first) - 1
        for t in range(begins[s + 1], min(first + 8, begins[-1])):
            right[t] = 0.0
    return right


def finds_the_first_of_equal_starts(q, k, v, tables, starts, lengths, scale):
    """With bisect_left, a sequence without queries is found in place of the one that has them."""
    begins, owner = starts.tolist(), []
    for t in range(begins[-1]):
        s = bisect.bisect_right(begins, t) - 1
        owner.append(begins.index(begins[s]))
    right = prefill(q, k, v, tables, starts, lengths, scale)
    for t, s in enumerate(owner):
        new, length = begins[s + 1] - begins[s], int(lengths[s])
        if new == 0:
            one, alone = torch.tensor([0, 1]), torch.tensor([length])
            right[t] = prefill(q[t : t + 1], k, v, tables[s : s + 1], one, alone, scale)[0]
    return right


def leaves_padding_as_it_was(*given):
    return prefill(*given, tail=7.0)


def padding_of_the_last_sequence(q, k, v, tables, starts, lengths, scale):
    padded = starts.clone()
    padded[-1] = len(q)
    return prefill(q, k, v, tables, padded, lengths + (padded - starts).diff(), scale)


def masked_after_it_was_loaded(*given):
    """A weight of 0 for what nobody wrote, times whatever stands there."""

    def gather(cache, table, length):
        return cache[table.long()].flatten(0, 1)

    return prefill(*given, gather=gather)


def heads_in_turn(*given):
    return prefill(*given, head=lambda h, group, G: h % G)


def rows_by_the_next_power_of_two(*given):
    """Groups of 3 heads, with rows of the tile counted as if there were 4."""
    return prefill(*given, head=lambda h, group, G: h // (1 << (group - 1).bit_length()))


def exp_without_maximum(*given):
    return prefill(*given, weigh=lambda scores: scores.exp() / scores.exp().sum(-1, keepdim=True))


def sum_is_not_shrunk(*given):
    """The online softmax in tiles of 16, where the sum of weights keeps its first maximum."""

    def weigh(scores):
        peaks = [scores[..., :end].amax(-1, True) for end in range(16, scores.shape[-1] + 16, 16)]
        parts = zip(scores.split(16, -1), peaks, strict=True)
        total = sum((part - peak).exp().sum(-1, True) for part, peak in parts)
        return (scores - peaks[-1]).exp() / total

    return prefill(*given, weigh=weigh)


def stays_float32(*given):
    return prefill(*given, dtype=torch.float32)


ALTERNATIVES = [one_query_after_another, *([the_engines_kernel] if INTERPRETED else [])]
KILLED_BY = {
    neighbouring_blocks: "blocks_in_table_order",
    diagonal_at_the_start: "queries_are_the_last",
    sees_one_ahead: "never_sees_ahead",
    sees_the_whole_chunk: "never_sees_ahead",
    all_decodes_after_the_first: "mixed_batch",
    finds_the_first_of_equal_starts: "no_queries",
    leaves_padding_as_it_was: "padding",
    padding_of_the_last_sequence: "padding",
    masked_after_it_was_loaded: "unwritten_slots",
    heads_in_turn: "grouped_heads",
    rows_by_the_next_power_of_two: "grouped_heads",
    exp_without_maximum: "rising_scores",
    sum_is_not_shrunk: "rising_scores",
    stays_float32: "dtype_kept",
}
