"""Requests for the benchmarks: many kinds, and the same ones on every machine.

Invariant: a workload is a function of its seed. Everything is drawn with ``random.Random.random``,
the one method whose sequence Python promises to keep, and turned into whole numbers by one
multiplication; no logarithm, no exponential, whose last bit may differ between two libraries.

    kind        share   prompt            answer         max_tokens   somebody
    chat        60 %    50 …  2,000       20 …   500     1,024        goes on talking
    document    25 %    4,000 … 16,000    100 …  500     1,024        has a text summarised
    writing     15 %    20 …    200       500 … 4,000    4,096        asks for a long one

Lengths are in tokens, each as likely as any other between its bounds. ``max_tokens`` is what the
client allows; where the answer ends by itself, nobody knows before it has ended.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

# Qwen2-0.5B, the footprint of the benchmarks: K and V, 24 layers, 2 K/V heads of 64, bfloat16.
BYTES_PER_TOKEN = 2 * 24 * 2 * 64 * 2
CONTEXT_LENGTH = 32_768
VOCABULARY = 151_936

NUM_REQUESTS = 256

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """Bounds of a kind of request, both ends included; ``share`` of 100 requests are of it."""

    name: str
    share: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    max_tokens: int


KINDS = (
    Kind("chat", 60, (50, 2_000), (20, 500), 1_024),
    Kind("document", 25, (4_000, 16_000), (100, 500), 1_024),
    Kind("writing", 15, (20, 200), (500, 4_000), 4_096),
)


@dataclass(frozen=True)
class Request:
    """What arrives, and what the benchmark alone knows: how long the answer will be."""

    kind: str
    prompt_tokens: int
    answer_tokens: int
    max_tokens: int

    @property
    def num_tokens(self) -> int:
        """How many tokens it holds when it ends."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def limit(self) -> int:
        """How many tokens it may hold, as far as anybody knows when it arrives."""
        return self.prompt_tokens + self.max_tokens


def draw(rng: Random, low: int, high: int) -> int:
    """A whole number between ``low`` and ``high``, both included."""
    return low + int(rng.random() * (high - low + 1))


def shuffle(rng: Random, items: MutableSequence[T]) -> None:
    """Bring ``items`` into a drawn order. ``Random.shuffle`` may change with Python's version."""
    for last in range(len(items) - 1, 0, -1):
        other = draw(rng, 0, last)
        items[last], items[other] = items[other], items[last]


def mixed_requests(seed: int = 0, count: int = NUM_REQUESTS) -> list[Request]:
    """``count`` requests in the order in which they arrive."""
    return requests_of(KINDS, seed, count)


def requests_of(kinds: Sequence[Kind], seed: int, count: int) -> list[Request]:
    """``count`` requests of ``kinds``, whose shares add up to 100."""
    rng = Random(seed)
    return [_request(rng, kinds) for _ in range(count)]


def _request(rng: Random, kinds: Sequence[Kind]) -> Request:
    kind = _kind(draw(rng, 1, 100), kinds)
    prompt, answer = draw(rng, *kind.prompt), draw(rng, *kind.answer)
    return Request(kind.name, prompt, answer, kind.max_tokens)


def _kind(percent: int, kinds: Sequence[Kind]) -> Kind:
    for kind in kinds:
        if percent <= kind.share:
            return kind
        percent -= kind.share
    raise AssertionError("the shares of all kinds add up to 100")


def token_ids(seed: int, text: int, count: int) -> list[int]:
    """The first ``count`` token ids of text number ``text``. Two texts have nothing in common."""
    rng = Random(seed * 1_000_003 + text)
    return [draw(rng, 0, VOCABULARY - 1) for _ in range(count)]
