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
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    config: EngineConfig,
    step_bytes: int = 0,
) -> int:
    """``config.num_blocks``, or what ``config.memory_share`` of the device's memory holds, without
    the ``step_bytes`` that a step needs. By default ``CONTEXTS`` whole contexts and scratch, on a
    GPU one for each sequence that may run, or half of the memory if that is less.

    Raises ConfigError for more than the device has, and for a share that holds no block.
    """
    block_bytes = model.kv_bytes_per_token(dtype) * config.block_size
    memory = device_memory(device)
    if memory is not None:
        if step_bytes > memory:
            raise ConfigError(
                f"a step of {config.token_budget} tokens needs {step_bytes:,} bytes beside the "
                f"weights; {device} has {memory:,} left, {step_bytes - memory:,} are missing: "
                "a smaller token_budget needs less"
            )
        memory -= step_bytes
    if config.num_blocks is not None:
        if memory is not None and (wanted := config.num_blocks * block_bytes) > memory:
            raise ConfigError(
                f"{config.num_blocks} blocks of {config.block_size} tokens take "
                f"{wanted:,} bytes; {device} has {memory:,}: {wanted - memory:,} are missing"
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
    contexts, length = CONTEXTS, model.max_position_embeddings
    if device.type == "cuda":
        contexts, length = config.max_num_seqs, config.max_model_len or length
    wanted = 1 + contexts * blocks_needed(length, config.block_size)
    return wanted if memory is None else max(2, min(wanted, memory // 2 // block_bytes))


def device_memory(device: torch.device) -> int | None:
    """Bytes that are free on a CUDA device. Of a CPU, all that it has: what is free changes with
    every file that is read, and a limit on prompts should not. None if nobody knows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return memory_bytes()
