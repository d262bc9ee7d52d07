"""Who gives its blocks back when there are none left.

Invariant: a policy chooses among the candidates and nothing else. Whom it may choose from is the
scheduler's business: never the first in line, so that somebody always finishes, and with priorities
only the least urgent ones. So a bad policy costs time and never an answer.

    running, in the order of admission       a   b   c   d        d needs a block, none is free
    candidates                                   b   c   d        a is first in line
    last_admitted                                        d        it yields: the others go on
    fewest_computed                              b                if it has the least to lose

A policy is a function from the candidates, in the order of admission and never empty, to one of
them. The one that asks for the block may be among them.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Candidates

from mie.errors import PartError
from mie.request import Sequence
from mie.scheduling.queue import WaitingQueue

VictimPolicy = Callable[[Candidates[Sequence]], Sequence]


def last_admitted(candidates: Candidates[Sequence]) -> Sequence:
    """Last in, first out: the order of arrival is kept, and the oldest lose nothing.

    As vLLM does, and the default.
    """
    return candidates[-1]


def fewest_computed(candidates: Candidates[Sequence]) -> Sequence:
    """The one with the fewest tokens to compute again; of several, the last admitted."""
    return min(reversed(candidates), key=lambda sequence: sequence.num_computed)


def least_urgent(running: Candidates[Sequence], queue: WaitingQueue) -> list[Sequence]:
    """Those whose urgency is the worst among ``running``: all of them, first come first served."""
    worst = max(map(queue.urgency, running), default=0)
    return [sequence for sequence in running if queue.urgency(sequence) == worst]


def choose(policy: VictimPolicy, candidates: list[Sequence]) -> Sequence:
    """What ``policy`` chooses. Raises PartError for what is no candidate."""
    victim = policy(list(candidates))
    if not any(victim is candidate for candidate in candidates):
        raise PartError(f"victim_policy chose {victim!r}, who is not among {candidates}")
    return victim
