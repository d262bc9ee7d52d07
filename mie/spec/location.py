"""Where a piece of code stands, in words that its author recognises.

Invariant: a location names a file as seen from here, or a notebook cell; never the temporary file
that a kernel compiles a cell into, and no folder above the project.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

HERE = Path(__file__).parent  # the specs: frames in here are never the reader's
PROJECT = HERE.parent.parent  # the checkout, or the folder that mie is installed in


@dataclass(frozen=True)
class Location:
    """A line of code. Prints as ``mie/ops/reference.py:21`` or ``cell In[7], line 3``."""

    place: str
    line: int

    @classmethod
    def at(cls, filename: str, line: int) -> Location:
        """``filename`` as Python knows it: what a code object calls ``co_filename``."""
        return cls(_cell(filename) or _short(filename), line)

    def __str__(self) -> str:
        between = ", line " if self.place.startswith("cell ") else ":"
        return f"{self.place}{between}{self.line}"


def location_of(thing: Any) -> Location | None:
    """Where a function or class begins; None for what was not written in Python."""
    thing = _written(thing)
    code = _first_code(thing)
    if code is None:
        return None
    line = _class_line(thing, code) if inspect.isclass(thing) else code.co_firstlineno
    return Location.at(code.co_filename, line)


def location_of_error(error: BaseException, thing: Any) -> Location | None:
    """The innermost line of ``thing``'s own file that ``error`` came through.

    Falls back on the first line that the spec called; None where the call itself failed.
    """
    code = _first_code(_written(thing))
    frames = [(frame.f_code.co_filename, line) for frame, line in _walk(error)]
    own = [at for at in frames if code is not None and at[0] == code.co_filename]
    called = [at for at in frames if Path(at[0]).parent != HERE]
    at = own[-1] if own else called[0] if called else None
    return None if at is None else Location.at(*at)


def name_of(thing: Any) -> str:
    """What its author calls it: ``rope``, ``Reader``, without the scope it was defined in."""
    thing = _written(thing)
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    return name.rpartition("<locals>.")[2]


def _walk(error: BaseException) -> Iterator[tuple[Any, int]]:
    return traceback.walk_tb(error.__traceback__)


def _written(thing: Any) -> Any:
    """The function or class somebody wrote, below decorators, partial application and instances."""
    thing = inspect.unwrap(thing)
    if isinstance(thing, functools.partial):
        return _written(thing.func)
    if inspect.ismethod(thing):
        return _written(thing.__func__)
    if inspect.isfunction(thing) or inspect.isclass(thing) or inspect.isbuiltin(thing):
        return thing
    return type(thing)


def _first_code(thing: Any) -> CodeType | None:
    """The code of a function, or of the first method that a class (or its parents) defines."""
    if inspect.isfunction(thing):
        return thing.__code__
    if inspect.isclass(thing):
        for cls in thing.__mro__:
            for member in map(inspect.unwrap, vars(cls).values()):
                # A dataclass writes its own methods: they have code, but no file.
                if inspect.isfunction(member) and linecache.getlines(member.__code__.co_filename):
                    return member.__code__
    return None


def _class_line(cls: type, method: CodeType) -> int:
    """The line of ``class``: from the source, since a class in a cell has no file to ask for."""
    tree = ast.parse("".join(linecache.getlines(method.co_filename)))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            assert node.end_lineno is not None
            if node.lineno <= method.co_firstlineno <= node.end_lineno:
                return node.lineno
    return method.co_firstlineno


def _cell(filename: str) -> str | None:
    """``cell In[7]``, if an IPython kernel compiled ``filename`` from a cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    label = shell.compile.format_code_name(filename) if shell is not None else None
    return None if label is None else f"cell {label[1]}"


def _short(filename: str) -> str:
    """A path as seen from the working folder or the project, else the bare name."""
    path = Path(filename)
    for folder in (Path.cwd(), PROJECT):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return path.name
