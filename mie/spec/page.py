"""The few pieces of HTML that the specs show in a notebook.

Invariant: whatever comes in is text, and what goes out is safe to put on a page. Colours and lines
are left to the page's own style sheet, so that they are right in the light and in the dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

LEFT = 'style="text-align: left"'  # JupyterLab aligns tables to the right, made for numbers


def text(words: str) -> str:
    return escape(words)


def code(name: str) -> str:
    return f"<code>{escape(name)}</code>"


def sentence(words: str) -> str:
    """A sentence of a docstring, its `code` set as code."""
    parts = escape(words).split("`")
    if len(parts) % 2 == 0:  # an unpaired backtick is itself
        return escape(words)
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table of cells that are HTML already."""
    columns = "".join(f'<th scope="col" {LEFT}>{word}</th>' for word in head)
    body = "".join(
        "<tr>" + "".join(f"<td {LEFT}>{cell}</td>" for cell in row) + "</tr>" for row in rows
    )
    title = f"<caption>{caption}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>"
