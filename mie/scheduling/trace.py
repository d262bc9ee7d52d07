"""What every step did: one record a step, the only source of timelines, counters and plots.

Invariant: a record is made of a plan and the state that it was made in, and costs no decision: with
a trace or without, the same tokens run in the same steps. Counts are exact and repeatable; times
stand apart from them, in seconds since the trace began.

Perfetto (https://ui.perfetto.dev) and chrome://tracing open what ``to_perfetto`` returns: a row for
each sequence, one for the engine's own work, and counters for tokens and blocks.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mie.memory.usage import memory_usage
from mie.scheduling.plan import Kind, SequenceOutput, StepPlan
from mie.scheduling.scheduler import Scheduler

NAMES_KEPT = 64  # names of waiting sequences in a record; where more wait, the count alone is kept


@dataclass(frozen=True)
class Work:
    """Tokens ``first`` to ``first + num_tokens`` (exclusive) of sequence ``name``."""

    name: str
    kind: Kind
    first: int
    num_tokens: int
    num_recomputed: int = 0
    num_sampled: int = 0


@dataclass(frozen=True)
class StepTimes:
    """When the step began, and how long it took to plan it, to run it and to take in its result."""

    start: float = 0.0
    schedule: float = 0.0
    run: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        return self.schedule + self.run + self.update


@dataclass(frozen=True)
class StepRecord:
    """One step. ``waiting`` have not been admitted yet, ``returning`` wait after a preemption;
    ``preempted`` went back in this step, ``ended`` is (name, reason). Memory is as the step ran."""

    number: int
    token_budget: int
    work: tuple[Work, ...] = ()
    waiting: tuple[str, ...] = ()
    returning: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    ended: tuple[tuple[str, str], ...] = ()
    num_waiting: int = 0
    num_padding: int = 0
    num_cached_tokens: int = 0  # of prompts admitted in this step: found, not computed
    blocks_copied: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    usable_blocks: int = 0
    used_blocks: int = 0
    internal_fragmentation: float = 0.0  # empty slots among those of used blocks
    saved_by_sharing: float = 0.0  # blocks that tables would need more without sharing
    times: StepTimes = field(default_factory=StepTimes)

    @property
    def num_running(self) -> int:
        """Sequences that compute something in this step."""
        return len(self.work)

    @property
    def num_tokens(self) -> int:
        return sum(work.num_tokens for work in self.work)

    @property
    def num_recomputed(self) -> int:
        """Tokens that had been computed before and were lost."""
        return sum(work.num_recomputed for work in self.work)

    @property
    def num_sampled(self) -> int:
        """Tokens that were chosen: output."""
        return sum(work.num_sampled for work in self.work)

    def count(self, kind: Kind) -> int:
        """Tokens computed by sequences of that kind."""
        return sum(work.num_tokens for work in self.work if work.kind == kind)


class Trace:
    """The last ``capacity`` records. ``begin`` takes the state down as the step is launched, and
    ``end`` adds what came of it. ``capacity`` 0 keeps none and computes none."""

    def __init__(self, capacity: int = 10_000) -> None:
        self.records: deque[StepRecord] = deque(maxlen=capacity)
        self.began = time.perf_counter()

    def begin(self, plan: StepPlan, scheduler: Scheduler) -> StepRecord | None:
        """The record of a step that is about to run."""
        if self.records.maxlen == 0:
            return None
        running = scheduler.running
        usage = memory_usage(scheduler.memory.pool, [s.table for s in running if s.table])
        num_waiting = len(scheduler.waiting)
        waiting = list(scheduler.waiting) if num_waiting <= NAMES_KEPT else []
        work = tuple(
            Work(s.name, s.kind, s.position, s.num_new, s.num_recomputed, len(s.draws))
            for s in plan.scheduled
        )
        return StepRecord(
            number=plan.number,
            token_budget=plan.token_budget,
            work=work,
            waiting=tuple(s.name for s in waiting if not s.num_preemptions),
            returning=tuple(s.name for s in waiting if s.num_preemptions),
            preempted=plan.preempted,
            num_waiting=num_waiting,
            num_padding=plan.num_padding,
            num_cached_tokens=plan.num_cached_tokens,
            blocks_copied=len(plan.copies),
            blocks_swapped_out=len(plan.swap_out),
            blocks_swapped_in=len(plan.swap_in),
            usable_blocks=usage.usable_blocks,
            used_blocks=usage.used_blocks,
            internal_fragmentation=usage.internal_fragmentation,
            saved_by_sharing=usage.saved_by_sharing,
        )

    def end(
        self, record: StepRecord | None, outputs: Iterable[SequenceOutput], times: StepTimes
    ) -> None:
        """The step has come back. ``times.start`` is a reading of ``time.perf_counter``."""
        if record is not None:
            ended = tuple((o.name, str(o.finish_reason)) for o in outputs if o.finish_reason)
            times = replace(times, start=times.start - self.began)
            self.records.append(replace(record, ended=ended, times=times))

    def clear(self) -> None:
        """Forget all records; time begins anew."""
        self.records.clear()
        self.began = time.perf_counter()


def to_json(records: Iterable[StepRecord]) -> str:
    """All records as one JSON list, with the sums that their properties make."""
    sums = ("num_running", "num_tokens", "num_recomputed", "num_sampled")
    return json.dumps(
        [asdict(record) | {name: getattr(record, name) for name in sums} for record in records]
    )


def to_perfetto(records: Iterable[StepRecord]) -> str:
    """The records in the trace event format of Chrome: JSON for Perfetto. Times in microseconds."""
    events: list[dict[str, Any]] = [
        _metadata("process_name", 1, 0, "engine"),
        _metadata("process_name", 2, 0, "sequences"),
        _metadata("thread_name", 1, 1, "step"),
    ]
    rows: dict[str, int] = {}
    for record in records:
        begin = record.times.start
        for part in ("schedule", "run", "update"):
            seconds = getattr(record.times, part)
            facts = {"step": record.number, "tokens": record.num_tokens}
            events.append(_slice(part, 1, 1, begin, seconds, facts))
            begin += seconds
        start = record.times.start + record.times.schedule
        for work in record.work:
            if work.name not in rows:
                rows[work.name] = len(rows) + 1
                events.append(_metadata("thread_name", 2, rows[work.name], work.name))
            events.append(
                _slice(work.kind, 2, rows[work.name], start, record.times.run, asdict(work))
            )
        tokens = {kind: record.count(kind) for kind in ("prefill", "decode", "recompute")}
        events.append(_counter("tokens", start, tokens | {"padding": record.num_padding}))
        events.append(_counter("blocks", start, {"used": record.used_blocks}))
        events.append(_counter("waiting", start, {"sequences": record.num_waiting}))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _metadata(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(
    name: str, process: int, thread: int, start: float, seconds: float, facts: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start * 1e6,
        "dur": seconds * 1e6,
        "args": facts,
    }


def _counter(name: str, at: float, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": 1, "ts": at * 1e6, "args": values}
