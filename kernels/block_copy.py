"""Copy blocks of K and V in place, all layers of all copies in one launch.

Invariant: afterwards each target holds what its source held, bit for bit, and every other block is
as it was. No target is a source or stands twice, so the copies can be made at once, in any order.

A block is one piece of memory in each layer, for K and for V: ``2·L`` pieces a copy. A program
moves one tile of one piece::

    kv_L2NBGD     layer 0, K     . . s . t .          blocks 2 -> 4
                  layer 0, V     . . s . t .
                  layer 1, K     . . s . t .          program (copy and tile, piece)
                  layer 1, V     . . s . t .

Cost: ``4·L·B·G·D`` elements a copy, half of them read and half written. Gathering the sources and
scattering them would move twice that and need room for them. Copy on write after Kwon et al., 2023.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mie.kernels.launch import cdiv, next_power_of_2

TILE_BYTES = 8192  # four accesses of 16 bytes for each of 128 threads


def copy_blocks_torch(kv_L2NBGD: Tensor, sources_P: Tensor, targets_P: Tensor) -> None:
    """What ``copy_blocks`` must do."""
    kv_L2NBGD[:, :, targets_P.long()] = kv_L2NBGD[:, :, sources_P.long()]


@triton.jit
def _copy_blocks_kernel(
    kv_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    stride_L: tl.tensor,
    stride_2: tl.tensor,
    stride_N: tl.tensor,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    copy = tl.program_id(0) // TILES
    elements = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    piece = tl.program_id(1).to(tl.int64)
    source = tl.load(sources_ptr + copy).to(tl.int64)
    target = tl.load(targets_ptr + copy).to(tl.int64)
    kv_ptr += piece // 2 * stride_L + piece % 2 * stride_2
    content = tl.load(kv_ptr + source * stride_N + elements, mask=elements < SIZE)
    tl.store(kv_ptr + target * stride_N + elements, content, mask=elements < SIZE)


def copy_blocks(kv_L2NBGD: Tensor, sources_P: Tensor, targets_P: Tensor) -> None:
    """Copy block ``sources_P[p]`` to ``targets_P[p]`` in all layers, for every p.

    A list of fixed length may be padded with copies of the scratch block to itself, which change
    nothing. Layers, K and V, and blocks may have any strides, and the dimensions inside a block
    any order, but a block's elements lie together.

    Raises ValueError for lists of two lengths and for a block with gaps; what stands in the lists
    is on the device and not looked at.
    """
    if sources_P.shape != targets_P.shape or sources_P.dim() != 1:
        raise ValueError(f"{tuple(sources_P.shape)} sources, {tuple(targets_P.shape)} targets")
    if not (sources_P.is_contiguous() and targets_P.is_contiguous()):
        raise ValueError(f"strides {sources_P.stride()} and {targets_P.stride()}, not 1")
    size = _block_elements(kv_L2NBGD)
    num_copies, num_pieces = len(sources_P), kv_L2NBGD.shape[0] * 2
    if num_copies and num_pieces:
        block = min(TILE_BYTES // kv_L2NBGD.element_size(), next_power_of_2(size))
        tiles = cdiv(size, block)
        _copy_blocks_kernel[(num_copies * tiles, num_pieces)](
            kv_L2NBGD, sources_P, targets_P, *kv_L2NBGD.stride()[:3], size, tiles, block,
            num_warps=4,
        )  # fmt: skip


def _block_elements(kv_L2NBGD: Tensor) -> int:
    """Elements of a block in one piece, which must lie together, in whatever order."""
    size = 1
    dimensions = zip(kv_L2NBGD.stride()[3:], kv_L2NBGD.shape[3:], strict=True)
    for stride, length in sorted(dimensions):
        if length > 1 and stride != size:
            raise ValueError(f"a block has elements {stride} apart where {size} is expected")
        size *= length
    return size
