"""From a sequence that lives on to what leaves the scheduler: parts of plans, and outputs.

Invariant: what is written here is copied, so nothing in a plan or an output changes afterwards.
"""

from __future__ import annotations

from mie.errors import PartError
from mie.request import Sequence
from mie.sampling_params import Draw
from mie.scheduling.plan import (
    PENDING,
    Kind,
    ScheduledSequence,
    SequenceOutput,
    StepPlan,
    StepResult,
)


def planned(sequence: Sequence, count: int) -> ScheduledSequence:
    """``count`` tokens of ``sequence``, whose table has slots for them already."""
    table, first = sequence.table, sequence.num_computed
    assert table is not None and table.num_tokens == first + count, f"{sequence}, {count} planned"
    end, known = first + count, len(sequence.token_ids)
    token_ids = tuple(sequence.token_ids[first:end])
    if end > known:
        token_ids += (PENDING,) * (end - max(first, known))
    draws: tuple[Draw, ...] = ()
    if end == known + sequence.num_pending:  # complete: the next token can be chosen
        draw, index = sequence.request.sampling.draw, sequence.index
        draws = (draw(end, index),)
        if sequence.to_fork:
            draws += tuple([draw(end, index + more) for more in range(1, sequence.num_seats)])
    kind: Kind = "decode" if first >= sequence.num_prompt_tokens else "prefill"
    again = 0
    if first < sequence.num_ever_computed:
        kind, again = "recompute", min(end, sequence.num_ever_computed) - first
    return ScheduledSequence(
        sequence.sequence_id,
        sequence.name,
        kind,
        token_ids,
        first,
        tuple(table.blocks),
        table.pool.block_size,
        draws,
        again,
    )


def check_result(plan: StepPlan, result: StepResult) -> None:
    """Raise PartError unless ``result`` has a token for each draw of ``plan``."""
    tokens = result.tokens
    for scheduled in plan.scheduled:
        wanted, got = len(scheduled.draws), len(tokens.get(scheduled.sequence_id, ()))
        if got != wanted:
            raise PartError(f"{plan}: {wanted} tokens wanted for {scheduled.name}, {got} came")


def chosen(sequence: Sequence) -> SequenceOutput:
    """The last token of ``sequence`` is new; it may have ended it."""
    return _output(sequence, sequence.name, sequence.index, sequence.token_ids[-1])


def ended(sequence: Sequence) -> list[SequenceOutput]:
    """``sequence`` has ended without a token, and with it the answers that were to be forked."""
    indices = range(sequence.index, sequence.index + sequence.num_seats)
    return [_output(sequence, sequence.request.name(index), index, None) for index in indices]


def _output(sequence: Sequence, name: str, index: int, token_id: int | None) -> SequenceOutput:
    return SequenceOutput(
        sequence.request.request_id,
        name,
        index,
        token_id,
        sequence.num_output_tokens,
        sequence.num_cached_tokens or 0,
        sequence.finish_reason,
    )
