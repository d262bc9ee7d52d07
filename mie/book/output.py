"""What a chapter shows has two forms that say the same thing: HTML, and plain text.

Invariant: the HTML form carries nothing that the text form lacks. The text form is what a
terminal, a screen reader's linear view and a diff of two runs see, so a table or a drawing that
speaks only through its picture is a bug.

The HTML form is one element of class ``mie-output`` that brings its own style. It takes its
colours and fonts from the page around it (the book's theme, JupyterLab, VS Code) through CSS
variables, so that it follows a switch to dark mode.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any


class Output:
    """The base of everything displayable: subclasses say ``html()`` and ``text()``."""

    def html(self) -> str:
        raise NotImplementedError

    def text(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.text()

    def _repr_mimebundle_(
        self, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
    ) -> dict[str, Any]:
        """What Jupyter asks for: both forms, and the front end picks the richest it can draw."""
        return {"text/html": self.html(), "text/plain": self.text()}


def escape(text: object) -> str:
    """The text as HTML or XML, in an element or between the quotes of an attribute.

    Tokens can be any bytes at all, and XML has no way to write most control characters: they
    become visible escapes such as ``\\x00``.
    """
    printable = re.sub(
        "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]",
        lambda match: match[0].encode("unicode_escape").decode(),
        str(text),
    )
    return html.escape(printable, quote=True)


@cache
def style(*sheets: str) -> str:
    """A ``<style>`` element of the named sheets, each ``package/name.css`` inside ``mie``.

    ``book/output.css`` always comes first: it defines the variables that the others use.
    """
    texts = [
        files("mie").joinpath(sheet).read_text("utf-8") for sheet in ("book/output.css", *sheets)
    ]
    rules = re.sub(r"/\*.*?\*/", "", "".join(texts), flags=re.DOTALL)
    rules = re.sub(r"\s+", " ", rules).strip()
    return f"<style>{rules}</style>"
