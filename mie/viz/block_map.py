"""The block pool and the block tables, one moment after the other.

Invariant: a block's pattern follows from who owns it at that moment, and the same table has the
same pattern in every frame. A block with several owners shows all their patterns, one stripe each,
and its count; the part without a pattern is the slots that hold nothing.

    0          1 ...... 2 ...... 3 ×2 ...    a shared block has a stripe for each of its owners
    scratch    ////////  ///      ////....   and block 2 has room left: internal fragmentation

What has changed since the frame before has a heavy outline, so that a split can be followed: the
copy is an arrow from the old block to the new one for as long as no step has made it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mie.book.palette import LOOKS, Look, look
from mie.memory.block_copies import BlockCopy
from mie.memory.block_pool import SCRATCH_BLOCK
from mie.viz.block_marks import (
    FREE,
    PLAIN,
    Entry,
    cached_bar,
    changed_sample,
    draw_legend,
    legend_rows,
    number_row,
    outline,
)
from mie.viz.pool_snapshot import BlockState, Snapshot, TableState, plural, words
from mie.viz.stepper import Frame, Stepper
from mie.viz.svg import MONO_ADVANCE, SMALL, WIDTH, Box, Canvas, paint, visible

_MOST_BLOCKS, _MOST_TABLES = 80, 6
_GAP_X, _GAP_Y = 12, 15  # between blocks
_COPY_ROOM, _LANE = 14, 3  # what arrows add to the gap, and how far two of them keep apart
_NUMBER, _BAND, _TEXT = 17, 18, 20  # heights in a block: its number, its patterns, its tokens
_SLOT_WITH_TEXT = 27  # the narrowest slot that a token is written into
_ROW = 26
_COPY, _OTHER = LOOKS[6], PLAIN
_FAINT = 0.09


def block_map(snapshots: Sequence[Snapshot], title: str) -> Stepper:
    """One frame for each snapshot: pool, tables, free list and copies, and what has changed.

    Raises ValueError for no snapshots, pools of different sizes, more than 80 blocks or 6 tables.
    """
    if not snapshots:
        raise ValueError(f"the block map {title!r} needs at least one snapshot")
    sizes = [(len(each.blocks), each.block_size) for each in snapshots]
    for index, size in enumerate(sizes):
        if size != sizes[0]:
            raise ValueError(
                f"snapshot {index + 1} shows {size[0]} blocks of {size[1]} slots, "
                f"the first one {sizes[0][0]} of {sizes[0][1]}"
            )
    if sizes[0][0] > _MOST_BLOCKS:
        raise ValueError(f"a pool of {sizes[0][0]} blocks; a map shows {_MOST_BLOCKS}")
    names = list(dict.fromkeys(table.name for each in snapshots for table in each.tables))
    if len(names) > _MOST_TABLES:
        raise ValueError(f"{len(names)} tables; a map has patterns for {_MOST_TABLES}")
    looks = {name: look(index) for index, name in enumerate(names)}
    layout = _lay_out(snapshots)
    pairs = zip([None, *snapshots], snapshots, strict=False)
    return Stepper([_draw(now, before, layout, looks, title) for before, now in pairs], title)


@dataclass(frozen=True)
class _Layout:
    """Where the blocks lie; the same in every frame."""

    columns: int
    rows: int
    width: float  # of a block
    height: float
    with_text: bool
    gap: float  # between two rows
    with_copies: bool
    with_others: bool
    with_cached: bool

    def block(self, index: int) -> Box:
        row, column = divmod(index, self.columns)
        x, y = column * (self.width + _GAP_X) + 2, 34 + row * (self.height + self.gap)
        return x, y, self.width, self.height

    @property
    def bottom(self) -> float:
        return 34 + self.rows * (self.height + self.gap)


def _lay_out(snapshots: Sequence[Snapshot]) -> _Layout:
    count, size = len(snapshots[0].blocks), snapshots[0].block_size
    columns = next((c for c, most in ((4, 12), (6, 24), (8, 40)) if count <= most), 10)
    with_text = any(table.tokens for each in snapshots for table in each.tables)
    if with_text:  # wider blocks, if there are not too many of them
        readable = int((WIDTH + _GAP_X) / (size * _SLOT_WITH_TEXT + _GAP_X))
        with_text = readable > 1 and count <= 8 * readable
        columns = min(columns, readable) if with_text else columns
    with_copies = any(state.pins for each in snapshots for state in each.blocks)
    return _Layout(
        columns,
        rows=-(-count // columns),
        width=(WIDTH - 4 - _GAP_X * (columns - 1)) / columns,
        height=_NUMBER + _BAND + (_TEXT if with_text else 0),
        with_text=with_text,
        gap=_GAP_Y + _COPY_ROOM * with_copies,
        with_copies=with_copies,
        with_others=any(state.others for each in snapshots for state in each.blocks),
        with_cached=any(state.cached for each in snapshots for state in each.blocks),
    )


def _draw(
    now: Snapshot,
    before: Snapshot | None,
    layout: _Layout,
    looks: Mapping[str, Look],
    title: str,
) -> Frame:
    tables_top = layout.bottom + 20
    free_top = tables_top + (_ROW * len(looks) + 34 if looks else 0)
    legend_top = free_top + _ROW + 14
    entries = _legend(layout)
    canvas = Canvas(WIDTH, legend_top + 22 * len(legend_rows(entries)), title)
    used = len(now.blocks) - 1 - len(now.free)
    canvas.text(2, 16, "Block pool", bold=True)
    count = f"{used} used, {len(now.free)} free, {plural(now.block_size, 'slot')} each"
    canvas.text(WIDTH - 2, 16, count, size=SMALL, anchor="end", muted=True)
    changed = now.changed(before)
    for block, state in enumerate(now.blocks):
        _block(canvas, layout.block(block), block, state, now.block_size, looks, layout)
        if block in changed:
            outline(canvas, layout.block(block))
    _copies(canvas, layout, now.copies)
    if looks:
        canvas.text(2, tables_top, "Block tables", bold=True)
    for index, (name, look_) in enumerate(looks.items()):
        old = before.table(name) if before else now.table(name)
        y = tables_top + 10 + _ROW * index
        _table(canvas, y, name, look_, now.table(name), old)
    _free(canvas, free_top, now)
    draw_legend(canvas, legend_top, entries)
    return canvas.frame(words(now, before))


# -- the pool --------------------------------------------------------------------------------------


def _block(
    canvas: Canvas,
    box: Box,
    block: int,
    state: BlockState,
    size: int,
    looks: Mapping[str, Look],
    layout: _Layout,
) -> None:
    x, y, width, height = box
    body = (x, y + _NUMBER, width, height - _NUMBER)
    canvas.text(x + 1, y + 12, str(block), size=SMALL, bold=state.count > 0, muted=not state.count)
    if block == SCRATCH_BLOCK:
        canvas.shade(body, _FAINT)
        if width > 48:
            _in_the_middle(canvas, body, "scratch")
        return
    if not state.count:
        canvas.cells([body], FREE)
        if state.cached:
            cached_bar(canvas, body)
            if width > 48:
                _in_the_middle(canvas, (x, body[1], width, body[3] - 5), "cached")
        return
    if state.count > 1:
        canvas.text(x + width - 1, y + 12, f"×{state.count}", size=SMALL, anchor="end", bold=True)
    filled = size if state.filled is None else state.filled
    holders = [looks[name] for name in state.owners] + [_COPY] * state.pins
    holders += [_OTHER] * (state.others > 0)
    stripe = width * filled / size / len(holders)
    for index, holder in enumerate(holders):
        canvas.cells([(x + stripe * index, body[1], stripe, _BAND)], holder)
    _slots(canvas, body, size, filled, state.tokens if layout.with_text else ())
    if state.cached:
        cached_bar(canvas, body)


def _in_the_middle(canvas: Canvas, box: Box, word: str) -> None:
    x, y, width, height = box
    canvas.text(x + width / 2, y + height / 2 + 4, word, size=SMALL, anchor="middle", muted=True)


def _slots(canvas: Canvas, body: Box, size: int, filled: int, tokens: Sequence[str]) -> None:
    """The block's edge, a line where an empty slot begins, and what the tokens say."""
    x, y, width, height = body
    slot = width / size
    canvas.line([(x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y)])
    if slot > 4:
        for index in range(filled + 1, size):
            canvas.line([(x + slot * index, y), (x + slot * index, y + _BAND)], faint=True)
    for index, token in enumerate(tokens):
        said = visible(token, max(int((slot - 3) / (10.5 * MONO_ADVANCE)), 2))
        middle = x + slot * (index + 0.5)
        canvas.text(middle, y + _BAND + 12, said, size=10.5, anchor="middle", mono=True)


def _copies(canvas: Canvas, layout: _Layout, copies: Sequence[BlockCopy]) -> None:
    """Arrows in the gaps between the blocks, one lane for each source, so that none is crossed."""
    sources = list(dict.fromkeys(copy.source for copy in copies))
    lanes = {source: (0, _LANE, -_LANE)[i % 3] for i, source in enumerate(sources)}
    ways = [_way(layout, source, target, lanes[source]) for source, target in copies]
    for points in ways:
        canvas.line(points, ink="var(--mie-paper, #fff)", width=5)
    for *points, before_last, last in ways:
        canvas.line([*points, before_last], ink=paint(_COPY.colour), width=1.6)
        canvas.arrow(*before_last, *last, _COPY.colour)


def _way(layout: _Layout, source: int, target: int, lane: float) -> list[tuple[float, float]]:
    x1, top1, width, height = layout.block(source)
    x2, top2, _, _ = layout.block(target)
    x1, x2 = x1 + width / 2, x2 + width / 2
    half = layout.gap / 2
    below, above = top1 <= top2, top1 < top2  # leave below the source; arrive above the target
    start = top1 + height + 3 if below else top1 - 2
    end = top2 - 2 if above else top2 + height + 3
    leave = (top1 + height + half if below else top1 - half) + lane
    arrive = (top2 - half if above else top2 + height + half) + lane
    points = [(x1, start), (x1, leave)]
    if abs(leave - arrive) > 1:  # rows lie between: pass them in the gap on the source's side
        left = x2 > x1 or (x2 == x1 and target % layout.columns > 0)
        gap = x2 + (-1 if left else 1) * (width + _GAP_X) / 2 + lane
        points += [(gap, leave), (gap, arrive)]
    return [*points, (x2, arrive), (x2, end)]


# -- tables and free list --------------------------------------------------------------------------


def _table(
    canvas: Canvas,
    y: float,
    name: str,
    look_: Look,
    table: TableState | None,
    before: TableState | None,
) -> None:
    baseline = y + 15
    canvas.cell((2, y + 3, 22, 15), look_)
    canvas.text(31, baseline, visible(name, 8), bold=True, muted=table is None)
    if table is None:
        canvas.text(98, baseline, "no table", size=SMALL, muted=True)
        return
    old = before.blocks if before else ()
    marked = [i for i, block in enumerate(table.blocks) if old[i : i + 1] != (block,)]
    number_row(canvas, 98, y, table.blocks, room=WIDTH - 98 - 78, marked=marked)
    count = plural(table.num_tokens, "token")
    canvas.text(WIDTH - 2, baseline, count, size=SMALL, anchor="end", muted=True)


def _free(canvas: Canvas, y: float, now: Snapshot) -> None:
    canvas.text(2, y + 15, "Next free", bold=True)
    if not now.free:
        canvas.text(98, y + 15, "none", size=SMALL, muted=True)
    cached = [index for index, block in enumerate(now.free) if now.blocks[block].cached]
    number_row(canvas, 98, y, now.free, room=WIDTH - 98, cached=cached, kind=FREE)


# -- the legend ------------------------------------------------------------------------------------


def _legend(layout: _Layout) -> list[Entry]:
    entries: list[Entry] = []
    if layout.with_copies:
        entries.append((lambda canvas, box: canvas.cells([box], _COPY), "held by a copy"))
    if layout.with_others:
        entries.append((lambda canvas, box: canvas.cells([box], _OTHER), "another owner"))
    entries.append((lambda canvas, box: canvas.cells([box], FREE), "free"))
    if layout.with_cached:
        entries.append((cached_bar, "cached"))
    entries.append((changed_sample, "changed"))
    return entries
