"""Numbers with their units, written for people.

Invariant: a count is never rounded (``269,060,552 B``), a measurement never claims more than
three significant digits (``12.3 ms``). Prefixes are decimal: 1 KB = 1000 B, so that bytes
divided by bytes per second come out right in the head.
"""

from __future__ import annotations

import math
from numbers import Integral

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SCALED = {"B", "B/s", "FLOP", "FLOP/s"}
_EXACT_IS_ENOUGH_BELOW = 100_000


def significant(value: float, digits: int = 3) -> str:
    """``value`` with that many significant digits and no exponent: 12.3, 0.00123, 12,300."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.{digits - 1}e}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:,.{decimals}f}"


def scaled(value: float, unit: str) -> str:
    """Three significant digits and a decimal prefix: ``scaled(2.69e8, "B")`` is ``269 MB``."""
    for factor, prefix in _PREFIXES:
        # 999.6 kB would be written 1,000 kB: step up to the next prefix a little early
        if abs(value) >= factor * 0.9995:
            prefix = "K" if prefix == "k" and unit.startswith("B") else prefix
            return f"{significant(value / factor)} {prefix}{unit}"
    return f"{significant(value)} {unit}"


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best: ``12.3 ms``, ``45.0 µs``, ``1.20 s``."""
    factor, unit = _duration_unit(seconds)
    return f"{significant(seconds * factor)} {unit}"


def _duration_unit(seconds: float) -> tuple[float, str]:
    for limit, factor, unit in (
        (0.9995e-6, 1e9, "ns"),
        (0.9995e-3, 1e6, "µs"),
        (0.9995, 1e3, "ms"),
    ):
        if abs(seconds) < limit and seconds != 0:
            return factor, unit
    return 1.0, "s"


def duration_range(median: float, low: float, high: float) -> str:
    """``12.3 ms (11.9–13.0)``: a median and its spread, all three in the median's unit."""
    factor, unit = _duration_unit(median)
    return (
        f"{significant(median * factor)} {unit} "
        f"({significant(low * factor)}–{significant(high * factor)})"
    )


def quantity(value: float, unit: str) -> str:
    """Any value with its unit. A whole number is a count and stays exact; a float is rounded.

    ``quantity(12288, "B")`` is ``12,288 B``, ``quantity(269060552, "B")`` is
    ``269,060,552 B (269 MB)``, ``quantity(0.0123, "s")`` is ``12.3 ms``.
    """
    if unit == "s":
        return duration(value)
    if isinstance(value, Integral):
        exact = f"{value:,} {unit}".rstrip()
        if unit in _SCALED and abs(value) >= _EXACT_IS_ENOUGH_BELOW:
            return f"{exact} ({scaled(value, unit)})"
        return exact
    if unit in _SCALED:
        return scaled(value, unit)
    return f"{significant(value)} {unit}".rstrip()
