"""Measurements from another machine, kept as files in ``book/results``.

Invariant: a recorded number never travels without its stamp. A file says on which hardware, with
which torch and on which day its numbers were taken, and how; a file that doesn't is not loaded.

    h200 = recording("h200-limits")
    recorded("reading memory", h200["read_bytes_per_s"], "B/s", h200.stamp)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "book" / "results"  # of the checkout


@dataclass(frozen=True)
class Recording:
    """Numbers by name, in SI units without prefix (bytes, seconds, operations), and their origin.

    ``stamp`` is what ``recorded`` wants: hardware, torch, day. ``how`` says what was done.
    """

    stamp: str
    how: str
    values: dict[str, float]

    def __getitem__(self, name: str) -> float:
        if name not in self.values:
            raise KeyError(f"no value {name!r} was recorded; there are {', '.join(self.values)}")
        return self.values[name]


def recording(name: str) -> Recording:
    """What ``book/results/<name>.json`` holds.

    Raises FileNotFoundError, which lists the recordings that exist, and ValueError if the file does
    not say where, when and how its numbers were taken.
    """
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in RESULTS.glob("*.json"))) or "none"
        raise FileNotFoundError(
            f"no recording {name!r} in book/results of a checkout; there are: {known}"
        )
    content = json.loads(path.read_text(encoding="utf-8"))
    if missing := [
        key for key in ("gpu", "torch", "date", "how", "values") if not content.get(key)
    ]:
        raise ValueError(f"{path.name} does not say: {', '.join(missing)}")
    stamp = f"{content['gpu']} · torch {content['torch']} · {content['date']}"
    return Recording(stamp, content["how"], content["values"])
