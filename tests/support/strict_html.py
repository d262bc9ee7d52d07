"""HTML read as strictly as XML, for the tests of what chapters display.

Invariant: a ``Tree`` that exists was well-formed: every element closed, in order. Browsers forgive
what this does not.
"""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"input", "br", "img", "hr"}


class Tree(HTMLParser):
    """Reads HTML strictly, and remembers each element's attributes and all text outside scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script", "title", "desc"):
            self.words.append(data)

    @property
    def ids(self) -> list[str]:
        return [attrs["id"] for _, attrs in self.tags if attrs.get("id")]

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]
