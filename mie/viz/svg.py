"""A small vocabulary for drawing: cells filled with patterns, words, arrows, braces, a legend.

Invariant: a drawing is a function of its data alone. No randomness, no clock, no global
counter: the same calls give the same bytes. Two different drawings never define the same id,
because every id carries a hash of the drawing's content.

    canvas = Canvas(200, 60, "Two blocks")
    canvas.cell((0, 10, 90, 30), look(0), "A")
    canvas.cell((100, 10, 90, 30), look(1), "B")
    frame = canvas.frame("Block 0 belongs to A, block 1 to B.")

Units are CSS pixels; the picture grows and shrinks with the page a little, and scrolls where
the page is narrower than that, so that its letters stay readable. A drawing of WIDTH fits a
phone without scrolling. Colours are CSS variables with a fallback, and everything else is
``currentColor``: the drawing follows the page into dark mode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from mie.book.output import escape
from mie.book.palette import COLOURS, Look
from mie.viz.stepper import Frame

WIDTH = 460
SMALL, NORMAL, LARGE = 12.5, 14, 16  # sizes of type
MONO_ADVANCE = 0.602  # the width of a letter in a monospaced font, in units of its size

_SMALLEST, _LARGEST = 0.72, 1.15  # how far a drawing may be scaled
_SCOPE = "\x00"  # stands for the drawing's hash until it is known; no escaped text contains it
_PATTERNS = {  # what is drawn over the tint, in a tile of 8 × 8
    "diagonal": '<path d="M-2 2 2-2M0 8 8 0M6 10 10 6" stroke-width="1.6"/>',
    "dots": '<path d="M2 2h0M6 6h0" stroke-width="2.6" stroke-linecap="round"/>',
    "crosshatch": '<path d="M0 8 8 0M0 0 8 8" stroke-width="1.1"/>',
    "horizontal": '<path d="M0 2h8M0 6h8" stroke-width="1.3"/>',
    "vertical": '<path d="M2 0v8M6 0v8" stroke-width="1.3"/>',
    "checks": '<path d="M0 2h4M4 6h4" stroke-width="4"/>',
}
_TINT = {"solid": 1.0, "tint": 0.16, "empty": 0.0}  # fills that need no pattern
_SIGNS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}

Box = tuple[float, float, float, float]  # left, top, width, height


def paint(colour: str) -> str:
    """A colour of the palette as a value for ``fill`` or ``stroke``."""
    return f"var(--mie-{colour}, {COLOURS[colour]})"


def visible(token: str, limit: int = 14) -> str:
    """A token as something to read: blanks and unprintable signs shown, cut to ``limit``."""
    shown = "".join(map(_sign, token))
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _sign(letter: str) -> str:
    if letter in _SIGNS:
        return _SIGNS[letter]
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode()


class Canvas:
    """A drawing in the making: each method adds one thing on top of those before it."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width = width
        self.height = height
        self.title = title
        self._parts: list[str] = []
        self._patterns: dict[str, Look] = {}

    def cells(self, boxes: Sequence[Box], look: Look, *, outline: float = 1.0) -> None:
        """Boxes of one owner, in the owner's pattern, as a single shape: cheap in hundreds."""
        if not boxes:
            return
        colour = paint(look.colour)
        if look.pattern in _PATTERNS:
            key = f"{look.pattern}-{look.colour}"
            self._patterns[key] = look
            fill = f'fill="url(#{_SCOPE}{key})"'
        else:
            fill = f'fill="{colour}" fill-opacity="{_TINT[look.pattern]:g}"'
        dashes = ' stroke-dasharray="3 2.5"' if look.pattern == "empty" else ""
        path = "".join(
            f"M{x:g} {y:g}h{width:g}v{height:g}h{-width:g}z" for x, y, width, height in boxes
        )
        self._add(
            f'<path d="{path}" {fill} stroke="{colour}" stroke-width="{outline:g}" '
            f'stroke-linejoin="round"{dashes}/>'
        )

    def cell(
        self, box: Box, look: Look, label: str = "", *, outline: float = 1.0, size: float = SMALL
    ) -> None:
        """One box, with a label in its middle that stays readable on any pattern."""
        self.cells([box], look, outline=outline)
        x, y, width, height = box
        middle, baseline = x + width / 2, y + height / 2 + size * 0.35
        self.label(middle, baseline, label, look, size=size, anchor="middle")

    def label(
        self,
        x: float,
        y: float,
        words: str,
        on: Look,
        *,
        size: float = SMALL,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Text on a cell: in the page's colour on a solid one, with a halo on a pattern."""
        ink = "var(--mie-paper, #fff)" if on.pattern == "solid" else "currentColor"
        halo = on.pattern in _PATTERNS
        if words:
            self.text(x, y, words, size=size, anchor=anchor, ink=ink, bold=bold, halo=halo)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = NORMAL,
        anchor: str = "start",
        ink: str = "currentColor",
        muted: bool = False,
        bold: bool = False,
        mono: bool = False,
        halo: bool = False,
        turn: float = 0,
    ) -> None:
        """One line of text; ``y`` is its baseline, ``turn`` rotates it, in degrees."""
        classes = " ".join(name for name, on in (("mono", mono), ("halo", halo)) if on)
        attributes = [
            f'x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{ink}"',
            f'class="{classes}"' if classes else "",
            f'text-anchor="{anchor}"' if anchor != "start" else "",
            'font-weight="600"' if bold else "",
            'opacity="0.68"' if muted else "",
            f'transform="rotate({turn:g} {x:g} {y:g})"' if turn else "",
        ]
        self._add(f"<text {' '.join(filter(None, attributes))}>{escape(words)}</text>")

    def line(
        self,
        points: Sequence[tuple[float, float]],
        *,
        ink: str = "currentColor",
        width: float = 1.0,
        faint: bool = False,
    ) -> None:
        """A path of straight pieces."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        opacity = ' opacity="0.22"' if faint else ""
        self._add(
            f'<path d="{path}" fill="none" stroke="{ink}" stroke-width="{width:g}"{opacity}/>'
        )

    def area(self, points: Sequence[tuple[float, float]], opacity: float) -> None:
        """A pale polygon in the colour of the text, behind what is drawn later."""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points) + "Z"
        self._add(f'<path d="{path}" fill="currentColor" opacity="{opacity:g}"/>')

    def shade(self, box: Box, opacity: float) -> None:
        """A pale box in the colour of the text: a row that is meant, a place that is still free."""
        x, y, width, height = box
        self.area([(x, y), (x + width, y), (x + width, y + height), (x, y + height)], opacity)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str = "grey") -> None:
        """A straight arrow from the first point to the second."""
        length = max(((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5, 1e-9)
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        left = (x2 - 8 * dx - 4 * dy, y2 - 8 * dy + 4 * dx)
        right = (x2 - 8 * dx + 4 * dy, y2 - 8 * dy - 4 * dx)
        ink = paint(colour)
        self.line([(x1, y1), (x2 - 6 * dx, y2 - 6 * dy)], ink=ink, width=1.6)
        head = "M" + "L".join(f"{x:g} {y:g}" for x, y in ((x2, y2), left, right)) + "Z"
        self._add(f'<path d="{head}" fill="{ink}"/>')

    def brace(self, x1: float, x2: float, y: float, label: str) -> None:
        """A brace over the stretch from ``x1`` to ``x2``, with its label above."""
        middle, r = (x1 + x2) / 2, min(6.0, (x2 - x1) / 4)
        self._add(
            f'<path d="M{x1:g} {y:g}q0 {-r:g} {r:g} {-r:g}H{middle - r:g}q{r:g} 0 {r:g} {-r:g}'
            f'q0 {r:g} {r:g} {r:g}H{x2 - r:g}q{r:g} 0 {r:g} {r:g}" fill="none" '
            f'stroke="currentColor" opacity="0.6"/>'
        )
        self.text(middle, y - 2 * r - 5, label, size=SMALL, anchor="middle")

    def legend(self, x: float, y: float, entries: Sequence[tuple[Look, str]]) -> None:
        """A row of small boxes with what they mean; ``y`` is the top of the boxes."""
        for look, meaning in entries:
            self.cell((x, y, 18, 12), look)
            self.text(x + 25, y + 10.5, meaning, size=SMALL)
            x += 25 + 6.9 * len(meaning) + 20

    def frame(self, words: str, name: str = "") -> Frame:
        """The finished drawing with the text that says the same."""
        body = "".join(self._parts)
        digest = hashlib.sha256((body + self.title + words).encode()).hexdigest()[:8]
        patterns = "".join(
            _pattern(f"{_SCOPE}{key}", look) for key, look in sorted(self._patterns.items())
        )
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" '
            f'style="max-width:{_LARGEST * self.width:g}px;min-width:{_SMALLEST * self.width:g}px">'
            f"<title>{escape(self.title)}</title><desc>{escape(words)}</desc>"
            f"{f'<defs>{patterns}</defs>' if patterns else ''}{body}</svg>"
        )
        return Frame(svg.replace(_SCOPE, f"mie-{digest}-"), words, name)

    def _add(self, part: str) -> None:
        self._parts.append(part)


def _pattern(identity: str, look: Look) -> str:
    colour = paint(look.colour)
    tint = f'<path d="M0 0h8v8h-8z" fill="{colour}" fill-opacity="0.14" stroke="none"/>'
    return (
        f'<pattern id="{identity}" width="8" height="8" patternUnits="userSpaceOnUse" '
        f'fill="none" stroke="{colour}" stroke-opacity="0.75">'
        f"{tint}{_PATTERNS[look.pattern]}</pattern>"
    )
