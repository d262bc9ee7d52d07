"""A matplotlib figure as a frame, for drawings that are plots.

Invariant: the same figure gives the same bytes, and nothing in it reaches the page around it.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from mie.book.output import escape
from mie.viz.stepper import Frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure_frame(figure: Figure, text: str, name: str = "") -> Frame:
    """The figure as SVG; ``text`` is its other form and says what it shows, with the numbers."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "mie", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    drawing = buffer.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    # Its style sheet says `*`, which would mean the whole page: the same two rules go on the root.
    alien = r"<style.*?</style>|<metadata>.*?</metadata>|<!--.*?-->"
    drawing = re.sub(alien, "", drawing, flags=re.DOTALL)
    width = figure.get_figwidth() * 96  # CSS pixels: inches of 96
    root = (
        f'<svg role="img" style="stroke-linejoin:round;stroke-linecap:butt;max-width:{width:g}px"'
    )
    title = f"<title>{escape(text)}</title>"
    return Frame(
        re.sub("<svg([^>]*>)", lambda m: f"{root}{m[1]}{title}", drawing, count=1), text, name
    )
