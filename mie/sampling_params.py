"""How the tokens of an answer are chosen, and how many: what a client may ask for.

Invariant: a ``SamplingParams`` that exists can be served. Everything is checked when it is made, so
that no step of the engine has to.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from mie.errors import RequestError

GREEDY_BELOW = 1e-5  # a temperature so low that dividing by it would give nothing but infinities
MAX_SEED = 2**63 - 1
_MASK = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """``max_tokens`` bounds each answer; ``None`` lets it fill the context. ``temperature`` 0 takes
    the most likely token (greedy); 1 draws by the model's own probabilities, less sharpens them.
    ``seed`` makes the draws repeatable, whatever else runs beside them; ``None`` takes one from the
    engine's. ``n`` answers are drawn for one prompt, which is computed once. ``ignore_eos`` goes on
    where the model says that it is done: for measurements.

    Raises RequestError for values that mean nothing.
    """

    max_tokens: int | None = 256
    temperature: float = 0.0
    seed: int | None = None
    n: int = 1
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "seed", "n"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, Real):
            raise RequestError(f"temperature is {self.temperature!r}; it must be a number")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature is {self.temperature}; it must be 0 or more")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise RequestError(f"seed is {self.seed}; it must lie between 0 and {MAX_SEED}")
        if self.n < 1:
            raise RequestError(f"n is {self.n}; it must be at least 1")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def draw(self, position: int, index: int) -> Draw:
        """How the token at ``position`` of answer number ``index`` is to be chosen."""
        temperature = 0.0 if self.temperature < GREEDY_BELOW else self.temperature
        return Draw(temperature, self.seed or 0, position, index)


class Draw(NamedTuple):
    """One token to choose: the noise depends on these numbers, and on nothing that runs beside."""

    temperature: float  # 0: the most likely token
    seed: int
    position: int  # that the token will have in its sequence
    index: int  # type: ignore[assignment]  # which of the request's answers; not tuple's method


def mix(*numbers: int) -> int:
    """One number of 63 bits from several, all bits stirred (the finaliser of SplitMix64)."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def _whole(name: str, value: Any) -> int | None:
    """``value`` as Python's own integer, NumPy's and others included; True is none."""
    if value is None and name != "n":
        return None
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise RequestError(f"{name} is {value!r}; it must be a whole number")
