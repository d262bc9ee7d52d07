"""How fast sequences are decoded: the engine's step on blocks against a plain loop of torch.

Invariant: both have the same weights, dtype, threads and lengths, and take turns, one step each, so
that whatever else the machine does in the meantime happens to both. A step of the engine includes
what a scheduler's step would: tables that grow, slots, and the cache's view of them, made anew.

The figure is the fastest step: what it takes when nobody disturbs it. With two threads on two cores
any other process makes one wait for the other, up to milliseconds in every product.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mie.bench.plain_loop import PlainLoop
from mie.bench.result import Result
from mie.execution.kv_cache import PagedKVCache, SequenceStep
from mie.memory.block_copies import BlockCopies
from mie.memory.block_pool import BlockPool, blocks_needed
from mie.memory.block_table import BlockTable
from mie.model.decoder import Decoder


@dataclass(frozen=True)
class DecodeSpeed(Result):
    """``num_sequences`` decoded at about ``context`` tokens each; the fastest of ``num_steps``."""

    dtype: str
    num_threads: int
    num_sequences: int
    context: int
    num_steps: int
    paged_nanoseconds: int
    plain_nanoseconds: int

    @property
    def paged_tokens_per_second(self) -> float:
        return self.num_sequences * 1e9 / self.paged_nanoseconds

    @property
    def plain_tokens_per_second(self) -> float:
        return self.num_sequences * 1e9 / self.plain_nanoseconds

    @property
    def paged_to_plain(self) -> float:
        """Above 1, the engine is faster."""
        return self.plain_nanoseconds / self.paged_nanoseconds


class PagedLoop:
    """Greedy decoding through ``PagedKVCache``, with tables as a scheduler keeps them."""

    def __init__(
        self, decoder: Decoder, num_sequences: int, max_length: int, block_size: int = 16
    ) -> None:
        self.decoder = decoder
        num_blocks = 1 + num_sequences * blocks_needed(max_length, block_size)
        pool = BlockPool(num_blocks, block_size)
        copies = BlockCopies(pool)
        self.tables = [BlockTable(pool, copies) for _ in range(num_sequences)]
        self.cache = PagedKVCache.for_decoder(decoder, num_blocks, block_size)

    @torch.inference_mode()
    def step(self, token_ids: Sequence[Sequence[int]]) -> list[int]:
        """Put the new tokens of each sequence behind its own; the most likely next of each."""
        sequences, positions, last = [], [], []
        for table, new in zip(self.tables, token_ids, strict=True):
            start = table.num_tokens
            assert table.append(len(new)), "the pool was made for less"
            slots = table.slots(start, table.num_tokens)
            sequences.append(SequenceStep(table.blocks, slots, table.num_tokens))
            positions += range(start, table.num_tokens)
            last.append(len(positions) - 1)
        device = self.decoder.device
        token_ids_T = torch.tensor([token for new in token_ids for token in new], device=device)
        positions_T = torch.tensor(positions, device=device)
        hidden_TE = self.decoder(token_ids_T, positions_T, self.cache.step(sequences))
        if len(last) < len(positions):
            hidden_TE = hidden_TE[last]
        return self.decoder.logits(hidden_TE).argmax(dim=-1).tolist()


def decode_speed(
    decoder: Decoder, num_sequences: int, context: int = 64, num_steps: int = 16
) -> DecodeSpeed:
    """Decode ``num_sequences`` random texts, whose lengths are ``context`` in the middle."""
    before = max(1, context - num_steps // 2)
    generator = torch.Generator().manual_seed(0)
    shape = num_sequences, before
    prompts_BT = torch.randint(decoder.config.vocab_size, shape, generator=generator)
    paged = PagedLoop(decoder, num_sequences, before + num_steps + 2)
    plain = PlainLoop(decoder, num_sequences, before + num_steps + 2)
    # The prompt and one step before the clock runs: the first of a kind makes room and plans.
    ours = paged.step([[token] for token in paged.step(prompts_BT.tolist())])
    theirs = plain.step(plain.step(prompts_BT.to(decoder.device)).unsqueeze(1))
    paged_times, plain_times = [], []
    for _ in range(num_steps):
        nanoseconds, ours = _timed(paged.step, [[token] for token in ours])
        paged_times.append(nanoseconds)
        nanoseconds, theirs = _timed(plain.step, theirs.unsqueeze(1))
        plain_times.append(nanoseconds)
    return DecodeSpeed(
        dtype=str(decoder.dtype).removeprefix("torch."),
        num_threads=torch.get_num_threads(),
        num_sequences=num_sequences,
        context=context,
        num_steps=num_steps,
        paged_nanoseconds=min(paged_times),
        plain_nanoseconds=min(plain_times),
    )


def _timed(step: Callable, tokens):
    """(nanoseconds, result), once the device has finished."""
    start = time.perf_counter_ns()
    result = step(tokens)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter_ns() - start, result
