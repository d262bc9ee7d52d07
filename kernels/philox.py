"""Uniform numbers that are a function of (key, position, token): no state, nothing to hand on.

Invariant: number ``v`` of (key, position) has the same bits on every machine, in whichever batch
and however many are asked for. Ten rounds of integer arithmetic make it, and an exact conversion.

A generator with a state gives its numbers to whoever comes first, so an answer would depend on what
runs beside it. Philox encrypts a counter instead: whoever knows the counter knows the number. One
encryption gives four words of 32 bits, for four neighbouring tokens::

    counter = (v // 4, position, 0, 0)     key = 64 bits of (seed, answer)

    token      0  1  2  3 | 4  5  6  7 | 8 ...
    v // 4     0          | 1          | 2
    word       0  1  2  3 | 0  1  2  3 | 0 ...

    one round: the high and low halves of two products, crossed over and stirred with the key

        c0 ──× A──┬─ high ─ ^ c3 ^ k1 ─> c2        c2 ──× B──┬─ high ─ ^ c1 ^ k0 ─> c0
                  └─ low ──────────────> c3                  └─ low ──────────────> c1

Of a word the 23 highest bits are kept: u = (bits + 1/2) / 2^23 lies in the open interval (0, 1) and
is a float32 without rounding. With 24 bits the half would have to be rounded, in the worst case up
to 1, and minus log(-log(1)) is infinite: one token in 16 million would win whatever its logit.

Cost: 10 rounds of 2 wide products for 4 numbers. Here, in torch, a round is 10 passes over int64
vectors of a quarter of the vocabulary: about 1.2 ms for 49,152 numbers on one core.

After Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDS = 10
PRODUCT_A, PRODUCT_B = 0xD2511F53, 0xCD9E8D57
KEY_STEP_0, KEY_STEP_1 = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
# How many counters are encrypted at once. The vectors of a round, of eight bytes a counter, should
# stay in the cache of a core; on a GPU they only have to fit.
MOST_COUNTERS = {"cpu": 16_384, "cuda": 4_194_304}


def philox_4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words for each counter. All are int64 that hold 32 bits, of shapes that broadcast.

    A product of two words wraps around in int64, which keeps its 64 bits: the low word is its low
    half, and the high word what an arithmetic shift leaves, once the copies of the sign are cut.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_a, product_b = c0 * PRODUCT_A, c2 * PRODUCT_B
        c0 = (product_b >> 32 ^ c1 ^ k0) & WORD
        c2 = (product_a >> 32 ^ c3 ^ k1) & WORD
        c1, c3 = product_b, product_a  # their low words; the high ones are cut with the next xor
        k0, k1 = (k0 + KEY_STEP_0) & WORD, (k1 + KEY_STEP_1) & WORD
    return c0, c1 & WORD, c2, c3 & WORD


def philox_uniform(
    key: int, position: int, size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """``size`` numbers in (0, 1), float32, for tokens 0 to ``size`` of one draw.

    ``key`` counts modulo 2^64, ``position`` modulo 2^32.
    """
    return philox_uniforms([key], [position], size, device)[0]


def philox_uniforms(
    keys: Sequence[int],
    positions: Sequence[int],
    size: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """``uniform_SV``: a row as of ``philox_uniform`` for each of the S draws, V being ``size``.

    Raises ValueError if there are not as many keys as positions.
    """
    if len(keys) != len(positions):
        raise ValueError(f"{len(keys)} keys for {len(positions)} positions")
    counters = -(-size // 4)
    uniform_SV = torch.empty(len(keys), size, device=device)
    most = MOST_COUNTERS.get(uniform_SV.device.type, MOST_COUNTERS["cpu"])
    group = max(1, most // max(1, counters))
    for start in range(0, len(keys), group):
        rows = slice(start, start + group)
        uniform_SV[rows] = _words(keys[rows], positions[rows], counters, device)[:, :size]
    return uniform_SV.add_(0.5).mul_(2.0**-23)


def gumbel(uniform_SV: Tensor) -> Tensor:
    """Numbers of the Gumbel distribution, -log(-log(u)): finite, between -2.9 and 16.7."""
    return uniform_SV.log().neg_().log_().neg_()


def _words(
    keys: Sequence[int], positions: Sequence[int], counters: int, device: torch.device | str
) -> Tensor:
    """The 23 highest bits of four words a counter, in the order of the tokens."""

    def column(numbers: Sequence[int], shift: int = 0) -> Tensor:
        return torch.tensor([[number >> shift & WORD] for number in numbers], device=device)

    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    groups_1C = torch.arange(counters, device=device).unsqueeze(0)
    counter = (groups_1C, column(positions), zero, zero)
    words = philox_4x32(counter, (column(keys), column(keys, 32)))
    return torch.stack(words, dim=-1).flatten(1) >> 9
