"""From words on a command line to an implementation: ``rope.py:my_rope``, ``pkg.mod:Name``.

Invariant: what comes back can be called; everything else is a ``TargetError`` that says which half
of the target is wrong and what would have been there.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from mie.spec.case import SpecError


class TargetError(SpecError):
    """A target names no implementation; the message says how far it led."""


def implementation_of(target: str) -> Any:
    """The function or class that ``target`` names, ``path/file.py:Name`` or ``package.mod:Name``.

    Modules are looked for as Python would from here, and next to a file are its neighbours.
    """
    place, colon, name = target.rpartition(":")
    if not (place and colon and name):
        raise TargetError(f"{target!r} should look like file.py:Name or package.module:Name")
    is_file = place.endswith(".py") or "/" in place or "\\" in place
    module = _file(Path(place)) if is_file else _module(place)
    thing = getattr(module, name, None)
    if thing is None:
        raise TargetError(f"{place} has no {name}; {_what_it_has(module, name)}")
    if not callable(thing):
        raise TargetError(f"{target} is a {type(thing).__name__}, not a function or class")
    return thing


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
    spec = spec_from_file_location(f"mie_target_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is not a Python file")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up there
    with _looking_in(path.parent), _explained(path):
        spec.loader.exec_module(module)
    return module


def _module(name: str) -> ModuleType:
    with _looking_in(Path.cwd()), _explained(name):
        return import_module(name)


@contextmanager
def _looking_in(folder: Path) -> Iterator[None]:
    """Imports find what lies in ``folder``, as they do for a script there."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


@contextmanager
def _explained(place: Path | str) -> Iterator[None]:
    """Whatever goes wrong while importing ``place`` says that it is about ``place``."""
    try:
        yield
    except Exception as error:
        raise TargetError(
            f"{place} could not be imported: {type(error).__name__}: {error}"
        ) from error


def _what_it_has(module: ModuleType, name: str) -> str:
    own = [
        key
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    near = difflib.get_close_matches(name, own, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"it has {', '.join(own)}" if own else "it defines no function or class"
