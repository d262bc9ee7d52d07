"""The pieces of a timeline: rows of cells, the marks on them, and the two strips below.

Invariant: every state has a pattern of its own. A number in a cell is a count of tokens, and a cell
without one is a single token or has no room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mie.book.palette import LOOKS, Look
from mie.scheduling.plan import KINDS
from mie.scheduling.trace import StepRecord
from mie.viz.block_marks import FREE, PLAIN
from mie.viz.svg import SMALL, WIDTH, Box, Canvas
from mie.viz.timeline_rows import USUAL, Moment, Rows, State, stretches

MOST_ROWS = 32
LEFT, RIGHT = 66, 16  # room for names, and for what stands behind the last column
TOP, TOKENS, BLOCKS = 42, 52, 30  # where the rows begin; heights of the two strips
STATES: dict[State, Look] = {
    "prefill": LOOKS[0],
    "decode": LOOKS[2],
    "recompute": LOOKS[1],
    "waiting": FREE,
    "returning": LOOKS[5],
    "padding": LOOKS[3],
}
SIGNS = {"abort": "✗", "kv_exhausted": "!"}  # of unusual ends

_LARGEST_CELL, _DIGITS = 26, 10.5  # the width of a column, and the size of a number in it
_DIGIT = 0.6  # how wide a digit is, in units of its size
_MERGE_BELOW = 12  # columns narrower than this are drawn in one piece where they are alike
_STACK: tuple[State, ...] = ("decode", "recompute", "prefill", "padding")  # from below
_ROWS = ((8, 22.0), (16, 18.0), (MOST_ROWS, 14.5))  # for so many rows, so high
_SHADOW = 0.06


@dataclass(frozen=True)
class View:
    """What one picture shows: the columns ``shown``, of which those after ``now`` are shadows.

    Without ``now`` it is the whole run. Pictures of one run with as many columns have one size.
    """

    records: Sequence[StepRecord]
    rows: Rows
    names: Sequence[str]
    shown: range
    now: int | None

    @property
    def last(self) -> int:
        """The last column that is no shadow."""
        return self.shown[-1] if self.now is None else self.now

    @property
    def cell(self) -> float:
        return min(_LARGEST_CELL, (WIDTH - LEFT - RIGHT) / len(self.shown))

    @property
    def row(self) -> float:
        return next(height for most, height in _ROWS if len(self.names) <= most)

    @property
    def right(self) -> float:
        return LEFT + self.cell * len(self.shown)

    @property
    def bottom(self) -> float:
        """Where the rows end."""
        return TOP + self.row * len(self.names)

    @property
    def has_letters(self) -> bool:
        """Whether a column is wide enough for one."""
        return self.cell >= _DIGITS

    def x(self, column: int) -> float:
        return LEFT + self.cell * (column - self.shown[0])

    def box(self, column: int, top: float, height: float, columns: int = 1) -> Box:
        """So many columns, without the gap to their neighbours."""
        edge = min(1, self.cell / 8)
        return self.x(column) + edge, top, self.cell * columns - 2 * edge, height


def draw_numbers(canvas: Canvas, view: View) -> None:
    """The numbers of the steps over their columns, as many as there is room for."""
    widest = 7.2 * len(str(view.records[view.shown[-1]].number)) + 6
    apart = next((n for n in (1, 2, 5, 10, 20, 50, 100) if n * view.cell >= widest), 200)
    for column in view.shown:
        number, here = view.records[column].number, column == view.now
        free = view.now is None or abs(column - view.now) * view.cell >= widest
        if here or (free and number % apart == 0):
            x = view.x(column) + view.cell / 2
            said = str(number)
            canvas.text(x, TOP - 7, said, size=SMALL, anchor="middle", bold=here, muted=not here)


# -- rows ------------------------------------------------------------------------------------------


def draw_row(canvas: Canvas, view: View, name: str, y: float) -> None:
    """One sequence: shadows of what is to come, then what it did."""
    row, size = view.rows[name], min(SMALL, view.row - 2)
    here = view.now is None or view.now in row
    said = name if len(name) <= 8 else f"…{name[-7:]}"  # names differ at their ends
    canvas.text(2, y + view.row / 2 + size * 0.36, said, size=size, bold=here, muted=not here)
    canvas.line([(LEFT, y + view.row), (view.right, y + view.row)], faint=True)
    top, height = y + 2, view.row - 4
    for column in view.shown:
        if column > view.last and column in row and row[column].work:
            canvas.shade(view.box(column, top, height), _SHADOW)
    for first, end in stretches(row, view.shown[0], view.last + 1):
        now = row[first]
        if now.state is None:
            continue
        if now.work and (view.cell >= _MERGE_BELOW or now.padding):
            for column in range(first, end):
                _cell(canvas, view.box(column, top, height), row[column])
            continue
        box, look = view.box(first, top, height, end - first), STATES[now.state]
        canvas.cells([box], look)
        if now.state in ("waiting", "returning") and not now.preempted and box[2] > 44:
            canvas.label(box[0] + 5, y + view.row / 2 + 3.8, "waits", look, size=_DIGITS)
    for column in range(view.shown[0], view.last + 1):
        if column in row:
            _marks(canvas, view, view.x(column), y, row[column])


def _cell(canvas: Canvas, box: Box, moment: Moment) -> None:
    """What one sequence computes in one step; padding takes its share of the width."""
    assert moment.work is not None and moment.state is not None
    count, padding = moment.work.num_tokens, moment.padding
    left, top, width, height = box
    part = width * count / (count + padding)
    if padding:
        canvas.cells([(left + part, top, width - part, height)], STATES["padding"])
    said = str(count) if count > 1 and len(str(count)) * _DIGIT * _DIGITS <= part else ""
    canvas.cell((left, top, part, height), STATES[moment.state], said, size=_DIGITS)


def _marks(canvas: Canvas, view: View, x: float, y: float, moment: Moment) -> None:
    """A preemption and an end, on top of what the cell shows."""
    if moment.preempted and view.has_letters:
        draw_sign(canvas, x + view.cell / 2, y + view.row / 2, "P")
    if moment.ended:
        edge = x + view.cell - 1 if moment.state else x + 1
        draw_end(canvas, (edge - 1.5, y + 1, 3, view.row - 2))
        if moment.ended not in USUAL:
            draw_sign(canvas, edge + 7.5, y + view.row / 2, SIGNS.get(moment.ended, "?"))


def draw_sign(canvas: Canvas, x: float, y: float, sign: str) -> None:
    """One letter with its middle there."""
    canvas.text(x, y + 4, sign, size=SMALL, anchor="middle", bold=True, halo=True)


def draw_end(canvas: Canvas, box: Box) -> None:
    """The mark of a sequence's last step: a heavy bar."""
    canvas.shade(box, 0.95)


# -- strips ----------------------------------------------------------------------------------------


def draw_tokens(canvas: Canvas, view: View, top: float) -> None:
    """What every step computes, stacked, under the line of the budget.

    The scale is that of the whole run. A budget of more than three times the fullest step is beyond
    the picture, and is said.
    """
    most = max(record.num_tokens + record.num_padding for record in view.records)
    budget = max(record.token_budget for record in view.records)
    ceiling = max(most, 1) if budget > 3 * most else max(most, budget)
    bottom = top + TOKENS
    canvas.text(2, top - 4, "Tokens", bold=True, size=SMALL)
    filled: dict[State, list[Box]] = {state: [] for state in _STACK}
    for column in view.shown:
        record, y = view.records[column], bottom
        counts: dict[State, int] = {kind: record.count(kind) for kind in KINDS}
        counts["padding"] = record.num_padding
        for state in _STACK:
            height = TOKENS * counts[state] / ceiling
            y -= height
            _bar(canvas, filled[state], view.box(column, y, height), column > view.last)
    for state, boxes in filled.items():
        canvas.cells(boxes, STATES[state], outline=min(1, view.cell / 8))
    canvas.line([(LEFT, bottom), (view.right, bottom)])
    if budget <= ceiling:
        y = bottom - TOKENS * budget / ceiling
        _limit(canvas, view, y, f"budget {budget}" if budget < 10_000 else str(budget))
    else:
        beyond = f"fullest step {most:,}; budget {budget:,}, beyond the picture"
        canvas.text(LEFT, top - 4, beyond, size=_DIGITS, muted=True)


def draw_blocks(canvas: Canvas, view: View, top: float) -> None:
    """The blocks in use in every step, of all that there are."""
    usable = max(record.usable_blocks for record in view.records)
    canvas.text(2, top - 4, "Blocks in use", bold=True, size=SMALL)
    filled: list[Box] = []
    for column in view.shown:
        height = BLOCKS * view.records[column].used_blocks / max(usable, 1)
        box = view.box(column, top + BLOCKS - height, height)
        _bar(canvas, filled, box, column > view.last)
    canvas.cells(filled, PLAIN, outline=min(1, view.cell / 8))
    canvas.line([(LEFT, top + BLOCKS), (view.right, top + BLOCKS)])
    _limit(canvas, view, top, f"all {usable}")


def _bar(canvas: Canvas, filled: list[Box], box: Box, shadow: bool) -> None:
    if shadow and box[3]:
        canvas.shade(box, _SHADOW)
    elif box[3]:
        filled.append(box)


def _limit(canvas: Canvas, view: View, y: float, said: str) -> None:
    """The line that no bar may cross, and what it stands for."""
    canvas.line([(LEFT - 4, y), (view.right, y)], width=1.6)
    canvas.text(LEFT - 7, y + 9, said, size=_DIGITS, anchor="end")
