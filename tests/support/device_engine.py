"""A device runner on the small random model: on a GPU with its kernels, elsewhere with oracles.

Invariant: K and V are NaN at first, so whatever is read and was not written shows in the tokens.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from engine_harness import Harness
from kernel_data import DEVICE
from oracle_ops import oracle_ops
from tiny_decoder import count_near_ties, tiny_decoder

from mie.execution.device_runner import DeviceRunner
from mie.execution.kv_cache import PagedKVCache
from mie.memory.manager import BlockManager
from mie.model.decoder import Decoder
from mie.ops.fast import FastOps, triton_ops
from mie.scheduling.limits import Limits
from mie.scheduling.scheduler import Scheduler


def decoder_on(device: str = DEVICE) -> Decoder:
    """The small random model on ``device``."""
    decoder = tiny_decoder()
    if device == "cpu":
        return decoder
    moved = copy.deepcopy(decoder).to(device)
    moved.device = torch.device(device)
    moved.frequencies_R = decoder.frequencies_R.to(device)
    return moved


def device_runner(
    memory: BlockManager,
    limits: Limits,
    *,
    in_flight: int = 2,
    graphs: bool = True,
    ops: FastOps | None = None,
) -> DeviceRunner:
    """With recorded steps, where the device records and ``graphs`` says so."""
    decoder, pool = decoder_on(), memory.pool
    cache = PagedKVCache.for_decoder(decoder, pool.num_blocks, pool.block_size)
    if ops is None:
        ops = triton_ops() if DEVICE == "cuda" else oracle_ops()
    host = memory.host.num_blocks
    runner = DeviceRunner(decoder, cache, limits, host, ops, in_flight=in_flight)
    cache.kv_L2NBGD.fill_(float("nan"))
    if graphs and DEVICE == "cuda":
        runner.capture()
    return runner


def device_engine(
    depth: int = 2,
    num_blocks: int = 40,
    block_size: int = 4,
    max_num_seqs: int = 4,
    token_budget: int = 16,
    host_blocks: int = 0,
    memory: dict[str, Any] | None = None,
    **options: Any,
) -> Harness:
    """``depth`` steps in flight; 0: each is waited for. ``options`` are those of the runner."""
    limits = Limits(max_num_seqs, token_budget, 64)
    manager = BlockManager(num_blocks + 1, block_size, host_blocks, **(memory or {}))
    runner = device_runner(manager, limits, in_flight=max(depth, 1), **options)
    launch = runner.launch if depth else None
    harness = Harness(limits, manager, Scheduler, runner.run, depth or 1, launch=launch)
    harness.runner = runner
    return harness


def is_right(harness: Harness) -> int:
    """Each answer is what the definition says. How many near ties there were."""
    ties = 0
    for (request_id, index), reason in harness.ends.items():
        request, answer = harness.requests[request_id], harness.answer(request_id, index)
        harness.ends_rightly(request, answer, reason)
        ties += count_near_ties(request, index, answer) if answer else 0
    return ties
