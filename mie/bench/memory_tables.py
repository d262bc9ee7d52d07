"""The memory benchmarks as tables: one source for the terminal, the report and the chapter.

Invariant: cells are text that is made from the numbers, and so is the sentence that reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mie.bench.batching import Batching
from mie.bench.block_sizes import BlockSizes
from mie.bench.churn import Churn, Outcome
from mie.bench.memory import MemoryReport
from mie.bench.pressure import Pressure
from mie.bench.reservations import Reservations
from mie.bench.sharing import PrefixSharing

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Table:
    """Rows under a head. The first column names the row, the others are numbers."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    reading: str  # one sentence: what to see


def percent(share: float, decimals: int = 1) -> str:
    """A share between 0 and 1 for people: ``88.6 %``, never broken into two lines."""
    return f"{100 * share:.{decimals}f}\N{NO-BREAK SPACE}%"


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def memory_tables(report: MemoryReport) -> dict[str, Table]:
    """The workload, then each benchmark by the name of its field, in the order of the report."""
    return {
        "workload": table_of_workload(report),
        "reservations": table_of_reservations(report.reservations),
        "sharing": table_of_sharing(report.sharing),
        "block_sizes": table_of_block_sizes(report.block_sizes),
        "churn": table_of_churn(report.churn),
        "batching": table_of_batching(report.batching),
        "pressure": table_of_pressure(report.pressure),
    }


def table_of_workload(report: MemoryReport) -> Table:
    rows = tuple(
        (kind.kind, f"{kind.num_requests}", f"{kind.prompt_tokens:,}", f"{kind.answer_tokens:,}")
        for kind in report.kinds
    )
    requests = sum(kind.num_requests for kind in report.kinds)
    tokens = sum(kind.prompt_tokens + kind.answer_tokens for kind in report.kinds)
    return Table(
        title="The workload",
        head=("kind", "requests", "prompt tokens", "answer tokens"),
        rows=rows,
        reading=(
            f"{requests} requests of seed {report.seed} hold {tokens:,} tokens when they end, "
            f"{report.bytes_per_token:,} bytes each: {gib(tokens * report.bytes_per_token)} "
            "of K and V."
        ),
    )


def table_of_reservations(result: Reservations) -> Table:
    rows = tuple(
        (
            each.policy,
            gib(each.reserved_bytes),
            gib(each.used_bytes),
            percent(each.waste_share),
            f"{each.fit}",
        )
        for each in result.policies
    )
    whole, paged = result.policies[0], result.policies[-1]
    return Table(
        title="Paged against contiguous",
        head=("reserved", "all requests", "of that used", "waste", "fit at once"),
        rows=rows,
        reading=(
            f"With a {whole.policy} for each, {whole.fit} of {result.num_requests} requests fit "
            f"into {gib(result.budget_bytes)} at once and {percent(whole.waste_share)} of what is "
            f"reserved is never used; paged, {paged.fit} fit and {percent(paged.waste_share)} "
            "stays empty."
        ),
    )


def table_of_sharing(result: PrefixSharing) -> Table:
    rows = tuple(
        (
            each.cache,
            f"{each.used_blocks:,}",
            f"{each.saved_blocks:,}",
            percent(each.saved_share),
            "; ".join(f"{blocks:,} × {count}" for count, blocks in each.owners),
            f"{each.computed_tokens:,}",
            percent(each.hit_rate),
        )
        for each in result.caches
    )
    best = max(result.caches, key=lambda each: each.saved_blocks)
    return Table(
        title="Prefix sharing",
        head=("cache", "blocks", "saved", "share", "system × owners", "computed", "hit rate"),
        rows=rows,
        reading=(
            f"A common system prompt of {result.system_prompt_tokens} tokens lies in memory once "
            f"for {result.num_requests} requests: {best.saved_blocks:,} blocks saved, "
            f"{percent(best.saved_share)} of all, and {best.found_tokens:,} of "
            f"{best.prompt_tokens:,} prompt tokens need not be computed."
        ),
    )


def table_of_block_sizes(result: BlockSizes) -> Table:
    rows = tuple(
        (
            f"{each.block_size}",
            percent(each.waste_share, 2),
            f"{each.empty_bytes / MIB:.1f} MiB",
            f"{each.entries_per_request:,.1f}",
            f"{each.table_entries:,}",
        )
        for each in result.sizes
    )
    first, last = result.sizes[0], result.sizes[-1]
    return Table(
        title="Internal fragmentation: empty slots by block size",
        head=("slots a block", "waste", "empty", "blocks a request", "blocks in all"),
        rows=rows,
        reading=(
            f"From blocks of {first.block_size} to blocks of {last.block_size} slots, what stays "
            f"empty grows from {percent(first.waste_share, 2)} to {percent(last.waste_share, 2)}, "
            f"and the mean table shrinks from {first.entries_per_request:,.1f} entries to "
            f"{last.entries_per_request:,.1f}."
        ),
    )


def table_of_churn(result: Churn) -> Table:
    rows = tuple(map(_outcome, (result.contiguous, result.paged)))
    title = "External fragmentation: requests that come and go"
    head = ("memory", "arrivals", "admitted", "no room", "holes too short", "in memory")
    return Table(title, head, rows, _reading_of_churn(result))


def _outcome(each: Outcome) -> tuple[str, ...]:
    return (
        each.memory,
        f"{each.arrivals:,}",
        f"{each.admitted:,}",
        f"{each.refused_full:,}",
        f"{each.refused_by_holes:,}",
        f"{each.mean_in_memory:.1f}",
    )


def _reading_of_churn(result: Churn) -> str:
    pieces, paged = result.contiguous, result.paged
    reading = (
        f"In one piece, {pieces.refused_by_holes} of {pieces.arrivals:,} requests are turned away "
        f"although enough is free in all; in blocks, {paged.refused_by_holes}."
    )
    if worst := pieces.worst_refusal:
        reading += (
            f" At worst, {worst.request_tokens:,} tokens found no place among "
            f"{worst.free_tokens:,} free ones, because the largest hole had {worst.largest_hole:,}."
        )
    return reading


def table_of_batching(result: Batching) -> Table:
    rows = tuple(
        (
            run.scheduler,
            f"{run.counts.steps:,}",
            f"{run.counts.mean_running:.1f}",
            percent(run.counts.slot_use),
            f"{run.counts.padding_tokens:,}",
            f"{run.counts.most_blocks:,}",
            f"{run.derived_seconds:.2f} s",
        )
        for run in result.runs
    )
    static, continuous = result.run("static"), result.run("continuous")
    known = result.run("static, exact")
    return Table(
        title=f"Batching: {result.num_requests} requests, {result.max_num_seqs} at once",
        head=("scheduler", "steps", "running", "slot use", "padding", "blocks", "derived"),
        rows=rows,
        reading=(
            f"In waves, {percent(static.counts.slot_use)} of {result.max_num_seqs} places compute "
            f"for somebody; continuously, {percent(continuous.counts.slot_use)}. So the same "
            f"{continuous.counts.output_tokens:,} tokens come out in {continuous.counts.steps:,} "
            f"steps and not in {static.counts.steps:,}, or {known.counts.steps:,} where waves "
            "reserve exact lengths that nobody knows in time. Derived for one H200, not measured: "
            f"{static.derived_seconds / continuous.derived_seconds:.1f} times as fast."
        ),
    )


def table_of_pressure(result: Pressure) -> Table:
    """A row for each pool: recomputing under both policies, then swapping."""
    rows = tuple(_pool_row(result, pool) for pool in result.pools)
    smallest = result.run(result.pools[-1], "recompute", "last_admitted")
    return Table(
        title=f"Memory pressure: {result.num_requests} requests in smaller and smaller pools",
        head=(
            "blocks",
            "completed",
            "steps",
            "preempted",
            "recomputed",
            "by fewest",
            "swapped",
        ),
        rows=rows,
        reading=(
            f"In {smallest.usable_blocks} blocks, which the longest request needs alone, all "
            f"{smallest.counts.completed} requests still end: {smallest.counts.preemptions} "
            f"preemptions, and {percent(smallest.recomputed_share, 0)} more tokens to compute. "
            f"Nobody is preempted in {result.needed_blocks}. The victim is the last admitted; by "
            "fewest, the one with the fewest tokens computed; swapped are blocks that wait on the "
            "host, where no token is computed again."
        ),
    )


def _pool_row(result: Pressure, pool: int) -> tuple[str, ...]:
    last, fewest = (
        result.run(pool, "recompute", policy) for policy in ("last_admitted", "fewest_computed")
    )
    swap = result.run(pool, "swap", "last_admitted")
    completed = {run.counts.completed for run in result.runs if run.usable_blocks == pool}
    return (
        f"{pool}",
        "–".join(f"{count}" for count in sorted(completed)),
        f"{last.counts.steps:,}",
        f"{last.counts.preemptions}",
        f"{last.counts.recomputed_tokens:,}",
        f"{fewest.counts.recomputed_tokens:,}",
        f"{swap.counts.blocks_swapped_out:,}",
    )
