"""The benchmarks of scheduling as plots, each with the words that say the same.

Invariant: as in ``memory_plots``: a figure and its words are functions of the result alone, and
colour only repeats what hatching, marker and dash say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mie.bench.batching import Batching
from mie.bench.memory_plots import bars, line, panels
from mie.bench.memory_tables import percent
from mie.bench.pressure import Pressure

if TYPE_CHECKING:
    from mie.bench.memory_plots import Figure

LINES = (  # the ways that are drawn, with a look each
    ("recompute", "last_admitted", 0),
    ("recompute", "fewest_computed", 1),
    ("swap", "last_admitted", 2),
)


def figure_of_batching(result: Batching) -> Figure:
    """Above the tokens computed, below the steps and the share of places that they use."""
    names = [run.scheduler for run in result.runs]
    for_somebody = [run.counts.computed_tokens / 1e3 for run in result.runs]
    for_nobody = [run.counts.padding_tokens / 1e3 for run in result.runs]
    titles = ("Tokens computed", f"Steps, and their use of {result.max_num_seqs} places")
    with panels(*titles) as (figure, (above, below)):
        series = ("for somebody", 0, for_somebody), ("padding", 1, for_nobody)
        drawn = bars(above, names, *series)
        shares = [f"{percent(run.counts.padding_share)} padding" for run in result.runs]
        above.bar_label(drawn, shares, padding=4)
        above.set_xlabel("thousands")
        above.legend(loc="lower right")
        drawn = bars(below, names, ("", 2, [float(run.counts.steps) for run in result.runs]))
        below.bar_label(drawn, [_use(result, run.scheduler) for run in result.runs], padding=4)
        below.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        for panel in (above, below):
            panel.margins(x=0.3)
            panel.locator_params(axis="x", nbins=5)
    return figure


def _use(result: Batching, scheduler: str) -> str:
    """How much of the places all schedulers could have had; one at a time leaves the others out."""
    counts = result.run(scheduler).counts
    return f"{percent(counts.sequence_steps / (counts.steps * result.max_num_seqs))} in use"


def words_of_batching(result: Batching) -> str:
    parts = [
        f"{run.scheduler}: {run.counts.steps:,} steps with {_use(result, run.scheduler)}, "
        f"{run.counts.computed_tokens / 1e3:,.0f} thousand tokens computed for somebody and "
        f"{run.counts.padding_tokens / 1e3:,.0f} thousand for nobody "
        f"({percent(run.counts.padding_share)} padding)"
        for run in result.runs
    ]
    return (
        f"Bars for {len(parts)} schedulers, {result.num_requests} requests, at most "
        f"{result.max_num_seqs} at once. " + "; ".join(parts) + "."
    )


def figure_of_pressure(result: Pressure) -> Figure:
    """Above the sequences thrown out, below the tokens computed again, over the size of the pool:
    the largest on the left."""
    pools = [float(pool) for pool in result.pools]
    with panels("Preemptions", "Tokens computed again", sharex=True) as (figure, (above, below)):
        for preemption, policy, look_index in LINES:
            counts = [result.run(pool, preemption, policy).counts for pool in result.pools]
            label = f"{preemption}, {policy.replace('_', ' ')}"
            line(above, look_index, pools, [float(each.preemptions) for each in counts], label)
            line(below, look_index, pools, [float(each.recomputed_tokens) for each in counts])
        above.legend(loc="upper left")
        below.set_xticks(pools, [f"{pool:.0f}" for pool in pools])
        below.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        below.set_xlabel(f"blocks of {result.block_size}")
        below.invert_xaxis()  # shared: both panels
    return figure


def words_of_pressure(result: Pressure) -> str:
    parts = []
    for preemption, policy, _ in LINES:
        runs = [result.run(pool, preemption, policy) for pool in result.pools]
        points = ", ".join(
            f"{run.usable_blocks}: {run.counts.preemptions} and {run.counts.recomputed_tokens:,}"
            for run in runs
        )
        parts.append(f"{preemption}, {policy.replace('_', ' ')} {points}")
    return (
        f"Lines for {len(parts)} ways to make room, over the blocks in the pool: preemptions, and "
        f"tokens computed again, while {result.num_requests} requests run to their ends. "
        + "; ".join(parts)
        + "."
    )


SCHEDULING_FIGURES: dict[str, tuple[Callable[[Any], Figure], Callable[[Any], str]]] = {
    "batching": (figure_of_batching, words_of_batching),
    "pressure": (figure_of_pressure, words_of_pressure),
}
