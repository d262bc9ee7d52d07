"""What every weight file looks like to the loader, whatever its format.

Invariant: a checkpoint knows the name, dtype and shape of all its tensors before a byte of data is
read. So the loader compares them with what the model needs first, and never builds half a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: ``dtype`` in the format's own word (``BF16``, ``Q4_1``), ``shape`` in
    elements, and the half-open byte range ``begin:end``, counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@runtime_checkable
class Checkpoint(Protocol):
    """One opened checkpoint: a file, or several that act as one."""

    path: Path
    tensors: Mapping[str, TensorInfo]

    def load(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor called ``name``, on the CPU; as stored, or converted to ``dtype``."""
        ...
