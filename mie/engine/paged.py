"""The loop of ``plain`` on blocks: the same tokens, and beginnings that are known already.

Invariant: a token is computed only where no block with its K and V was found, and a block is
registered only after a step has written it. So the last token of an answer, which nobody has
computed, is in no block, and neither is what would have come after it.

    prompt        t0 … t15 | t16 … t31 | t32 t33         a third request for the same text
    found         block 4  | block 9   |                 32 tokens that are not computed
    computed                             t32 t33         the first step, at position 32
                                                 t34     every later step: one token

Cost for a prompt of P tokens of which C are found, and N new ones: P - C + N - 1 tokens through
the model, and ``blocks_needed(P + N - 1)`` blocks, of which C / block_size may be shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from mie.engine.plain import next_token
from mie.errors import ConfigError, OutOfBlocksError
from mie.execution.kv_cache import PagedKVCache, PagedStep, SequenceStep
from mie.machine import memory_bytes
from mie.memory.block_copies import BlockCopies
from mie.memory.block_pool import BlockPool, blocks_needed
from mie.memory.block_table import BlockTable
from mie.memory.prefix_cache import HashPrefixCache, PrefixCache
from mie.model.config import ModelConfig
from mie.model.decoder import Decoder


class KVMemory:
    """All blocks of one decoder: who owns them (integers) and what is in them (tensors)."""

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: int,
        block_size: int = 16,
        *,
        block_pool: Callable[[int, int], BlockPool] = BlockPool,
        block_table: Callable[..., BlockTable] = BlockTable,
        prefix_cache: Callable[[BlockPool], PrefixCache] = HashPrefixCache,
    ) -> None:
        self.pool = block_pool(num_blocks, block_size)
        self.copies = BlockCopies(self.pool)
        self.prefix_cache = prefix_cache(self.pool)
        self.cache = PagedKVCache.for_decoder(decoder, num_blocks, block_size)
        self._new_table = block_table

    @property
    def num_tokens(self) -> int:
        """How many tokens all blocks together hold."""
        return (self.pool.num_blocks - 1) * self.pool.block_size

    def table(self, prompt: Sequence[int], salt: str = "") -> BlockTable:
        """A table with the blocks that hold the known beginning of ``prompt``."""
        blocks = self.prefix_cache.match(prompt, salt)
        table = self._new_table(self.pool, self.copies, blocks)
        self.prefix_cache.hits.add(len(prompt), table.num_tokens)
        return table

    def step(self, table: BlockTable, num_new: int) -> PagedStep:
        """Slots for ``num_new`` more tokens of ``table``, and the cache for their step.

        Raises OutOfBlocksError when there are too few blocks; then nothing has changed.
        """
        if not table.append(num_new):
            raise OutOfBlocksError(
                f"tokens to add: {num_new}; blocks of {self.pool.block_size} needed: "
                f"{table.blocks_to_append(num_new)}, free: {self.pool.num_free} of "
                f"{self.pool.num_blocks - 1}, this sequence's own: {len(table.blocks)}"
            )
        try:
            self.cache.copy_blocks(self.copies.take())
        finally:
            self.copies.launched()
        slots = table.slots(table.num_tokens - num_new, table.num_tokens)
        return self.cache.step([SequenceStep(table.blocks, slots, table.num_tokens)])


def greedy_paged(
    decoder: Decoder,
    memory: KVMemory,
    table: BlockTable,
    prompt: Iterable[int],
    salt: str = "",
) -> Iterator[int]:
    """The most likely token after ``prompt``, the one after that, …; the caller stops.

    ``table`` holds the K and V of the first ``table.num_tokens`` tokens of ``prompt``; the
    caller gives it back. Raises OutOfBlocksError when another token does not fit.
    """
    tokens = list(prompt)
    while True:
        position = table.num_tokens
        new = tokens[position:]
        token = next_token(decoder, new, position, memory.step(table, len(new)))
        memory.prefix_cache.insert(table, tokens, table.num_tokens, salt)
        yield token
        tokens.append(token)


def choose_num_blocks(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    num_blocks: int | None,
) -> int:
    """``num_blocks`` if the device has memory for it. By default one whole context, and scratch, or
    what half of the device's memory holds if that is less.

    Raises ConfigError for more than the device has.
    """
    block_bytes = config.kv_bytes_per_token(dtype) * block_size
    memory = device_memory(device)
    if num_blocks is None:
        num_blocks = 1 + blocks_needed(config.max_position_embeddings, block_size)
        if memory is not None:
            num_blocks = max(2, min(num_blocks, memory // 2 // block_bytes))
    elif memory is not None and num_blocks * block_bytes > memory:
        raise ConfigError(
            f"{num_blocks} blocks of {block_size} tokens take {num_blocks * block_bytes:,} bytes; "
            f"{device} has {memory:,}"
        )
    return num_blocks


def device_memory(device: torch.device) -> int | None:
    """Bytes that are free on a CUDA device. Of a CPU, all that it has: what is free changes with
    every file that is read, and a limit on prompts should not. None if nobody knows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return memory_bytes()
