"""Where swapped blocks lie: K and V in the host's memory, of the same shape as on the device.

Invariant: host block h holds what ``move_out`` wrote last. Who owns it, ``mie.memory.swap`` knows.

Cost: a block is ``2 * layers`` pieces of ``block_size * kv_heads * head_dim`` numbers each way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mie.execution.kv_cache import PagedKVCache
from mie.memory.swap import SwapIn, SwapOut


class SwapSpace:
    """Room for ``num_blocks`` blocks of ``cache``, taken at once."""

    def __init__(self, cache: PagedKVCache, num_blocks: int) -> None:
        self.cache = cache
        layers, two, _, *block = cache.kv_L2NBGD.shape
        shape = (layers, two, num_blocks, *block)
        pinned = cache.kv_L2NBGD.is_cuda and num_blocks > 0
        self.kv_L2NBGD = torch.empty(shape, dtype=cache.kv_L2NBGD.dtype, pin_memory=pinned)

    @property
    def nbytes(self) -> int:
        return self.kv_L2NBGD.nbytes

    def move_out(self, moves: Sequence[SwapOut]) -> None:
        """From the device to the host, all layers."""
        if moves:
            device, host = zip(*moves, strict=True)
            content = self.cache.kv_L2NBGD.index_select(2, self._index(device))
            self.kv_L2NBGD.index_copy_(2, torch.tensor(host), content.cpu())

    def move_in(self, moves: Sequence[SwapIn]) -> None:
        """From the host to the device, all layers."""
        if moves:
            host, device = zip(*moves, strict=True)
            content = self.kv_L2NBGD.index_select(2, torch.tensor(host))
            target = self.cache.kv_L2NBGD
            target.index_copy_(2, self._index(device), content.to(target.device))

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, device=self.cache.kv_L2NBGD.device)
