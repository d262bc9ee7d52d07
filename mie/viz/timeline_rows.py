"""What each sequence does in each step, and the words that say it, from the records of a trace.

Invariant: nothing is guessed. A sequence that a record does not name has no moment in that step,
and padding is given to rows only where the sum comes out: a wave of static batching is a rectangle,
as long as its longest row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mie.scheduling.plan import KINDS
from mie.scheduling.trace import StepRecord, Work
from mie.viz.pool_snapshot import plural

State = Literal["prefill", "decode", "recompute", "waiting", "returning", "padding"]
SAID: dict[State, str] = {"returning": "waiting again"}  # where the name of a state is no word
USUAL = ("stop", "length")  # reasons to end that need no remark


@dataclass(frozen=True)
class Moment:
    """One sequence in one step. ``state`` is None where a record tells of nothing but its end.

    ``padding`` tokens are computed in its row for nobody. ``ended`` is the reason, if this step was
    its last.
    """

    state: State | None
    work: Work | None = None
    padding: int = 0
    preempted: bool = False
    ended: str = ""


Rows = dict[str, dict[int, Moment]]  # by name, then by the index of the record


def rows_of(records: Sequence[StepRecord]) -> Rows:
    """The moments of every sequence, in the order in which they appear; answers to one request
    stand together."""
    rows: Rows = {}
    wave: list[str] = []  # who shares a rectangle of static batching
    over: set[str] = set()
    for column, record in enumerate(records):
        now = _named(record)
        if over.issuperset(wave):
            wave = []
        over.difference_update(work.name for work in record.work)  # a name may come again
        wave += [work.name for work in record.work if work.name not in wave]
        for name, count in _padding(record, wave).items():
            now[name] = replace(now.get(name, Moment("padding")), padding=count)
        for name, reason in record.ended:
            now[name] = replace(now.get(name, Moment(None)), ended=reason)
            over.add(name)
            if name not in rows and name not in wave:  # an answer that its first token has ended
                wave.append(name)
        for name, moment in now.items():
            rows.setdefault(name, {})[column] = moment
    return {name: rows[name] for name in _together(rows)}


def _named(record: StepRecord) -> dict[str, Moment]:
    now = {work.name: Moment(work.kind, work) for work in record.work}
    for name in (*record.returning, *record.preempted):
        now[name] = Moment("returning", preempted=name in record.preempted)
    return now | {name: Moment("waiting") for name in record.waiting}


def _padding(record: StepRecord, wave: Sequence[str]) -> dict[str, int]:
    """Tokens of padding in each row of the wave that has some."""
    counts = {work.name: work.num_tokens for work in record.work}
    longest = max(counts.values(), default=0)
    padding = {name: longest - counts.get(name, 0) for name in wave}
    if sum(padding.values()) != record.num_padding:
        return {}
    return {name: count for name, count in padding.items() if count}


def _together(names: Iterable[str]) -> list[str]:
    """The names in their order, but r/1 right behind r/0."""
    requests: dict[str, list[str]] = {}
    for name in names:
        requests.setdefault(name.rpartition("/")[0] or name, []).append(name)
    return [name for answers in requests.values() for name in answers]


# -- words -----------------------------------------------------------------------------------------


def step_words(record: StepRecord, column: int, rows: Rows) -> str:
    """Every number of the record but its times, which no two runs have in common."""
    lines = [_tokens(record), *map(_work, record.work)]
    if record.num_padding:
        shares = (
            f"{name} {row[column].padding}"
            for name, row in rows.items()
            if column in row and row[column].padding
        )
        said = plural(record.num_padding, "token")
        lines.append(f"Padding: {'; '.join([said, *filter(None, [', '.join(shares)])])}.")
    if record.num_waiting > len(record.waiting) + len(record.returning):
        lines.append(f"Waiting: {plural(record.num_waiting, 'sequence')}, names not kept.")
    endings = [f"{name} ({reason})" for name, reason in record.ended]
    for head, names in (
        ("Waiting", record.waiting),
        ("Waiting again", record.returning),
        ("Preempted", record.preempted),
        ("Ended", endings),
    ):
        if names:
            lines.append(f"{head}: {', '.join(names)}.")
    for head, count, noun in (
        ("Found in the prefix cache", record.num_cached_tokens, "token"),
        ("Copied", record.blocks_copied, "block"),
        ("Swapped out", record.blocks_swapped_out, "block"),
        ("Swapped in", record.blocks_swapped_in, "block"),
    ):
        if count:
            lines.append(f"{head}: {plural(count, noun)}.")
    memory = f"Memory: {record.used_blocks} of {plural(record.usable_blocks, 'block')} used"
    if record.internal_fragmentation:
        memory += f", {100 * record.internal_fragmentation:.1f} % of their slots empty"
    if record.saved_by_sharing:
        memory += f", {100 * record.saved_by_sharing:.1f} % saved by sharing"
    return "\n".join([*lines, f"{memory}."])


def _tokens(record: StepRecord) -> str:
    said = f"{record.num_tokens} of {plural(record.token_budget, 'token')}"
    kinds = ", ".join(f"{record.count(kind)} {kind}" for kind in KINDS if record.count(kind))
    return f"{said}: {kinds}." if kinds else f"{said}."


def _work(work: Work) -> str:
    last = work.first + work.num_tokens - 1
    where = f"{work.first}" if work.num_tokens == 1 else f"{work.first} to {last}"
    said = f"{work.name}: {work.kind}, {plural(work.num_tokens, 'token')} at {where}"
    if work.num_recomputed:
        said += f", {work.num_recomputed} computed before"
    if work.num_sampled:
        said += f", {work.num_sampled} chosen"
    return said + "."


def run_words(records: Sequence[StepRecord], names: Sequence[str], rows: Rows) -> str:
    """A whole run: its sums, its fullest steps, and what each sequence did when."""
    sums = {kind: sum(record.count(kind) for record in records) for kind in KINDS}
    kinds = ", ".join(f"{count} {kind}" for kind, count in sums.items() if count)
    head = f"{_steps(records).capitalize()}: {plural(sum(sums.values()), 'token')} computed"
    padding = sum(record.num_padding for record in records)
    head += f", {kinds}" * bool(kinds) + f", and {padding} of padding" * bool(padding)
    tokens = max(records, key=lambda record: record.num_tokens)
    blocks = max(records, key=lambda record: record.used_blocks)
    most = (
        f"At most {tokens.num_tokens} of {plural(tokens.token_budget, 'token')}, in step "
        f"{tokens.number}; at most {blocks.used_blocks} of {plural(blocks.usable_blocks, 'block')}"
        f", in step {blocks.number}."
    )
    return "\n".join([f"{head}.", most, *(_row_words(name, rows[name], records) for name in names)])


def _row_words(name: str, row: dict[int, Moment], records: Sequence[StepRecord]) -> str:
    parts = []
    for first, end in stretches(row, 0, len(records)):
        now, last = row[first], row[end - 1]
        said = "preempted, " if now.preempted else ""
        said += SAID.get(now.state, now.state) if now.state else ""
        if count := sum(work.num_tokens for c in range(first, end) if (work := row[c].work)):
            said += f" of {count}"
        if said:
            parts.append(f"{said} in {_steps(records[first:end])}")
        if last.ended:
            parts.append(f"ended in {_steps(records[end - 1 : end])} ({last.ended})")
    return f"{name}: {'; '.join(parts)}."


def stretches(row: dict[int, Moment], first: int, end: int) -> list[tuple[int, int]]:
    """Columns from ``first`` to ``end`` (exclusive) in runs of one state without a gap; what ends
    or is preempted begins a new one."""
    found: list[tuple[int, int]] = []
    for column in sorted(c for c in row if first <= c < end):
        now, before = row[column], row.get(column - 1)
        alike = before and before.state == now.state and not before.ended and not now.preempted
        if found and found[-1][1] == column and alike:
            found[-1] = (found[-1][0], column + 1)
        else:
            found.append((column, column + 1))
    return found


def _steps(records: Sequence[StepRecord]) -> str:
    first, last = records[0].number, records[-1].number
    return f"step {first}" if first == last else f"steps {first} to {last}"
