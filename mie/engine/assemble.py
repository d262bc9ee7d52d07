"""From a decoder and settings to an engine that runs: memory, scheduler, runner, core.

Invariant: each part is made here, from the class that ``parts`` names, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mie import parts as all_parts
from mie.config import PREFIX_CACHES, QUEUES, EngineConfig
from mie.engine.core import EngineCore
from mie.engine.paged import KVMemory
from mie.engine.sizing import choose_num_blocks
from mie.execution.model_runner import ModelRunner
from mie.model.decoder import Decoder
from mie.scheduling.trace import Trace

MEMORY_PARTS = ("block_pool", "block_table", "prefix_cache")
ENGINE_PARTS = (*MEMORY_PARTS, "scheduler", "queue", "victim_policy")


@dataclass(frozen=True)
class Engine:
    """What belongs together: who owns which block and what is in it, who decides, who computes."""

    memory: KVMemory
    runner: ModelRunner
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
    num_blocks = choose_num_blocks(decoder.config, decoder.dtype, decoder.device, config)
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
    runner = ModelRunner(decoder, memory.cache, num_host_blocks)
    return Engine(memory, runner, EngineCore(scheduler, runner.run, Trace(config.trace_steps)))
