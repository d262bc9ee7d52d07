"""The memory benchmarks as plots, each with the words that say the same.

Invariant: a figure and its words are functions of the result alone. ``words_of_x`` names every
number that ``figure_of_x`` draws, or its ends where it draws a line of many. Shades are
told apart by hatching, lines by marker and dash; colour only repeats it.

Needs matplotlib, from the ``book`` extra. Nothing is imported for it before a figure is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mie.bench.block_sizes import BlockSizes
from mie.bench.churn import Churn
from mie.bench.memory_tables import GIB, percent
from mie.bench.reservations import Reservations
from mie.bench.sharing import PrefixSharing
from mie.bench.workloads import BYTES_PER_TOKEN
from mie.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (5.8, 4.8)  # inches: two panels, one above the other, so that a phone shows them large


def require_matplotlib() -> None:
    """Raises ConfigError where there is none, with what to do."""
    if find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: pip install 'mie[book]'")


@contextmanager
def panels(*titles: str, **options: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure of one panel for each title, from top to bottom, in the book's style."""
    require_matplotlib()
    import matplotlib.style
    from matplotlib.figure import Figure

    from mie.book.plots import STYLE

    with matplotlib.style.context(STYLE):
        figure = Figure(figsize=SIZE)
        axes = figure.subplots(len(titles), 1, **options)
        for panel, title in zip(axes, titles, strict=True):
            panel.set_title(title)
        yield figure, axes


def bars(panel: Any, names: list[str], *series: tuple[str, int, list[float]]) -> Any:
    """Lying bars, the first on top; each series is (label, look, lengths), one behind another."""
    from mie.book.plots import bar_style

    left = [0.0] * len(names)
    drawn = None
    for label, look, lengths in series:
        drawn = panel.barh(names, lengths, left=left, label=label, **bar_style(look))
        left = [a + b for a, b in zip(left, lengths, strict=True)]
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)
    panel.grid(axis="x")
    panel.margins(x=0.14)
    return drawn


def line(panel: Any, look_index: int, x: list[float], y: list[float], label: str = "") -> None:
    from mie.book.palette import look

    style = look(look_index)
    panel.plot(x, y, color=style.hex, marker=style.marker, linestyle=style.dash, label=label)


# -- reservations --------------------------------------------------------------------------------


def figure_of_reservations(result: Reservations) -> Figure:
    """Above what is reserved and used, below how many fit into the budget."""
    names = [each.policy for each in result.policies]
    used = [each.used_bytes / GIB for each in result.policies]
    empty = [(each.reserved_bytes - each.used_bytes) / GIB for each in result.policies]
    budget = f"{result.budget_bytes / GIB:g} GiB"
    titles = (f"Reserved for {result.num_requests} requests", f"Fit into {budget} at once")
    with panels(*titles) as (figure, (above, below)):
        drawn = bars(above, names, ("used", 0, used), ("never used", 1, empty))
        waste = [f"{percent(each.waste_share)} waste" for each in result.policies]
        above.bar_label(drawn, waste, padding=4)
        above.margins(x=0.24)
        above.set_xlabel("GiB")
        above.legend(loc="lower right")
        drawn = bars(below, names, ("", 2, [each.fit for each in result.policies]))
        below.bar_label(drawn, padding=4)
        below.set_xlabel("requests")
    return figure


def words_of_reservations(result: Reservations) -> str:
    parts = [
        f"{each.policy}: {each.reserved_bytes / GIB:.2f} GiB reserved, "
        f"{percent(each.waste_share)} of it never used, {each.fit} requests fit at once"
        for each in result.policies
    ]
    used = result.policies[0].used_bytes / GIB
    return (
        f"Bars for {len(parts)} ways to reserve memory for {result.num_requests} requests that "
        f"use {used:.2f} GiB, with a budget of {result.budget_bytes / GIB:g} GiB. "
        + "; ".join(parts)
        + "."
    )


# -- sharing -------------------------------------------------------------------------------------


def figure_of_sharing(result: PrefixSharing) -> Figure:
    """Above the blocks in use, below the prompt tokens computed."""
    names = [each.cache for each in result.caches]
    system = [float(sum(blocks for _, blocks in each.owners)) for each in result.caches]
    own = [each.used_blocks - shared for each, shared in zip(result.caches, system, strict=True)]
    titles = ("Blocks in use", "Prompt tokens")
    with panels(*titles) as (figure, (above, below)):
        series = ("everything else", 0, own), ("system prompt", 1, system)
        drawn = bars(above, names, *series)
        above.bar_label(drawn, [f"{each.used_blocks:,}" for each in result.caches], padding=4)
        computed = [float(each.computed_tokens) for each in result.caches]
        found = [float(each.found_tokens) for each in result.caches]
        drawn = bars(below, names, ("computed", 2, computed), ("found", 3, found))
        below.bar_label(
            drawn, [f"{percent(each.hit_rate)} found" for each in result.caches], padding=4
        )
        for panel in (above, below):
            panel.margins(x=0.24)
            panel.locator_params(axis="x", nbins=5)
            panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
            panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    return figure


def words_of_sharing(result: PrefixSharing) -> str:
    parts = []
    for each in result.caches:
        owners = " and ".join(
            f"{blocks:,} blocks with {count} {'owner' if count == 1 else 'owners'}"
            for count, blocks in each.owners
        )
        parts.append(
            f"{each.cache}: {each.used_blocks:,} blocks in use, the system prompt in {owners}, "
            f"{each.computed_tokens:,} prompt tokens computed and {each.found_tokens:,} found "
            f"({percent(each.hit_rate)})"
        )
    return (
        f"Bars for {len(parts)} prefix caches; {result.num_requests} requests begin with the same "
        f"{result.system_prompt_tokens} tokens. " + "; ".join(parts) + "."
    )


# -- block sizes ---------------------------------------------------------------------------------


def figure_of_block_sizes(result: BlockSizes) -> Figure:
    """Above the share of empty slots, below the length of a table, over the block size."""
    sizes = [float(each.block_size) for each in result.sizes]
    waste = [100 * each.waste_share for each in result.sizes]
    entries = [each.entries_per_request for each in result.sizes]
    titles = ("Empty slots (%)", "Table entries a request")
    with panels(*titles, sharex=True) as (figure, (above, below)):
        line(above, 1, sizes, waste)
        line(below, 0, sizes, entries)
        below.set_xscale("log", base=2)
        below.set_yscale("log")
        below.set_xticks(sizes, [f"{each.block_size}" for each in result.sizes])
        below.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        below.set_xlabel("slots a block")
    return figure


def words_of_block_sizes(result: BlockSizes) -> str:
    parts = [
        f"{each.block_size}: {percent(each.waste_share, 2)}, {each.entries_per_request:,.1f}"
        for each in result.sizes
    ]
    return (
        "Two lines over the number of slots in a block: the share of empty slots, and the mean "
        "number of entries in a request's table. " + "; ".join(parts) + "."
    )


# -- churn ---------------------------------------------------------------------------------------


def figure_of_churn(result: Churn) -> Figure:
    """Above and below one memory each: free in all, and the longest request that would fit."""
    moments = [result.sample_every * (i + 1) for i in range(len(result.paged.samples))]
    x = [float(moment) for moment in moments]
    titles = ("In one piece", "In blocks")
    with panels(*titles, sharex=True, sharey=True) as (figure, axes):
        for panel, outcome in zip(axes, (result.contiguous, result.paged), strict=True):
            free = [_mib(tokens) for tokens, _ in outcome.samples]
            hole = [_mib(tokens) for _, tokens in outcome.samples]
            panel.fill_between(
                x, hole, free, facecolor="none", edgecolor="#b9c0c8", hatch="////", linewidth=0
            )
            _thin(panel, x, free, 0, "free in all")
            _thin(panel, x, hole, 1, "largest request that fits")
            panel.set_ylabel("MiB")
        axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, 1.05), ncols=2)
        axes[0].set_ylim(0, 1.35 * max(_mib(f) for f, _ in result.contiguous.samples))
        axes[1].set_xlabel("requests that have arrived")
        axes[1].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    return figure


def _thin(panel: Any, x: list[float], y: list[float], look_index: int, label: str) -> None:
    from mie.book.palette import look

    style = look(look_index)
    marks = dict(marker=style.marker, markersize=3.5, markevery=(2 * look_index, 6))
    panel.plot(x, y, color=style.hex, linestyle=style.dash, linewidth=1.3, label=label, **marks)


def _mib(tokens: int) -> float:
    return tokens * BYTES_PER_TOKEN / 2**20


def words_of_churn(result: Churn) -> str:
    parts = []
    for each in (result.contiguous, result.paged):
        free = sum(tokens for tokens, _ in each.samples)
        holes = sum(tokens for _, tokens in each.samples)
        count = len(each.samples)
        parts.append(
            f"{each.memory}: {_mib(free) / count:.0f} MiB free on average, of which the largest "
            f"request that fits takes {_mib(holes) / count:.0f} MiB; {each.refused_by_holes} "
            f"requests refused because of holes, {each.refused_full} for want of memory"
        )
    one_line = all(free == hole for free, hole in result.paged.samples)
    return (
        f"Two lines for each memory while {result.arrivals:,} requests arrive: what is free in "
        f"all, and the largest request that would fit, {len(result.paged.samples)} samples. "
        + "; ".join(parts)
        + (". In blocks the two lines are one." if one_line else ".")
    )


FIGURES: dict[str, tuple[Callable[[Any], Figure], Callable[[Any], str]]] = {
    "reservations": (figure_of_reservations, words_of_reservations),
    "sharing": (figure_of_sharing, words_of_sharing),
    "block_sizes": (figure_of_block_sizes, words_of_block_sizes),
    "churn": (figure_of_churn, words_of_churn),
}
