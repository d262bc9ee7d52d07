"""How many blocks K and V get.

Invariant: blocks are counted once, before anything is allocated, and what does not fit the device
is refused with both numbers.
"""

from __future__ import annotations

import torch

from mie.config import EngineConfig
from mie.errors import ConfigError
from mie.machine import memory_bytes
from mie.memory.block_pool import blocks_needed
from mie.model.config import ModelConfig

CONTEXTS = 4  # whole contexts that fit by default: room for many requests of ordinary length


def choose_num_blocks(
    model: ModelConfig, dtype: torch.dtype, device: torch.device, config: EngineConfig
) -> int:
    """``config.num_blocks``, or what ``config.memory_share`` of the device's memory holds. By
    default ``CONTEXTS`` whole contexts and scratch, or half of the memory if that is less.

    Raises ConfigError for more than the device has, and for a share that holds no block.
    """
    block_bytes = model.kv_bytes_per_token(dtype) * config.block_size
    memory = device_memory(device)
    if config.num_blocks is not None:
        if memory is not None and config.num_blocks * block_bytes > memory:
            raise ConfigError(
                f"{config.num_blocks} blocks of {config.block_size} tokens take "
                f"{config.num_blocks * block_bytes:,} bytes; {device} has {memory:,}"
            )
        return config.num_blocks
    if config.memory_share is not None:
        if memory is None:
            raise ConfigError(f"memory_share is {config.memory_share} of an unknown memory")
        num_blocks = int(memory * config.memory_share) // block_bytes
        if num_blocks < 2:
            raise ConfigError(
                f"memory_share {config.memory_share} of {memory:,} bytes holds {num_blocks} blocks "
                f"of {block_bytes:,}; at least 2 are needed"
            )
        return num_blocks
    wanted = 1 + CONTEXTS * blocks_needed(model.max_position_embeddings, config.block_size)
    return wanted if memory is None else max(2, min(wanted, memory // 2 // block_bytes))


def device_memory(device: torch.device) -> int | None:
    """Bytes that are free on a CUDA device. Of a CPU, all that it has: what is free changes with
    every file that is read, and a limit on prompts should not. None if nobody knows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return memory_bytes()
