"""What a case expects of tensors, and the first place where it is not so.

Invariant: nothing here knows an engine. A case works out its numbers in plain Python and compares
them here; what is wrong is reported as one position with the two values found there, because one
counter-example is easier to think about than an array of differences. Plain values are compared in
``mie.spec.expect``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mie.spec.expect import CounterExample

BFLOAT16_STEP = 2.0**-7  # relative distance of neighbouring bfloat16 numbers: 8 significant bits


def normal(*shape: int, seed: int) -> Tensor:
    """The same normally distributed float32 numbers every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensor(got: Any, what: str) -> Tensor:
    """``got``, if it is a tensor at all: a function without its ``return`` gives None."""
    if not isinstance(got, Tensor):
        raise CounterExample(f"{what}: expected a tensor, got {got!r}")
    return got


def has_dtype(got: Any, dtype: torch.dtype, what: str) -> None:
    """``got`` is a tensor of ``dtype``."""
    if tensor(got, what).dtype != dtype:
        raise CounterExample(f"{what}: expected the dtype {dtype}, got {got.dtype}")


def has_shape(got: Any, shape: tuple[int, ...], what: str) -> None:
    """``got`` is a tensor of ``shape``."""
    if tensor(got, what).shape != shape:
        raise CounterExample(f"{what}: expected the shape {shape}, got {tuple(got.shape)}")


def close(got: Any, expected: Any, tolerance: float, what: str) -> None:
    """``got`` has the shape of ``expected``, a tensor or nested lists, and nearly its numbers.

    Nearly: within ``tolerance``, relative where the expected number is larger than 1.
    """
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    has_shape(got, tuple(wanted.shape), what)
    given = got.detach().to(torch.float64)
    near = (given - wanted).abs() <= tolerance * wanted.abs().clamp(min=1.0)
    if not near.all():  # NaN is near nothing
        first = tuple((~near).nonzero()[0].tolist())
        raise CounterExample(
            f"{what}{_at(first)}: expected {wanted[first]:.8g}, got {given[first]:.8g}"
        )


def same_bits(got: Any, expected: Tensor, what: str) -> None:
    """Two tensors agree in dtype, shape and every bit, even of a NaN."""
    has_dtype(got, expected.dtype, what)
    has_shape(got, tuple(expected.shape), what)
    differ = (_bytes(got) != _bytes(expected)).any(dim=-1)
    if differ.any():
        first = int(differ.nonzero()[0])
        raise CounterExample(
            f"{what}, element {first}: expected the bytes {_hex(expected, first)}, "
            f"got {_hex(got, first)}"
        )


@contextmanager
def untouched(**tensors: Tensor) -> Iterator[None]:
    """Whatever happens inside, the ``tensors`` are the same after it."""
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    yield
    for name, tensor in tensors.items():
        same_bits(tensor, before[name], f"{name} after the call")


def _bytes(tensor: Tensor) -> Tensor:
    """One row of bytes for each element."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _hex(tensor: Tensor, element: int) -> str:
    return " ".join(f"{byte:02x}" for byte in _bytes(tensor)[element].tolist())


def _at(index: tuple[int, ...]) -> str:
    return f", at [{', '.join(map(str, index))}]" if index else ""
