"""A run of the engine: sequences as rows, steps as columns, and below what each step cost.

Invariant: a picture follows from the records of the trace alone, without their times: two runs that
schedule alike give the same bytes.

    step      1    2    3    4    5
    a         5    ■    ■    ■|                    a is done with step 4
    b         9    7    ■    ■    ■                b's prompt comes in two chunks, 9 and 7 tokens
    c         waits     3    ■    P                c waits, runs, and is preempted in step 5

    tokens    ▇    ▅    ▃    ▂    ▁                of the token budget
    blocks    ▃    ▅    ▆    ▆    ▄                of all that there are

Each frame is one step: columns up to it are filled, later ones are shadows, and where a run has
more steps than the page is wide, the columns slide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mie.book.palette import Look
from mie.scheduling.plan import KINDS
from mie.scheduling.trace import StepRecord
from mie.viz.block_marks import Entry, draw_legend, legend_rows
from mie.viz.stepper import Frame, Stepper
from mie.viz.svg import SMALL, WIDTH, Box, Canvas
from mie.viz.timeline_parts import (
    BLOCKS,
    MOST_ROWS,
    SIGNS,
    STATES,
    TOKENS,
    TOP,
    View,
    draw_blocks,
    draw_end,
    draw_numbers,
    draw_row,
    draw_sign,
    draw_tokens,
)
from mie.viz.timeline_rows import SAID, USUAL, Rows, rows_of, run_words, step_words

MOST_FRAMES, MOST_STEPS = 60, 360
WINDOWS = range(6, 31)


def timeline(
    records: Sequence[StepRecord],
    title: str,
    *,
    names: Sequence[str] | None = None,
    window: int = 18,
    every: int = 1,
    steps: range | None = None,
) -> Stepper:
    """One frame for each step, or for every ``every``-th and the last. The words of a frame say all
    numbers of its step; the steps between two frames are columns like all others.

    ``names``: the sequences to show, in that order; the strips below count all of them. ``window``:
    how many steps are seen at once. ``steps``: numbers of the steps to show, for long runs.

    Raises ValueError for no steps or more than 60 frames, more than 32 sequences, a name that no
    record has, a window outside 6 to 30, and ``every`` below 1.
    """
    if window not in WINDOWS:
        raise ValueError(f"a window of {window} steps; it must be {WINDOWS[0]} to {WINDOWS[-1]}")
    if every < 1:
        raise ValueError(f"every is {every}; it must be at least 1")
    records = list(records)
    shown = [i for i, record in enumerate(records) if steps is None or record.number in steps]
    rows, names = _rows(records, title, names, shown)
    chosen = shown[::every]
    if chosen[-1] != shown[-1]:
        chosen.append(shown[-1])
    if len(chosen) > MOST_FRAMES:
        raise ValueError(
            f"{len(chosen)} frames; a timeline has {MOST_FRAMES}: ask for less with every or steps"
        )
    columns = min(window, shown[-1] + 1 - shown[0])
    frames = []
    for now in chosen:
        ahead = now + 1 + columns // 3  # so many shadows, while there are enough steps to come
        end = min(max(ahead, shown[0] + columns), shown[-1] + 1)
        view = View(records, rows, names, range(end - columns, end), now)
        frames.append(_draw(view, title))
    return Stepper(frames, title)


def timeline_figure(
    records: Sequence[StepRecord], title: str, *, names: Sequence[str] | None = None
) -> Frame:
    """The whole run as one picture, with what each sequence did when in its words.

    Raises ValueError for no steps, more than 360 steps or 32 sequences, and an unknown name.
    """
    records = list(records)
    if len(records) > MOST_STEPS:
        raise ValueError(f"{len(records)} steps; a picture shows {MOST_STEPS}: give it a part")
    shown = range(len(records))
    rows, names = _rows(records, title, names, shown)
    return _draw(View(records, rows, names, shown, None), title)


def _rows(
    records: Sequence[StepRecord],
    title: str,
    names: Sequence[str] | None,
    shown: Sequence[int],
) -> tuple[Rows, Sequence[str]]:
    """All moments, and the names of the rows to draw."""
    if not shown:
        raise ValueError(f"the timeline {title!r} has no steps to show")
    rows = rows_of(records)
    if names is None:
        names = [name for name, row in rows.items() if not row.keys().isdisjoint(shown)]
    if unknown := [name for name in names if name not in rows]:
        raise ValueError(f"no record names {', '.join(unknown)}; there are {', '.join(rows)}")
    if len(names) > MOST_ROWS:
        raise ValueError(f"{len(names)} sequences; a timeline has {MOST_ROWS} rows: choose names")
    return rows, names


def _draw(view: View, title: str) -> Frame:
    tokens_top = view.bottom + 26
    blocks_top = tokens_top + TOKENS + 26
    bottom = blocks_top + BLOCKS
    entries = _legend(view)
    canvas = Canvas(WIDTH, bottom + 16 + 22 * len(legend_rows(entries)), title)
    said, sums = _head(view)
    canvas.text(2, 14, said, bold=True)
    canvas.text(WIDTH - 2, 14, sums, size=SMALL, anchor="end", muted=True)
    if view.now is not None:
        canvas.shade((view.x(view.now), TOP - 20, view.cell, bottom - TOP + 20), 0.09)
    draw_numbers(canvas, view)
    for index, name in enumerate(view.names):
        draw_row(canvas, view, name, TOP + view.row * index)
    draw_tokens(canvas, view, tokens_top)
    draw_blocks(canvas, view, blocks_top)
    draw_legend(canvas, bottom + 16, entries)
    if view.now is None:
        return canvas.frame(run_words(view.records, view.names, view.rows))
    record = view.records[view.now]
    return canvas.frame(step_words(record, view.now, view.rows), f"step {record.number}")


def _head(view: View) -> tuple[str, str]:
    """What stands over the picture, left and right."""
    now = view.records if view.now is None else [view.records[view.now]]
    tokens, padding = (
        sum(record.num_tokens for record in now),
        sum(record.num_padding for record in now),
    )
    wasted = f", {padding:,} of padding" if padding else ""
    if view.now is None:
        count = len(view.records)
        return f"{count} {'step' if count == 1 else 'steps'}", f"{tokens:,} tokens{wasted}"
    record = now[0]
    said = f"{tokens} of {record.token_budget} tokens{wasted}"
    return f"Step {record.number}", f"{said}, {record.used_blocks} of {record.usable_blocks} blocks"


def _legend(view: View) -> list[Entry]:
    """What the run has, whether it is seen at the moment or not."""
    moments = [moment for name in view.names for moment in view.rows[name].values()]
    states = {moment.state for moment in moments}
    states |= {kind for kind in KINDS if any(record.count(kind) for record in view.records)}
    if any(record.num_padding for record in view.records):
        states.add("padding")
    entries: list[Entry] = [
        (_sample(look), SAID.get(state, state)) for state, look in STATES.items() if state in states
    ]
    if view.has_letters and any(moment.preempted for moment in moments):
        entries.append((_sign("P"), "preempted"))
    reasons = {moment.ended for moment in moments} - {""}
    if reasons:
        entries.append((_end_sample, "ended"))
    entries += [(_sign(SIGNS.get(each, "?")), each) for each in sorted(reasons - {*USUAL})]
    return entries


def _sample(look: Look) -> Callable[[Canvas, Box], None]:
    return lambda canvas, box: canvas.cells([box], look)


def _sign(sign: str) -> Callable[[Canvas, Box], None]:
    return lambda canvas, box: draw_sign(canvas, box[0] + 9, box[1] + 6, sign)


def _end_sample(canvas: Canvas, box: Box) -> None:
    draw_end(canvas, (box[0] + 7, box[1] - 2, 3, 16))
