"""``mie bench kernels``: the kernels of the fast step, each by itself.

Invariant: as in ``mie.terminal.bench_commands``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from mie.terminal.bench import show_rows
from mie.terminal.console import stderr

if TYPE_CHECKING:
    from mie.bench.kernels import KernelTime

HOW = (
    "each kernel alone: many calls recorded as one CUDA graph, the median replay divided by the "
    "calls; bfloat16, random numbers; attention on the K and V of four layers in turn, in blocks "
    "scattered at random; values are seconds"
)


def measured() -> tuple[list[KernelTime], str]:
    """The times, and the same as a recording: JSON with its stamp."""
    import torch

    from mie.bench.kernels import measure_kernels
    from mie.bench.recorded_run import stamp_of

    with stderr().status("") as status:
        times = measure_kernels(status.update)
    where = stamp_of(torch.device("cuda"), torch.bfloat16)
    values = {time.name: time.seconds for time in times}
    return times, json.dumps({**where, "how": HOW, "values": values}, indent=2)


def show_kernels(times: Sequence[KernelTime], console: Console) -> None:
    """A row for each: microseconds, and what it reaches of what it is counted in."""
    rows = [
        (
            time.name,
            f"{time.seconds * 1e6:,.2f}",
            f"{time.bytes_per_second / 1e12:.2f}" if time.num_bytes else "",
            f"{time.flops_per_second / 1e12:.0f}" if time.num_flops else "",
        )
        for time in times
    ]
    show_rows("Kernels, each alone", ("kernel", "µs", "TB/s", "TFLOP/s"), rows, console)
