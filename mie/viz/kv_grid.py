"""Which positions' K and V each step computes, and which it finds in the cache.

Invariant: a cell's pattern follows from the trace alone. A position that a run computes for the
first time is new, computed in an earlier step too it is repeated work, and below the first
computed position it is read from the cache.

One row a step, one column a position; without a cache the repeated work fills a triangle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mie.book.palette import Look, look
from mie.viz.stepper import Frame, Stepper
from mie.viz.svg import SMALL, WIDTH, Canvas, visible

_LEFT, _RIGHT = 54, 44  # room for the names of the steps and for their counts
_LARGEST_CELL, _ROW = 26, 20
_TOKENS_HEIGHT = 64
_NEW, _AGAIN, _READ = look(0), look(1), look(2)


@dataclass(frozen=True)
class Computed:
    """One step of a run: positions ``first`` to ``end`` (exclusive) went through the model.

    Those before ``first`` came from the cache.
    """

    first: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.first


Runs = Mapping[str, Sequence[Computed]]


def kv_grid(tokens: Sequence[str], runs: Runs, title: str) -> Stepper:
    """``tokens``: the text of every position. ``runs``: for each run to compare its steps.

    Raises ValueError when a run's step lies outside the tokens, or the runs differ in length.
    """
    lengths = {name: len(steps) for name, steps in runs.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"the runs have different numbers of steps: {lengths}")
    for name, steps in runs.items():
        for step in steps:
            if not 0 <= step.first < step.end <= len(tokens):
                raise ValueError(f"{name}: {step} in a sequence of {len(tokens)} positions")
    count = next(iter(lengths.values()))
    return Stepper([_draw(tokens, runs, now, title) for now in range(count)], title)


def _draw(tokens: Sequence[str], runs: Runs, now: int, title: str) -> Frame:
    cell = min(_LARGEST_CELL, (WIDTH - _LEFT - _RIGHT) / len(tokens))
    panel = 56 + _ROW * max(map(len, runs.values()))
    bottom = _TOKENS_HEIGHT + len(runs) * panel
    canvas = Canvas(WIDTH, bottom + 20, title)
    for position, token in enumerate(tokens):
        x = _LEFT + cell * (position + 0.5) + 4
        canvas.text(x, _TOKENS_HEIGHT - 4, visible(token, 9), size=SMALL, mono=True, turn=-52)
    for index, (name, run) in enumerate(runs.items()):
        _panel(canvas, _TOKENS_HEIGHT + index * panel, cell, name, run, now)
    kinds = [(_NEW, "computed"), (_AGAIN, "computed again"), (_READ, "read from the cache")]
    canvas.legend(0, bottom + 2, kinds)
    return canvas.frame(_words(runs, now))


def _panel(
    canvas: Canvas, top: float, cell: float, name: str, run: Sequence[Computed], now: int
) -> None:
    """One run: a row a step, those still to come as shadows."""
    so_far = sum(step.count for step in run[: now + 1])
    canvas.text(_LEFT, top + 20, name, bold=True)
    canvas.text(WIDTH, top + 20, f"{so_far} computed", anchor="end", bold=True)
    known = 0  # positions that an earlier step of this run has computed
    for index, step in enumerate(run):
        y = top + 30 + index * _ROW
        if index > now:
            canvas.shade((_LEFT + 1, y + 1, cell * step.end - 2, _ROW - 2), 0.05)
            continue
        if index == now:
            canvas.shade((0, y, WIDTH, _ROW), 0.07)
        baseline, muted = y + _ROW / 2 + 4.5, index != now
        canvas.text(6, baseline, f"step {index + 1}", size=SMALL, muted=muted)
        canvas.text(WIDTH - 6, baseline, f"+{step.count}", size=SMALL, anchor="end", muted=muted)
        for kind, places in _by_kind(step, known):
            boxes = [(_LEFT + cell * place + 1, y + 1, cell - 2, _ROW - 2) for place in places]
            canvas.cells(boxes, kind)
        known = max(known, step.end)


def _by_kind(step: Computed, known: int) -> list[tuple[Look, range]]:
    """The step's positions, split into read, computed again and computed for the first time."""
    new = max(known, step.first)
    return [
        (_READ, range(step.first)),
        (_AGAIN, range(step.first, min(new, step.end))),
        (_NEW, range(new, step.end)),
    ]


def _words(runs: Runs, now: int) -> str:
    return "\n".join(_run_words(name, run, now) for name, run in runs.items())


def _run_words(name: str, run: Sequence[Computed], now: int) -> str:
    step = run[now]
    known = max((earlier.end for earlier in run[:now]), default=0)
    (_, read), (_, again), _ = _by_kind(step, known)
    words = f"{name}: computes {step.count} {'position' if step.count == 1 else 'positions'}"
    if again:
        words += f", {len(again)} of them again"
    if read:
        words += f", reads {len(read)} from the cache"
    so_far = sum(each.count for each in run[: now + 1])
    return f"{words}; {so_far} computed so far."
