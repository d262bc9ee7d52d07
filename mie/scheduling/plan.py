"""What crosses between the scheduler and whoever runs the model: a plan goes out, a result back.

Invariant: a plan is all that a step needs to know, and it does not change. Numbers of tokens,
blocks and slots, no sequence, no table: whoever runs it can be another thread, another process or
another machine, and the scheduler may go on meanwhile.

    step 7: 35 of 64 tokens: a[40] b[21] c[0:33], 2 preempted

Two sequences decode, at positions 40 and 21, and the first 33 tokens of a prompt are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mie.memory.block_copies import BlockCopy
from mie.memory.swap import SwapIn, SwapOut
from mie.request import FinishReason
from mie.sampling_params import Draw

Kind = Literal["prefill", "decode", "recompute"]
KINDS: tuple[Kind, ...] = ("prefill", "decode", "recompute")
PENDING = -1  # in place of a token that a step in flight chooses: only the device knows it


class StepsInFlightError(Exception):
    """Nothing can be planned before the steps in flight have come back, and nothing is."""


class ScheduledSequence(NamedTuple):
    """One sequence's part of a step: ``token_ids`` to compute, the first of them at ``position``.

    ``blocks`` are the sequence's, in the order of the text, ``block_size`` slots each.
    ``draws`` are the tokens to choose after the last of them: none while a prompt is incomplete,
    several where a request wants several answers. ``num_recomputed`` of the tokens had been
    computed before. ``kind`` is for people: the scheduler has no phases. A token that is not known
    yet is ``PENDING``: it was chosen for this sequence by the step before, and is on the device.
    """

    sequence_id: int
    name: str
    kind: Kind
    token_ids: tuple[int, ...]
    position: int
    blocks: tuple[int, ...]
    block_size: int
    draws: tuple[Draw, ...]
    num_recomputed: int = 0

    @property
    def num_new(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """How many tokens it has in memory after the step: what its queries may see."""
        return self.position + len(self.token_ids)

    @property
    def slots(self) -> tuple[int, ...]:
        """Where the new K and V go."""
        size = self.block_size
        positions = range(self.position, self.num_tokens)
        return tuple(self.blocks[at // size] * size + at % size for at in positions)

    def __repr__(self) -> str:
        where = f"{self.position}" if self.num_new == 1 else f"{self.position}:{self.num_tokens}"
        return f"{self.name}[{where}]"


@dataclass(frozen=True)
class StepPlan:
    """Everything that one step does, in this order: blocks move (swapped out, copied, swapped in),
    then the model runs over the tokens of all ``scheduled`` sequences at once.

    ``num_padding`` tokens more are computed for nothing, as static batching does.
    """

    number: int
    token_budget: int
    scheduled: tuple[ScheduledSequence, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    swap_out: tuple[SwapOut, ...] = ()
    swap_in: tuple[SwapIn, ...] = ()
    preempted: tuple[str, ...] = ()  # names of sequences that had to go back to the queue
    num_padding: int = 0
    num_cached_tokens: int = 0  # of prompts that came in with this step: found, not computed

    @property
    def num_tokens(self) -> int:
        """How many tokens the model computes for somebody."""
        return sum(scheduled.num_new for scheduled in self.scheduled)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run: no token to compute and no block to move."""
        return not (self.scheduled or self.copies or self.swap_out or self.swap_in)

    def __repr__(self) -> str:
        head = f"step {self.number}: {self.num_tokens} of {self.token_budget} tokens"
        work = " ".join(map(repr, self.scheduled))
        extras = [
            f"{count} {what}"
            for count, what in (
                (self.num_padding, "padding"),
                (len(self.copies), "blocks copied"),
                (len(self.swap_out), "blocks out"),
                (len(self.swap_in), "blocks in"),
                (len(self.preempted), "preempted"),
            )
            if count
        ]
        return ", ".join([f"{head}: {work}" if work else head, *extras])


@dataclass(frozen=True)
class StepResult:
    """The tokens that were chosen: for each sequence id, one for each of its draws."""

    tokens: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        chosen = (f"{number}: {', '.join(map(str, ids))}" for number, ids in self.tokens.items())
        return f"StepResult({'; '.join(chosen)})"


class SequenceOutput(NamedTuple):
    """What a step means for one answer: a token more, an end, or both.

    ``num_output_tokens`` counts from 1 and never stands still: no token comes out twice, however
    often its sequence was preempted. An answer that ends without a token has ``token_id`` None.
    """

    request_id: str
    name: str  # of the sequence, as in plans and traces
    index: int  # type: ignore[assignment]  # of the answer; not tuple's method
    token_id: int | None
    num_output_tokens: int
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
