"""Eight looks for eight things: each is a colour *and* a pattern, a marker, a line.

Invariant: no two looks share a pattern, a marker or a dash, so a drawing that uses them can be
read without seeing colour at all. The colours are Okabe and Ito's set for colour-blind readers
[1], darkened until each has a contrast of at least 3 to 1 against white; dark pages lighten
them in ``output.css``.

[1] M. Okabe and K. Ito, Color Universal Design, 2008, https://jfly.uni-koeln.de/color/
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """One owner, kind or series, in every channel that the book draws with."""

    colour: str  # the name of a colour in COLOURS, and of the CSS variable --mie-<name>
    pattern: str  # how mie.viz.svg fills an area
    hatch: str  # how matplotlib fills one
    marker: str  # matplotlib's name of a point's shape
    dash: tuple[int, tuple[float, ...]]  # matplotlib's line: offset, (on, off, ...) in points

    @property
    def hex(self) -> str:
        return COLOURS[self.colour]


COLOURS = {
    "blue": "#0072b2",
    "vermilion": "#cc5500",
    "green": "#00855f",
    "pink": "#b3508b",
    "sky": "#2f8dbf",
    "amber": "#a87000",
    "violet": "#6451b5",
    "grey": "#6b7280",
}

LOOKS = (
    Look("blue", "solid", "", "o", (0, ())),
    Look("vermilion", "diagonal", "///", "s", (0, (5, 2))),
    Look("green", "dots", "..", "^", (0, (1, 1.5))),
    Look("pink", "crosshatch", "xx", "D", (0, (6, 2, 1, 2))),
    Look("sky", "horizontal", "--", "v", (0, (9, 3))),
    Look("amber", "vertical", "||", "P", (0, (3, 1, 1, 1, 1, 1))),
    Look("violet", "checks", "++", "X", (0, (2, 3))),
    Look("grey", "empty", "\\\\", "*", (0, (12, 2, 2, 2))),
)


def look(index: int) -> Look:
    """The look of owner number ``index``; after eight they repeat, so label what you draw."""
    return LOOKS[index % len(LOOKS)]
