"""Compile the Triton kernels for GPUs that are not there, and show what became of each.

Invariant: what is compiled is what the engine launches. A case (``kernel_cases``) calls the public
function of a kernel with a model's shapes, on torch's ``meta`` device: tensors without memory. The
function chooses tiles, warps and stages as it always does. Only the last step is another one::

    rms_norm(x, weight, eps)                    x, weight: shapes and dtypes, no numbers
      └─ _rms_norm_kernel[grid](...)            as on a GPU, up to here
           └─ JITFunction.run ── compile ── PTX ── ptxas -v ── cubin
                                 │                 │
                                 │                 registers, bytes spilled
                                 for an architecture that a stand-in for the driver names

Shown for each: registers a thread, bytes of shared memory, bytes of stores and loads that ptxas had
to spill, and whether the PTX has tensor core instructions (wgmma of Hopper, or mma) and copies past
the registers (cp.async, or tma). Launches that compile to the same code share a line.

Exit status: 1 where a kernel spills beyond what ``kernel_cases.EXPLAINED_SPILLS`` allows, wants
more shared memory than the architecture has, or does not compile; else 0. 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

# Shared memory that one block of threads may have: CUDA C++ Programming Guide, table of compute
# capabilities. Of what is not listed nothing is checked.
KIB = 1024
SHARED_MEMORY = {80: 163 * KIB, 86: 99 * KIB, 87: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB}
INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "cp.async": r"\bcp\.async\.c[ag]\b",
    "tma": r"\bcp\.async\.bulk\.tensor",
}
COLUMNS = (
    "kernel", "configuration", "architecture", "warps", "registers", "shared", "spills",
    "instructions", "seconds",
)  # fmt: skip


@dataclass
class Line:
    """What became of one kernel, for all configurations that compile to the same code."""

    kernel: str
    configurations: list[str]
    architecture: int
    num_warps: int = 0
    registers: int = 0
    shared_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    instructions: list[str] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""

    @property
    def spilled(self) -> int:
        return self.spill_store_bytes + self.spill_load_bytes


class AbsentGPU:
    """Stands where Triton looks for its driver: names an architecture, and can launch nothing."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture  # a process keeps what it has compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_case(table: str, name: str, architecture: int, models: Collection[str]) -> list[Line]:
    """All lines of one kernel for one architecture. Runs in a process of the pool."""
    cases = importlib.import_module(table)
    lines: dict[str, Line] = {}
    for launch in cases.CASES[name]:
        for model in (model for model in cases.MODELS if model.name in models):
            which = f" {launch.__name__}" if len(cases.CASES[name]) > 1 else ""
            configuration = model.name + which
            try:
                compiled = compiled_by(launch, model, name, architecture)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                lines[configuration] = Line(name, [configuration], architecture, error=text)
                continue
            for kernel, log, seconds in compiled:
                if kernel.hash not in lines:
                    lines[kernel.hash] = described(name, architecture, kernel, log, seconds)
                if configuration not in lines[kernel.hash].configurations:
                    lines[kernel.hash].configurations.append(configuration)
    return list(lines.values())


def compiled_by(
    launch: Callable[[Any, int], object], model: Any, name: str, architecture: int
) -> list[tuple[Any, str, float]]:
    """What ``launch`` compiles of the kernel ``name``: (kernel, ptxas's log, seconds) each time.

    Other kernels that it launches are left out. The log is empty for a kernel that was compiled
    before. Raises LookupError where ``name`` is not launched.
    """
    import triton
    from triton.runtime.jit import JITFunction

    compiled: list[tuple[Any, str, float]] = []
    others: set[str] = set()
    run = JITFunction.run

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if self.__name__ != name:
            others.add(self.__name__)
            return
        log, start = io.StringIO(), perf_counter()
        with redirect_stdout(log):
            kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((kernel, log.getvalue(), perf_counter() - start))

    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True  # a kernel out of the cache has no log
    triton.runtime.driver.set_active(AbsentGPU(architecture))
    JITFunction.run = compile_instead
    try:
        launch(model, architecture)
    finally:
        JITFunction.run = run
    if not compiled:
        raise LookupError(f"{launch.__name__} launched {sorted(others)}, not {name}")
    return compiled


def described(name: str, architecture: int, kernel: Any, log: str, seconds: float) -> Line:
    """A line without configurations, read from the PTX and from what ptxas said."""

    def total(pattern: str) -> int:
        found = re.findall(pattern, log)
        assert found, f"ptxas did not say {pattern!r} of {name}:\n{log}"
        return sum(map(int, found))

    return Line(
        name,
        [],
        architecture,
        num_warps=kernel.metadata.num_warps,
        registers=total(r"Used (\d+) registers"),
        shared_bytes=kernel.metadata.shared,
        spill_store_bytes=total(r"(\d+) bytes spill stores"),
        spill_load_bytes=total(r"(\d+) bytes spill loads"),
        instructions=[
            word for word, pattern in INSTRUCTIONS.items() if re.search(pattern, kernel.asm["ptx"])
        ],
        seconds=seconds,
    )


def complaint(line: Line, explained: Mapping[tuple[str, int], tuple[int, str]]) -> str:
    """What is wrong with a line, or nothing."""
    if line.error:
        return line.error
    limit = SHARED_MEMORY.get(line.architecture)
    if limit is not None and line.shared_bytes > limit:
        return f"{line.shared_bytes} bytes of shared memory, the architecture has {limit}"
    allowed, _ = explained.get((line.kernel, line.architecture), (0, ""))
    if line.spilled > allowed:
        return f"{line.spilled} bytes of spills, {allowed} are explained"
    return ""


def table_of(lines: Sequence[Line]) -> str:
    """The lines as text, in columns."""
    rows = [
        (
            line.kernel,
            ", ".join(line.configurations),
            f"sm_{line.architecture}",
            *(
                ("failed", *[""] * 5)
                if line.error
                else (
                    str(line.num_warps),
                    str(line.registers),
                    f"{line.shared_bytes:,}",
                    f"{line.spill_store_bytes}/{line.spill_load_bytes}",
                    " ".join(line.instructions) or "-",
                    f"{line.seconds:.2f}",
                )
            ),
        )
        for line in lines
    ]
    rows.insert(0, COLUMNS)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = {"warps", "registers", "shared", "spills", "seconds"}
    return "\n".join(
        "  ".join(
            cell.rjust(width) if title in numbers else cell.ljust(width)
            for cell, width, title in zip(row, widths, COLUMNS, strict=True)
        ).rstrip()
        for row in rows
    )


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compile the Triton kernels without a GPU, as the engine launches them in "
        "bfloat16, and show registers, shared memory and spills."
    )
    parser.add_argument(
        "--architecture", nargs="+", default=["sm_80", "sm_90"], metavar="SM",
        help="GPU architectures, for instance sm_80 (A100) sm_89 (L40) sm_90 (H100, H200)",
    )  # fmt: skip
    parser.add_argument("--kernel", nargs="+", metavar="NAME", help="these kernels only")
    parser.add_argument("--model", nargs="+", metavar="NAME", help="shapes of these models only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lines there, too")
    parser.add_argument("--cases", default="kernel_cases", metavar="MODULE", help="another table")
    parser.add_argument("--processes", type=int, default=2, help="how many compile at once")
    wanted = parser.parse_args(given)
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error(
            "TRITON_INTERPRET is set, so this process would interpret kernels, not compile them; "
            "say: env -u TRITON_INTERPRET python tools/compile_kernels.py"
        )
    if importlib.util.find_spec("triton") is None:
        parser.error("triton is not installed; it exists for Linux only")
    for architecture in wanted.architecture:
        if not re.fullmatch(r"sm_\d{2,3}", architecture):
            parser.error(f"{architecture!r} is no architecture; sm_90 would be one")
    cases = importlib.import_module(wanted.cases)
    for kind, known in (("kernel", list(cases.CASES)), ("model", [m.name for m in cases.MODELS])):
        names = list(dict.fromkeys(getattr(wanted, kind) or known))
        setattr(wanted, kind, names)
        if unknown := [name for name in names if name not in known]:
            parser.error(f"no {kind} {unknown[0]!r} in {wanted.cases}; known: {', '.join(known)}")
    return wanted


def compile_all(wanted: argparse.Namespace) -> list[Line]:
    """One task a kernel and architecture. A process that Triton brings down ends the command."""
    tasks = [
        (wanted.cases, name, int(architecture.removeprefix("sm_")), wanted.model)
        for name in wanted.kernel
        for architecture in dict.fromkeys(wanted.architecture)
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(wanted.processes, mp_context=context) as pool:
        return [
            line for lines in pool.map(compile_case, *zip(*tasks, strict=True)) for line in lines
        ]


def main(given: Sequence[str] | None = None) -> int:
    wanted = arguments(given)
    cases = importlib.import_module(wanted.cases)
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("TRITON_CACHE_DIR", cache)
        lines = compile_all(wanted)
    print(f"Triton {version('triton')}, {cases.SETTING}\n\n{table_of(lines)}")
    complaints = [
        (line, text) for line in lines if (text := complaint(line, cases.EXPLAINED_SPILLS))
    ]
    for place in dict.fromkeys((line.kernel, line.architecture) for line in lines if line.spilled):
        if place in cases.EXPLAINED_SPILLS:
            kernel, architecture = place
            allowed, why = cases.EXPLAINED_SPILLS[place]
            print(f"\n{kernel} (sm_{architecture}) may spill {allowed} bytes: {why}")
    for line, text in complaints:
        where = f"sm_{line.architecture}, {', '.join(line.configurations)}"
        print(f"\nwrong: {line.kernel} ({where}): {text}")
    if wanted.json:
        wanted.json.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
