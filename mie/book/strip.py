"""The strip under a chapter's title: what it needs, what it builds, and what this run is made of.

Invariant: hardware, versions and date are read when the cell runs, so a page can't claim a
machine that its numbers don't come from. What the chapter asks for (dtype, device) and how long
it takes on two cores, its author says. The same cell makes the run
repeatable: it seeds the generators, keeps torch to the cores that this process may use, and
sets the plot style; the strip says so.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

from mie import machine
from mie.book.output import Output, escape, style
from mie.book.plots import use_style
from mie.book.source import repository_path, repository_url

SEED = 0


def strip(
    *,
    needs: Sequence[str] = (),
    builds: Sequence[str] = (),
    spec: str | Sequence[str] = (),
    seconds: float,
    numbers: str = "float32 on the CPU",
) -> Strip:
    """Prepare this run and describe it. Make it the last value of a chapter's first cell.

    needs: chapters, by number (``"01"``, linked to the page beside this one) or in words.
    builds: modules, by their import name (``"mie.model.safetensors"``); each must exist.
    spec: the specs that check a reader's version; each must exist.
    seconds: how long the chapter takes on two CPU cores.
    numbers: the dtype and the device that the chapter asks for.
    """
    threads = _prepare()
    specs = [spec] if isinstance(spec, str) else spec
    chapter: list[Row] = [
        ("Needs", [_chapter(each) for each in needs] or [("nothing before it", None)]),
        ("Builds", [_module(each) for each in builds]),
        ("Spec", [_spec(each) for each in specs]),
        ("Takes", [(f"about {seconds:g} s on two CPU cores", None)]),
    ]
    run: list[Row] = [
        ("Run on", _words(*_hardware(), datetime.date.today().isoformat())),
        ("Numbers", _words(numbers)),
        ("Versions", _words(*(f"{name} {version}" for name, version in _versions().items()))),
        ("Set here", _words(f"seed {SEED}", _threads(threads), "plots as SVG")),
    ]
    return Strip([row for row in chapter if row[1]], run)


Item = tuple[str, str | None]  # what to say, and where it links to
Row = tuple[str, list[Item]]


class Strip(Output):
    """What the chapter is, and what this run is: rows of a heading and its items."""

    def __init__(self, chapter: Sequence[Row], run: Sequence[Row]) -> None:
        self.chapter = chapter
        self.run = run

    def text(self) -> str:
        rows = [*self.chapter, *self.run]
        width = max(len(heading) for heading, _ in rows)
        return "\n".join(
            f"{heading.ljust(width)}  {' · '.join(text for text, _ in items)}"
            for heading, items in rows
        )

    def html(self) -> str:
        return (
            f'<section class="mie-output mie-strip" aria-label="About this chapter and this run">'
            f"{style('book/strip.css')}{_rows_html(self.chapter)}{_rows_html(self.run)}</section>"
        )


def _rows_html(rows: Sequence[Row]) -> str:
    body = (
        f"<dt>{escape(heading)}</dt><dd>{' · '.join(map(_item_html, items))}</dd>"
        for heading, items in rows
    )
    return f"<dl>{''.join(body)}</dl>"


def _words(*texts: str) -> list[Item]:
    return [(text, None) for text in texts]


def _item_html(item: Item) -> str:
    text, url = item
    words = escape(text).replace("/", "/<wbr/>")  # a path may break after its slashes
    return f'<a href="{escape(url)}">{words}</a>' if url else f"<span>{words}</span>"


def _prepare() -> int:
    """Seed everything that is random, bound torch's threads, set the plot style."""
    import numpy
    import torch

    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
    # In a container torch counts the host's cores, and threads that wait for a core cost more than
    # they bring. OMP_NUM_THREADS, where set, is already in get_num_threads().
    threads = min(torch.get_num_threads(), machine.usable_cores())
    torch.set_num_threads(threads)
    use_style()
    return threads


def _threads(count: int) -> str:
    return "torch on 1 thread" if count == 1 else f"torch on {count} threads"


def _hardware() -> list[str]:
    cores, memory = machine.usable_cores(), machine.memory_bytes()
    return [
        f"{machine.cpu_model() or 'a CPU that gives no name'}, {cores} "
        f"{'core' if cores == 1 else 'cores'}",
        f"{memory / 2**30:.0f} GiB of memory" if memory else "memory unknown",
        machine.gpu() or "no GPU",
    ]


def _versions() -> dict[str, str]:
    return machine.versions("torch", "triton", "mie")


def _chapter(needed: str) -> Item:
    """A chapter beside this one, with its title; anything else is passed on as words."""
    for path in sorted(Path().glob(f"{needed}-*.ipynb")) if needed.isdigit() else ():
        suffix = ".html" if os.environ.get("MIE_BOOK") else ".ipynb"
        return f"{needed} {_title(path)}", path.with_suffix(suffix).name
    return f"chapter {needed}" if needed.isdigit() else needed, None


def _title(notebook: Path) -> str:
    """The first heading of a notebook."""
    for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
        for line in "".join(cell["source"]).splitlines():
            if cell["cell_type"] == "markdown" and line.startswith("# "):
                return line.removeprefix("# ").strip()
    raise ValueError(f"{notebook} has no title: no Markdown cell with a line that starts with '# '")


def _module(name: str) -> Item:
    path = repository_path(importlib.import_module(name))
    return path or name, f"{repository_url()}/blob/main/{path}" if path else None


def _spec(name: str) -> Item:
    from mie.spec import cases

    count = len(cases(name))
    _, url = _module(f"mie.spec.{name}")
    return f"{name} ({count} {'case' if count == 1 else 'cases'})", url
