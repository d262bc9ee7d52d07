"""Carry out a plan: move blocks, run the model once over all tokens, choose the next ones.

Invariant: blocks move before anything is written: out to the host first, then copies, then in from
the host. So whatever the plan gives to a new owner has been read before.

The runner remembers nothing between steps but the bytes of K and V; which token belongs to whom it
learns from each plan anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from mie.execution.batch import Batch
from mie.execution.kv_cache import PagedKVCache
from mie.execution.swap_space import SwapSpace
from mie.model.decoder import Decoder
from mie.sampling.sampler import sample
from mie.sampling_params import Draw
from mie.scheduling.plan import StepPlan, StepResult


class ModelRunner:
    """``decoder`` on the blocks of ``cache``, with ``num_host_blocks`` in the host's memory.

    ``sample`` chooses a token for each draw from a row of logits.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedKVCache,
        num_host_blocks: int = 0,
        sample: Callable[[Tensor, Sequence[Draw]], list[int]] = sample,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self.swap_space = SwapSpace(cache, num_host_blocks)
        self.sample = sample

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """The tokens that ``plan`` asks for."""
        self.swap_space.move_out(plan.swap_out)
        self.cache.copy_blocks(plan.copies)
        self.swap_space.move_in(plan.swap_in)
        if not plan.scheduled:
            return StepResult()
        batch = Batch.of(plan, self.decoder.device)
        step = self.cache.step(batch.sequences, plan.num_padding)
        hidden_TE = self.decoder(batch.token_ids_T, batch.positions_T, step)
        tokens = iter(self._choose(hidden_TE, batch))
        return StepResult(
            {s.sequence_id: tuple(islice(tokens, len(s.draws))) for s in plan.scheduled if s.draws}
        )

    def _choose(self, hidden_TE: Tensor, batch: Batch) -> list[int]:
        """One token for each draw; the logits of a row are computed once for all of its draws."""
        if not batch.draws:
            return []
        logits_SV = self.decoder.logits(hidden_TE[batch.sampled_rows_S])
        if len(batch.draws) > len(batch.num_draws):
            counts = torch.tensor(batch.num_draws, device=logits_SV.device)
            logits_SV = logits_SV.repeat_interleave(counts, dim=0)
        return self.sample(logits_SV, batch.draws)
