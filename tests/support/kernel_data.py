"""What tests of kernels share: where they run, how exact they must be, and caches in blocks.

Invariant: a test takes nothing from the device but the result. All data are drawn on the CPU from a
seed, so the interpreter and a GPU are given the same numbers.

Dtypes: a CPU tests float32 and float16. Triton's interpreter keeps a bfloat16 as the integer of its
bits and cuts instead of rounding when it stores one, so bfloat16 is tested on a GPU alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (
    [torch.float32, torch.bfloat16, torch.float16]
    if DEVICE == "cuda"
    else [torch.float32, torch.float16]
)
SAFETY = 8  # how far beyond the expected error of float32 sums a test reaches


def tolerance(dtype: torch.dtype, reduction_length: int = 1) -> tuple[float, float]:
    """``(atol, rtol)`` for results near 1 which sum ``reduction_length`` products of values near 1.

    float32: each addition is off by at most eps / 2 of its result. Errors of n additions in two
    orders are independent, so they grow with sqrt(n).

    Half types: got and expected are rounded once each, so they are at most one unit in the last
    place apart: ``rtol = eps``. Weights that are rounded before a product add at most eps / 2 of
    the mean of ``|v|``, whatever their number: ``atol = eps``. The sum in float32 comes on top.
    """
    exact = SAFETY * torch.finfo(torch.float32).eps * math.sqrt(max(reduction_length, 1))
    if dtype == torch.float32:
        return exact, exact
    eps = torch.finfo(dtype).eps
    return eps + exact, eps + exact


def assert_close(
    got: Tensor, expected: Tensor, dtype: torch.dtype, reduction_length: int = 1
) -> None:
    """Equal within ``tolerance``, of one shape and dtype; a NaN is never close to anything."""
    atol, rtol = tolerance(dtype, reduction_length)
    torch.testing.assert_close(got, expected, atol=atol, rtol=rtol)


class PagedData:
    """K and V of S sequences, scattered over blocks. ``k_NBGD`` and ``v_NBGD`` are views.

    ``tables_RM`` and ``lengths_S`` are int32. Entries behind the last needed block are 0.
    """

    def __init__(self, kv_2NBGD: Tensor, tables_RM: Tensor, lengths_S: Tensor) -> None:
        self.kv_2NBGD = kv_2NBGD
        self.k_NBGD, self.v_NBGD = kv_2NBGD
        self.tables_RM = tables_RM
        self.lengths_S = lengths_S
        self.block_size = kv_2NBGD.shape[2]

    def blocks(self, sequence: int) -> Tensor:
        """The blocks that ``sequence`` needs, in the order of its text: int32."""
        needed = -(-int(self.lengths_S[sequence]) // self.block_size)
        return self.tables_RM[sequence, :needed]

    def slots(self, sequence: int) -> Tensor:
        """The slot of each position of ``sequence``: int64."""
        position = torch.arange(int(self.lengths_S[sequence]), device=self.tables_RM.device)
        block = self.tables_RM[sequence, position // self.block_size].long()
        return block * self.block_size + position % self.block_size


def paged(
    lengths: Sequence[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int,
    poison: bool = True,
    heads_outside: bool = False,
    free_blocks: int = 2,
    device: str = DEVICE,
) -> PagedData:
    """Random K and V of ``len(lengths)`` sequences in random blocks. Block 0 is scratch.

    ``poison`` fills every slot that no sequence owns with NaN: the scratch block, the free blocks,
    and the slots behind the last token of each sequence. ``heads_outside`` lays a block out in
    memory as [G, B, D]; the shape stays [N, B, G, D]. A length may be 0.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = 1 + sum(needed) + free_blocks
    order = (1 + torch.randperm(num_blocks - 1, generator=generator)).int()
    tables_RM = torch.zeros(len(lengths), max([*needed, 1]), dtype=torch.int32)
    kv_2NBGD = torch.randn(
        (2, num_blocks, block_size, num_kv_heads, head_dim), generator=generator
    ).to(dtype)
    owned_NB = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    first = 0
    for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        blocks = order[first : first + count]
        first += count
        tables_RM[row, :count] = blocks
        position = torch.arange(length)
        owned_NB[blocks.long()[position // block_size], position % block_size] = True
    if poison:
        kv_2NBGD[:, ~owned_NB] = float("nan")
    if heads_outside:
        kv_2NBGD = kv_2NBGD.transpose(2, 3).contiguous().transpose(2, 3)
    return PagedData(
        kv_2NBGD=kv_2NBGD.to(device),
        tables_RM=tables_RM.to(device),
        lengths_S=torch.tensor(lengths, dtype=torch.int32, device=device),
    )
