"""The memory benchmarks as one page that needs nothing else: plots, and the tables below them.

Invariant: the page fetches nothing and runs nothing, and the same numbers give the same bytes.
Every plot carries its words as alternative text, and stands above the table with its numbers.

Needs matplotlib, from the ``book`` extra.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from mie.bench.memory import MemoryReport
from mie.bench.memory_plots import FIGURES
from mie.bench.memory_tables import Table, memory_tables
from mie.bench.scheduling_plots import SCHEDULING_FIGURES

if TYPE_CHECKING:
    from mie.bench.memory_plots import Figure

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 46rem; }
body { margin: 2rem auto; padding: 0 1rem; }
figure { margin: 1.2rem 0; }
figure svg { display: block; width: 100%; height: auto; background: white; border-radius: 6px; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 60%; }
th, td { text-align: right; padding: .3rem .8rem; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { border-bottom: 2px solid; }
td, tbody th { border-bottom: 1px solid #8884; font-weight: normal; }
footer { margin-top: 3rem; opacity: .75; font-size: .875rem; }
"""


def memory_page(report: MemoryReport) -> str:
    """The whole page. Raises ConfigError without matplotlib."""
    tables = memory_tables(report)
    figures = FIGURES | SCHEDULING_FIGURES
    assert figures.keys() <= tables.keys(), f"plots {[*figures]} and tables {[*tables]}"
    sections = [
        _section(table, _figure(report, name, *figures[name]) if name in figures else "")
        for name, table in tables.items()
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>What paging and scheduling save</title>\n<style>{STYLE}</style>\n"
        "</head>\n<body>\n<main>\n"
        "<h1>What paging and scheduling save</h1>\n"
        "<p>Counts of blocks, tokens and steps at the footprint of Qwen2-0.5B in bfloat16, the "
        "same on every machine.</p>\n"
        + "\n".join(sections)
        + f"\n</main>\n<footer>mie bench memory --seed {report.seed}</footer>\n</body>\n</html>\n"
    )


def _figure(
    report: MemoryReport,
    name: str,
    figure_of: Callable[[Any], Figure],
    words_of: Callable[[Any], str],
) -> str:
    from mie.viz import figure_frame

    result = getattr(report, name)
    frame = figure_frame(figure_of(result), words_of(result))
    return f"<figure>{_own_ids(frame.svg, name)}</figure>\n"


def _own_ids(svg: str, name: str) -> str:
    """Matplotlib numbers its ids from 1 in every figure; on one page they need a name in front."""
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    return re.sub(r"(url\(|href=\")#", rf"\1#{name}-", svg)


def _section(table: Table, figure: str = "") -> str:
    head = "".join(f'<th scope="col">{escape(word)}</th>' for word in table.head)
    body = "".join(_row(row) for row in table.rows)
    return (
        f"<section>\n<h2>{escape(table.title)}</h2>\n<p>{escape(table.reading)}</p>\n{figure}"
        f'<div class="table"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>'
        "</div>\n</section>"
    )


def _row(row: tuple[str, ...]) -> str:
    first, *rest = map(escape, row)
    cells = "".join(f"<td>{cell}</td>" for cell in rest)
    return f'<tr><th scope="row">{first}</th>{cells}</tr>\n'
