"""One way for plots to look: quiet axes, drawings that stay sharp, and never colour alone.

Invariant: two series that differ in colour differ in line and marker too, two bars in hatching
too, and the same data give the same bytes.
"""

from __future__ import annotations

from typing import Any

from mie.book.palette import LOOKS, look

STYLE: dict[str, Any] = {
    "figure.figsize": (7.0, 3.4),
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    # The page's own fonts draw the letters; the hash salt makes the ids inside the file repeatable.
    "svg.fonttype": "none",
    "svg.hashsalt": "mie",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#59616b",
    "axes.labelcolor": "#1f2328",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.8,
    "xtick.color": "#59616b",
    "ytick.color": "#59616b",
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "hatch.linewidth": 0.9,
    "legend.frameon": False,
}


def use_style() -> None:
    """Set the book's style for every plot that follows, and SVG as the notebook's format."""
    import matplotlib.style
    from cycler import cycler

    series = (
        cycler(color=[each.hex for each in LOOKS])
        + cycler(marker=[each.marker for each in LOOKS])
        + cycler(linestyle=[each.dash for each in LOOKS])
    )
    matplotlib.style.use({**STYLE, "axes.prop_cycle": series})
    if _in_notebook():
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("svg", metadata={"Date": None})


def bar_style(index: int) -> dict[str, Any]:
    """Arguments for ``axes.bar(..., **bar_style(i))``: series ``i``'s colour and its hatching."""
    return {"color": look(index).hex, "hatch": look(index).hatch, "edgecolor": "white"}


def _in_notebook() -> bool:
    """Whether a kernel with a display runs this, rather than a plain interpreter."""
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None
