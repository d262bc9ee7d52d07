"""What ``mie.bench.offline`` measured: runs, the split of a step, and both beside the bound.

Invariant: fields are readings of clocks and counts; whatever is divided or subtracted is a
property. Times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mie.bench.bound import Bound
from mie.bench.result import Result
from mie.bench.step_profile import GpuSteps


@dataclass(frozen=True)
class Window(Result):
    """Consecutive steps: seconds of all of them, and what of that the scheduler took."""

    steps: int
    seconds: float
    schedule_seconds: float
    update_seconds: float


@dataclass(frozen=True)
class OfflineRun(Result):
    """One run. ``steps`` are calls of ``step()``; ``window`` is in the middle of the output."""

    seconds: float
    output_tokens: int
    steps: int
    window: Window

    @property
    def tokens_per_second(self) -> float:
        """Output tokens."""
        return self.output_tokens / self.seconds


@dataclass(frozen=True)
class Split(Result):
    """Where an average step in the middle of the best run goes, in seconds.

    On a GPU: ``cpu_seconds`` is what the CPU does while it does not wait, ``gap_seconds`` is when
    the GPU has nothing to do. Without one the CPU is busy all the time, and the rest is None.
    """

    window: Window
    gpu: GpuSteps | None

    @property
    def wall_seconds(self) -> float:
        return self.window.seconds / self.window.steps

    @property
    def schedule_seconds(self) -> float:
        return self.window.schedule_seconds / self.window.steps

    @property
    def update_seconds(self) -> float:
        return self.window.update_seconds / self.window.steps

    @property
    def cpu_seconds(self) -> float:
        return self.wall_seconds if self.gpu is None else self.gpu.cpu_seconds

    @property
    def launch_seconds(self) -> float:
        """Of the CPU's time: all but scheduling and taking in results."""
        return max(0.0, self.cpu_seconds - self.schedule_seconds - self.update_seconds)

    @property
    def gpu_seconds(self) -> float | None:
        return self.gpu.busy_seconds if self.gpu else None

    @property
    def gap_seconds(self) -> float | None:
        return max(0.0, self.wall_seconds - self.gpu.busy_seconds) if self.gpu else None


@dataclass(frozen=True)
class WorkloadResult(Result):
    """All runs of one workload on one decoder. ``settings`` are the engine's."""

    model: str
    workload: str
    num_requests: int
    prompt_tokens: int
    settings: dict[str, Any]
    runs: tuple[OfflineRun, ...]
    bound: Bound | None
    bound_says: str  # where the limits are from, or why there is no bound
    split: Split

    @property
    def best(self) -> OfflineRun:
        return min(self.runs, key=lambda run: run.seconds)

    @property
    def share_of_bound(self) -> float | None:
        return self.bound.seconds / self.best.seconds if self.bound else None
