"""How fast sequences are decoded: the engine's whole step against a plain loop of torch.

Invariant: both have the same weights, dtype, threads and lengths, and take turns, one step each, so
that whatever else the machine does in the meantime happens to both. A step of the engine is
``EngineCore.step``: schedule, batch, run, choose, update, prefix cache and trace included.

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
from mie.engine.core import EngineCore
from mie.execution.kv_cache import PagedKVCache
from mie.execution.model_runner import ModelRunner
from mie.memory.block_pool import blocks_needed
from mie.memory.manager import BlockManager
from mie.model.decoder import Decoder
from mie.request import Request
from mie.sampling_params import SamplingParams
from mie.scheduling.limits import Limits
from mie.scheduling.plan import StepPlan, StepResult
from mie.scheduling.scheduler import Scheduler

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
    engine_nanoseconds: int
    plain_nanoseconds: int

    @property
    def engine_tokens_per_second(self) -> float:
        return self.num_sequences * 1e9 / self.engine_nanoseconds

    @property
    def plain_tokens_per_second(self) -> float:
        return self.num_sequences * 1e9 / self.plain_nanoseconds

    @property
    def engine_to_plain(self) -> float:
        """Above 1, the engine is faster."""
        return self.plain_nanoseconds / self.engine_nanoseconds


class EngineLoop:
    """The engine around ``decoder``, greedy, ``num_new`` tokens for each of ``prompts``."""

    def __init__(
        self, decoder: Decoder, prompts: Sequence[Sequence[int]], num_new: int, block_size: int = 16
    ) -> None:
        longest = max(map(len, prompts)) + num_new
        each = blocks_needed(longest, block_size) + 1  # and one that stays free while it runs
        memory = BlockManager(1 + len(prompts) * each, block_size)
        self.cache = PagedKVCache.for_decoder(decoder, memory.pool.num_blocks, block_size)
        self.runner = ModelRunner(decoder, self.cache)
        limits = Limits(len(prompts), sum(map(len, prompts)), longest)
        self.core = EngineCore(Scheduler(limits, memory), self.runner.run)
        sampling = SamplingParams(max_tokens=num_new, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            self.core.add(Request(str(number), tuple(prompt), sampling))

    def step(self) -> list[int]:
        """One step of all sequences: the token of each."""
        return [output.token_id or 0 for output in self.core.step()]

    def pretend_prompts(self) -> None:
        """The first step without the model: K and V are whatever the cache holds."""
        self.core.run = _zeros
        self.step()
        self.core.run = self.runner.run


def _zeros(plan: StepPlan) -> StepResult:
    return StepResult({s.sequence_id: (0,) * len(s.draws) for s in plan.scheduled})


def decode_speed(
    decoder: Decoder, num_sequences: int, context: int = 64, num_steps: int = 16
) -> DecodeSpeed:
    """Decode ``num_sequences`` texts, whose lengths are ``context`` in the middle of the steps.

    What came before is not computed but filled in with random numbers: how long a step takes does
    not depend on them, and a prompt would take longer than all that is measured.
    """
    before = max(1, context - num_steps // 2 - 1)
    size = decoder.config.vocab_size
    prompts = [
        [(number + place) % size for place in range(before)] for number in range(num_sequences)
    ]
    engine = EngineLoop(decoder, prompts, num_steps + 2)
    plain = PlainLoop(decoder, num_sequences, before + num_steps + 1)
    engine.cache.kv_L2NBGD.normal_()
    plain.kv_L2BGSD.normal_()
    engine.pretend_prompts()
    plain.length = before
    # One step before the clock runs: the first of a kind makes room and plans.
    engine.step()
    theirs = plain.step(torch.zeros(num_sequences, 1, dtype=torch.int64, device=decoder.device))
    engine_times: list[int] = []
    plain_times: list[int] = []
    for _ in range(num_steps):
        nanoseconds, _ = _timed(lambda _: engine.step(), None)
        engine_times.append(nanoseconds)
        nanoseconds, theirs = _timed(plain.step, theirs.unsqueeze(1))
        plain_times.append(nanoseconds)
    return DecodeSpeed(
        dtype=str(decoder.dtype).removeprefix("torch."),
        num_threads=torch.get_num_threads(),
        num_sequences=num_sequences,
        context=context,
        num_steps=num_steps,
        engine_nanoseconds=min(engine_times),
        plain_nanoseconds=min(plain_times),
    )


def _timed(step: Callable[[Given], Made], given: Given) -> tuple[int, Made]:
    """(nanoseconds, result), once the device has finished."""
    start = time.perf_counter_ns()
    result = step(given)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter_ns() - start, result
