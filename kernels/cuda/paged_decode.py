"""Paged decode attention in CUDA C++: compiled on the first call, then launched as Triton's is.

Invariant: the same plan, workspace and output as ``mie.kernels.paged_decode``, so that either can
stand where the other does. One launch on torch's current stream, and nothing else: no copy, no
allocation but the output, no wait. So a graph can capture it, once the kernel is compiled.

The source is ``paged_decode.cu``. NVRTC, NVIDIA's compiler as a library, makes it machine code for
the GPU that is there; what Triton calls ``constexpr`` are the arguments of a C++ template::

    paged_decode<BFLOAT16, 128, 4, 3>     dtype, head size, warps, stages

It takes groups of at most 8 query heads, head sizes 64 and 128, float16 and bfloat16. The Triton
kernel takes more; nothing in the engine depends on this one. ``cuda.core`` is imported on the first
call, so the module can be imported, and read, without it.

Cost: that of the kernel, see the source. Compiling takes about a second for each template.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mie.kernels.decode_plan import DecodePlan

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "paged_decode.cu"
TYPES = {torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}
HEAD_DIMS = (64, 128)
MAX_GROUP = 8  # columns of a tensor core's second operand
LANES = 32
TOKENS = 16  # of a tile
ALIGNMENT = 16  # bytes that a lane copies at once


@dataclass(frozen=True)
class CudaConfig:
    """How a thread block works: ``warps`` of them, each with ``stages`` tiles in shared memory."""

    warps: int = 4
    stages: int = 3

    def __post_init__(self) -> None:
        if self.warps < 1 or self.stages < 2:
            raise ValueError(f"warps {self.warps} below 1, or stages {self.stages} below 2")

    def shared_bytes(self, head_dim: int) -> int:
        """Shared memory of a thread block: K and V, 2 bytes an element."""
        return self.warps * self.stages * 2 * TOKENS * head_dim * 2


def template(dtype: torch.dtype, head_dim: int, config: CudaConfig) -> str:
    """The kernel's name with its compile-time arguments, as C++ writes it."""
    return f"paged_decode<{TYPES[dtype]}, {head_dim}, {config.warps}, {config.stages}>"


def load_cuda_core() -> Any:
    """The package ``cuda.core``, under either of its names. Raises ``ImportError`` without it."""
    try:
        import cuda.core as core
    except ImportError:
        core = None
    if hasattr(core, "Program"):
        return core
    try:
        import cuda.core.experimental as experimental  # its name before version 0.5
    except ImportError as error:
        raise ImportError(
            "kernels in CUDA C++ are compiled by cuda.core: pip install cuda-core[cu13]"
        ) from error
    return experimental


def compile_kernel(name: str, arch: str) -> Any:
    """The source as machine code for ``arch``, such as ``sm_90``; needs no GPU.

    An ``ObjectCode`` of cuda.core; its ``get_kernel(name)`` loads it. An error in the source raises
    what cuda.core raises, with the compiler's log.
    """
    core = load_cuda_core()
    options = core.ProgramOptions(
        name=SOURCE.name, std="c++17", arch=arch, ftz=True, include_path=[str(FOLDER)]
    )
    program = core.Program(SOURCE.read_text(encoding="utf-8"), "c++", options)
    return program.compile("cubin", name_expressions=(name,))


class _Kernel:
    """A kernel loaded on one device, with as much shared memory as its launches need."""

    def __init__(self, name: str, device: int, shared_bytes: int) -> None:
        core = load_cuda_core()
        from cuda.bindings import driver

        core.Device(device).set_current()
        major, minor = torch.cuda.get_device_capability(device)
        self.code = compile_kernel(name, f"sm_{major}{minor}")
        self.kernel = self.code.get_kernel(name)
        handle = self.kernel.handle if hasattr(self.kernel, "handle") else self.kernel._handle
        # Above 48 KiB a kernel must ask for its shared memory.
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(most, shared_bytes, handle, device)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise ValueError(f"{shared_bytes} bytes of shared memory are refused: {status.name}")
        self.start, self.config = core.launch, core.LaunchConfig
        self.stream, self.shared_bytes = _TorchStream(device), shared_bytes

    def launch(self, grid: tuple[int, int], threads: int, *arguments: object) -> None:
        config = self.config(grid=grid, block=threads, shmem_size=self.shared_bytes)
        self.start(self.stream, config, self.kernel, *arguments)


class _TorchStream:
    """Torch's current stream on a device, in the words that cuda.core understands."""

    def __init__(self, device: int) -> None:
        self.device = device

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream(self.device).cuda_stream


_kernels: dict[tuple[str, int], _Kernel] = {}


def paged_decode_cuda(
    q_XHD: Tensor,
    k_NBGD: Tensor,
    v_NBGD: Tensor,
    tables_RM: Tensor,
    rows_X: Tensor | None,
    lengths_X: Tensor,
    scale: float,
    plan: DecodePlan,
    config: CudaConfig | None = None,
) -> Tensor:
    """``mie.kernels.paged_decode.paged_decode``, in CUDA C++; the arguments mean the same.

    Slots of K and V start at multiples of 16 bytes. Raises ``ValueError`` where shapes, or plan and
    lengths, disagree, and ``ImportError`` without ``cuda.core``.
    """
    X, H, D = q_XHD.shape
    _, B, G, _ = k_NBGD.shape
    plan.check(q_XHD, k_NBGD, v_NBGD, tables_RM, lengths_X)
    if D not in HEAD_DIMS or H // G > MAX_GROUP:
        raise ValueError(f"head size {D} in groups of {H // G}, not 64 or 128 in at most 8")
    if q_XHD.dtype not in TYPES:
        raise ValueError(f"q is {q_XHD.dtype}, not one of {', '.join(map(str, TYPES))}")
    if any(stride * q_XHD.element_size() % ALIGNMENT for stride in k_NBGD.stride()[:3]):
        raise ValueError(f"strides {k_NBGD.stride()} of K are no multiples of {ALIGNMENT} bytes")
    if any(stride % 2 for stride in q_XHD.stride()[:2]):
        raise ValueError(f"strides {q_XHD.stride()} of q are odd: it is read two at a time")
    import numpy

    config = config or CudaConfig()
    name, device = template(q_XHD.dtype, D, config), q_XHD.get_device()
    if (name, device) not in _kernels:
        _kernels[name, device] = _Kernel(name, device, config.shared_bytes(D))
    out_XHD = torch.empty((X, H, D), dtype=q_XHD.dtype, device=q_XHD.device)
    _kernels[name, device].launch(
        (G, plan.max_items(X)),
        config.warps * LANES,
        q_XHD.data_ptr(),
        k_NBGD.data_ptr(),
        v_NBGD.data_ptr(),
        tables_RM.data_ptr(),
        0 if rows_X is None else rows_X.data_ptr(),
        out_XHD.data_ptr(),
        plan.items_5W.data_ptr(),
        plan.partial_WHD.data_ptr(),
        plan.max_WH.data_ptr(),
        plan.sum_WH.data_ptr(),
        plan.arrived_XG.data_ptr(),
        numpy.float32(scale / math.log(2)),
        H // G,  # an int of Python is passed in 64 bits
        B.bit_length() - 1,
        tables_RM.stride(0),
        plan.capacity,
        q_XHD.stride(0),
        q_XHD.stride(1),
        *k_NBGD.stride()[:3],
    )
    return out_XHD
