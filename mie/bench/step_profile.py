"""What a GPU does in a few steps: how long it works, how long the CPU waits for it, which kernels.

Invariant: times are those of the GPU's own clock, as CUPTI records them through ``torch.profiler``;
kernels of a replayed graph appear one by one. Everything that the profiled steps launch ends before
the recording does, so the sum over kernels is that of whole steps.

    CPU   schedule | launch | update | wait   ...
    GPU        kernel kernel kernel kernel .. gap .. kernel        busy: the union of the kernels

A profile that records kernels alone hardly disturbs a step. One that records PyTorch's operations
too makes each of them some microseconds slower: it is for looking, in https://ui.perfetto.dev, and
no number is taken from it.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.bench.result import Result

if TYPE_CHECKING:
    import torch

ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_THE_CPU = ("cuda_runtime", "cuda_driver")
# Not cudaDeviceSynchronize: no step needs it, and the end of a profile does.
WAITING = {
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
}
SHOWN = 12  # kernels that are listed by name


@dataclass(frozen=True)
class Kernel(Result):
    """All launches of one kernel, a step on average."""

    name: str
    seconds: float
    launches: float


@dataclass(frozen=True)
class GpuSteps(Result):
    """Averages of a step. ``cpu_seconds`` is the time that the CPU did not wait for the GPU."""

    steps: int
    wall_seconds: float
    busy_seconds: float
    cpu_seconds: float
    launches: float  # kernels and copies
    kernels: tuple[Kernel, ...]  # those that take most


def profile_steps(
    step: Callable[[], object],
    goes_on: Callable[[], bool],
    count: int,
    device: torch.device,
    *,
    operations: bool = False,
) -> tuple[str, int, float]:
    """Call ``step`` up to ``count`` times while ``goes_on()``, and record what it does on
    ``device``; with ``operations`` also what PyTorch does on the CPU.

    Returns the trace (JSON in Chrome's format), the number of steps, and their seconds.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if cuda else []
    activities += [ProfilerActivity.CPU] if operations or not cuda else []
    if cuda:
        torch.cuda.synchronize(device)
    taken = 0
    with profile(activities=activities) as profiler:
        began = time.perf_counter()
        while taken < count and goes_on():
            step()
            taken += 1
        seconds = time.perf_counter() - began
        if cuda:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return file.read_text(encoding="utf-8"), taken, seconds


def read_profile(trace: str, steps: int, seconds: float) -> GpuSteps:
    """What ``profile_steps`` recorded, as averages of a step."""
    events = [event for event in json.loads(trace)["traceEvents"] if event.get("ph") == "X"]
    gpu = [event for event in events if event.get("cat") in ON_THE_GPU]
    cpu = [event for event in events if event.get("cat") in ON_THE_CPU]
    blocking = {_correlation(event) for event in gpu if _blocks(event)} - {None}
    waits = [e for e in cpu if e["name"] in WAITING or _correlation(e) in blocking]
    waited = 1e-6 * union((event["ts"], event["ts"] + event["dur"]) for event in waits)
    busy = 1e-6 * union((event["ts"], event["ts"] + event["dur"]) for event in gpu)
    return GpuSteps(
        steps=steps,
        wall_seconds=seconds / steps,
        busy_seconds=busy / steps,
        cpu_seconds=max(0.0, seconds - waited) / steps,
        launches=len(gpu) / steps,
        kernels=_kernels(gpu, steps),
    )


def union(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the (start, end) spans lasts."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _kernels(gpu: Iterable[dict[str, Any]], steps: int) -> tuple[Kernel, ...]:
    durations: dict[str, list[float]] = defaultdict(list)
    for event in gpu:
        durations[event["name"]].append(1e-6 * event["dur"])
    kernels = [
        Kernel(name, sum(each) / steps, len(each) / steps) for name, each in durations.items()
    ]
    return tuple(sorted(kernels, key=lambda kernel: -kernel.seconds)[:SHOWN])


def _correlation(event: dict[str, Any]) -> Any:
    """The number that a call and the work that it launched have in common."""
    return event.get("args", {}).get("correlation")


def _blocks(event: dict[str, Any]) -> bool:
    """A copy into ordinary memory of the host: the call returns when it is done."""
    return "DtoH" in event["name"] and "Pageable" in event["name"]
