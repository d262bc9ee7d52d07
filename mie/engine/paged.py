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

from collections.abc import Iterable, Iterator
from typing import Any

from mie.engine.plain import next_token
from mie.errors import OutOfBlocksError
from mie.execution.kv_cache import PagedKVCache, PagedStep, SequenceStep
from mie.memory.block_table import BlockTable
from mie.memory.manager import BlockManager
from mie.model.decoder import Decoder


class KVMemory(BlockManager):
    """All blocks of one decoder: who owns them (integers) and what is in them (tensors).

    ``parts`` are the parts of memory that are replaced: see ``BlockManager``.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: int,
        block_size: int = 16,
        num_host_blocks: int = 0,
        **parts: Any,
    ) -> None:
        super().__init__(num_blocks, block_size, num_host_blocks, **parts)
        self.cache = PagedKVCache.for_decoder(decoder, num_blocks, block_size)

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
    memory.prefix_cache.hits.add(len(tokens), table.num_tokens)  # once a request
    while True:
        position = table.num_tokens
        new = tokens[position:]
        token = next_token(decoder, new, position, memory.step(table, len(new)))
        memory.prefix_cache.insert(table, tokens, table.num_tokens, salt)
        yield token
        tokens.append(token)
