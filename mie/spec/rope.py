"""What any rotary position embedding must do.

    rope(x_THD, cos_TR, sin_TR) -> y_THD

Element i of a head and element i + R make a pair, R = D / 2, and every pair is turned in its plane:

    [ y[i]     ]   [ cos  -sin ] [ x[i]     ]
    [ y[i + R] ] = [ sin   cos ] [ x[i + R] ]

``cos_TR`` and ``sin_TR`` are float32, one row for each token and one column for each pair. Su et
al., 2021.
"""

from __future__ import annotations

import cmath
import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mie.spec.tensors import BFLOAT16_STEP, close, has_dtype, normal, tensor, untouched

RoPE = Callable[[Tensor, Tensor, Tensor], Tensor]


def tables(angles_TR: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
    """``cos_TR`` and ``sin_TR`` of angles in radians."""
    cos = torch.tensor([[math.cos(angle) for angle in row] for row in angles_TR])
    sin = torch.tensor([[math.sin(angle) for angle in row] for row in angles_TR])
    return cos, sin


def angles_at(positions: Sequence[int], R: int) -> list[list[float]]:
    """The usual angles: pair i turns by ``position · 10000^(-i/R)``."""
    return [[p * 10_000.0 ** (-i / R) for i in range(R)] for p in positions]


def turned(x_THD: Tensor, angles_TR: Sequence[Sequence[float]]) -> list[list[list[float]]]:
    """Every head of token t turned by row t of the angles, in Python's float64."""
    tokens = zip(x_THD.tolist(), angles_TR, strict=True)
    return [[turn(head, angles_R) for head in heads] for heads, angles_R in tokens]


def turn(head: Sequence[float], angles_R: Sequence[float]) -> list[float]:
    """One head. A pair is a point of the plane, and a product of complex numbers turns it."""
    R = len(angles_R)
    pairs = [complex(head[i], head[i + R]) * cmath.rect(1.0, angles_R[i]) for i in range(R)]
    return [pair.real for pair in pairs] + [pair.imag for pair in pairs]


def case_direction(rope: RoPE) -> None:
    """A pair (1, 0) turned by an angle a becomes (cos a, sin a). Otherwise: turned the other way,
    what stood three tokens before looks like three tokens after."""
    got = rope(torch.tensor([[[1.0, 0.0]]]), *tables([[0.5]]))
    close(got, [[[math.cos(0.5), math.sin(0.5)]]], 1e-6, "rope of the pair (1, 0) by 0.5 radians")


def case_half_split_pairs(rope: RoPE) -> None:
    """Element i is paired with element i + R, not with its neighbour. Otherwise: the checkpoint was
    trained with other pairs, and only the first token, which is not turned, comes out right."""
    D, quarter_turn = 6, [math.pi / 2] * 3
    for i in range(D):
        x_THD = torch.zeros(1, 1, D)
        x_THD[0, 0, i] = 1.0
        expected = turned(x_THD, [quarter_turn])
        got = rope(x_THD, *tables([quarter_turn]))
        close(got, expected, 1e-6, f"rope by a quarter turn, x = 1 in element {i} only")


def case_position_zero(rope: RoPE) -> None:
    """An angle of zero changes no bit. Otherwise: something besides the rotation is applied, and
    every token carries it."""
    x_THD = normal(1, 3, 8, seed=1)
    close(rope(x_THD, *tables([[0.0] * 4])), x_THD, 0.0, "rope at position 0")


def case_norm_kept(rope: RoPE) -> None:
    """A head is as long after turning as before. Otherwise: the size of a score tells positions
    apart, and far tokens win or lose whatever they say."""
    x_THD = normal(4, 2, 8, seed=2)
    got = rope(x_THD, *tables(angles_at([1, 10, 100, 1000], R=4)))
    expected = [[math.hypot(*head) for head in heads] for heads in x_THD.tolist()]
    lengths = tensor(got, "rope").norm(dim=-1)
    close(lengths, expected, 1e-5, "length of a head after rope")


def case_relative_distance(rope: RoPE) -> None:
    """The product of a turned query and a turned key depends on their distance alone. Otherwise: a
    sentence means something else a page further down."""
    for start in (0, 5, 300):
        q_THD, k_THD = normal(1, 1, 8, seed=3), normal(1, 1, 8, seed=4)
        [[query]], [[key]] = turned(q_THD, angles_at([7], R=4)), k_THD.tolist()
        expected = math.fsum(map(operator.mul, query, key))  # the query at 7, the key at 0
        turned_q = rope(q_THD, *tables(angles_at([start + 7], R=4)))
        turned_k = rope(k_THD, *tables(angles_at([start], R=4)))
        close((turned_q * turned_k).sum(), expected, 1e-4, f"q · k at {start + 7} and {start}")


def case_angle_of_the_pair(rope: RoPE) -> None:
    """Pair i turns by column i of the tables. Otherwise: pairs made to tell chapters apart spin
    like those that tell neighbours apart, and the model loses its long view."""
    x_THD, angles = torch.ones(1, 1, 8), [[0.0, 0.1, 0.2, 0.3]]
    expected = turned(x_THD, angles)
    got = rope(x_THD, *tables(angles))
    close(got, expected, 1e-6, "rope of ones by 0, 0.1, 0.2 and 0.3 radians")


def case_angle_of_the_token(rope: RoPE) -> None:
    """Token t turns by row t of the tables, in whatever order positions come. Otherwise: in a step
    that mixes requests, tokens are placed in each other's texts."""
    positions, x_THD = [40, 3, 3, 1000], normal(4, 2, 6, seed=5)
    angles = angles_at(positions, R=3)
    expected = turned(x_THD, angles)
    got = rope(x_THD, *tables(angles))
    close(got, expected, 1e-5, f"rope at positions {positions}")


def case_heads_alike(rope: RoPE) -> None:
    """All heads of a token turn by the same angles. Otherwise: wherever there are as many heads as
    tokens, positions run along the heads and no shape complains."""
    x_THD = torch.tensor([1.0, 0.0, 0.0, 0.0]).repeat(3, 3, 1)
    angles = angles_at([0, 1, 2], R=2)
    expected = turned(x_THD, angles)
    got = rope(x_THD, *tables(angles))
    close(got, expected, 1e-6, "rope of 3 tokens with 3 equal heads")


def case_tables_as_given(rope: RoPE) -> None:
    """Cosines and sines are multiplied as they come, whatever their size. Otherwise: YaRN, which
    scales the tables to sharpen the attention of a stretched context, stays blurred."""
    x_THD = normal(1, 2, 4, seed=6)
    angles = angles_at([3], R=2)
    cos_TR, sin_TR = tables(angles)
    expected = turned(1.5 * x_THD, angles)
    got = rope(x_THD, 1.5 * cos_TR, 1.5 * sin_TR)
    close(got, expected, 1e-5, "rope with its tables times 1.5")


def case_float32_inside(rope: RoPE) -> None:
    """bfloat16 heads are turned in float32 and rounded once. Otherwise: near 45 degrees cosine and
    sine round to the same number, and two positions become one."""
    x_THD = torch.full((1, 1, 2), 256.0, dtype=torch.bfloat16)
    expected = turned(x_THD, [[0.785]])
    got = rope(x_THD, *tables([[0.785]]))
    close(got, expected, BFLOAT16_STEP, "rope of (256, 256) by 0.785 radians, in bfloat16")


def case_views(rope: RoPE) -> None:
    """`x` may be a slice of a wider tensor. Otherwise: queries and keys, which one product makes
    side by side, must be copied apart first."""
    qkv = normal(3, 5, 4, seed=7)
    angles = angles_at([0, 1, 2], R=2)
    expected = turned(qkv[:, 2:4], angles)
    got = rope(qkv[:, 2:4], *tables(angles))
    close(got, expected, 1e-5, "rope of heads 2 and 3 of 5")


def case_dtype_kept(rope: RoPE) -> None:
    """The result has the dtype of `x`, not that of the tables. Otherwise: queries are float32, the
    cached keys are not, and their product refuses."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = rope(normal(1, 1, 4, seed=8).to(dtype), *tables([[0.1, 0.2]]))
        has_dtype(got, dtype, f"rope of {dtype}")


def case_input_untouched(rope: RoPE) -> None:
    """`x` and the tables are only read. Otherwise: the next layer turns by what this one left in
    the tables, which all layers share."""
    x_THD = normal(2, 2, 4, seed=9)
    cos_TR, sin_TR = tables(angles_at([1, 2], R=2))
    with untouched(x=x_THD, cos=cos_TR, sin=sin_TR):
        rope(x_THD, cos_TR, sin_TR)
