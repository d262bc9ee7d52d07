"""Show the engine's own source in the page, as it is at this moment.

Invariant: what the page shows is what runs. The text comes from the imported object, never from
a copy, and the title links to its lines in the repository.

The output is Markdown with a fenced block, because that is what both front ends highlight in
their own colours: JupyterLab with its code theme, the published book with Sphinx's.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mie.book.output import style


@dataclass(frozen=True)
class Place:
    """Where an object's source stands: ``first`` and ``last`` are line numbers, counted from 1."""

    name: str
    path: str
    first: int
    last: int
    url: str | None
    code: str

    @property
    def where(self) -> str:
        return f"{self.path}:{self.first}-{self.last}"


def show(obj: Any, *more: Any) -> Source:
    """The source of functions, classes, methods or whole modules, in the order given."""
    return Source(tuple(locate(each) for each in (obj, *more)))


class Source:
    """What ``show`` returns; displays itself when it is the last value of a cell."""

    def __init__(self, places: tuple[Place, ...]) -> None:
        self.places = places

    def markdown(self) -> str:
        head = f'<div class="mie-output mie-source">{style("book/source.css")}'
        return "\n\n".join([head, *map(_markdown, self.places), "</div>\n"])

    def __repr__(self) -> str:
        return "\n\n".join(f"{place.name}  {place.where}\n{place.code}" for place in self.places)

    def _repr_mimebundle_(
        self, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
    ) -> dict[str, Any]:
        return {"text/markdown": self.markdown(), "text/plain": repr(self)}


def locate(obj: Any) -> Place:
    """Find an object's source; TypeError or OSError, from ``inspect``, where it has none."""
    if isinstance(obj, property):
        obj = obj.fget
    target = inspect.unwrap(obj)
    lines, first = inspect.getsourcelines(target)
    first = max(first, 1)  # inspect says 0 for a whole module
    last = first + len(lines) - 1
    module = target if isinstance(target, ModuleType) else inspect.getmodule(target)
    path = repository_path(module) if module else None
    return Place(
        name=getattr(target, "__qualname__", target.__name__),
        path=path or _elsewhere(target),
        first=first,
        last=last,
        url=f"{repository_url()}/blob/main/{path}#L{first}-L{last}" if path else None,
        code=textwrap.dedent("".join(lines)).rstrip(),
    )


def repository_path(module: ModuleType) -> str | None:
    """The file of one of our modules, from the root of the repository; None for a stranger's.

    Made from the module's name, so that it is the same for a checkout and an installed wheel,
    and ``mie.kernels`` is found where it lives: in ``kernels/``.
    """
    parts = module.__name__.split(".")
    if parts[0] != "mie":
        return None
    if parts[:2] == ["mie", "kernels"]:
        parts = parts[1:]
    is_package = hasattr(module, "__path__")
    return "/".join(parts) + ("/__init__.py" if is_package else ".py")


def repository_url() -> str:
    """The address that the installed package gives as its repository."""
    for entry in importlib.metadata.metadata("mie").get_all("Project-URL") or ():
        label, _, url = entry.partition(", ")
        if label == "Repository":
            return url.rstrip("/")
    raise LookupError("the package mie is installed without a Repository address")


def _elsewhere(obj: Any) -> str:
    """A name for a file that is not ours. A notebook's cells are files with made-up names."""
    name = Path(inspect.getfile(obj)).name
    return "this notebook" if "ipykernel" in inspect.getfile(obj) or name.startswith("<") else name


def _markdown(place: Place) -> str:
    longest_run = max(map(len, re.findall("`+", place.code)), default=0)
    fence = "`" * max(3, longest_run + 1)
    where = f"[{place.where}]({place.url})" if place.url else place.where
    return f"`{place.name}` {where}\n\n{fence}python\n{place.code}\n{fence}"
