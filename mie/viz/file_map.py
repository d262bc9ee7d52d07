"""A file as a map: which bytes are what, one stretch at a time.

Invariant: the segments cover the file, each byte once. The bar on the left is to scale, which
mostly shows that one segment is nearly everything; the map beside it grows with the logarithm,
so that eight bytes can still be read.

    scale   map
    ┌─┐───┌──────────────┐ 0
    │ │\\  │ length       │ 8
    │ │ \\ │ header       │ 29,264
    │ │  \\│ tensors      │
    └─┘───└──────────────┘ 269,060,552
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mie.book.palette import LOOKS, Look
from mie.book.units import quantity
from mie.viz.stepper import Frame, Stepper
from mie.viz.svg import MONO_ADVANCE, NORMAL, SMALL, WIDTH, Canvas

_TOP = 34
_SCALE_X, _SCALE_WIDTH = 1, 18
_MAP_X, _MAP_WIDTH = 60, 296
_BYTES_SHOWN = 16


@dataclass(frozen=True)
class Segment:
    """Bytes ``start`` to ``end`` (exclusive) of a file, and what they are.

    ``note`` is one short line ("BF16, 49152 × 576"), ``says`` the sentence that explains it,
    ``head`` the first bytes themselves, of which up to 16 are shown.
    """

    name: str
    start: int
    end: int
    note: str = ""
    says: str = ""
    head: bytes = b""

    @property
    def size(self) -> int:
        return self.end - self.start


def file_map(segments: Sequence[Segment], title: str) -> Stepper:
    """First the whole file, then each segment in turn with its first bytes.

    Raises ValueError where a segment does not begin at the byte at which the one before it ends.
    """
    if not segments:
        raise ValueError("a map needs at least one segment")
    expected = 0
    for segment in segments:
        if segment.start != expected or segment.size < 0:
            raise ValueError(
                f"segment {segment.name!r} covers bytes {segment.start} to {segment.end}, "
                f"but the segment before it ends at {expected}"
            )
        expected = segment.end
    whole = _draw(segments, None, title)
    return Stepper(
        [whole, *(_draw(segments, i, title) for i in range(len(segments)))], title, "part"
    )


def _draw(segments: Sequence[Segment], chosen: int | None, title: str) -> Frame:
    heights = [_height(segment) for segment in segments]
    bottom = _TOP + sum(heights)
    canvas = Canvas(WIDTH, bottom + 96, title)
    canvas.text(_SCALE_X, 16, "to scale", size=SMALL, muted=True)
    canvas.text(_MAP_X, 16, "readable", size=SMALL, muted=True)
    canvas.text(_MAP_X + _MAP_WIDTH + 12, 16, "byte", size=SMALL, muted=True)

    total = max(segments[-1].end, 1)
    y = float(_TOP)
    for index, (segment, height) in enumerate(zip(segments, heights, strict=True)):
        _segment(canvas, segment, index, y, height, chosen)
        scale = [_TOP + sum(heights) * edge / total for edge in (segment.start, segment.end)]
        _link(canvas, scale, (y, y + height), on=chosen == index)
        look = _look(index, chosen)
        canvas.cell((_SCALE_X, scale[0], _SCALE_WIDTH, max(scale[1] - scale[0], 1)), look)
        y += height
    _offset(canvas, y, segments[-1].end, strong=chosen == len(segments) - 1)
    if chosen is None:
        return canvas.frame(_overview(segments), "the whole file")
    _first_bytes(canvas, segments[chosen], bottom + 34)
    return canvas.frame(_words(segments[chosen]), segments[chosen].name)


def _height(segment: Segment) -> float:
    return 30 + 3 * math.log10(max(segment.size, 1))


def _segment(
    canvas: Canvas, segment: Segment, index: int, y: float, height: float, chosen: int | None
) -> None:
    look = _look(index, chosen)
    canvas.cell((_MAP_X, y + 1.5, _MAP_WIDTH, height - 3), look)
    baseline, end = y + height / 2 + 5, _MAP_X + _MAP_WIDTH - 12
    note = segment.note or f"{segment.size:,} B"
    name = _tail(segment.name, room=_MAP_WIDTH - 36 - len(note) * SMALL * 0.55)
    canvas.label(_MAP_X + 12, baseline, name, look, size=NORMAL, bold=True)
    canvas.label(end, baseline, note, look, anchor="end")
    _offset(canvas, y, segment.start, strong=chosen in (index, index - 1) and chosen is not None)


def _tail(name: str, room: float) -> str:
    """The end of a name that is too long for its box: a tensor's name says the most at its end."""
    letters = int(room / (NORMAL * 0.6))
    return name if len(name) <= letters else "…" + name[1 - letters :]


def _look(index: int, chosen: int | None) -> Look:
    """Every segment carries its name, so a pale tint is enough; the one we speak of is solid."""
    return replace(LOOKS[index % len(LOOKS)], pattern="solid" if index == chosen else "tint")


def _offset(canvas: Canvas, y: float, offset: int, *, strong: bool) -> None:
    x = _MAP_X + _MAP_WIDTH + 12
    canvas.text(x, y + 4, f"{offset:,}", size=SMALL, mono=True, bold=strong, muted=not strong)


def _link(canvas: Canvas, scale: Sequence[float], rows: tuple[float, float], *, on: bool) -> None:
    left, right = _SCALE_X + _SCALE_WIDTH + 2, _MAP_X - 3
    corners = [(left, scale[0]), (right, rows[0]), (right, rows[1]), (left, scale[1])]
    if on:
        canvas.area(corners, 0.12)
    canvas.line(corners[:2], faint=True)
    canvas.line(corners[2:], faint=True)


def _first_bytes(canvas: Canvas, segment: Segment, y: float) -> None:
    head = segment.head[:_BYTES_SHOWN]
    if not head:
        return
    more = segment.size > len(head)
    canvas.text(
        0, y, f"the first {len(head)} bytes" if more else "all its bytes", size=SMALL, muted=True
    )
    for row in range(0, len(head), 8):
        part = head[row : row + 8]
        line = y + 22 + 20 * (row // 8)
        for column, byte in enumerate(part):
            canvas.text(_MAP_X + 28 * column, line, f"{byte:02x}", size=NORMAL, mono=True)
        x = _MAP_X + 28 * 8 + 12
        for column, byte in enumerate(part):
            printable = 32 <= byte < 127
            canvas.text(
                x + NORMAL * MONO_ADVANCE * column,
                line,
                chr(byte) if printable else ".",
                mono=True,
                muted=not printable,
            )


def _overview(segments: Sequence[Segment]) -> str:
    names = ", ".join(f"{segment.name} ({quantity(segment.size, 'B')})" for segment in segments)
    return f"{segments[-1].end:,} bytes: {names}."


def _words(segment: Segment) -> str:
    words = f"Bytes {segment.start:,} to {segment.end:,}, {quantity(segment.size, 'B')}"
    if segment.note:
        words += f": {segment.note}"
    words += "."
    if segment.says:
        words += f" {segment.says}"
    if segment.head:
        words += f" It begins with {segment.head[:_BYTES_SHOWN].hex(' ')}."
    return words
