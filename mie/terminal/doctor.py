"""What works on this machine, what doesn't, and what to do about it.

Invariant: every line was found out by trying or by asking the system, now; a problem always comes
with what to do. ``problem`` is kept for what the engine cannot work without: a machine with no GPU,
no model yet and no notebook tools is healthy, and its lines are notes.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from mie.machine import cpu_model, memory_bytes, usable_cores
from mie.model import hub
from mie.model.packaged import home, installed

if TYPE_CHECKING:
    from rich.console import Console

GB = 1e9
ROOM_FOR_A_MODEL = 0.5 * GB  # the built-in model while it is unpacked
MEMORY_FOR_A_MODEL = 2 * GB  # torch, and the built-in model in float32 with its cache


class State(StrEnum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing looked at: how it is, and what to do if that is not as it should be."""

    topic: str
    state: State
    says: str
    advice: str = ""


def examine() -> list[Finding]:
    """All findings, from the ground up."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _processor,
        _memory,
        _needed_packages,
        _torch,
        _gpus,
        _triton,
        _models,
        _book_tools,
    ]
    return [finding for check in checks for finding in check()]


def show(findings: list[Finding], console: Console) -> None:
    """A line each: mark, topic, what is; below it what to do."""
    marks = {State.OK: ("✓", "green"), State.NOTE: ("–", "yellow"), State.PROBLEM: ("✗", "red")}
    for finding in findings:
        mark, colour = marks[finding.state]
        word = "" if finding.state is State.OK else f"{finding.state}: "
        console.print(f"[{colour}]{mark}[/] [bold]{finding.topic:9}[/] ", end="")
        console.print(f"{word}{finding.says}", markup=False, soft_wrap=True)
        if finding.advice:
            console.print(f"{'':12}→ {finding.advice}", style="dim", markup=False, soft_wrap=True)
    problems = sum(finding.state is State.PROBLEM for finding in findings)
    verdict = f"{problems} to solve first" if problems else "ready"
    console.print(f"\n{verdict}", style="bold red" if problems else "bold green")


# -- the machine --------------------------------------------------------------------------------


def _python() -> Iterator[Finding]:
    says = f"{platform.python_version()} in {sys.prefix}, on {platform.platform(terse=True)}"
    yield Finding("Python", State.OK, says)  # an older one would not have come this far


def _processor() -> Iterator[Finding]:
    flags = _cpu_flags()
    says = f"{cpu_model() or 'unknown'}, {usable_cores()} cores for this process"
    if flags is None:
        yield Finding("processor", State.OK, says)
    elif bf16 := sorted(flags & {"avx512_bf16", "amx_bf16", "bf16"}):
        yield Finding("processor", State.OK, f"{says}, bfloat16 in hardware ({', '.join(bf16)})")
    else:
        advice = "stay with float32, which is the default: bfloat16 is emulated here"
        yield Finding("processor", State.NOTE, f"{says}, no bfloat16 instructions", advice)


def _cpu_flags() -> set[str] | None:
    """What the processor says it can do; None where the system has no list."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return None
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    return set(lines[0].split()) if lines else None


def _memory() -> Iterator[Finding]:
    total = memory_bytes()
    if total is None:
        return
    says = f"{total / GB:.1f} GB"
    if total < MEMORY_FOR_A_MODEL:
        advice = (
            f"the built-in model wants {MEMORY_FOR_A_MODEL / GB:.0f} GB; --dtype bfloat16 halves it"
        )
        yield Finding("memory", State.NOTE, says, advice)
    else:
        yield Finding("memory", State.OK, says)


# -- packages -----------------------------------------------------------------------------------


def _needed_packages() -> Iterator[Finding]:
    wanting = _unmet(_requirements(extra=None))
    if wanting:
        advice = "pip install " + " ".join(f"'{requirement}'" for requirement in wanting)
        says = ", ".join(f"{wanted} (here: {here or 'none'})" for wanted, here in wanting.items())
        yield Finding("packages", State.PROBLEM, says, advice)
    else:
        yield Finding("packages", State.OK, "all that the engine needs")


def _book_tools() -> Iterator[Finding]:
    tools = _requirements(extra="book")
    if wanting := _unmet(tools):
        advice = "pip install 'mie[book]', or make setup in a checkout"
        yield Finding("book", State.NOTE, f"wanting {', '.join(map(str, wanting))}", advice)
    else:
        here = ", ".join(f"{tool.name} {_version(tool.name)}" for tool in tools)
        yield Finding("book", State.OK, here)


def _requirements(extra: str | None) -> list[Requirement]:
    """What mie asks for on this platform: always, or in addition for one ``extra``."""
    chosen = []
    for line in metadata.requires("mie") or []:
        requirement = Requirement(line)
        marker, requirement.marker = requirement.marker, None
        always = marker is None or marker.evaluate({"extra": ""})
        for_extra = marker is not None and marker.evaluate({"extra": extra or ""})
        if always if extra is None else for_extra and not always:
            chosen.append(requirement)
    return chosen


def _unmet(requirements: list[Requirement]) -> dict[Requirement, str | None]:
    """Those that are not met, with the version that is here instead."""
    here = {requirement: _version(requirement.name) for requirement in requirements}
    return {
        requirement: version
        for requirement, version in here.items()
        if version is None or not requirement.specifier.contains(version, prereleases=True)
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# -- computing ----------------------------------------------------------------------------------


def _torch() -> Iterator[Finding]:
    try:
        import torch

        ones = torch.ones(8, 8)
        assert torch.equal(ones @ ones, 8 * ones)
    except Exception as error:  # a broken installation can raise anything
        advice = "reinstall it: pip install --force-reinstall torch"
        yield Finding("torch", State.PROBLEM, f"does not compute: {error}", advice)
        return
    threads = torch.get_num_threads()
    yield Finding("torch", State.OK, f"{torch.__version__}, {threads} threads")


def _gpus() -> Iterator[Finding]:
    try:
        import torch
    except Exception:  # told by _torch
        return
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") and torch.version.cuda is None:
            advice = "install a CUDA build of torch: see pytorch.org/get-started"
            yield Finding("GPU", State.NOTE, "there is a driver, but torch is a CPU build", advice)
        else:
            advice = "none needed: the GPU chapters show recorded measurements"
            yield Finding("GPU", State.NOTE, "no CUDA device that torch can use", advice)
        return
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)


def _gpu(index: int) -> Finding:
    import torch

    device = torch.cuda.get_device_properties(index)
    says = f"cuda:{index} {device.name}, {device.total_memory / GB:.0f} GB"
    says += f", sm_{device.major}{device.minor}, CUDA {torch.version.cuda}"
    try:
        ones = torch.ones(16, 16, device=f"cuda:{index}", dtype=torch.bfloat16)
        assert (ones @ ones).sum().item() == 16**3
    except Exception as error:  # out of memory, no kernel for this device, a driver in trouble
        advice = "use --device cpu, or a build of torch for this GPU and driver"
        return Finding("GPU", State.PROBLEM, f"{says}: does not compute: {error}", advice)
    return Finding("GPU", State.OK, f"{says}, bfloat16 works")


def _triton() -> Iterator[Finding]:
    version = _version("triton")
    if version is None:
        advice = "none needed outside Linux: the kernel chapters say why they stop there"
        if sys.platform == "linux":
            advice = "pip install triton (the kernel chapters need it)"
        yield Finding("triton", State.NOTE, "not installed", advice)
        return
    pinned = [
        str(requirement.specifier)
        for requirement in map(Requirement, metadata.requires("torch") or [])
        if requirement.name == "triton" and not requirement.specifier.contains(version)
    ]
    if pinned:
        advice = f"pip install 'triton{pinned[0]}'"
        yield Finding("triton", State.NOTE, f"{version}, but torch asks for {pinned[0]}", advice)
    else:
        yield Finding("triton", State.OK, version)


# -- models -------------------------------------------------------------------------------------


def _models() -> Iterator[Finding]:
    name = hub.DEFAULT_MODEL
    folder = installed(hub.BUILT_IN[name])
    if folder is not None:
        try:
            hub.find_local(folder)
        except Exception as error:
            yield Finding(
                "model", State.PROBLEM, str(error), f"remove {folder}, it is fetched again"
            )
        else:
            size = sum(file.stat().st_size for file in folder.iterdir())
            yield Finding("model", State.OK, f"{name} in {folder}, {size / GB:.2f} GB")
        return
    free = shutil.disk_usage(_nearest_existing(home())).free
    megabytes = hub.BUILT_IN[name].wheel_bytes / 1e6
    says = f"{name} is not here yet; it would go to {home()} ({free / GB:.1f} GB free)"
    if free < ROOM_FOR_A_MODEL:
        yield Finding("model", State.PROBLEM, says, "make room, or set MIE_HOME to another disk")
    else:
        advice = f"mie doctor --fetch, or the first mie generate, downloads {megabytes:.0f} MB"
        yield Finding("model", State.NOTE, says, advice)
    if os.environ.get("HF_HUB_OFFLINE"):
        yield Finding("model", State.NOTE, "HF_HUB_OFFLINE is set: names on the hub stay unknown")


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())
