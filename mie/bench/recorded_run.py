"""A measured workload as a recording: the numbers, and where, when and with what they were taken.

Invariant: the file has what ``mie.book.recordings`` asks of one (``gpu``, ``torch``, ``date``,
``how``, ``values``), so that it can be put into ``book/results`` and cited. Values are in SI units
without prefix; everything else about the run stands beside them.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie import __version__, machine

if TYPE_CHECKING:
    import torch

    from mie.bench.offline import WorkloadResult
    from mie.model.decoder import Decoder

CHECKOUT = Path(__file__).resolve().parents[2]


def stamp(decoder: Decoder, commit: str | None = None) -> dict[str, Any]:
    """``stamp_of`` the device and dtype that ``decoder`` has."""
    return stamp_of(decoder.device, decoder.dtype, commit)


def stamp_of(device: torch.device, dtype: torch.dtype, commit: str | None = None) -> dict[str, Any]:
    """Hardware, versions, day and commit. ``commit`` None: that of the checkout, if it is one.

    ``gpu`` is the name of ``device``; without one it names the processor.
    """
    import torch

    cpu, cuda = machine.cpu_model(), device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_properties(device).name if cuda else f"none ({cpu})",
        "cpu": cpu,
        "cores": machine.usable_cores(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "triton": machine.versions("triton").get("triton"),
        "python": platform.python_version(),
        "mie": __version__,
        "commit": commit or commit_of(CHECKOUT),
        "date": date.today().isoformat(),
    }


def commit_of(folder: Path) -> str | None:
    """The commit that ``folder`` is at, and whether files differ from it; None if nobody knows."""

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    if not (folder / ".git").exists():
        return None
    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + (", changed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def as_recording(result: WorkloadResult, where: Mapping[str, Any]) -> dict[str, Any]:
    """``result`` with its stamp, ready for ``json.dumps``."""
    best, split, bound = result.best, result.split, result.bound
    values = {
        "output_tokens_per_s": best.tokens_per_second,
        "seconds": best.seconds,
        "output_tokens": best.output_tokens,
        "prompt_tokens": result.prompt_tokens,
        "requests": result.num_requests,
        "steps": best.steps,
        "step_wall_s": split.wall_seconds,
        "step_cpu_s": split.cpu_seconds,
        "step_schedule_s": split.schedule_seconds,
        "step_launch_s": split.launch_seconds,
        "step_update_s": split.update_seconds,
        "step_gpu_s": split.gpu_seconds,
        "step_gap_s": split.gap_seconds,
        "bound_tokens_per_s": bound.tokens_per_second if bound else None,
        "share_of_bound": result.share_of_bound,
    }
    return {
        **where,
        "how": (
            f"{result.model}, workload {result.workload}: the best of {len(result.runs)} runs "
            "after a warm-up; temperature 0.6, end of sequence ignored, no detokenising"
        ),
        "model": result.model,
        "workload": result.workload,
        "values": {name: value for name, value in values.items() if value is not None},
        "runs": [run.as_dict() for run in result.runs],
        "bound": bound.as_dict() if bound else None,
        "bound_says": result.bound_says,
        "kernels": [kernel.as_dict() for kernel in split.gpu.kernels] if split.gpu else [],
        "settings": result.settings,
    }
