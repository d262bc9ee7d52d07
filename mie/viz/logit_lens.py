"""What the model would say if it stopped at each layer.

Invariant: probabilities are drawn on one scale, from 0 to 1, in every frame, so that bars of
different layers can be compared by eye. The idea is the logit lens [1]: the final norm and the
output matrix applied to the hidden state after every layer.

[1] nostalgebraist, interpreting GPT: the logit lens, 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mie.book.palette import LOOKS, look
from mie.viz.stepper import Frame, Stepper
from mie.viz.svg import LARGE, SMALL, WIDTH, Canvas, visible

_LABEL_END, _BAR_X, _BAR_WIDTH, _ROW = 124, 134, 270, 30
_CHART_X, _CHART_HEIGHT = 40, 84
_ANSWER, _OTHER = look(0), replace(LOOKS[-1], pattern="diagonal")


@dataclass(frozen=True)
class Reading:
    """The lens at one layer.

    ``top``: the likeliest tokens and their probabilities, likeliest first. ``answer``: the
    probability of the token that the whole model goes on to choose, whether it is among them or
    not.
    """

    layer: str
    top: Sequence[tuple[str, float]]
    answer: float


def logit_lens(readings: Sequence[Reading], answer: str, title: str) -> Stepper:
    """One frame a layer: its likeliest tokens above, the answer's probability so far below."""
    frames = [_draw(readings, index, answer, title) for index in range(len(readings))]
    return Stepper(frames, title, "layer")


def _draw(readings: Sequence[Reading], now: int, answer: str, title: str) -> Frame:
    reading = readings[now]
    rows = max(len(each.top) for each in readings)
    chart_top = 44 + rows * _ROW + 44
    canvas = Canvas(WIDTH, chart_top + _CHART_HEIGHT + 28, title)
    canvas.text(0, 16, f"After {reading.layer}", size=LARGE, bold=True)
    canvas.text(WIDTH, 16, "the likeliest next tokens", size=SMALL, anchor="end", muted=True)
    for row, (token, probability) in enumerate(reading.top):
        _bar(canvas, 36 + row * _ROW, token, probability, is_answer=token == answer)
    _chart(canvas, readings, now, chart_top, answer)
    return canvas.frame(_words(reading, answer), reading.layer)


def _bar(canvas: Canvas, y: float, token: str, probability: float, *, is_answer: bool) -> None:
    canvas.text(
        _LABEL_END, y + 16, visible(token), size=SMALL + 1, anchor="end", mono=True, bold=is_answer
    )
    width = max(_BAR_WIDTH * probability, 1.5)
    canvas.line([(_BAR_X, y + 22), (_BAR_X, y)], faint=True)
    canvas.cell((_BAR_X, y + 1, width, 20), _ANSWER if is_answer else _OTHER)
    canvas.text(_BAR_X + width + 8, y + 16, _percent(probability), size=SMALL, bold=is_answer)


def _chart(canvas: Canvas, readings: Sequence[Reading], now: int, top: float, answer: str) -> None:
    canvas.text(
        0, top - 18, f"Probability of {visible(answer)} after each layer", size=SMALL, muted=True
    )
    for share, label in ((0, "0"), (0.5, "50%"), (1, "100%")):
        y = top + _CHART_HEIGHT * (1 - share)
        canvas.text(_CHART_X - 8, y + 4, label, size=SMALL - 1, anchor="end", muted=True)
        canvas.line([(_CHART_X, y), (WIDTH, y)], faint=True)
    step = (WIDTH - _CHART_X) / len(readings)
    columns = []
    for index, reading in enumerate(readings[: now + 1]):
        left, height = _CHART_X + step * (index + 0.15), max(_CHART_HEIGHT * reading.answer, 1)
        columns.append((left, top + _CHART_HEIGHT - height, step * 0.7, height))
    canvas.cells(columns, _ANSWER)
    for index, anchor, x in ((0, "start", _CHART_X), (-1, "end", WIDTH)):
        y = top + _CHART_HEIGHT + 18
        canvas.text(x, y, readings[index].layer, size=SMALL - 1, anchor=anchor, muted=True)


def _words(reading: Reading, answer: str) -> str:
    tokens = ", ".join(f"“{visible(token)}” {_percent(share)}" for token, share in reading.top)
    return f"{tokens}. The final answer, “{visible(answer)}”, stands at {_percent(reading.answer)}."


def _percent(share: float) -> str:
    return "<0.1%" if 0 < share < 0.001 else f"{share:.1%}"
