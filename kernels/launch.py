"""What all kernels share when they are launched.

Invariant: a process runs its kernels compiled or interpreted, never both: Triton decides when it is
first imported, from ``TRITON_INTERPRET``.

The interpreter keeps a bfloat16 as the integer of its bits, so products of bfloat16 tiles are wrong
there. A kernel that multiplies tiles takes ``UPCAST=INTERPRETED`` and turns them to float32 first.

On Hopper, a kernel can begin while the one before it ends (programmatic dependent launch): it says
so when it is launched, and waits inside, before it reads what others write::

    kernel 1    reads weights, waits, computes, writes .
    kernel 2              reads weights, waits . . . . . computes, writes
                                                       ^ kernel 1 has ended, its results are there

Every kernel that begins early waits before it ends, so who has waited for the kernel before it has
waited for all of them.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def cdiv(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below ``number``: what ``tl.arange`` can count to."""
    return 1 << (number - 1).bit_length()


@functools.cache
def begins_early(device: torch.device) -> bool:
    """Whether kernels on ``device`` can begin while the one before them ends."""
    if INTERPRETED or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_kernels_before(EARLY: tl.constexpr) -> None:
    """All that earlier kernels have written can be read; the next kernel may begin."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
