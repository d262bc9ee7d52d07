"""What any attention must do, for one sequence.

    attention(q_THD, k_SGD, v_SGD, scale) -> out_THD

The T queries are the last T of the S positions, and a query sees its own position and all before::

         keys 0 1 2 3 4        S = 5, T = 2
    query 0   x x x x .        out = softmax(q · k · scale over the visible keys) · v
    query 1   x x x x x

H query heads share G key/value heads: query head h reads head h // (H // G). Vaswani et al., 2017;
Ainslie et al., 2023.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
from torch import Tensor

from mie.spec.tensors import BFLOAT16_STEP, close, has_dtype, normal, untouched

Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]
Heads = list[list[list[float]]]  # token, head, element


def attended(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, scale: float) -> Heads:
    """The definition, one query head at a time, in Python's float64."""
    T, H, _ = q_THD.shape
    S, G, _ = k_SGD.shape
    q, k, v = q_THD.tolist(), k_SGD.transpose(0, 1).tolist(), v_SGD.transpose(0, 1).tolist()

    def head(t: int, h: int) -> list[float]:
        g, visible = h // (H // G), S - T + t + 1
        return mix(q[t][h], k[g][:visible], v[g][:visible], scale)

    return [[head(t, h) for h in range(H)] for t in range(T)]


def mix(
    query: list[float], keys: list[list[float]], values: list[list[float]], scale: float
) -> list[float]:
    """The average of ``values``, each weighted by how well its key fits the query."""
    scores = [scale * math.fsum(map(operator.mul, query, key)) for key in keys]
    weights = [math.exp(score - max(scores)) for score in scores]
    columns = zip(*values, strict=True)
    return [math.fsum(map(operator.mul, weights, column)) / sum(weights) for column in columns]


def random_qkv(T: int, S: int, H: int, G: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    return normal(T, H, D, seed=T), normal(S, G, D, seed=S + 100), normal(S, G, D, seed=S + 200)


def case_softmax_average(attention: Attention) -> None:
    """A query returns the average of the visible values, weighted by the softmax of its scores.
    Otherwise: this is not the function that the model was trained with."""
    q_THD, k_SGD, v_SGD = random_qkv(T=4, S=4, H=2, G=2, D=8)
    expected = attended(q_THD, k_SGD, v_SGD, 0.35)
    close(attention(q_THD, k_SGD, v_SGD, 0.35), expected, 1e-5, "attention of 4 tokens")


def case_one_key(attention: Attention) -> None:
    """With a single key the value comes back, whatever the score. Otherwise: the first token of
    every text, which sees nothing but itself, is wrong, and all others look at it."""
    q_THD, k_SGD, v_SGD = random_qkv(T=1, S=1, H=2, G=1, D=4)
    expected = [[v_SGD[0, 0].tolist()] * 2]
    close(attention(q_THD, k_SGD, v_SGD, 0.5), expected, 1e-6, "attention to one key")


def case_sees_itself(attention: Attention) -> None:
    """A query sees the key at its own position. Otherwise: the first token sees nothing, its
    softmax divides zero by zero, and NaN spreads from there."""
    v_SGD = torch.tensor([10.0, 20.0, 30.0, 40.0]).reshape(4, 1, 1)
    got = attention(torch.zeros(4, 1, 1), torch.zeros(4, 1, 1), v_SGD, 1.0)
    expected = torch.tensor([10.0, 15.0, 20.0, 25.0]).reshape(4, 1, 1)
    close(got, expected, 1e-5, "attention with equal scores to the values 10, 20, 30, 40")


def case_never_sees_ahead(attention: Attention) -> None:
    """Whatever the later keys and values are, an earlier query gives the same. Otherwise: a prompt
    computed at once differs from the same prompt computed token by token."""
    q_THD, k_SGD, v_SGD = random_qkv(T=6, S=6, H=2, G=1, D=4)
    expected = attended(q_THD[:3], k_SGD[:3], v_SGD[:3], 0.5)
    k_SGD[3:], v_SGD[3:] = 1e4, -1e4
    got = attention(q_THD, k_SGD, v_SGD, 0.5)[:3]
    close(got, expected, 1e-5, "attention of tokens 0 to 2, with huge keys after them")


def case_queries_are_the_last(attention: Attention) -> None:
    """T queries stand at the last T of the S positions. Otherwise: with a cache, a new token sees
    the beginning of the text and not what was said last."""
    v_SGD = torch.arange(6.0).reshape(6, 1, 1)
    got = attention(torch.zeros(2, 1, 1), torch.zeros(6, 1, 1), v_SGD, 1.0)
    expected = [[[2.0]], [[2.5]]]  # the averages of 0 … 4 and of 0 … 5
    close(got, expected, 1e-5, "attention of 2 queries, equal scores, to the values 0 … 5")


def case_grouped_heads(attention: Attention) -> None:
    """Query head h reads key/value head h // (H // G). Otherwise: heads read a stranger's memory,
    in every model with fewer key/value heads than query heads."""
    for H, G in ((4, 4), (9, 3), (8, 1), (16, 2)):
        # Key head g fits position g only, and its value there is 10 g + g: the tens of the result
        # say whose keys a head reads, the units whose values.
        k_SGD, v_SGD = torch.zeros(G, G, 1), torch.zeros(G, G, 1)
        for g in range(G):
            k_SGD[g, g] = 100.0
            for s in range(G):
                v_SGD[s, g] = 10.0 * s + g
        expected = [[[11.0 * (h // (H // G))] for h in range(H)]]
        got = attention(torch.ones(1, H, 1), k_SGD, v_SGD, 1.0)
        close(got, expected, 1e-5, f"attention, H={H} over G={G}")


def case_scale_used(attention: Attention) -> None:
    """Scores are multiplied by the `scale` that is given. Otherwise: models whose scale is not 1 /
    sqrt(D) attend too sharply or too vaguely."""
    q_THD, k_SGD, v_SGD = random_qkv(T=1, S=5, H=1, G=1, D=4)
    for scale in (0.0, 0.1, 2.0):
        expected = attended(q_THD, k_SGD, v_SGD, scale)
        close(attention(q_THD, k_SGD, v_SGD, scale), expected, 1e-5, f"attention, scale={scale}")


def case_large_scores(attention: Attention) -> None:
    """Scores of 100,000 and of -100,000 are only compared. Otherwise: `exp` overflows, or all
    weights vanish together, or a mask of -10,000 is the best score in sight."""
    k_SGD = torch.tensor([99.0, 100.0, 100.0]).reshape(3, 1, 1)
    v_SGD = torch.tensor([1.0, 2.0, 4.0]).reshape(3, 1, 1)
    for sign, expected in ((1.0, [1.0, 2.0, 3.0]), (-1.0, [1.0, 1.0, 1.0])):
        got = attention(torch.full((3, 1, 1), sign * 1000.0), k_SGD, v_SGD, 1.0)
        expected_THD = torch.tensor(expected).reshape(3, 1, 1)
        close(got, expected_THD, 1e-5, f"attention with scores about {sign * 100_000:g}")


def case_chunks_equal_whole(attention: Attention) -> None:
    """Computed in chunks over a growing cache, a text gives what it gives at once. Otherwise: the
    answer depends on how the scheduler happened to cut the prompt."""
    for chunk in (1, 3):
        q_THD, k_SGD, v_SGD = random_qkv(T=7, S=7, H=4, G=2, D=4)
        whole = attended(q_THD, k_SGD, v_SGD, 0.5)
        for begin in range(0, 7, chunk):
            end = min(begin + chunk, 7)
            got = attention(q_THD[begin:end], k_SGD[:end], v_SGD[:end], 0.5)
            close(got, whole[begin:end], 1e-5, f"attention of tokens {begin} to {end - 1} of 7")


def case_odd_sizes(attention: Attention) -> None:
    """No size need be even or a power of two. Otherwise: SmolLM2, with 9 query heads in groups of
    3, or a text of 17 tokens, reads past the end of a tile."""
    for T, S, H, G, D in ((1, 17, 3, 3, 6), (5, 5, 9, 3, 10), (3, 33, 7, 1, 5), (2, 3, 6, 2, 1)):
        q_THD, k_SGD, v_SGD = random_qkv(T, S, H, G, D)
        expected = attended(q_THD, k_SGD, v_SGD, 0.3)
        got = attention(q_THD, k_SGD, v_SGD, 0.3)
        close(got, expected, 1e-5, f"attention, T={T} S={S} H={H} G={G} D={D}")


def case_float32_inside(attention: Attention) -> None:
    """Scores of bfloat16 input stay float32 until the softmax is done. Otherwise: above 64 a score
    is rounded to halves, and weights that should differ by a tenth are equal."""
    q_THD = torch.tensor([1.0, 1.0] + [0.0] * 6).reshape(1, 1, 8)
    k_SGD, v_SGD = torch.zeros(8, 1, 8), 100.0 * torch.eye(8).unsqueeze(1)
    k_SGD[:, 0, 0], k_SGD[:, 0, 1] = 64.0, torch.arange(8) / 8  # scores 64, 64.125, … 64.875
    got = attention(q_THD.bfloat16(), k_SGD.bfloat16(), v_SGD.bfloat16(), 1.0)
    expected = attended(q_THD, k_SGD, v_SGD, 1.0)
    close(got, expected, 2 * BFLOAT16_STEP, "attention with scores 64 … 64.875, in bfloat16")


def case_views(attention: Attention) -> None:
    """Keys and values may be the written part of a larger buffer, and no more is read. Otherwise:
    the cache must be copied in every step, or what it held before leaks into the answer."""
    q_THD, k_SGD, v_SGD = random_qkv(T=2, S=5, H=2, G=1, D=4)
    cache = torch.full((9, 2, 1, 4), math.nan)  # room for 9 positions, K and V side by side
    cache[:5, 0], cache[:5, 1] = k_SGD, v_SGD
    expected = attended(q_THD, k_SGD, v_SGD, 0.5)
    got = attention(q_THD, cache[:5, 0], cache[:5, 1], 0.5)
    close(got, expected, 1e-5, "attention over 5 positions of a cache of 9")


def case_dtype_kept(attention: Attention) -> None:
    """The result has the queries' dtype. Otherwise: the output projection refuses, or the whole
    model quietly runs at twice the bytes."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q_THD, k_SGD, v_SGD = random_qkv(T=2, S=3, H=2, G=1, D=4)
        got = attention(q_THD.to(dtype), k_SGD.to(dtype), v_SGD.to(dtype), 0.5)
        has_dtype(got, dtype, f"attention of {dtype}")


def case_input_untouched(attention: Attention) -> None:
    """`q`, `k` and `v` are only read. Otherwise: the cache changes under every later token."""
    q_THD, k_SGD, v_SGD = random_qkv(T=2, S=3, H=2, G=1, D=4)
    with untouched(q=q_THD, k=k_SGD, v=v_SGD):
        attention(q_THD, k_SGD, v_SGD, 0.5)
