"""One sequence, one token after another: the two loops that every later schedule must equal.

Invariant: token n + 1 is the most likely one after tokens 0 … n. Nothing else in the engine may
change which token that is; it may only find it sooner.

Cost for a prompt of P tokens and N new ones, in tokens put through the model:

    without_cache   P + (P + 1) + … + (P + N - 1)     grows with the square of the length
    with_cache      P + N - 1                         every token once
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mie.execution.contiguous_cache import ContiguousCache
from mie.model.decoder import Decoder
from mie.model.kv_cache import KVCache, NoCache


def greedy_without_cache(decoder: Decoder, prompt: Sequence[int]) -> Iterator[int]:
    """The definition: every token from the whole text before it. Endless; the caller stops."""
    tokens = list(prompt)
    cache = NoCache(decoder.ops.attention)
    while True:
        token = next_token(decoder, tokens, 0, cache)
        yield token
        tokens.append(token)


def greedy_with_cache(
    decoder: Decoder, prompt: Sequence[int], cache: ContiguousCache
) -> Iterator[int]:
    """The same tokens, computing each position once. Ends when the cache is full.

    ``cache`` may already hold the beginning of a conversation; ``prompt`` is then what comes
    after it. The first step computes the prompt (prefill), each later one a single token
    (decode).
    """
    new = list(prompt)
    while cache.length + len(new) <= cache.capacity:
        token = next_token(decoder, new, cache.length, cache)
        cache.advance(len(new))
        yield token
        new = [token]


@torch.inference_mode()
def next_token(
    decoder: Decoder,
    token_ids: Sequence[int],
    position: int,
    cache: KVCache,
) -> int:
    """One step: put ``token_ids``, the first of them at ``position``, through the model and
    choose the most likely next token."""
    token_ids_T = torch.tensor(token_ids, device=decoder.device)
    positions_T = torch.arange(position, position + len(token_ids), device=decoder.device)
    hidden_TE = decoder(token_ids_T, positions_T, cache)
    return int(decoder.logits(hidden_TE[-1:]).argmax())
