"""What any attention of decoding sequences over blocks must do.

    paged_decode(q_XHD, k_NBGD, v_NBGD, tables_XM, lengths_X, scale) -> out_XHD

X sequences bring one query each. Position p of sequence x lies in block ``tables_XM[x, p // B]``,
slot ``p % B``, and its query sees the first ``lengths_X[x]`` positions, its own the last of them::

    B = 4, length 6, table 2 0 -1      block 0    p4 p5  ?  ?
                                       block 1     ?  ?  ?  ?      another's, or nobody's
                                       block 2    p0 p1 p2 p3

Tables and lengths are int32. What stands at ``?``, and behind the last block in a table, may be
anything. What attention alone must do is in ``mie.spec.attention``; here is what is new when K and
V lie in blocks. Blocks have 4 slots and heads 16 elements, so that a kernel in Triton's interpreter
can be held to all cases in a few seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mie.spec.attention import mix
from mie.spec.tensors import close, has_dtype, normal, untouched

PagedDecode = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
B, D = 4, 16


def numbers(*values: Sequence[int]) -> Tensor:
    """Rows of a table, filled up with 0."""
    width = max(map(len, values))
    rows = [[*row, *[0] * (width - len(row))] for row in values]
    return torch.tensor(rows, dtype=torch.int32)


def many(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def blocks(num_blocks: int, G: int, seed: int) -> tuple[Tensor, Tensor]:
    """K and V of ``num_blocks`` blocks, with a block of NaN in memory before the first."""
    memory = normal(2, num_blocks + 1, B, G, D, seed=seed)
    memory[:, 0] = math.nan
    return memory[0, 1:], memory[1, 1:]


def attended(
    q_XHD: Tensor,
    k_NBGD: Tensor,
    v_NBGD: Tensor,
    tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    scale: float,
) -> list[list[list[float]]]:
    """The definition: position after position, one query head at a time, in Python's float64."""
    X, H, _ = q_XHD.shape
    J = H // k_NBGD.shape[2]
    q = q_XHD.tolist()

    def head(x: int, h: int) -> list[float]:
        at = [(tables[x][p // B], p % B, h // J) for p in range(lengths[x])]
        keys, values = ([cache[i].tolist() for i in at] for cache in (k_NBGD, v_NBGD))
        return mix(q[x][h], keys, values, scale)

    return [[head(x, h) for h in range(H)] for x in range(X)]


def averages(paged_decode: PagedDecode, v_NBGD: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
    """Of one head, with all scores equal: the mean of the values that each sequence reads."""
    q_XHD = torch.zeros(len(lengths), 1, D)
    return paged_decode(q_XHD, torch.zeros_like(v_NBGD), v_NBGD, tables, lengths, 1.0)


def constant(values: Sequence[float]) -> Tensor:
    """Rows of one head, all of whose elements are equal: ``[X, 1, D]``."""
    return torch.tensor(values).reshape(-1, 1, 1).expand(-1, 1, D)


def case_formula(paged_decode: PagedDecode) -> None:
    """Each query gets the average of its sequence's values, weighted by the softmax of the scores
    times `scale`. Otherwise: this is not the attention that the model was trained with."""
    k_NBGD, v_NBGD = blocks(5, 2, seed=1)
    q_XHD, tables, lengths = normal(2, 2, D, seed=2), [[0, 1, 2], [3, 4]], [11, 6]
    for scale in (0.25, 0.6):
        expected = attended(q_XHD, k_NBGD, v_NBGD, tables, lengths, scale)
        got = paged_decode(q_XHD, k_NBGD, v_NBGD, numbers(*tables), many(*lengths), scale)
        close(got, expected, 1e-5, f"paged_decode of 11 and 6 tokens, scale={scale}")


def case_scattered_blocks(paged_decode: PagedDecode) -> None:
    """A table may name any blocks in any order, and two tables may name the same ones. Otherwise:
    a sequence reads its neighbour in memory, or a shared prefix must be stored twice."""
    k_NBGD, v_NBGD = blocks(7, 1, seed=3)
    q_XHD, tables, lengths = normal(2, 1, D, seed=4), [[5, 2, 6], [5, 2, 0]], [12, 10]
    expected = attended(q_XHD, k_NBGD, v_NBGD, tables, lengths, 0.5)
    got = paged_decode(q_XHD, k_NBGD, v_NBGD, numbers(*tables), many(*lengths), 0.5)
    close(got, expected, 1e-5, "paged_decode over the blocks 5 2 6 and 5 2 0")


def case_ends_of_a_block(paged_decode: PagedDecode) -> None:
    """All `length` positions are read and none behind them, also where a block ends. Otherwise:
    once in a block's length of tokens, a token forgets itself or sees what was there before."""
    v_NBGD = torch.arange(3.0 * B).reshape(3, B, 1, 1).expand(3, B, 1, D).contiguous()
    for length in (1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1):
        got = averages(paged_decode, v_NBGD, numbers([0, 1, 2]), many(length))
        what = f"paged_decode of {length} tokens in blocks of {B}, values 0, 1, 2, …"
        close(got, constant([(length - 1) / 2]), 1e-5, what)


def case_poison(paged_decode: PagedDecode) -> None:
    """NaN in slots that are not the sequence's own never reaches its result. Otherwise: memory that
    was used before, or never, turns answers into noise, since zero times NaN is NaN."""
    k_NBGD, v_NBGD = blocks(4, 1, seed=5)
    q_XHD, tables, lengths = normal(2, 1, D, seed=6), [[3, 1], [2]], [6, 1]
    expected = attended(q_XHD, k_NBGD, v_NBGD, tables, lengths, 0.5)
    for cache in (k_NBGD, v_NBGD):
        cache[0] = math.nan  # nobody's
        cache[1, 2:], cache[2, 1:] = math.nan, math.inf  # behind the last tokens
    got = paged_decode(q_XHD, k_NBGD, v_NBGD, numbers(*tables), many(*lengths), 0.5)
    close(got, expected, 1e-5, "paged_decode of 6 and 1 tokens, NaN behind them")


def case_behind_the_table(paged_decode: PagedDecode) -> None:
    """Entries of a table behind the last block that is needed are not followed. Otherwise: a block
    number that is old, or none at all, leads the kernel out of the cache."""
    k_NBGD, v_NBGD = blocks(3, 1, seed=7)
    q_XHD, tables, lengths = normal(2, 1, D, seed=8), [[1], [2, 0]], [B, 2 * B]
    expected = attended(q_XHD, k_NBGD, v_NBGD, tables, lengths, 0.5)
    wide = numbers([1, -1, -1, -1], [2, 0, -1, -1])
    got = paged_decode(q_XHD, k_NBGD, v_NBGD, wide, many(*lengths), 0.5)
    close(got, expected, 1e-5, "paged_decode of full blocks, with -1 behind them in the tables")


def case_grouped_heads(paged_decode: PagedDecode) -> None:
    """Query head h reads key/value head h // (H // G). Otherwise: heads read a stranger's memory,
    in every model with fewer key/value heads than query heads."""
    for H, G in ((2, 2), (6, 2), (7, 1)):
        k_NBGD, v_NBGD = blocks(2, G, seed=9)
        q_XHD = normal(1, H, D, seed=10)
        expected = attended(q_XHD, k_NBGD, v_NBGD, [[1, 0]], [5], 0.5)
        got = paged_decode(q_XHD, k_NBGD, v_NBGD, numbers([1, 0]), many(5), 0.5)
        close(got, expected, 1e-5, f"paged_decode, H={H} over G={G}")


def case_length_zero(paged_decode: PagedDecode) -> None:
    """A sequence of length 0 gets zeros, whatever stands in its table. Otherwise: a batch that was
    filled up to a recorded size divides zero by zero, and NaN spreads from rows of nobody."""
    v_NBGD = torch.full((2, B, 1, D), 3.0)
    v_NBGD[1] = math.nan
    got = averages(paged_decode, v_NBGD, numbers([1], [0], [1]), many(0, 2, 0))
    close(got, constant([0.0, 3.0, 0.0]), 1e-6, "paged_decode of 0, 2 and 0 tokens, values 3")


def case_large_scores(paged_decode: PagedDecode) -> None:
    """Scores that rise or fall by thousands from block to block are only compared. Otherwise: `exp`
    overflows, or what was summed under a smaller maximum counts for more than it should."""
    position = torch.arange(3.0 * B).reshape(3, B, 1, 1)
    v_NBGD = position.expand(3, B, 1, D).contiguous()
    k_NBGD = torch.zeros(3, B, 1, D)
    k_NBGD[..., :1] = 1000.0 * (position // B)
    q_XHD = torch.ones(2, 1, D)
    tables = numbers([0, 1, 2], [2, 1, 0])
    got = paged_decode(q_XHD, k_NBGD, v_NBGD, tables, many(9, 12), 1.0)
    # The highest block decides: one token of it in the first context, four in the second.
    close(got, constant([8.0, 9.5]), 1e-5, "paged_decode, scores 0, 1000, 2000 and back")


def case_dtype_kept(paged_decode: PagedDecode) -> None:
    """The result has the queries' dtype. Otherwise: the output projection refuses, or the whole
    model quietly runs at twice the bytes."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        k_NBGD, v_NBGD = (cache.to(dtype) for cache in blocks(1, 1, seed=11))
        q_XHD = normal(1, 2, D, seed=12).to(dtype)
        got = paged_decode(q_XHD, k_NBGD, v_NBGD, numbers([0]), many(3), 0.5)
        has_dtype(got, dtype, f"paged_decode of {dtype}")


def case_input_untouched(paged_decode: PagedDecode) -> None:
    """Queries, cache, tables and lengths are only read. Otherwise: the next layer, which is given
    the same tables and lengths, reads something else."""
    k_NBGD, v_NBGD = blocks(2, 1, seed=13)
    q_XHD, tables_XM, lengths_X = normal(1, 2, D, seed=14), numbers([1, 0]), many(6)
    k_NBGD[0, 2:] = v_NBGD[0, 2:] = math.nan
    with untouched(q=q_XHD, k=k_NBGD, v=v_NBGD, tables=tables_XM, lengths=lengths_X):
        paged_decode(q_XHD, k_NBGD, v_NBGD, tables_XM, lengths_X, 0.5)
