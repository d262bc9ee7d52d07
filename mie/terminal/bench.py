"""Benchmarks in a terminal: a table, and one sentence that reads it.

Invariant: nothing is computed here that the benchmark does not say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table as RichTable

from mie.bench.memory_tables import Table
from mie.bench.pool import COUNTED, KINDS, OperationCost

if TYPE_CHECKING:
    from rich.console import Console


def show_tables(tables: Iterable[Table], console: Console) -> None:
    """Each table with its title above and its reading below."""
    for table in tables:
        _show(table.title, table.head, table.rows, console)
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
    _show(f"Nanoseconds an operation, {count:,} of each", head, rows, console)
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


def _steps(cost: OperationCost) -> str:
    if cost.fewest_steps == cost.most_steps:
        return f"{cost.most_steps}"
    return f"{cost.fewest_steps}–{cost.most_steps}"


def _show(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], console: Console) -> None:
    table = RichTable(title=title, title_justify="left", title_style="bold")
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table, highlight=False)
