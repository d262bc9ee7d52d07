"""Sequences for the specs of the parts that see them: queues and victim policies.

Invariant: no two are equal in all that a part could look at, and some are in all but their number.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from mie.memory.manager import BlockManager
from mie.request import Request, Sequence
from mie.sampling_params import SamplingParams
from mie.spec.expect import CounterExample, equal


def arrived(
    number: int,
    length: int = 5,
    *,
    n: int = 1,
    priority: int = 0,
    out: int = 8,
    salt: str = "",
) -> list[Sequence]:
    """The ``n`` answers to the request that arrived as number ``number``."""
    sampling = SamplingParams(max_tokens=out, n=n)
    prompt = tuple(range(number, number + length))
    request = Request(f"r{number}", prompt, sampling, priority=priority, salt=salt)
    return [Sequence(request, 10 * number + i, number, out, i) for i in range(n)]


def several() -> list[Sequence]:
    """Long ones and short ones, urgent ones and patient ones, twins, and answers to one request."""
    shapes: list[dict[str, Any]] = [
        {"length": 40},
        {"length": 3, "priority": 2},
        {"length": 3, "priority": 2},
        {"length": 12, "n": 3},
        {"length": 12, "n": 2, "priority": -1, "salt": "red"},
        {"length": 1, "out": 60},
        {"length": 40, "priority": 7, "salt": "red"},
        {"length": 40},
    ]
    return [one for number, shape in enumerate(shapes, 1) for one in arrived(number, **shape)]


def at_random(seed: int, count: int) -> list[Sequence]:
    """``count`` sequences, in no order."""
    rng = random.Random(seed)
    made: list[Sequence] = []
    for number in range(1, count + 1):
        shape: dict[str, Any] = {"n": rng.choice((1, 1, 2, 3)), "priority": rng.randrange(-2, 3)}
        made += arrived(number, rng.randrange(1, 30), **shape)
    rng.shuffle(made)
    return made[:count]


def lived(sequence: Sequence, memory: BlockManager, computed: int, output: int = 0) -> Sequence:
    """``sequence`` after it ran: so many of its tokens are computed, in blocks of its own, and so
    many of its answer are there."""
    for token in range(output):
        sequence.append(token)
    sequence.table = memory.empty_table()
    equal(sequence.table.append(computed), True, f"append({computed}) with enough free blocks")
    sequence.num_computed = sequence.num_ever_computed = computed
    return sequence


def state(sequence: Sequence) -> dict[str, Any]:
    """All that a sequence says of itself."""
    said = dict(vars(sequence))
    table = said.pop("table")
    said["token_ids"] = list(sequence.token_ids)
    said["table"] = None if table is None else (table, list(table.blocks), table.num_tokens)
    return said


def leaves_alone(call: Callable[[], object], sequences: list[Sequence], what: str) -> object:
    """What ``call`` returns. It may change neither the list nor any sequence in it."""
    members, before = list(sequences), [state(sequence) for sequence in sequences]
    result = call()
    if len(members) != len(sequences) or any(
        one is not other for one, other in zip(members, sequences, strict=True)
    ):
        raise CounterExample(f"the list after {what}: expected {members}, got {sequences}")
    for sequence, was in zip(members, before, strict=True):
        now = state(sequence)
        for name in sorted({*was, *now}):
            equal(now.get(name), was.get(name), f"{name} of {sequence.name} after {what}")
    return result
