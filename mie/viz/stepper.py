"""A picture that moves by steps, in a page that nothing runs behind.

Invariant: every frame, as picture and as text, is in the page before any script runs. The
script only hides all frames but one and answers the keys; without it, and in print, the first
and the last picture stand with the text of every step. Nothing is fetched, and two steppers on
a page know nothing of each other.

    frames = [Frame(svg, "Block 1 goes to A."), Frame(svg, "Block 2 goes to B.")]
    Stepper(frames, "Two allocations")

Cost: the page grows by the frames' bytes: 100 frames of 5 KB are half a megabyte, and hidden
frames are laid out but not painted.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from mie.book.output import Output, escape, style


@dataclass(frozen=True)
class Frame:
    """One picture and the words that say the same: whoever reads only ``text`` learns every number.

    ``svg`` is one whole ``<svg>`` element. ``name`` says which frame this is ("layer 3"), where
    "step 3" would say too little.
    """

    svg: str
    text: str
    name: str = ""

    def __repr__(self) -> str:
        return f"{self.name}: {self.text}" if self.name else self.text

    def _repr_mimebundle_(
        self, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
    ) -> dict[str, Any]:
        html = (
            f'<figure class="mie-output mie-stepper">{style("viz/stepper.css")}'
            f"{_frame_html(self.svg, self.name, self.text)}</figure>"
        )
        return {"text/html": html, "text/plain": repr(self)}


class Stepper(Output):
    """Frames, shown one at a time: buttons, a slider, the arrow keys, Home and End.

    Frames should have one size, so that nothing moves but what changed. ``label`` is what a
    frame without a name is called, with its number: step 3.
    """

    def __init__(self, frames: Sequence[Frame], title: str, label: str = "step") -> None:
        if not frames:
            raise ValueError(f"the stepper {title!r} has no frames")
        self.frames = tuple(frames)
        self.title = title
        self.label = label

    def name(self, index: int) -> str:
        """What a frame is called: by its own name, or by its number; alone it needs neither."""
        number = f"{self.label} {index + 1}" if len(self.frames) > 1 else ""
        return self.frames[index].name or number

    def text(self) -> str:
        steps = (
            f"{self.name(i)}: {frame.text}" if self.name(i) else frame.text
            for i, frame in enumerate(self.frames)
        )
        return "\n".join([self.title, *steps])

    def html(self) -> str:
        identity = _identity(self)
        frames = "".join(
            _frame_html(scope_ids(frame.svg, f"{identity}-{index}-"), self.name(index), frame.text)
            for index, frame in enumerate(self.frames)
        )
        return (
            f'<figure class="mie-output mie-stepper" id="{identity}" tabindex="0" role="group" '
            f'aria-label="{escape(self.title)}" data-lm-suppress-shortcuts="true">'
            f"<figcaption>{escape(self.title)}</figcaption>{style('viz/stepper.css')}"
            f'<div class="mie-frames">{frames}</div>'
            f"{self._controls_html() if len(self.frames) > 1 else ''}"
            f"<script>{_script()}</script></figure>"
        )

    def _controls_html(self) -> str:
        last = len(self.frames) - 1
        label = escape(self.label)
        return (
            '<div class="mie-controls" hidden="hidden">'
            f'<button type="button" data-go="-1" aria-label="Previous {label}">{_BACK}</button>'
            f'<input type="range" min="0" max="{last}" value="0" step="1" aria-label="{label}"/>'
            f'<button type="button" data-go="1" aria-label="Next {label}">{_FORWARD}</button>'
            '<button type="button" data-play="" aria-label="Play" aria-pressed="false">'
            f"{_PLAY}{_PAUSE}</button>"
            '<span class="mie-where" aria-hidden="true"></span></div>'
            '<p class="mie-live" aria-live="polite"></p>'
        )


def scope_ids(svg: str, prefix: str) -> str:
    """Every id and every reference to one, with ``prefix`` before it: a copy that shares nothing.

    A quote inside text is always escaped in our drawings, so text that looks like an attribute
    is safe.
    """
    return re.sub(r'(\sid="|\shref="#|\sxlink:href="#|="url\(#)', rf"\g<1>{prefix}", svg)


def _icon(name: str, path: str) -> str:
    return (
        f'<svg class="mie-{name}" viewBox="0 0 16 16" aria-hidden="true"><path d="{path}"/></svg>'
    )


_BACK = _icon("back", "M10.5 3 5.5 8l5 5")
_FORWARD = _icon("forward", "M5.5 3l5 5-5 5")
_PLAY = _icon("play", "M4.5 2.5v11l9-5.5z")
_PAUSE = _icon("pause", "M4 3h3v10H4zM9 3h3v10H9z")


def _frame_html(svg: str, name: str, text: str) -> str:
    heading = f"<strong>{escape(name)}</strong> " if name else ""
    return (
        f'<div class="mie-frame"><div class="mie-picture">{svg}</div>'
        f'<p class="mie-words">{heading}<span>{escape(text)}</span></p></div>'
    )


_times_rendered: Counter[str] = Counter()


def _identity(stepper: Stepper) -> str:
    """An id that a second run of the same notebook gives again, and no other stepper has.

    A hash of the content; the same content shown again in one run gets a number behind it.
    """
    frames = [(frame.svg, frame.text, frame.name) for frame in stepper.frames]
    content = repr((stepper.title, stepper.label, frames))
    digest = hashlib.sha256(content.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    _times_rendered[digest] += 1
    again = _times_rendered[digest]
    return f"mie-{digest}" if again == 1 else f"mie-{digest}-{again}"


@cache
def _script() -> str:
    lines = files("mie").joinpath("viz/stepper.js").read_text("utf-8").splitlines()
    code = (line.strip() for line in lines)
    return "\n".join(line for line in code if line and not line.startswith("//"))
