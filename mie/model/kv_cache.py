"""What the decoder asks of a cache, and the cache that remembers nothing.

Invariant: ``attend`` gets the queries, keys and values of this step's tokens and returns what the
queries see. Where K and V are kept, of how many sequences the tokens are, and whether anything is
kept at all, the decoder neither knows nor asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from mie.ops import reference


class KVCache(Protocol):
    """Keeps the K and V of earlier tokens and lets new ones attend to them."""

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float
    ) -> Tensor:
        """Remember this step's K and V of ``layer``; return ``out_THD`` over all that it holds."""
        ...


class NoCache:
    """Forgets everything: the tokens of a step are the whole context.

    What a transformer does by definition, and the oracle of every cache: computing all positions
    again must give what remembering them gives.
    """

    def __init__(self, attention: Callable[..., Tensor] = reference.attention) -> None:
        self.attention = attention

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float
    ) -> Tensor:
        return self.attention(q_THD, k_TGD, v_TGD, scale)
