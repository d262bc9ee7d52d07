"""A bar for whoever waits: answers that are done, and tokens a second.

Invariant: it is drawn only where somebody looks, on a terminal's standard error or in a notebook
that is open, so that a program's output and a published page are the same with and without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(num_requests: int, wanted: bool | None) -> Iterator[Callable[[int, int], None]]:
    """``tell(finished, tokens)`` adds to it. ``wanted`` None: for several, if somebody looks."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    looks = console.is_terminal or (console.is_jupyter and not os.environ.get("MIE_BOOK"))
    shown = wanted if wanted is not None else num_requests > 1 and looks
    columns = (
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]:,.1f} tokens/s"),
    )
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task("answers", total=num_requests, rate=0.0)
        total = 0

        def tell(finished: int, tokens: int) -> None:
            nonlocal total
            total += tokens
            elapsed = progress.tasks[task].elapsed or 0.0
            progress.update(task, advance=finished, rate=total / elapsed if elapsed else 0.0)

        yield tell
