"""A small model of random weights, and what its answers must be by the definition.

Invariant: the definition keeps nothing. It computes the whole text at once, without cache, batch or
engine, and looks at every token of an answer: was that the one to choose, after all before it?
If each was, the answer is the one that the plain loop gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from mie.model.config import ModelConfig
from mie.model.decoder import Decoder
from mie.model.kv_cache import NoCache
from mie.ops.dispatch import Ops, for_device
from mie.request import Request
from mie.sampling.sampler import gumbel_noise
from mie.sampling_params import Draw

VOCABULARY = 31
NEAR_TIE = 1e-4  # in logits, or in the scores that are compared to draw


@cache
def tiny_decoder(fused: bool = False, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    """Two layers of random weights. Its norms are 1, and its answers wander."""
    config = ModelConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
        }
    )
    model = Decoder(config, dtype, ops=for_device("cpu") if fused else Ops())
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1)
        else:
            parameter.normal_(std=0.4, generator=generator)
    return model


@cache
def noise(draw: Draw) -> Tensor:
    return gumbel_noise([draw], VOCABULARY)[0]


def count_near_ties(request: Request, index: int, answer: Sequence[int]) -> int:
    """How many tokens of ``answer`` are the second best of two that are all but equal.

    Raises AssertionError for one that is worse.
    """
    lead_T = leads(request, index, answer)
    wrong = [int(place) for place in (lead_T > NEAR_TIE).nonzero()]
    assert not wrong, f"{request.request_id}/{index}: tokens {wrong} of {answer}: {lead_T[wrong]}"
    return int((lead_T > 0).sum())


@torch.inference_mode()
def leads(request: Request, index: int, answer: Sequence[int]) -> Tensor:
    """By how much the best token leads the one that was chosen, for each token of the answer."""
    scores_TV = scores(request.prompt, tuple(answer))
    if not request.sampling.is_greedy:
        first = len(request.prompt)
        draws = [request.sampling.draw(first + place, index) for place in range(len(answer))]
        noise_TV = torch.stack([noise(draw) for draw in draws])
        scores_TV = scores_TV / request.sampling.temperature + noise_TV
    chosen_T1 = torch.tensor(answer).unsqueeze(1)
    return scores_TV.amax(dim=-1) - scores_TV.gather(1, chosen_T1).squeeze(1)


@cache
@torch.inference_mode()
def scores(prompt: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
    """The logits that each token of the answer was chosen from: all tokens in one go."""
    tokens = torch.tensor([*prompt, *answer[:-1]])
    model = tiny_decoder()
    hidden_TE = model(tokens, torch.arange(len(tokens)), NoCache())
    return model.logits(hidden_TE[len(prompt) - 1 :])
