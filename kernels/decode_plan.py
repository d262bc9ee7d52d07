"""Who reads which part of which context in a decode step: made on the device, once for all layers.

Invariant: the items of a plan cover every token of every sequence exactly once. There is at least
one for each sequence, an empty one too, and never more than ``X + splits`` of them, whatever the
lengths: so the grid of a captured graph can be fixed while the lengths change.

One program of the attention kernel reads one item: a chunk of one context, for one key/value head.
Few long contexts have to be cut so that all of the GPU reads; many contexts fill it anyway, and
each cut costs a merge. So the length of a chunk follows from the tokens of all sequences together,
``chunk = max(min_chunk, total / splits)``, where ``splits`` programs for each of G heads fill it::

    splits 66, min_chunk 128
    lengths 4096            total 4096      chunk 128       x0 x0 x0 x0 x0 ...     32 items
    lengths 64 × 2048       total 131,072   chunk 1986      x0 x1 x2 x3 x4 ...     64 items
    lengths 700, 90, 0      total 790       chunk 128       x0 x0 x0 x0 x1 x2       6 items

A context of ``n`` tokens becomes ``round(n / chunk)`` equal parts, each rounded up to the tile that
the kernel reads at once (700 to 4 · 192). Parts of one sequence are neighbours.

Cost: each program of the plan reads the ``X`` lengths and sums them again, to write 32 items of 20
bytes. Nothing returns to the host. Cutting contexts to fill a GPU is flash-decoding (Dao et al.,
2023); planning once a step for all layers, with a fixed grid, is FlashInfer (Ye et al., 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mie.kernels.launch import cdiv, next_power_of_2

MAX_SEQUENCES = 1024
MAX_GROUP = 16  # query heads of a key/value head: rows of the least tile of a tensor core
ITEMS_A_PROGRAM = 32
NO_GPU_PROCESSORS = 4  # what the interpreter plans for: few programs, one after another
FIELDS = 5  # of an item, see DecodePlan.items_5W


@dataclass(frozen=True)
class DecodeConfig:
    """How a launch divides its work.

    ``tile`` tokens are read at a time by ``warps`` warps, ``stages`` deep. Contexts are cut for
    ``programs`` programs a multiprocessor, into chunks of about ``min_chunk`` tokens or more.
    """

    tile: int
    warps: int
    stages: int
    programs: int
    min_chunk: int

    def __post_init__(self) -> None:
        for name in ("tile", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} {value} is no power of 2")
        if self.min_chunk < self.tile:
            raise ValueError(f"min_chunk {self.min_chunk} is below the tile of {self.tile}")
        if min(self.stages, self.programs) < 1:
            raise ValueError(f"stages {self.stages} or programs {self.programs} below 1")


def decode_config(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    max_sequences: int = MAX_SEQUENCES,
) -> DecodeConfig:
    """What was found best on an H200 for these shapes. A tile of K takes about 16 KiB.

    A few sequences are a matter of latency: small programs begin to read sooner, and two of them a
    multiprocessor leave fewer parts to merge.
    """
    if dtype == torch.float32:
        return DecodeConfig(tile=32, warps=8, stages=3, programs=4, min_chunk=128)
    if max_sequences <= 16:
        return DecodeConfig(tile=32, warps=2, stages=4, programs=2, min_chunk=64)
    if num_heads // num_kv_heads > 4:
        return DecodeConfig(tile=64, warps=8, stages=3, programs=2, min_chunk=128)
    return DecodeConfig(tile=64, warps=4, stages=2, programs=4, min_chunk=128)


def chunks_torch(
    lengths_X: Tensor, splits: int, min_chunk: int, tile: int
) -> list[tuple[int, int, int]]:
    """``(sequence, begin, end)`` of each item, in order: what the kernel must write."""
    lengths = lengths_X.tolist()
    chunk = max(min_chunk, cdiv(sum(lengths), splits))
    items = []
    for sequence, length in enumerate(lengths):
        parts = max(1, (length + chunk // 2) // chunk)
        size = cdiv(max(length, 1), parts * tile) * tile
        begins = range(0, max(length, 1), size)
        items += [(sequence, begin, min(begin + size, length)) for begin in begins]
    return items


@triton.jit
def _cdiv(numerator: tl.tensor, denominator: tl.tensor) -> tl.tensor:
    return (numerator + denominator - 1) // denominator


@triton.jit
def _parts(length: tl.tensor, chunk: tl.tensor, tile: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """How long the parts of a context are, and how many: ``(size, count)``, one for length 0."""
    length = tl.maximum(length, 1)
    parts = tl.maximum((length + chunk // 2) // chunk, 1)
    size = _cdiv(length, parts * tile) * tile
    return size, _cdiv(length, size)


@triton.jit(do_not_specialize=["num_sequences", "num_items", "splits"])
def _plan_kernel(
    lengths_ptr: tl.tensor,
    items_ptr: tl.tensor,
    num_sequences: tl.tensor,
    num_items: tl.tensor,
    splits: tl.tensor,
    capacity: tl.tensor,
    min_chunk: tl.tensor,
    tile: tl.tensor,
    SEQUENCES: tl.constexpr,
    ITEMS: tl.constexpr,
) -> None:
    x = tl.arange(0, SEQUENCES)
    length_X = tl.load(lengths_ptr + x, mask=x < num_sequences, other=0)
    chunk = tl.maximum(_cdiv(tl.sum(length_X, 0), splits), min_chunk)
    _, count_X = _parts(length_X, chunk, tile)
    last_X = tl.cumsum(count_X, 0)  # the first item behind those of each sequence

    w = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    passed_WX = (last_X[None, :] <= w[:, None]) & (x < num_sequences)[None, :]
    sequence_W = tl.sum(passed_WX.to(tl.int32), 1)
    first_W = tl.max(tl.where(passed_WX, last_X[None, :], 0), 1)
    used_W = sequence_W < num_sequences
    length_W = tl.load(lengths_ptr + sequence_W, mask=used_W, other=0)
    size_W, count_W = _parts(length_W, chunk, tile)
    begin_W = (w - first_W) * size_W
    end_W = tl.minimum(begin_W + size_W, length_W)

    inside_W = w < num_items
    tl.store(items_ptr + w, sequence_W, mask=inside_W)
    tl.store(items_ptr + capacity + w, begin_W, mask=inside_W)
    tl.store(items_ptr + 2 * capacity + w, end_W, mask=inside_W)
    tl.store(items_ptr + 3 * capacity + w, first_W, mask=inside_W)
    tl.store(items_ptr + 4 * capacity + w, tl.where(used_W, count_W, 0), mask=inside_W)


class DecodePlan:
    """The items of a step for at most ``max_sequences`` sequences, and room to merge their parts.

    ``items_5W`` int32, one column an item: sequence, first token, the token behind the last, first
    item of the sequence, number of its items. The last is 0 behind the last item.

    ``partial_WHD``, ``max_WH``, ``sum_WH`` float32: what a part of a context came to.
    ``arrived_XG`` int32: how many parts of a sequence are done; 0 before and after each launch, so
    one plan serves all layers, one after another on one stream. None of the addresses ever changes.
    """

    def __init__(
        self,
        max_sequences: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        config: DecodeConfig | None = None,
    ) -> None:
        """Raises ``ValueError`` for shapes that the kernel does not divide."""
        if not 0 < max_sequences <= MAX_SEQUENCES:
            raise ValueError(f"max_sequences {max_sequences} is not in 1 ... {MAX_SEQUENCES}")
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} heads in groups of {num_kv_heads} key/value heads")
        if num_heads // num_kv_heads > MAX_GROUP:
            queries = num_heads // num_kv_heads
            raise ValueError(f"{queries} queries a key/value head, more than {MAX_GROUP}")
        if block_size & (block_size - 1):
            raise ValueError(f"block_size {block_size} is no power of 2")
        self.max_sequences = max_sequences
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        shape = num_heads, num_kv_heads, head_dim, dtype, max_sequences
        self.config = config or decode_config(*shape)
        programs = self.config.programs * processors(self.device)
        self.splits = max(1, programs // num_kv_heads)  # how often all contexts together are cut
        self.capacity = self.max_items(max_sequences)
        self.planned: Tensor | None = None  # the lengths of the last update

        W, H, D = self.capacity, num_heads, head_dim
        self.items_5W = torch.zeros(FIELDS, W, dtype=torch.int32, device=self.device)
        self.partial_WHD = torch.empty(W, H, D, dtype=torch.float32, device=self.device)
        self.max_WH = torch.empty(W, H, dtype=torch.float32, device=self.device)
        self.sum_WH = torch.empty(W, H, dtype=torch.float32, device=self.device)
        self.arrived_XG = torch.zeros(
            max_sequences, num_kv_heads, dtype=torch.int32, device=self.device
        )

    def max_items(self, num_sequences: int) -> int:
        """No lengths of so many sequences make more items: each is rounded up by less than one."""
        return num_sequences + self.splits

    def check(
        self, q_XHD: Tensor, k_NBGD: Tensor, v_NBGD: Tensor, tables_RM: Tensor, lengths_X: Tensor
    ) -> None:
        """Raise ``ValueError`` where a kernel's arguments do not fit each other, or this plan."""
        (X, H, D), (_, B, G, _) = q_XHD.shape, k_NBGD.shape
        planned = (self.num_heads, self.num_kv_heads, self.head_dim, self.block_size)
        if planned != (H, G, D, B):
            raise ValueError(f"heads, K/V heads, size, block are {(H, G, D, B)}, planned {planned}")
        if q_XHD.dtype != self.dtype or not q_XHD.dtype == k_NBGD.dtype == v_NBGD.dtype:
            raise ValueError(f"q is {q_XHD.dtype}, K {k_NBGD.dtype}, planned {self.dtype}")
        if self.planned is None or self.planned.data_ptr() != lengths_X.data_ptr():
            raise ValueError(
                "the plan was made for other lengths: call plan.update(lengths_X) first"
            )
        if len(self.planned) != X:
            raise ValueError(f"{X} queries, and a plan of {len(self.planned)} sequences")
        if k_NBGD.stride() != v_NBGD.stride():
            raise ValueError(f"K has strides {k_NBGD.stride()}, V {v_NBGD.stride()}")
        strides = (q_XHD.stride(2), k_NBGD.stride(3), tables_RM.stride(1))
        if strides != (1, 1, 1):
            raise ValueError(f"the last dimension of q, K, tables has strides {strides}, not 1")

    def update(self, lengths_X: Tensor) -> None:
        """Divide contexts of ``lengths_X`` tokens, int32 and contiguous: one launch."""
        X = len(lengths_X)
        if self.max_sequences < X:
            raise ValueError(f"{X} lengths in a plan for {self.max_sequences} sequences")
        if lengths_X.dtype != torch.int32 or not lengths_X.is_contiguous():
            raise ValueError(f"lengths are {lengths_X.dtype}, not contiguous int32")
        W = self.max_items(X)
        _plan_kernel[(cdiv(W, ITEMS_A_PROGRAM),)](
            lengths_X,
            self.items_5W,
            X,
            W,
            self.splits,
            self.capacity,
            self.config.min_chunk,
            self.config.tile,
            SEQUENCES=max(128, next_power_of_2(self.max_sequences)),
            ITEMS=ITEMS_A_PROGRAM,
            num_warps=4,
        )
        self.planned = lengths_X

    def items(self) -> list[tuple[int, int, int]]:
        """``(sequence, begin, end)`` of each item, in order. Waits for the device."""
        if self.planned is None:
            return []
        columns = self.items_5W[:, : self.max_items(len(self.planned))].T.tolist()
        return [(sequence, begin, end) for sequence, begin, end, _, count in columns if count]


def processors(device: torch.device) -> int:
    """Multiprocessors of ``device``."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return NO_GPU_PROCESSORS
