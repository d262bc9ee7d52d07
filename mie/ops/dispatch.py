"""The seam between the model and its arithmetic.

Invariant: the decoder calls the four operations through one ``Ops`` and nowhere else, so exchanging
a field exchanges that operation in the whole model, and nothing besides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mie.ops import reference


@dataclass(frozen=True)
class Ops:
    """The operations a decoder is made of; signatures as in ``mie.ops.reference``."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = reference.rms_norm
    rope: Callable[[Tensor, Tensor, Tensor], Tensor] = reference.rope
    swiglu: Callable[[Tensor, Tensor], Tensor] = reference.swiglu
    attention: Callable[[Tensor, Tensor, Tensor, float], Tensor] = reference.attention
