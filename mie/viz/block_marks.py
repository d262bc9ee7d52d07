"""Small marks that drawings of blocks share: cached, changed, a row of numbers, a legend.

Invariant: a mark has a shape of its own, so that it adds to an owner's pattern and hides none:
*cached* is a bar along the lower edge, *changed* a heavy outline, *free* a dashed edge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from mie.book.palette import LOOKS, Look
from mie.viz.svg import SMALL, WIDTH, Box, Canvas

FREE = LOOKS[7]
PLAIN = replace(FREE, pattern="tint")
_NUMBER_STEP = 27

# How a legend draws its sample, and what the sample means.
Entry = tuple[Callable[[Canvas, Box], None], str]


def cached_bar(canvas: Canvas, box: Box) -> None:
    """The mark of a block that the prefix cache knows: a bar along its lower edge."""
    x, y, width, height = box
    canvas.shade((x, y + height - 4, width, 4), 0.75)


def outline(canvas: Canvas, box: Box) -> None:
    """The mark of what has changed since the frame before."""
    x, y, width, height = box
    left, top, right, bottom = x - 3, y - 2, x + width + 3, y + height + 3
    around = [(left, top), (right, top), (right, bottom), (left, bottom)]
    canvas.line([*around, *around[:2]], width=2.4)


def number_row(
    canvas: Canvas,
    x: float,
    y: float,
    blocks: Sequence[int],
    room: float,
    marked: Sequence[int] = (),
    cached: Sequence[int] = (),
    kind: Look = PLAIN,
) -> None:
    """Block numbers in small boxes, as many as ``room`` has space for, and how many more."""
    step = _NUMBER_STEP
    shown = len(blocks)
    if shown * step > room:
        shown = int((room - 68) / step)
    for index, block in enumerate(blocks[:shown]):
        box = (x + step * index + 1, y + 1, 23, 19)
        canvas.cells([box], kind)
        canvas.text(box[0] + 11.5, y + 15, str(block), size=SMALL, anchor="middle")
        if index in cached:
            cached_bar(canvas, box)
        if index in marked:
            outline(canvas, (box[0] + 2, box[1] + 1, 19, 16))
    if shown < len(blocks):
        more = f"… {len(blocks) - shown} more"
        canvas.text(x + step * shown + 2, y + 15, more, size=SMALL, muted=True)


def changed_sample(canvas: Canvas, box: Box) -> None:
    """What ``outline`` looks like, for a legend."""
    x, y, width, height = box
    outline(canvas, (x + 4, y + 3, width - 8, height - 6))


def legend_rows(entries: Iterable[Entry]) -> list[list[tuple[float, Entry]]]:
    """The entries with their left edges, broken into rows."""
    rows: list[list[tuple[float, Entry]]] = []
    x = float(WIDTH)
    for entry in entries:
        width = 27 + 6.9 * len(entry[1])
        if x + width > WIDTH:
            rows.append([])
            x = 2
        rows[-1].append((x, entry))
        x += width + 16
    return rows


def draw_legend(canvas: Canvas, y: float, entries: Iterable[Entry]) -> None:
    """Samples with what they mean; ``y`` is the top of the first row."""
    for row in legend_rows(entries):
        for x, (sample, meaning) in row:
            sample(canvas, (x, y, 18, 12))
            canvas.text(x + 25, y + 10.5, meaning, size=SMALL)
        y += 22
