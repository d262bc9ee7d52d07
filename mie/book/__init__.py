"""What chapters use: the strip, sources, predictions beside measurements, a clock, a plot style.

Without a GPU, Triton kernels are interpreted in a process that imports this first: Triton decides
when it is imported.
"""

import os

from mie.machine import may_have_a_gpu

if not may_have_a_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from mie.book.plots import bar_style
from mie.book.predict import Prediction, compare, exact, observed, recorded, reported
from mie.book.recordings import Recording, recording
from mie.book.source import show
from mie.book.strip import strip
from mie.book.timing import Timing, measure

__all__ = [
    "Prediction",
    "Recording",
    "Timing",
    "bar_style",
    "compare",
    "exact",
    "measure",
    "observed",
    "recorded",
    "recording",
    "reported",
    "show",
    "strip",
]
