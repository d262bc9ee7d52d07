"""Where a reader begins: each part's signature, with nothing behind it.

Invariant: a stub checks as TODO, neither right nor wrong. Copy one into a file or a cell, write it,
and check it there; what it must do is in the spec of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mie.model.checkpoint import TensorInfo


class SafetensorsReader:
    """One ``.safetensors`` file: its table of contents at once, its tensors when asked for."""

    path: Path
    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: str | Path) -> None:
        """Read the header. Raises ``CheckpointError``, naming the file, unless all is sound."""
        raise NotImplementedError("read the header and fill self.path and self.tensors")

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor ``name`` as stored, or converted to ``dtype``."""
        raise NotImplementedError("cut the tensor's bytes out of the file")


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis, in float32, rounded to x's dtype."""
    raise NotImplementedError("normalise each row")


def rope(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + R]) by its angle, in float32, rounded to x's dtype."""
    raise NotImplementedError("turn each pair")


def swiglu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) · up, in float32, rounded to the input's dtype."""
    raise NotImplementedError("let the gate decide")


def attention(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, scale: float) -> Tensor:
    """Causal grouped-query attention; the T queries are the last T of the S positions."""
    raise NotImplementedError("weigh the values")


STUBS: dict[str, Any] = {
    "safetensors_reader": SafetensorsReader,
    "rms_norm": rms_norm,
    "rope": rope,
    "swiglu": swiglu,
    "attention": attention,
}
