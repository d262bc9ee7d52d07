"""What this program runs on and with: processors, memory, accelerator, versions.

Invariant: everything is asked of the machine at the moment of the call. ``None`` means that it
would not say, and is shown as such; nothing is guessed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path


def cpu_model() -> str | None:
    """The processor's name for itself."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine() or None


def usable_cores() -> int:
    """How many cores this process may keep busy: its affinity, or the container's quota if less."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cgroup("cpu.max")  # "200000 100000": microseconds per period, or "max 100000"
    if quota and not quota.startswith("max"):
        allowed, period = map(int, quota.split())
        cores = min(cores, max(1, allowed // period))
    return cores


def memory_bytes() -> int | None:
    """Physical memory, or the container's limit if that is less."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # the system doesn't know these names
        return None
    limit = _cgroup("memory.max")
    return min(total, int(limit)) if limit and limit != "max" else total


def gpu() -> str | None:
    """The accelerator's name and memory, as ``NVIDIA H200, 140 GiB``."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def versions(*packages: str) -> dict[str, str]:
    """Python's version and those of the packages that are installed."""
    found = {"Python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cgroup(name: str) -> str | None:
    """A limit of the control group that this process sees as its root; Linux only."""
    path = Path("/sys/fs/cgroup") / name
    return path.read_text().strip() if path.exists() else None


def may_have_a_gpu() -> bool:
    """Whether a driver of NVIDIA's is there: what can be known without loading torch."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))
