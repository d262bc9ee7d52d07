"""A drawing with knobs: live where a kernel runs, all their positions on the published page.

Invariant: the published page shows the same pictures as the live one and needs no kernel, no
widget script and no network: while the book is executed (``MIE_BOOK`` is set) the knobs turn
into the steps of a stepper.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from mie.viz.stepper import Frame, Stepper

_MOST_FRAMES = 100


def interactive(draw: Callable[..., Frame], title: str, /, **choices: Iterable[Any]) -> Any:
    """``draw(name=value, ...)`` for values that the reader picks from ``choices``.

        interactive(draw_head, "Where head h looks", layer=range(4), head=range(3))

    Returns something that displays itself: widgets in a live notebook, else a ``Stepper``.
    """
    values = {name: list(options) for name, options in choices.items()}
    if _kernel_runs() and not os.environ.get("MIE_BOOK"):
        return with_widgets(draw, values)
    return with_steps(draw, title, values)


def with_widgets(draw: Callable[..., Frame], choices: dict[str, list[Any]]) -> Any:
    """One slider over each list of choices; every move draws again."""
    import ipywidgets
    from IPython.display import display

    sliders = {
        name: ipywidgets.SelectionSlider(
            options=[(str(value), value) for value in values],
            description=name,
            continuous_update=False,
        )
        for name, values in choices.items()
    }
    return ipywidgets.interactive(lambda **chosen: display(draw(**chosen)), **sliders)


def with_steps(draw: Callable[..., Frame], title: str, choices: dict[str, list[Any]]) -> Stepper:
    """All combinations, the last choice turning fastest; ValueError for too many to publish."""
    combinations = list(itertools.product(*choices.values()))
    if len(combinations) > _MOST_FRAMES:
        sizes = " × ".join(f"{len(values)} {name}" for name, values in choices.items())
        raise ValueError(f"{sizes} is {len(combinations)} pictures; a page takes {_MOST_FRAMES}")
    frames = []
    for combination in combinations:
        chosen = dict(zip(choices, combination, strict=True))
        frame = draw(**chosen)
        if not isinstance(frame, Frame):
            raise TypeError(
                f"draw returned {type(frame).__name__}, not a Frame: a picture needs its text; "
                "figure_frame(figure, text) makes one from a matplotlib figure"
            )
        name = ", ".join(f"{key} {value}" for key, value in chosen.items())
        frames.append(replace(frame, name=name))
    return Stepper(frames, title)


def _kernel_runs() -> bool:
    try:
        from IPython import get_ipython
    except ImportError:  # only the book's readers install it
        return False
    return getattr(get_ipython(), "kernel", None) is not None
