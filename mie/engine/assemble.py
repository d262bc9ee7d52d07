"""From a decoder and settings to an engine that runs: memory, scheduler, runner, core.

Invariant: each part is made here, from the class that ``parts`` names, and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from mie import parts as all_parts
from mie.config import PREFIX_CACHES, QUEUES, EngineConfig
from mie.engine.core import EngineCore
from mie.engine.overlapped_core import OverlappedCore
from mie.engine.paged import KVMemory
from mie.engine.sizing import choose_num_blocks
from mie.errors import ConfigError
from mie.execution.device_runner import DeviceRunner
from mie.execution.model_runner import ModelRunner
from mie.execution.step_memory import step_memory
from mie.model.decoder import Decoder
from mie.ops.fast import FastOps, adapted_paged_decode, adapted_paged_prefill, triton_ops
from mie.scheduling.trace import Trace

MEMORY_PARTS = ("block_pool", "block_table", "prefix_cache")
MOST_SEQUENCES, LARGEST_GROUP = 1024, 16  # that the decode kernel takes
FAST_PARTS = ("add_rms_norm", "paged_decode", "paged_prefill")  # of the fast step alone
ENGINE_PARTS = (*MEMORY_PARTS, "scheduler", "queue", "victim_policy", *FAST_PARTS)


@dataclass(frozen=True)
class Engine:
    """What belongs together: who owns which block and what is in it, who decides, who computes."""

    memory: KVMemory
    runner: ModelRunner | DeviceRunner
    core: EngineCore


def assemble(
    decoder: Decoder, config: EngineConfig, parts: Mapping[str, Any] | None = None
) -> Engine:
    """An engine around ``decoder``; a part that is replaced wins over the setting that names one.

    Raises ConfigError for limits that the model or the device contradicts.
    """
    chosen = {
        **all_parts.choose(parts),
        **{
            name: all_parts.load(where)
            for name, where in (
                ("prefix_cache", PREFIX_CACHES[config.prefix_cache]),
                ("queue", QUEUES[config.policy]),
            )
            if name not in (parts or {})
        },
    }
    limits = config.limits(decoder.config.max_position_embeddings)
    ops = fast_ops(decoder, config, parts or {})
    step_bytes = 0 if ops is None else step_memory(decoder, ops, limits, config.cuda_graphs)
    shape = decoder.config, decoder.dtype, decoder.device
    num_blocks = choose_num_blocks(*shape, config, step_bytes)
    num_host_blocks = 0
    if config.preemption == "swap":
        wanted = config.num_host_blocks
        num_host_blocks = num_blocks - 1 if wanted is None else wanted
    memory = KVMemory(
        decoder,
        num_blocks,
        config.block_size,
        num_host_blocks,
        **{name: chosen[name] for name in MEMORY_PARTS},
    )
    scheduler = chosen["scheduler"](limits, memory, chosen["queue"](), chosen["victim_policy"])
    trace = Trace(config.trace_steps)
    if ops is None:
        runner = ModelRunner(decoder, memory.cache, num_host_blocks)
        return Engine(memory, runner, EngineCore(scheduler, runner.run, trace))
    overlap = config.overlap and hasattr(scheduler, "max_in_flight")
    device_runner = DeviceRunner(
        decoder, memory.cache, limits, num_host_blocks, ops, in_flight=2 if overlap else 1
    )
    if config.cuda_graphs and decoder.device.type == "cuda":
        device_runner.capture()
    if overlap:
        core: EngineCore = OverlappedCore(scheduler, device_runner.launch, trace)
    else:
        core = EngineCore(scheduler, device_runner.run, trace)
    return Engine(memory, device_runner, core)


def fast_ops(decoder: Decoder, config: EngineConfig, parts: Mapping[str, Any]) -> FastOps | None:
    """The operations of the fast step, a reader's among them; None where the plain one runs: by
    ``config``, because Triton is missing, or because a part is replaced that it does not have.

    Raises ConfigError where ``config`` asks for Triton and it cannot be had, and where a part is
    replaced that the plain step does not have.
    """
    obstacles = [
        f"part {name} is replaced" for name in ("rope", "swiglu", "attention") if name in parts
    ]
    if not config.fast_ops:
        obstacles.append("fast_ops is False")
    if config.block_size & (config.block_size - 1):
        obstacles.append(f"block_size {config.block_size} is no power of 2")
    if config.max_num_seqs > MOST_SEQUENCES:
        obstacles.append(f"max_num_seqs {config.max_num_seqs} is above {MOST_SEQUENCES}")
    group = decoder.config.num_heads // decoder.config.num_kv_heads
    if group > LARGEST_GROUP:
        obstacles.append(f"{group} query heads share K and V, more than {LARGEST_GROUP}")
    if find_spec("triton") is None:
        obstacles.append("Triton is not installed")
    elif decoder.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        obstacles.append(f"Triton needs a GPU, or TRITON_INTERPRET=1, and not {decoder.device}")
    if config.kernels == "triton" and obstacles:
        raise ConfigError(f"kernels is 'triton', but {obstacles[0]}")
    on_gpu = decoder.device.type == "cuda"
    if obstacles or config.kernels == "torch" or (config.kernels == "auto" and not on_gpu):
        if names := [name for name in FAST_PARTS if name in parts]:
            reason = obstacles[0] if obstacles else f"kernels is {config.kernels!r}"
            raise ConfigError(f"only the fast step has the part {names[0]}, but {reason}")
        return None
    replaced = {name: parts[name] for name in ("rms_norm", *FAST_PARTS) if name in parts}
    if "paged_decode" in replaced:
        replaced["paged_decode"] = adapted_paged_decode(replaced["paged_decode"])
    if "paged_prefill" in replaced:
        replaced["paged_prefill"] = adapted_paged_prefill(replaced["paged_prefill"])
    return triton_ops(replaced)
