"""What a benchmark returns: counts that were taken, and shares made of them.

Invariant: fields are counts and names, so that two machines agree in every bit; what is divided is
divided in a property, from two whole numbers, which every machine rounds in the same way.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class Result:
    """The base of the frozen dataclasses that benchmarks return."""

    def as_dict(self) -> dict[str, Any]:
        """Fields in their order, then properties: numbers, texts, lists and dicts of them."""
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        names += [name for name, value in vars(type(self)).items() if isinstance(value, property)]
        return {name: _plain(getattr(self, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, Result):
        return value.as_dict()
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value
