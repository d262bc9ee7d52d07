"""The CUDA C++ kernel on a CPU: its source, compiled by the C++ compiler with an emulated warp.

Invariant: what is tested is ``paged_decode.cu`` as it stands. Only its instructions are others:
``warp_emulator.h`` takes the place of ``instructions.cuh``. The launch is that of ``_Kernel``, so
``paged_decode_cuda`` runs unchanged, with tensors of the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

from mie.kernels.cuda.paged_decode import SOURCE

COMPILER = shutil.which("g++") or shutil.which("clang++")
INCLUDE = '#include "instructions.cuh"'
POINTER, INTEGER, FLOAT = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_float
ARGUMENTS = [POINTER] * 11 + [FLOAT] + [INTEGER] * 9
ENTRY = """
extern "C" void run(int grid_x, int grid_y, int threads, const Half* q, const Half* k,
                    const Half* v, const int* tables, const int* rows, Half* out, const int* items,
                    float* partial, float* most, float* sum, int* arrived, float scale, long long J,
                    long long log_b, long long table_stride, long long capacity, long long q_x,
                    long long q_h, long long n, long long b, long long g) {
  auto kernel = [&] {
    NAME(q, k, v, tables, rows, out, items, partial, most, sum, arrived, scale, J, log_b,
         table_stride, capacity, q_x, q_h, n, b, g);
  };
  launch(grid_x, grid_y, threads, [](void* f) { (*static_cast<decltype(kernel)*>(f))(); }, &kernel);
}
"""


@functools.cache
def build(name: str, source: str) -> ctypes.CDLL:
    """``source`` with an entry for the kernel ``name``, such as ``paged_decode<FLOAT16, ...>``."""
    assert COMPILER is not None and INCLUDE in source
    header = Path(__file__).with_name("warp_emulator.h")
    source = source.replace(INCLUDE, "").replace("extern __shared__", "extern")
    text = f'#include "{header}"\n{source}\n{ENTRY.replace("NAME", name)}'
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "kernel.so")
        command = [COMPILER, "-std=c++17", "-O0", "-w", "-shared", "-fPIC"]
        command += ["-U_FORTIFY_SOURCE", "-x", "c++", "-", "-o", str(library)]
        subprocess.run(command, input=text, text=True, check=True)
        return ctypes.CDLL(str(library))


class EmulatedKernel:
    """What ``_Kernel`` is on a GPU. ``copied_bytes``, ``extra_cycles``: of the last launch."""

    source = SOURCE.read_text(encoding="utf-8")

    def __init__(self, name: str, device: int, shared_bytes: int) -> None:
        self.library = build(name, self.source)

    def launch(self, grid: tuple[int, int], threads: int, *arguments: object) -> None:
        run = self.library.run
        run.argtypes = [ctypes.c_int] * 3 + ARGUMENTS
        run(*grid, threads, *arguments)
        failure = ctypes.c_char_p.in_dll(self.library, "failure").value
        assert failure is None, failure.decode()
        EmulatedKernel.copied_bytes = self.counter("copied_bytes")
        EmulatedKernel.extra_cycles = self.counter("extra_cycles")

    def counter(self, name: str) -> int:
        return ctypes.c_longlong.in_dll(self.library, name).value
