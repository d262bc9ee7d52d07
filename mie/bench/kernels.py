"""What each kernel of the fast step takes on a GPU, and how near that is to its memory.

Invariant: a time is that of the GPU alone. Many calls are recorded as one CUDA graph and the graph
is replayed, so no launch from Python is in it; the figure is the median replay, divided by the
calls. K and V are those of several layers in turn, more than the L2 cache holds, in blocks
scattered at random; all numbers are drawn, since a GPU is faster on zeros.

Attention of decodes is counted in bytes, K and V of all contexts read once; attention of prompts in
operations, four for each pair of a query and a key that it may see, head and number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any

from mie.bench.result import Result
from mie.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-6
WIDTH = 1024  # of the rows that are normed: Qwen3-0.6B
HEAD = 128
BLOCK = 16
LAYERS = 4  # whose K and V are read in turn
REPLAYS = 20
HEADS = {"16-8": (16, 8), "28-4": (28, 4)}  # of Qwen3-0.6B and Qwen2.5-7B
DECODES = {  # sequences, context, heads, block size
    "128x1024/16-8/b16": (128, 1024, "16-8", 16),
    "128x1024/16-8/b256": (128, 1024, "16-8", 256),
    "256x512/16-8/b16": (256, 512, "16-8", 16),
    "64x2048/28-4/b16": (64, 2048, "28-4", 16),
    "8x2048/28-4/b16": (8, 2048, "28-4", 16),
    "1x4096/16-8/b16": (1, 4096, "16-8", 16),
}
PREFILLS = {  # (new tokens, tokens with those before) of each sequence
    "16x1024": [(1024, 1024)] * 16,
    "2048on6144": [(2048, 8192)],
    "200dec+512": [*[(1, 600)] * 200, (512, 512)],
}


@dataclass(frozen=True)
class KernelTime(Result):
    """``seconds`` of one call; ``num_bytes`` or ``num_flops`` are what it has to do at least."""

    name: str
    seconds: float
    num_bytes: int = 0
    num_flops: int = 0

    @property
    def bytes_per_second(self) -> float:
        return self.num_bytes / self.seconds

    @property
    def flops_per_second(self) -> float:
        return self.num_flops / self.seconds


def measure_kernels(tell: Callable[[str], None] = lambda name: None) -> list[KernelTime]:
    """All of them; about a minute. ``tell`` is given the name of each before it is measured.

    Raises ConfigError where there is no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("times of kernels are times of a GPU, and there is no CUDA device")
    torch.manual_seed(0)
    done = []
    for name, work in _cases():
        tell(name)
        calls, num_bytes, num_flops = work()
        done.append(KernelTime(name, graph_seconds(calls), num_bytes, num_flops))
        torch.cuda.empty_cache()
    return done


def graph_seconds(calls: Sequence[Callable[[], Any]], replays: int = REPLAYS) -> float:
    """Seconds of one of ``calls``, all of them replayed as one graph: the median of ``replays``."""
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times[2:]) / len(calls)


Work = Callable[[], tuple[list[Callable[[], Any]], int, int]]


def _cases() -> Iterator[tuple[str, Work]]:
    yield "graph_kernel", _trivial
    for rows in (256, 8192):
        for way in ("spelled_out", "apart", "fused"):
            yield f"add_rms_norm_{way}_{rows}", partial(_norm, way, rows)
    for name, shape in DECODES.items():
        yield f"paged_decode/{name}", partial(_decode, *shape)
    if all(find_spec(name) for name in ("cuda", "cuda.core", "cuda.bindings")):
        for name, shape in DECODES.items():
            yield f"cuda_decode/{name}", partial(_decode, *shape, in_cuda=True)
    for name, lengths in PREFILLS.items():
        for heads in HEADS:
            yield f"paged_prefill/{name}/{heads}", partial(_prefill, lengths, heads)


def _trivial() -> tuple[list[Callable[[], Any]], int, int]:
    """A kernel that writes one number."""
    import torch

    from mie.kernels.inputs import write_state

    state_RC = torch.zeros(8, 8, dtype=torch.int32, device="cuda")
    write_3U = torch.ones(3, 1, dtype=torch.int32, device="cuda")
    return [partial(write_state, state_RC, write_3U)] * 100, 0, 0


def _norm(way: str, rows: int) -> tuple[list[Callable[[], Any]], int, int]:
    import torch

    from mie.kernels import rms_norm as norms
    from mie.ops import reference

    x, residual = torch.randn(2, rows, WIDTH, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(WIDTH, device="cuda", dtype=torch.bfloat16)
    ways: dict[str, Callable[[], Any]] = {
        "spelled_out": lambda: reference.rms_norm(x + residual, weight, EPS),
        "apart": lambda: norms.rms_norm(x + residual, weight, EPS),
        "fused": lambda: norms.add_rms_norm(x, residual, weight, EPS),
    }
    return [ways[way]] * 20, 4 * x.nbytes, 0


def _decode(
    sequences: int, context: int, heads: str, block_size: int, in_cuda: bool = False
) -> tuple[list[Callable[[], Any]], int, int]:
    import torch

    from mie.kernels.cuda import paged_decode as in_cpp
    from mie.kernels.paged_decode import DecodePlan, paged_decode

    kernel = in_cpp.paged_decode_cuda if in_cuda else paged_decode
    H, G = HEADS[heads]
    caches, tables_RM = _blocks([context] * sequences, G, block_size)
    q_XHD = torch.randn(sequences, H, HEAD, device="cuda", dtype=torch.bfloat16)
    lengths_X = torch.full((sequences,), context, dtype=torch.int32, device="cuda")
    plan = DecodePlan(sequences, H, G, HEAD, block_size, q_XHD.device, q_XHD.dtype)
    plan.update(lengths_X)
    calls: list[Callable[[], Any]] = [
        partial(kernel, q_XHD, *kv, tables_RM, None, lengths_X, HEAD**-0.5, plan) for kv in caches
    ]
    return calls * 4, decode_bytes([context] * sequences, G), 0


def _prefill(
    lengths: Sequence[tuple[int, int]], heads: str
) -> tuple[list[Callable[[], Any]], int, int]:
    import torch

    from mie.kernels.paged_prefill import paged_prefill

    H, G = HEADS[heads]
    caches, tables_RM = _blocks([total for _, total in lengths], G, BLOCK)
    new = torch.tensor([0, *[count for count, _ in lengths]])
    starts_S1 = new.cumsum(0).to(device="cuda", dtype=torch.int32)
    lengths_S = torch.tensor([total for _, total in lengths], dtype=torch.int32, device="cuda")
    rows_S = torch.arange(len(lengths), dtype=torch.int32, device="cuda")
    q_THD = torch.randn(int(new.sum()), H, HEAD, device="cuda", dtype=torch.bfloat16)
    place = tables_RM, rows_S, starts_S1, lengths_S, HEAD**-0.5, int(new.max())
    calls: list[Callable[[], Any]] = [partial(paged_prefill, q_THD, *kv, *place) for kv in caches]
    return calls * 2, 0, prefill_flops(lengths, H)


def _blocks(
    lengths: Sequence[int], G: int, block_size: int
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """K and V of ``LAYERS`` layers, and tables of blocks in random order; block 0 is scratch."""
    import torch

    widths = [-(-length // block_size) for length in lengths]
    order = (torch.randperm(sum(widths), device="cuda") + 1).to(torch.int32)
    tables_RM = torch.zeros(len(lengths), max(widths), dtype=torch.int32, device="cuda")
    for row, blocks in enumerate(order.split(widths)):
        tables_RM[row, : len(blocks)] = blocks
    shape = (2, sum(widths) + 1, block_size, G, HEAD)
    caches = []
    for _ in range(LAYERS):
        k_NBGD, v_NBGD = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        caches.append((k_NBGD, v_NBGD))
    return caches, tables_RM


def decode_bytes(lengths: Sequence[int], num_kv_heads: int) -> int:
    """K and V of contexts of ``lengths`` tokens in one layer, bfloat16, each read once."""
    return sum(lengths) * 2 * num_kv_heads * HEAD * 2


def prefill_flops(lengths: Sequence[tuple[int, int]], num_heads: int) -> int:
    """Two products for each pair of a query and a key that it may see: ``(new, total)`` tokens."""
    pairs = sum(new * (total - new) + new * (new + 1) // 2 for new, total in lengths)
    return 4 * pairs * num_heads * HEAD
