"""A bar for whoever waits: answers that are done, and tokens a second.

Invariant: it is drawn on standard error and only where somebody looks, so that a program's output
is the same with and without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(num_requests: int, wanted: bool | None) -> Iterator[Callable[[int, int], None]]:
    """``tell(finished, tokens)`` adds to the bar. ``wanted`` None: for several, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    shown = wanted if wanted is not None else num_requests > 1 and console.is_terminal
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
