"""A plan as tensors: the tokens of all sequences in one row, with no padding between them.

Invariant: the order is that of the plan, and the tokens of a sequence stand together. Every linear
layer, norm and activation treats tokens one by one, so they run over all of them at once; attention
alone has to know whose they are (``kv_cache``). Orca calls this selective batching.

    plan                 a[40]   b[21]   c[0:3]           two decodes and a chunk of a prompt
    token_ids_T          a40     b21     c0  c1  c2
    positions_T          40      21      0   1   2
    sampled_rows_S       0       1                        c is not complete: nobody needs its logits

Yu et al., 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from mie.execution.kv_cache import SequenceStep
from mie.sampling_params import Draw
from mie.scheduling.plan import StepPlan


@dataclass(frozen=True)
class Batch:
    """``token_ids_T`` and ``positions_T`` on the device, padding last; ``sampled_rows_S`` are the
    rows that a token is chosen from, ``draws`` how: as many for each row as ``num_draws`` says."""

    token_ids_T: Tensor  # noqa: N815
    positions_T: Tensor  # noqa: N815
    sampled_rows_S: Tensor  # noqa: N815
    sequences: Sequence[SequenceStep]
    draws: Sequence[Draw]
    num_draws: Sequence[int]

    @classmethod
    def of(cls, plan: StepPlan, device: torch.device) -> Batch:
        """The batch of ``plan``, which has something scheduled."""
        scheduled = plan.scheduled
        padding = [0] * plan.num_padding
        token_ids = [*chain.from_iterable(s.token_ids for s in scheduled), *padding]
        positions = [
            *chain.from_iterable(range(s.position, s.num_tokens) for s in scheduled),
            *padding,
        ]
        rows, end = [], 0
        for s in scheduled:
            end += s.num_new
            if s.draws:
                rows.append(end - 1)
        return cls(
            token_ids_T=torch.tensor(token_ids, device=device),
            positions_T=torch.tensor(positions, device=device),
            sampled_rows_S=torch.tensor(rows, dtype=torch.int64, device=device),
            sequences=[SequenceStep(s.blocks, s.slots, s.num_tokens) for s in scheduled],
            draws=[draw for s in scheduled for draw in s.draws],
            num_draws=[len(s.draws) for s in scheduled if s.draws],
        )
