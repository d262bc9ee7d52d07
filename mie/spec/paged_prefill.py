"""What any attention for chunks and decodes in one call must do.

    paged_prefill(q_THD, k_NBGD, v_NBGD, tables_SM, starts_S1, lengths_S, scale) -> out_THD

The new tokens of S sequences stand in one row. Sequence s brings the queries ``starts_S1[s]`` to
``starts_S1[s + 1]``: the last of its ``lengths_S[s]`` positions. Position p lies in block
``tables_SM[s, p // B]``, at place ``p % B``. Rows from ``starts_S1[S]`` on are of nobody::

    starts 0 1 4      queries   a  b  b  b  .  .        a decodes; b brings 3 of its 5 tokens
    lengths 9 5       sees      9  3  4  5              positions of its own sequence

Tables, starts and lengths are int32, and all of them may be on the device. What attention alone
must do is in ``mie.spec.attention``. No case has more than 40 positions, and none computes in
bfloat16, so a kernel in Triton's interpreter can be held to them as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mie.spec.attention import Heads, attended
from mie.spec.tensors import close, has_dtype, normal

PagedPrefill = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class Batch:
    """Sequences of ``lengths`` tokens, the last ``new`` of which are queries, in blocks of ``B``.

    ``q`` has a row for each of them, and at the end some of nobody; ``k`` and ``v`` are those of
    each sequence, by position. Blocks are handed out in turn, the last one first, and everything
    that no sequence has written is ``unwritten``.
    """

    new: Sequence[int]
    q: Tensor
    k: Sequence[Tensor]
    v: Sequence[Tensor]
    B: int
    unwritten: float = 0.0

    @classmethod
    def random(
        cls,
        new: Sequence[int],
        lengths: Sequence[int],
        H: int = 4,
        G: int = 2,
        D: int = 16,
        B: int = 4,
        padding: int = 0,
        unwritten: float = 0.0,
    ) -> Batch:
        q_THD = normal(sum(new) + padding, H, D, seed=sum(lengths))
        k = [normal(n, G, D, seed=n + 100) for n in lengths]
        v = [normal(n, G, D, seed=n + 200) for n in lengths]
        return cls(new, q_THD, k, v, B, unwritten)

    def arguments(self, scale: float = 0.3, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
        """What the part is called with."""
        G, D = self.k[0].shape[1:]
        counts = [-(-len(k) // self.B) for k in self.k]
        kv_2NBGD = torch.full((2, 1 + sum(counts), self.B, G, D), self.unwritten)
        tables_SM = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
        free = list(range(1, 1 + sum(counts)))
        for m in range(max(counts)):  # so that no sequence has two neighbours
            for s, count in enumerate(counts):
                if m < count:
                    tables_SM[s, m] = free.pop()
        for s, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            for p in range(len(k)):
                block = int(tables_SM[s, p // self.B])
                kv_2NBGD[0, block, p % self.B], kv_2NBGD[1, block, p % self.B] = k[p], v[p]
        starts = [sum(self.new[:s]) for s in range(len(self.new) + 1)]
        lengths = [len(k) for k in self.k]
        kv = kv_2NBGD.to(dtype)
        integers = (torch.tensor(each, dtype=torch.int32) for each in (starts, lengths))
        return self.q.to(dtype), kv[0], kv[1], tables_SM, *integers, scale

    def expected(self, scale: float = 0.3) -> Heads:
        """The definition, one sequence after the other; rows of nobody are 0."""
        rows: Heads = []
        for new, k_LGD, v_LGD in zip(self.new, self.k, self.v, strict=True):
            q_THD = self.q[len(rows) : len(rows) + new]
            rows += attended(q_THD, k_LGD, v_LGD, scale) if new else []
        return rows + torch.zeros_like(self.q[len(rows) :]).tolist()


def equal_scores(paged_prefill: PagedPrefill, new: int, length: int) -> Any:
    """The part's result for one sequence whose V is 0, 1, 2, ... and whose scores are all 0."""
    zeros, v_LGD = torch.zeros(length, 1, 1), torch.arange(float(length)).reshape(length, 1, 1)
    batch = Batch([new], torch.zeros(new, 1, 1), [zeros], [v_LGD], B=2)
    return paged_prefill(*batch.arguments(1.0))


def case_blocks_in_table_order(paged_prefill: PagedPrefill) -> None:
    """Position p of a sequence lies in block `tables[s, p // B]`, at place `p % B`. Otherwise: a
    sequence reads what another one wrote, and its answer speaks of somebody else's text."""
    for H, G, D, B in ((4, 2, 16, 4), (3, 3, 8, 8), (6, 2, 24, 2)):
        batch = Batch.random([4, 3], [10, 7], H, G, D, B)
        what = f"paged_prefill of 4 of 10 and 3 of 7 tokens, H={H} G={G} D={D}, blocks of {B}"
        close(paged_prefill(*batch.arguments()), batch.expected(), 1e-5, what)


def case_queries_are_the_last(paged_prefill: PagedPrefill) -> None:
    """The queries of a sequence stand at its last positions, behind a cached prefix. Otherwise: a
    chunk sees the beginning of the text and not what stands before it."""
    got = equal_scores(paged_prefill, 2, 6)
    expected = [[[2.0]], [[2.5]]]  # the averages of 0 ... 4 and of 0 ... 5
    close(got, expected, 1e-5, "paged_prefill of the last 2 of 6 tokens, V = 0 ... 5, equal scores")


def case_never_sees_ahead(paged_prefill: PagedPrefill) -> None:
    """A query sees itself and what is before it, though K and V of the whole chunk are written.
    Otherwise: a prompt that is computed at once differs from one that comes token by token."""
    got = equal_scores(paged_prefill, 7, 7)
    expected = [[[p / 2]] for p in range(7)]
    close(got, expected, 1e-5, "paged_prefill of a prompt of 7 tokens, V = 0 ... 6, equal scores")


def case_mixed_batch(paged_prefill: PagedPrefill) -> None:
    """Decodes, chunks and whole prompts share a call, in any order, and each gives what it gives
    alone. Otherwise: an answer depends on who is computed in the same step."""
    new, lengths = [1, 9, 1, 1, 5, 17], [20, 9, 1, 33, 21, 40]
    batch = Batch.random(new, lengths)
    what = f"paged_prefill of {new} new tokens of sequences of {lengths}"
    close(paged_prefill(*batch.arguments()), batch.expected(), 1e-5, what)


def case_no_queries(paged_prefill: PagedPrefill) -> None:
    """A sequence may bring no query: its start is that of the next one. Otherwise: the row that
    belongs to its neighbour is computed with its blocks."""
    new, lengths = [2, 0, 1, 0], [5, 6, 9, 3]
    batch = Batch.random(new, lengths)
    what = f"paged_prefill of {new} new tokens of sequences of {lengths}"
    close(paged_prefill(*batch.arguments()), batch.expected(), 1e-5, what)


def case_padding(paged_prefill: PagedPrefill) -> None:
    """Rows behind the last sequence's are of nobody and come out as 0. Otherwise: what they read
    is chance, and where it is NaN a norm or a sum over the batch spreads it."""
    batch = Batch.random([1, 3], [6, 8], padding=5)
    batch.q[4:] = math.nan
    what = "paged_prefill of 4 queries and 5 rows of nobody"
    close(paged_prefill(*batch.arguments()), batch.expected(), 1e-5, what)


def case_unwritten_slots(paged_prefill: PagedPrefill) -> None:
    """Slots behind the last position and blocks of nobody may hold NaN. Otherwise: a weight of 0
    times NaN is NaN, and a block's former owner ruins the answer of the next."""
    batch = Batch.random([1, 6], [5, 10], padding=1, unwritten=math.nan)
    what = "paged_prefill of 1 of 5 and 6 of 10 tokens, NaN in all other slots"
    close(paged_prefill(*batch.arguments()), batch.expected(), 1e-5, what)


def case_grouped_heads(paged_prefill: PagedPrefill) -> None:
    """Query head h of a token reads key/value head h // (H // G), also where 3 heads share one.
    Otherwise: rows of a tile are taken for the wrong token, or read a stranger's memory."""
    for H, G in ((2, 2), (9, 3), (7, 1)):
        batch = Batch.random([3, 1], [3, 5], H, G)
        got = paged_prefill(*batch.arguments())
        close(got, batch.expected(), 1e-5, f"paged_prefill, H={H} over G={G}")


def case_rising_scores(paged_prefill: PagedPrefill) -> None:
    """Scores that rise to thousands over 40 positions, or fall from there, are weighted as one
    softmax. Otherwise: `exp` overflows, or a sum that was begun with another maximum is kept."""
    for sign in (1.0, -1.0):
        k_LGD = (sign * torch.arange(40.0)).reshape(40, 1, 1).expand(40, 1, 16) * 6
        v_LGD = normal(40, 1, 16, seed=1)
        q_THD = torch.linspace(0.0, 1.0, 8).reshape(8, 1, 1).expand(8, 1, 16).contiguous()
        batch = Batch([8], q_THD, [k_LGD], [v_LGD], B=4)
        what = f"paged_prefill with scores up to {sign * 3744:g}"
        close(paged_prefill(*batch.arguments(1.0)), batch.expected(1.0), 1e-5, what)


def case_dtype_kept(paged_prefill: PagedPrefill) -> None:
    """The result has the queries' dtype. Otherwise: the product behind it refuses."""
    batch = Batch.random([2], [3])
    for dtype in (torch.float32, torch.float16):
        got = paged_prefill(*batch.arguments(dtype=dtype))
        has_dtype(got, dtype, f"paged_prefill of {dtype}")
        close(got, batch.expected(), 1e-5 if dtype == torch.float32 else 4e-3, f"in {dtype}")
