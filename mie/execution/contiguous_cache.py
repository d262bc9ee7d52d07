"""K and V of one sequence in one contiguous stretch of memory, reserved in advance.

Invariant: positions ``0 … length - 1`` of every layer hold the K and V of the sequence's tokens, in
order. ``attend`` writes a step's tokens behind them, layer after layer; ``advance`` makes them
count once all layers have written::

    position   0   1   2   3   4   5   6   7      capacity = 8
               k   k   k   k   k   +   .   .      length = 5, one token in this step

This is how engines kept K and V before paging. It stays as the oracle that paged memory must equal,
and its weakness is the subject of the memory chapters: capacity is paid for whether used or not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mie.errors import ContextLengthError
from mie.model.config import ModelConfig
from mie.model.decoder import Decoder
from mie.ops import reference


class ContiguousCache:
    """Room for ``capacity`` tokens of one sequence, all layers.

    Memory: ``config.kv_bytes_per_token(dtype) * capacity``, taken at once.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: Callable[..., Tensor] = reference.attention,
    ) -> None:
        shape = (config.num_layers, capacity, config.num_kv_heads, config.head_dim)
        self.k_LSGD = torch.zeros(shape, dtype=dtype, device=device)
        self.v_LSGD = torch.zeros(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0
        self.attention = attention

    @classmethod
    def for_decoder(cls, decoder: Decoder, capacity: int) -> ContiguousCache:
        """In the decoder's dtype, on its device, with its attention."""
        return cls(decoder.config, capacity, decoder.dtype, decoder.device, decoder.ops.attention)

    @property
    def nbytes(self) -> int:
        return self.k_LSGD.nbytes + self.v_LSGD.nbytes

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float
    ) -> Tensor:
        """Write this step's K and V of ``layer``; attend over everything written so far.

        Raises ContextLengthError when the step does not fit; then nothing has been written.
        """
        end = self.length + len(k_TGD)
        if end > self.capacity:
            raise ContextLengthError(f"{end} tokens in a cache with room for {self.capacity}")
        self.k_LSGD[layer, self.length : end] = k_TGD
        self.v_LSGD[layer, self.length : end] = v_TGD
        return self.attention(q_THD, self.k_LSGD[layer, :end], self.v_LSGD[layer, :end], scale)

    def advance(self, num_tokens: int) -> None:
        """The step is done in all layers: its tokens are part of the context now."""
        assert self.length + num_tokens <= self.capacity
        self.length += num_tokens
