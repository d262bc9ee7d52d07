"""A case is one rule of a part, as a function that any implementation can be handed to.

Invariant: a case says both halves of its rule in its docstring, what must hold and what breaks in
an engine where it doesn't. The chapter's table, the terminal and the test report all read it there,
so there is no second copy to go stale::

    def case_zero_row(rms_norm: RMSNorm) -> None:
        \"\"\"A row of zeros gives zeros. Otherwise: a padded row turns into NaN and spreads.\"\"\"

A spec is a module of this package, named like the part; its cases are read in the order they stand.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from mie.errors import MieError
from mie.spec.location import Location, location_of

SPECS = (  # in the book's order
    "safetensors_reader",
    "rms_norm",
    "rope",
    "swiglu",
    "attention",
    "block_pool",
    "block_table",
    "prefix_cache",
    "scheduler",
    "queue",
    "victim_policy",
    "add_rms_norm",
    "paged_decode",
    "paged_prefill",
)
PREFIX = "case_"
HALVES = " Otherwise: "


class SpecError(MieError):
    """A spec is not one: it has no cases, or a case does not say its rule."""


class UnknownSpecError(SpecError):
    """There is no spec of that name; the message lists those that there are."""


@dataclass(frozen=True)
class Case:
    """One rule. Call it with an implementation: it returns, or raises what it found."""

    name: str
    rule: str
    otherwise: str
    run: Callable[[Any], None]

    def __call__(self, implementation: Any) -> None:
        self.run(implementation)

    @property
    def location(self) -> Location | None:
        return location_of(self.run)


def names() -> tuple[str, ...]:
    """The parts that have a spec, in the order in which the book builds them."""
    return SPECS


def cases(name: str) -> tuple[Case, ...]:
    """The rules of part ``name``. Raises ``UnknownSpecError`` where there is no such spec."""
    if name not in SPECS:
        raise UnknownSpecError(f"no spec called {name!r}; there are {', '.join(SPECS)}")
    return cases_in(import_module(f"mie.spec.{name}"))


def cases_in(module: ModuleType) -> tuple[Case, ...]:
    """Every ``case_*`` function of ``module``. A module without any raises ``SpecError``."""
    found = tuple(
        _read(name.removeprefix(PREFIX), function)
        for name, function in vars(module).items()
        if name.startswith(PREFIX)
    )
    if not found:
        raise SpecError(
            f"the spec {module.__name__} has no {PREFIX}* function: it would pass anything"
        )
    return found


def _read(name: str, function: Callable[[Any], None]) -> Case:
    """Take the docstring apart at its one "Otherwise:"."""
    said = " ".join((inspect.getdoc(function) or "").split())
    rule, _, otherwise = said.partition(HALVES)
    if not (rule.endswith(".") and otherwise.endswith(".")):
        raise SpecError(f'{PREFIX}{name} says {said!r}, not "A rule. Otherwise: what breaks."')
    return Case(name, rule, otherwise, function)
