"""The parts of the engine that a reader may replace.

Invariant: every name here has a default that the engine ships and a spec of the same name in
``mie.spec`` that says what any replacement must do.

``add_rms_norm``, ``paged_decode`` and ``paged_prefill`` are operations of the fast step alone
(``kernels="triton"``, or a GPU). The plain step has nothing to put them in the place of, and is
refused with one of them. ``paged_decode`` serves steps in which every sequence brings one token.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from mie.errors import UnknownPartError

DEFAULTS: dict[str, str] = {
    "safetensors_reader": "mie.model.safetensors:SafetensorsFile",
    "rms_norm": "mie.ops.reference:rms_norm",
    "rope": "mie.ops.reference:rope",
    "swiglu": "mie.ops.reference:swiglu",
    "attention": "mie.ops.reference:attention",
    "block_pool": "mie.memory.block_pool:BlockPool",
    "block_table": "mie.memory.block_table:BlockTable",
    "prefix_cache": "mie.memory.prefix_cache:HashPrefixCache",
    "scheduler": "mie.scheduling.scheduler:Scheduler",
    "queue": "mie.scheduling.queue:FirstComeFirstServed",
    "victim_policy": "mie.scheduling.policy:last_admitted",
    "add_rms_norm": "mie.ops.reference:add_rms_norm",
    "paged_decode": "mie.ops.reference:paged_decode",
    "paged_prefill": "mie.ops.reference:paged_prefill",
}


def default(name: str) -> Any:
    """The class or function that the engine uses for part ``name`` unless told otherwise."""
    _refuse_unknown([name])
    return load(DEFAULTS[name])


def load(where: str) -> Any:
    """The class or function that ``module:attribute`` names."""
    module, _, attribute = where.partition(":")
    return getattr(import_module(module), attribute)


def choose(replacements: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Every part by name: the replacement where there is one, the default elsewhere."""
    replacements = replacements or {}
    _refuse_unknown(replacements)
    if nothing := sorted(name for name, part in replacements.items() if part is None):
        raise UnknownPartError(f"the part {nothing[0]} is None; leave it out for the engine's own")
    return {
        name: replacements[name] if name in replacements else default(name) for name in DEFAULTS
    }


def _refuse_unknown(names: Mapping[str, Any] | list[str]) -> None:
    unknown = sorted(set(names) - set(DEFAULTS))
    if unknown:
        raise UnknownPartError(
            f"no part called {', '.join(unknown)}; the parts are {', '.join(DEFAULTS)}"
        )
