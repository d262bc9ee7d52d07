"""The next token of each sequence, from its row of logits: greedy, or drawn.

Invariant: what is drawn for a token depends on its logits, its temperature and its noise, and the
noise is a function of (seed, index of the answer, position). Which sequences share the batch, how
the prompt was cut and whether it was computed twice changes nothing.

Drawing by the Gumbel trick in its exponential form: with q independent and exponentially
distributed, the largest p / q belongs to token v with probability p[v]. One argmax instead of
a sorted sum, and nothing to add up to one. After Maddison et al., 2014.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mie.sampling_params import Draw, mix


def sample(logits_SV: Tensor, draws: Sequence[Draw]) -> list[int]:
    """A token for each row. ``logits_SV`` is float32; row s is chosen from as ``draws[s]`` says."""
    assert len(logits_SV) == len(draws), f"{len(logits_SV)} rows for {len(draws)} draws"
    chosen: list[int] = logits_SV.argmax(dim=-1).tolist()
    drawn = [row for row, draw in enumerate(draws) if draw.temperature > 0]
    if drawn:
        temperatures_S1 = logits_SV.new_tensor([[draws[row].temperature] for row in drawn])
        probabilities_SV = (logits_SV[drawn] / temperatures_S1).softmax(dim=-1)
        size = logits_SV.shape[-1]
        noise_SV = torch.stack([exponential_noise(draws[row], size) for row in drawn])
        picks = (probabilities_SV / noise_SV.to(logits_SV.device)).argmax(dim=-1).tolist()
        for row, token in zip(drawn, picks, strict=True):
            chosen[row] = token
    return chosen


def exponential_noise(draw: Draw, size: int) -> Tensor:
    """``size`` numbers above 0 for one draw, float32, on the CPU: the same on every machine."""
    generator = torch.Generator().manual_seed(mix(draw.seed, draw.index, draw.position))
    return torch.empty(size).exponential_(generator=generator).clamp_(min=1e-10)
