"""A radix tree of cached texts, one moment after the other.

Invariant: one row of boxes for each node, its children below it and further to the right; a box is
a block, with its number, what its tokens say and who holds it. Held blocks carry a pattern; the
others are what the pool may evict, and the row below lists them in the order in which they go.

    |-[4 ×2 | You are a ][9 ×2 | helpful ]         a node with two blocks, both held by two tables
      |-[2 ×1 | What is ]                          its children differ in their first block
      |-[7 | Tell me ]                             nobody holds block 7: it may be evicted
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from mie.book.palette import look
from mie.memory.radix_tree import Node, RadixTree
from mie.viz.block_marks import (
    FREE,
    Entry,
    changed_sample,
    draw_legend,
    legend_rows,
    number_row,
    outline,
)
from mie.viz.pool_snapshot import legible, listed, numbered, plural
from mie.viz.stepper import Frame, Stepper
from mie.viz.svg import MONO_ADVANCE, SMALL, WIDTH, Canvas, visible

_TOP, _INDENT, _ROW = 34, 22, 26
_CELL, _CELL_HEIGHT, _GAP = 100, 54, 12  # a block, and what lies between two rows
_MOST_NODES = 40
_HELD = look(1)


@dataclass(frozen=True)
class CachedText:
    """One block of a node: what its tokens say after the texts ``before``, and how many owners
    it has."""

    block: int
    text: str
    count: int
    before: tuple[str, ...]  # the salt, then one text for each block


@dataclass(frozen=True)
class NodeState:
    """One node. ``path`` is its place: (1, 2) is the second child of the first node."""

    path: tuple[int, ...]
    salt: str
    blocks: tuple[CachedText, ...]


@dataclass(frozen=True)
class TreeSnapshot:
    """One moment. ``evictable`` is in the order in which the pool hands these blocks out, after
    ``num_uncached`` free blocks whose content nobody wants. ``note`` says what has happened."""

    note: str
    nodes: tuple[NodeState, ...]
    evictable: tuple[int, ...]
    num_uncached: int

    @property
    def texts(self) -> dict[int, CachedText]:
        return {each.block: each for node in self.nodes for each in node.blocks}


def tree_snapshot(tree: RadixTree, decode: Callable[[list[int]], str], note: str) -> TreeSnapshot:
    """What ``tree`` holds now; ``decode`` turns the tokens of a block into text."""
    pool = tree.pool

    def walk(node: Node, path: tuple[int, ...], before: tuple[str, ...]) -> list[NodeState]:
        blocks = []
        for block, tokens in zip(node.blocks, node.tokens, strict=True):
            blocks.append(CachedText(block, decode(list(tokens)), pool.ref_count(block), before))
            before = (*before, blocks[-1].text)
        found = [NodeState(path, node.salt, tuple(blocks))]
        for index, child in enumerate(node.children.values(), start=1):
            found += walk(child, (*path, index), before)
        return found

    nodes: list[NodeState] = []
    roots = sorted(tree.roots.values(), key=lambda root: root.salt != "")  # no salt comes first
    tops = [child for root in roots for child in root.children.values()]
    for index, top in enumerate(tops, start=1):
        nodes += walk(top, (index,), (top.salt,))
    free = list(pool.free_blocks())
    evictable = tuple(block for block in free if pool.is_cached(block))
    return TreeSnapshot(note, tuple(nodes), evictable, len(free) - len(evictable))


def prefix_tree(snapshots: Sequence[TreeSnapshot], title: str) -> Stepper:
    """One frame for each snapshot: the tree, what may be evicted, and what has changed.

    Raises ValueError for no snapshots, and for a tree of more than 40 nodes.
    """
    if not snapshots:
        raise ValueError(f"the prefix tree {title!r} needs at least one snapshot")
    most = max(len(each.nodes) for each in snapshots)
    if most > _MOST_NODES:
        raise ValueError(f"a tree of {most} nodes; a drawing shows {_MOST_NODES}")
    bottom = max(_bottom(each) for each in snapshots)
    pairs = zip([None, *snapshots], snapshots, strict=False)
    return Stepper([_draw(now, before, bottom, title) for before, now in pairs], title)


# -- the drawing -----------------------------------------------------------------------------------


def _left(node: NodeState) -> float:
    return min(_INDENT * len(node.path), 8 * _INDENT) - _INDENT + 14


def _per_line(node: NodeState) -> int:
    """How many blocks stand side by side before the node goes on below."""
    return int((WIDTH - 4 - _left(node)) / _CELL)


def _height(node: NodeState) -> float:
    return -(-len(node.blocks) // _per_line(node)) * _CELL_HEIGHT + _GAP


def _bottom(now: TreeSnapshot) -> float:
    salts = {node.salt for node in now.nodes if node.salt}
    return _TOP + 10 + sum(map(_height, now.nodes)) + 22 * len(salts)


def _draw(now: TreeSnapshot, before: TreeSnapshot | None, bottom: float, title: str) -> Frame:
    legend_top = bottom + 2 * _ROW + 14
    entries = _legend()
    canvas = Canvas(WIDTH, legend_top + 22 * len(legend_rows(entries)), title)
    canvas.text(2, 16, "Prefix tree", bold=True)
    count = f"{plural(len(now.nodes), 'node')}, {plural(len(now.texts), 'block')}"
    canvas.text(WIDTH - 2, 16, count, size=SMALL, anchor="end", muted=True)
    if not now.nodes:
        canvas.text(14, _TOP + 20, "nothing is cached", size=SMALL, muted=True)
    y, salt = float(_TOP), ""
    ends: dict[tuple[int, ...], float] = {(): _TOP - 6}  # where the line to the children begins
    changed = _changed(now, before)
    for node in now.nodes:
        if node.salt != salt:
            salt = node.salt
            canvas.text(2, y + 12, f"salt {visible(salt, 40)}", size=SMALL, muted=True)
            y += 22
            ends[()] = y - 6
        parent, left = node.path[:-1], _left(node)
        x = left - 9
        canvas.line([(x, ends[parent]), (x, y + _CELL_HEIGHT / 2), (left, y + _CELL_HEIGHT / 2)])
        ends[parent] = y + _CELL_HEIGHT / 2
        _node(canvas, left, y, node, changed)
        y += _height(node)
        ends[node.path] = y - _GAP
    _lists(canvas, bottom, now, before)
    draw_legend(canvas, legend_top, entries)
    return canvas.frame(_words(now, before), "")


def _node(canvas: Canvas, left: float, y: float, node: NodeState, changed: set[int]) -> None:
    per_line = _per_line(node)
    boxes = [
        (left + _CELL * (i % per_line), y + _CELL_HEIGHT * (i // per_line), _CELL, _CELL_HEIGHT)
        for i in range(len(node.blocks))
    ]
    letters = int((_CELL - 10) / (11 * MONO_ADVANCE))
    for each, (x, top, width, height) in zip(node.blocks, boxes, strict=True):
        canvas.cells([(x, top, width, height)], FREE)
        if each.count:
            canvas.cells([(x, top, width, 17)], _HELD)
        canvas.label(x + 5, top + 13, str(each.block), _HELD, bold=True)
        if each.count:
            canvas.label(x + width - 5, top + 13, f"×{each.count}", _HELD, anchor="end", bold=True)
        text = legible(each.text)
        lines = wrap(text, letters, max_lines=2, placeholder="…") or [visible(text, letters)]
        for line, part in enumerate(lines):
            canvas.text(x + 5, top + 30 + 14 * line, part, size=11, mono=True)
    for each, (x, top, width, height) in zip(node.blocks, boxes, strict=True):
        if each.block in changed:
            outline(canvas, (x + 3, top + 2, width - 6, height - 5))


def _lists(canvas: Canvas, y: float, now: TreeSnapshot, before: TreeSnapshot | None) -> None:
    """What may be evicted, in its order, and what has been since the frame before."""
    for name, blocks, none in (
        ("Evictable", now.evictable, "nothing"),
        ("Evicted", _evicted(now, before), "nothing since the frame before"),
    ):
        canvas.text(2, y + 15, name, bold=True)
        if not blocks:
            canvas.text(98, y + 15, none, size=SMALL, muted=True)
        number_row(canvas, 98, y, blocks, room=WIDTH - 98 - 86, kind=FREE)
        if blocks is now.evictable and blocks and now.num_uncached:
            after = f"after {now.num_uncached} free"
            canvas.text(WIDTH - 2, y + 15, after, size=SMALL, anchor="end", muted=True)
        y += _ROW


def _legend() -> list[Entry]:
    return [
        (lambda canvas, box: canvas.cells([box], _HELD), "held: locked"),
        (lambda canvas, box: canvas.cells([box], FREE), "evictable"),
        (changed_sample, "changed"),
    ]


# -- what has changed, and words -------------------------------------------------------------------


def _changed(now: TreeSnapshot, before: TreeSnapshot | None) -> set[int]:
    """Blocks that are new, hold other tokens, or have more or fewer owners than before."""
    if before is None:
        return set()
    old = before.texts
    return {block for block, each in now.texts.items() if old.get(block) != each}


def _evicted(now: TreeSnapshot, before: TreeSnapshot | None) -> tuple[int, ...]:
    """Blocks that are no longer known as what they were, whether they are used again or not."""
    known = {(each.block, each.before, each.text) for each in now.texts.values()}
    old = before.texts.values() if before else ()
    return tuple(e.block for e in old if (e.block, e.before, e.text) not in known)


def _words(now: TreeSnapshot, before: TreeSnapshot | None) -> str:
    lines = [now.note]
    salt = ""
    for node in now.nodes:
        if node.salt != salt:
            salt = node.salt
            lines.append(f"With the salt {visible(salt, 40)}:")
        place = ".".join(map(str, node.path))
        lines.append(f"Node {place}: {'; '.join(map(_block_words, node.blocks))}.")
    if not now.nodes:
        lines.append("Nothing is cached.")
    if now.evictable:
        first = f" after {plural(now.num_uncached, 'free block')}" if now.num_uncached else ""
        lines.append(f"Evictable{first}, next first: {listed(now.evictable)}.")
    elif now.nodes:
        lines.append("Nothing is evictable.")
    evicted = _evicted(now, before)
    if evicted:
        lines.append(f"Evicted: {numbered(evicted)}.")
    changed = sorted(_changed(now, before))
    if changed:
        lines.append(f"Changed: {numbered(changed)}.")
    return "\n".join(lines)


def _block_words(each: CachedText) -> str:
    held = f"held by {each.count}" if each.count else "evictable"
    said = legible(each.text).strip() or visible(each.text)
    return f"block {each.block} “{said}”, {held}"
