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
from typing import TypeVar

import torch

from mie.bench.plain_loop import PlainLoop
from mie.bench.result import Result
from mie.execution.kv_cache import PagedKVCache, SequenceStep
from mie.memory.block_copies import BlockCopies
from mie.memory.block_pool import BlockPool, blocks_needed
from mie.memory.block_table import BlockTable
from mie.model.decoder import Decoder

Given = TypeVar("Given")
Made = TypeVar("Made")


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
        sequences: list[SequenceStep] = []
        positions: list[int] = []
        last: list[int] = []
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
    """Decode ``num_sequences`` texts, whose lengths are ``context`` in the middle of the steps.

    What came before is not computed but filled in with random numbers: how long a step takes does
    not depend on them, and a prompt would take longer than all that is measured.
    """
    before = max(1, context - num_steps // 2 - 1)
    paged = PagedLoop(decoder, num_sequences, before + num_steps + 1)
    plain = PlainLoop(decoder, num_sequences, before + num_steps + 1)
    for table in paged.tables:
        assert table.append(before), "the pool was made for less"
    plain.length = before
    paged.cache.kv_L2NBGD.normal_()
    plain.kv_L2BGSD.normal_()
    # One step before the clock runs: the first of a kind makes room and plans.
    ours = paged.step([[0]] * num_sequences)
    theirs = plain.step(torch.zeros(num_sequences, 1, dtype=torch.int64, device=decoder.device))
    paged_times: list[int] = []
    plain_times: list[int] = []
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


def _timed(step: Callable[[Given], Made], given: Given) -> tuple[int, Made]:
    """(nanoseconds, result), once the device has finished."""
    start = time.perf_counter_ns()
    result = step(given)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter_ns() - start, result
