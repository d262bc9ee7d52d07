"""The seam between the model and its arithmetic.

Invariant: the decoder and its caches call the operations through one ``Ops`` and nowhere else, so
exchanging a field exchanges that operation in the whole model, and nothing besides.

    Ops()                                   the reference: the oracle, and what the book shows first
    for_device(device)                      what is fast there
    for_device(device, {"rope": mine})      the same, with one operation of a reader's
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from mie.ops import fused, reference

# q_XHD, kv_2NBGD of a layer, scale -> out_XHD
DecodeAttention = Callable[[Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class Ops:
    """The operations a decoder is made of; signatures as in ``mie.ops.reference``.

    ``paged_decode`` is called once a step with the block tables, the lengths and a layer's
    ``kv_2NBGD``, and returns attention for the sequences that bring one new token each, to be
    called in every layer: see ``mie.ops.fused.PagedDecode``. Where it is None, ``attention`` runs
    for each sequence by itself.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = reference.rms_norm
    rope: Callable[[Tensor, Tensor, Tensor], Tensor] = reference.rope
    swiglu: Callable[[Tensor, Tensor], Tensor] = reference.swiglu
    attention: Callable[[Tensor, Tensor, Tensor, float], Tensor] = reference.attention
    paged_decode: (
        Callable[[Sequence[Sequence[int]], Sequence[int], Tensor], DecodeAttention] | None
    ) = None


def for_device(
    device: torch.device | str,
    replacements: Mapping[str, Any] | None = None,
    *,
    fast: bool = True,
) -> Ops:
    """The operations for a decoder on ``device``: ``replacements`` where there are some, elsewhere
    the fast ones, or with ``fast=False`` the reference.

    Whoever replaces ``attention`` has it called for everything: there is no ``paged_decode`` beside
    it, unless that is replaced too. Raises KeyError for a name that is no operation.
    """
    replacements = dict(replacements or {})
    if unknown := sorted(replacements.keys() - {field.name for field in fields(Ops)}):
        raise KeyError(f"no operation called {unknown[0]}")
    if not fast:
        return Ops(**replacements)
    chosen: dict[str, Any] = {
        "rms_norm": fused.rms_norm,
        "rope": fused.rope,
        "swiglu": fused.swiglu,
        "attention": fused.attention,
        "paged_decode": None if "attention" in replacements else fused.PagedDecode,
    }
    return Ops(**{**chosen, **replacements})
