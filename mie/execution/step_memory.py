"""How much memory a step takes beside weights, K and V: measured, before K and V get the rest.

Invariant: what is measured is the largest step that the limits allow, run as the engine runs it:
``token_budget`` tokens, and logits for every sequence that may be in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mie.errors import ConfigError
from mie.execution.fused_forward import FusedForward
from mie.execution.kv_cache import PagedKVCache
from mie.model.decoder import Decoder
from mie.ops.fast import FastOps
from mie.scheduling.limits import Limits

SPARE = 1.1  # the allocator's blocks are larger than what lies in them
GRAPHS_BYTES = 512 << 20  # recorded steps: what they hold beside the memory that they share


def step_memory(decoder: Decoder, ops: FastOps, limits: Limits, graphs: bool) -> int:
    """Bytes that the largest step needs, with ``graphs`` recorded steps as well; 0 on a CPU, where
    memory is handed over when written. Raises ConfigError if the step does not fit."""
    device = decoder.device
    if device.type != "cuda":
        return 0
    T, S = limits.token_budget, min(limits.max_num_seqs, limits.token_budget)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        _one_step(decoder, ops, T, S)
    except torch.OutOfMemoryError as error:
        free, _ = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"a step of {T} tokens does not fit beside the weights: {device} has {free:,} bytes "
            "left; a smaller token_budget needs less"
        ) from error
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    recorded = S * decoder.config.vocab_size * 4 + GRAPHS_BYTES  # logits, and all else
    return int(peak * SPARE) + (recorded if graphs else 0)


@torch.inference_mode()
def _one_step(decoder: Decoder, ops: FastOps, T: int, S: int) -> None:
    cache = PagedKVCache.for_decoder(decoder, 1)
    forward = FusedForward(decoder, cache, ops, 1)
    tokens_T = torch.zeros(T, dtype=torch.int64, device=decoder.device)

    def attend(layer: int, q_THD: Tensor) -> Tensor:
        return torch.zeros_like(q_THD)

    hidden_TE = forward(tokens_T, torch.zeros_like(tokens_T), tokens_T - 1, attend)
    decoder.logits(hidden_TE[:S])
