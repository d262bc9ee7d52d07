"""Benchmarks in a terminal: a table, and one sentence that reads it.

Invariant: nothing is computed here that the benchmark does not say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table as RichTable

from mie import machine
from mie.bench.memory_tables import Table, percent
from mie.bench.pool import COUNTED, KINDS, OperationCost

if TYPE_CHECKING:
    from rich.console import Console

    from mie.bench.decode import DecodeSpeed
    from mie.bench.throughput import Throughput
    from mie.model.decoder import Decoder

FASTEST = "continuous"  # what the others are compared with


def show_tables(tables: Iterable[Table], console: Console) -> None:
    """Each table with its title above and its reading below."""
    for table in tables:
        show_rows(table.title, table.head, table.rows, console)
        console.print(f"{table.reading}\n", markup=False, highlight=False)


def show_pool_costs(costs: Sequence[OperationCost], console: Console) -> None:
    """A row for each operation: times on the pools side by side, then steps in the lists."""
    sizes = list(dict.fromkeys(cost.num_blocks for cost in costs))
    rows = []
    for kind in KINDS:
        those = [cost for cost in costs if cost.kind == kind]
        times = [f"{cost.nanoseconds:,.0f}" for cost in those]
        rows.append((kind, *times, " / ".join(dict.fromkeys(map(_steps, those)))))
    count = costs[0].operations
    head = ("operation", *(f"{size:,} blocks" for size in sizes), "steps")
    show_rows(f"Nanoseconds an operation, {count:,} of each", head, rows, console)
    same = all(
        len({(c.fewest_steps, c.most_steps) for c in costs if c.kind == kind}) == 1
        for kind in KINDS
    )
    console.print(
        "Times are medians on this machine. Steps are reads and writes of the pool's lists in one "
        f"call, {'the same' if same else 'not the same'} in all pools; "
        f"{min(count, COUNTED):,} calls of each were counted.",
        highlight=False,
    )


def stamp(decoder: Decoder) -> dict[str, Any]:
    """Where the times were taken, with what, and in which numbers."""
    import torch

    return {
        "cpu": machine.cpu_model(),
        "cores": machine.usable_cores(),
        "gpu": machine.gpu(),
        "device": str(decoder.device),
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": machine.versions("torch", "mie"),
    }


def show_throughput(result: Throughput, where: Mapping[str, Any], console: Console) -> None:
    """A row for each schedule, and what counts alone had let expect."""
    rows = [
        (
            run.scheduler,
            f"{run.tokens_per_second:,.1f}",
            f"{run.steps:,}",
            f"{run.mean_batch:.1f}",
            percent(run.padding_share),
            f"{run.median_first_token_seconds:.2f} s",
            f"{run.seconds:.1f} s",
        )
        for run in result.runs
    ]
    head = ("", "tokens/s", "steps", "batch", "padding", "first token", "total")
    title = f"Throughput: {where['dtype']} on {where['device']}, {where['threads']} threads"
    show_rows(title, head, rows, console)
    cost, slow = result.cost, [run.scheduler for run in result.runs if run.scheduler != FASTEST]
    ratios = ", ".join(
        f"{result.measured_ratio(name):.1f} times {name} (expected from counts: "
        f"{result.predicted_ratio(name):.1f})"
        for name in slow
    )
    counts = [run.num_requests for run in result.runs]
    alone, total = min(counts), max(counts)
    few = f"One at a time, the first {alone} of {total} requests run. " if alone < total else ""
    console.print(
        f"Continuous: {ratios}. A step costs {1e3 * cost.seconds_per_step:.1f} ms and "
        f"{1e3 * cost.seconds_per_token:.2f} ms for each token. Output tokens are counted; first "
        f"token: the median time until a request has one, all of them waiting from the start. "
        f"{few}Static waves are told the lengths of all answers. {result.same_answers} of {alone} "
        "answers are the same in all runs.",
        markup=False,
        highlight=False,
    )
    console.print(f"{where['cpu']}, {where['gpu'] or 'no GPU'}", style="dim", markup=False)


def show_decode_speeds(speeds: Sequence[DecodeSpeed], console: Console) -> None:
    """A row for each number of sequences."""
    rows = [
        (
            f"{speed.num_sequences}",
            f"{speed.engine_tokens_per_second:,.1f}",
            f"{speed.plain_tokens_per_second:,.1f}",
            f"{speed.engine_to_plain:.2f}",
        )
        for speed in speeds
    ]
    show_rows(
        "Decoding, tokens a second", ("sequences", "engine", "plain loop", "ratio"), rows, console
    )


def _steps(cost: OperationCost) -> str:
    if cost.fewest_steps == cost.most_steps:
        return f"{cost.most_steps}"
    return f"{cost.fewest_steps}–{cost.most_steps}"


def show_rows(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], console: Console
) -> None:
    """A table under ``title``. The first column names the row, the others are numbers."""
    table = RichTable(title=title, title_justify="left", title_style="bold")
    rows = list(rows)
    for index, name in enumerate(head):
        words = " ".join([name, *(row[index] for row in rows)]).split()
        widest = max(map(len, words), default=0)  # a narrow terminal breaks lines, no words
        table.add_column(name, justify="right" if index else "left", min_width=widest)
    for row in rows:
        table.add_row(*row)
    console.print(table, highlight=False)
