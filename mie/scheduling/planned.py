"""From a sequence that lives on to the numbers that a plan carries.

Invariant: what is written here is copied, so that nothing in a plan changes after it was made.
"""

from __future__ import annotations

from mie.request import Sequence
from mie.scheduling.plan import Kind, ScheduledSequence


def planned(sequence: Sequence, count: int) -> ScheduledSequence:
    """``count`` tokens of ``sequence``, whose table has slots for them already."""
    table, first = sequence.table, sequence.num_computed
    assert table is not None and table.num_tokens == first + count, f"{sequence}, {count} planned"
    end = first + count
    complete = end == sequence.num_tokens
    sampling = sequence.request.sampling
    return ScheduledSequence(
        sequence_id=sequence.sequence_id,
        name=sequence.name,
        kind=_kind(sequence),
        token_ids=tuple(sequence.token_ids[first:end]),
        position=first,
        blocks=tuple(table.blocks),
        slots=tuple(table.slots(first, end)),
        draws=tuple(
            sampling.draw(end, index)
            for index in range(sequence.index, sequence.index + sequence.num_seats)
            if complete
        ),
        num_recomputed=max(0, min(end, sequence.num_ever_computed) - first),
    )


def _kind(sequence: Sequence) -> Kind:
    if sequence.num_computed < sequence.num_ever_computed:
        return "recompute"
    return "decode" if sequence.num_computed >= sequence.num_prompt_tokens else "prefill"
