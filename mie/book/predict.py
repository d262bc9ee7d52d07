"""Numbers derived by hand, set beside the numbers that came out.

Invariant: a number is either *exact* (blocks, steps, bytes: the prediction must be met to the
last unit, and a chapter whose prediction fails is a chapter whose test fails) or *reported*
(times: the machine is not ours, so the gap is shown and explained, never asserted). Nothing
lies between: a tolerance on a time would only turn a slow day into a red build.

    kv = Prediction("K/V per token", 2 * 24 * 2 * 64 * 2, "B", "K and V, 24 layers, 2 heads of 64")
    compare(
        exact(kv, cache.nbytes // cache.num_tokens),
        reported(step, timing, cause="Python launches 300 operations a step"),
    )
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mie.book.output import Output, escape, style
from mie.book.timing import Timing
from mie.book.units import quantity, significant


@dataclass(frozen=True)
class Prediction:
    """A number written down before the program runs, and the reasoning that gave it."""

    name: str
    value: float
    unit: str
    because: str = ""

    def __str__(self) -> str:
        reason = f", because {self.because}" if self.because else ""
        return f"{self.name}: {quantity(self.value, self.unit)}{reason}"


@dataclass(frozen=True)
class Row:
    """One line of a comparison. Every cell is already text, except the two numbers of the ratio."""

    name: str
    kind: str  # "exact", "reported", "observed" or "recorded"
    measured: str
    predicted: str = ""
    because: str = ""
    ratio: str = ""
    cause: str = ""


def exact(prediction: Prediction, measured: int) -> Row:
    """A count that must come out as predicted; AssertionError, with both numbers, if it doesn't."""
    if measured != prediction.value:
        raise AssertionError(
            f"{prediction.name}: predicted {quantity(prediction.value, prediction.unit)}, "
            f"measured {quantity(measured, prediction.unit)} "
            f"(off by {measured - prediction.value:+,})"
        )
    return _beside(prediction, "exact", quantity(measured, prediction.unit), measured, "")


def reported(prediction: Prediction, measured: float | Timing[Any], cause: str = "") -> Row:
    """A measurement beside its prediction, and in ``cause`` why they differ.

    A ``Timing`` counts by its median and shows its spread; its prediction is in seconds.
    """
    if isinstance(measured, Timing):
        if prediction.unit != "s":
            raise ValueError(
                f"{prediction.name} is predicted in {prediction.unit!r} and measured in 's': "
                "convert the timing, for example with timing.per_second(count)"
            )
        return _beside(prediction, "reported", repr(measured), measured.median, cause)
    shown = quantity(float(measured), prediction.unit)
    return _beside(prediction, "reported", shown, measured, cause)


def observed(name: str, measured: float | Timing[Any], unit: str = "s", cause: str = "") -> Row:
    """A measurement of this run that nobody predicted."""
    shown = repr(measured) if isinstance(measured, Timing) else quantity(measured, unit)
    return Row(name, "observed", shown, cause=cause)


def recorded(name: str, value: float, unit: str, stamp: str) -> Row:
    """A number from another machine and day; ``stamp`` says which hardware, versions, date."""
    if not stamp:
        raise ValueError(f"{name} was recorded, but the stamp does not say where and when")
    return Row(name, "recorded", quantity(value, unit), cause=stamp)


def compare(*rows: Row, caption: str = "Predicted and measured") -> Comparison:
    """The rows as a table. Put device, dtype, model, batch and length into the caption."""
    if not rows:
        raise ValueError("a comparison needs at least one row")
    return Comparison(rows, caption)


def _beside(prediction: Prediction, kind: str, shown: str, measured: float, cause: str) -> Row:
    ratio = significant(measured / prediction.value) + "×" if prediction.value else ""
    predicted = quantity(prediction.value, prediction.unit)
    return Row(prediction.name, kind, shown, predicted, prediction.because, ratio, cause)


_MARKS = {"exact": "✓", "reported": "~", "observed": "·", "recorded": "●"}


class Comparison(Output):
    """A table of predictions and measurements; columns that would be empty are left out."""

    def __init__(self, rows: tuple[Row, ...], caption: str) -> None:
        self.rows = rows
        self.caption = caption
        self._columns = [
            (heading, cells)
            for heading, cells in (
                ("quantity", [row.name for row in rows]),
                ("predicted", [row.predicted for row in rows]),
                ("measured", [row.measured for row in rows]),
                ("ratio", [row.ratio for row in rows]),
                ("kind", [f"{row.kind} {_MARKS[row.kind]}" for row in rows]),
                ("cause", [row.cause for row in rows]),
            )
            if any(cells)
        ]

    def text(self) -> str:
        lines = [[heading for heading, _ in self._columns], []]
        lines += [list(cells) for cells in zip(*(cells for _, cells in self._columns), strict=True)]
        widths = [max(len(heading), *map(len, cells)) for heading, cells in self._columns]
        lines[1] = ["-" * width for width in widths]
        table = "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )
        reasons = [f"{row.name}: {row.because}" for row in self.rows if row.because]
        return "\n".join([self.caption, "", table, *([""] if reasons else []), *reasons])

    def html(self) -> str:
        # On a phone the style turns rows into cards; the roles keep it a table for screen readers.
        heads = "".join(
            f'<th scope="col" role="columnheader" data-heading="{heading}">{heading}</th>'
            for heading, _ in self._columns
        )
        body = "".join(self._row_html(index, row) for index, row in enumerate(self.rows))
        return (
            f'<div class="mie-output mie-compare">{style("book/predict.css")}<table role="table">'
            f"<caption>{escape(self.caption)}</caption>"
            f'<thead role="rowgroup"><tr role="row">{heads}</tr></thead>'
            f'<tbody role="rowgroup">{body}</tbody></table></div>'
        )

    def _row_html(self, index: int, row: Row) -> str:
        because = f'<span class="mie-because">{escape(row.because)}</span>' if row.because else ""
        name = f'<th scope="row" role="rowheader">{escape(row.name)}{because}</th>'
        cells = "".join(
            f'<td role="cell" data-heading="{heading}">'
            f"{escape(cells[index]) if heading == 'cause' else _number_html(cells[index])}</td>"
            for heading, cells in self._columns[1:]
        )
        return f'<tr role="row" data-kind="{row.kind}">{name}{cells}</tr>'


def _number_html(cell: str) -> str:
    """A number, and what stands behind it in brackets kept together and smaller."""
    number, bracket, rest = cell.partition(" (")
    aside = f' <span class="mie-aside">({escape(rest)}</span>' if bracket else ""
    return f'<span><span class="mie-number">{escape(number)}</span>{aside}</span>' if cell else ""
