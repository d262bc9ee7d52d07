"""K and V of all sequences in blocks: where the bytes lie that block tables speak of.

Invariant: slot ``s`` of a layer holds the K and V of one token of whoever owns block
``s // block_size``. A step first writes the K and V of all its tokens to their slots, then each
sequence reads the slots of its own context and no others. What stands anywhere else (in free
blocks, behind the last token of a block, in the scratch block) is never read and may be anything::

    sequence a   blocks 4, 1   num_tokens 6         sequence b   blocks 2   num_tokens 3

    block           0           1           2           3           4
    slot         0 1 2 3     4 5 6 7     8 9 . .      . . . .     . . . .       block_size = 4
                 scratch     a a . .     b b b .      free        a a a a

In one step both may be computed. The queries of a sequence stand together in the flat batch, and
the model's other layers never learn where one ends and the next begins::

    q_THD, k_TGD, v_TGD      a  a  b           a brings two new tokens, b one
    slots_T                  4  5  10          K and V go there
    context                 (4, 1: 6)  (2: 3)  and each sequence reads this

Layout: ``[layers, 2, blocks, block_size, kv_heads, head_dim]``. A layer's K is one piece of memory,
so writing to slots is one indexed copy. In it a block is one piece too, so a gather moves
``block_size * kv_heads * head_dim`` elements at a time. Copying a block moves 2 pieces a layer.

Cost of a step in one layer, beyond attention itself: each new token is written once, and each
context is copied together, block after block. A kernel that reads the blocks where they are saves
that copy. After Kwon et al., 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mie.model.config import ModelConfig
from mie.model.decoder import Decoder
from mie.ops import reference
from mie.ops.dispatch import DecodeAttention, Ops


@dataclass(frozen=True)
class SequenceStep:
    """One sequence's part of a step: it reads ``num_tokens`` tokens, the last of which are new.

    ``blocks`` are physical, in the order of the text. ``slots`` are those of the new tokens, which
    are at least one: ``BlockTable.blocks`` and ``BlockTable.slots``.
    """

    blocks: Sequence[int]
    slots: Sequence[int]
    num_tokens: int

    def check(self, block_size: int) -> None:
        """The three must speak of the same tokens."""
        new, room = len(self.slots), len(self.blocks) * block_size
        assert 0 < new <= self.num_tokens, f"{new} new tokens among {self.num_tokens}"
        assert self.num_tokens <= room, f"{self.num_tokens} tokens in {room} slots"
        for position, slot in enumerate(self.slots, start=self.num_tokens - new):
            expected = self.blocks[position // block_size] * block_size + position % block_size
            assert slot == expected, f"position {position} in slot {slot}, not {expected}"


class PagedKVCache:
    """``num_blocks`` blocks of ``block_size`` slots, all layers, taken at once and filled with 0.

    ``kv_L2NBGD``: layer, K or V, block, slot in the block, key/value head, head size.

    Memory: ``config.kv_bytes_per_token(dtype) * num_blocks * block_size``. On a CPU the system
    hands a page of it over when it is first written; a GPU does so at once.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        ops: Ops | None = None,
    ) -> None:
        places = (config.num_layers, 2, num_blocks, block_size)
        shape = (*places, config.num_kv_heads, config.head_dim)
        self.kv_L2NBGD = _zeros(shape, dtype, torch.device(device))
        self.layers = list(self.kv_L2NBGD)  # views; to make them in every step takes time
        self.slots = [(kv[0].flatten(0, 1), kv[1].flatten(0, 1)) for kv in self.layers]
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ops = ops or Ops()

    @classmethod
    def for_decoder(cls, decoder: Decoder, num_blocks: int, block_size: int = 16) -> PagedKVCache:
        """In the decoder's dtype, on its device, with its operations."""
        shape = decoder.config, num_blocks, block_size
        return cls(*shape, decoder.dtype, decoder.device, decoder.ops)

    @property
    def nbytes(self) -> int:
        return self.kv_L2NBGD.nbytes

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Make the copies (source, target) of ``mie.memory.block_copies``, in all layers.

        No target is a source or stands twice, so they can be made at once.
        """
        if not copies:
            return
        sources, targets = zip(*copies, strict=True)
        assert len({*targets}) == len(targets), f"a block is the target of two: {targets}"
        assert not {*sources} & {*targets}, f"a block is source and target: {copies}"
        content = self.kv_L2NBGD.index_select(2, self._index(sources))
        self.kv_L2NBGD.index_copy_(2, self._index(targets), content)

    def step(self, sequences: Sequence[SequenceStep], num_padding: int = 0) -> PagedStep:
        """The cache as the decoder sees it in one step.

        The flat batch holds ``sequences`` in this order, the new tokens of each together. It ends
        with ``num_padding`` tokens of nobody: their K and V go to slot 0 of the scratch block, and
        what they attend to is zero.
        """
        return PagedStep(self, sequences, num_padding)

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.kv_L2NBGD.device)


class PagedStep:
    """One step on a ``PagedKVCache``: where its tokens go, and what each sequence may read.

    All that does not depend on the layer is prepared here, once.
    """

    def __init__(
        self, cache: PagedKVCache, sequences: Sequence[SequenceStep], num_padding: int = 0
    ) -> None:
        assert sequences, "a step computes something"
        assert num_padding >= 0, f"{num_padding} padding tokens"
        for sequence in sequences:
            sequence.check(cache.block_size)
        slots = [slot for sequence in sequences for slot in sequence.slots]
        assert len({*slots}) == len(slots), "two tokens of one step in one slot"
        self.cache = cache
        self.num_padding = num_padding
        self.slots_T = cache._index([*slots, *[0] * num_padding])
        self._divide(sequences)

    def _divide(self, sequences: Sequence[SequenceStep]) -> None:
        """Decodes that are computed together, and the rest, each by itself: ``self.chunks`` of
        (first row, behind the last row, blocks, tokens of context)."""
        together = self.cache.ops.paged_decode
        decodes: list[tuple[int, SequenceStep]] = []
        self.chunks: list[tuple[int, int, Tensor, int]] = []
        end = 0
        for sequence in sequences:
            start, end = end, end + len(sequence.slots)
            if together is not None and end - start == 1:
                decodes.append((start, sequence))
            else:
                table_M = self.cache._index(sequence.blocks)
                self.chunks.append((start, end, table_M, sequence.num_tokens))
        self.decode: DecodeAttention | None = None
        if decodes and together is not None:
            rows, those = zip(*decodes, strict=True)
            tables = [sequence.blocks for sequence in those]
            lengths = [sequence.num_tokens for sequence in those]
            self.decode = together(tables, lengths, self.cache.layers[0])
            self.decode_rows = self.cache._index(rows)

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float
    ) -> Tensor:
        """Write this step's K and V of ``layer``; let each sequence attend to its context."""
        k_slots, v_slots = self.cache.slots[layer]
        k_slots.index_copy_(0, self.slots_T, k_TGD)
        v_slots.index_copy_(0, self.slots_T, v_TGD)
        kv_2NBGD = self.cache.layers[layer]
        if self.decode is not None and not self.chunks and not self.num_padding:
            return self.decode(q_THD, kv_2NBGD, scale)
        out_THD = torch.zeros_like(q_THD)
        if self.decode is not None:
            q_XHD = q_THD.index_select(0, self.decode_rows)
            out_THD.index_copy_(0, self.decode_rows, self.decode(q_XHD, kv_2NBGD, scale))
        k_NBGD, v_NBGD = kv_2NBGD
        attention = self.cache.ops.attention
        for start, end, table_M, length in self.chunks:
            q_XHD = q_THD[start:end]
            out_THD[start:end] = reference.paged_attention(
                q_XHD, k_NBGD, v_NBGD, table_M, length, scale, attention
            )
        return out_THD


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``torch.zeros``, which on a CPU writes every page; NumPy leaves that to the system."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
