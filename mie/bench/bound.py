"""The least time that a workload can take on a machine: bytes over bandwidth, products over rate.

Invariant: what is counted has to be done by every engine that computes these tokens in this dtype,
and nothing is counted that a better schedule could leave out. So a share of the bound says how far
an engine is from the machine, and shares of two machines can be compared.

    K and V     each decoded token reads those of all tokens before it      bytes / read rate
    weights     each step reads them once, or multiplies with them for      bytes / read rate, or
                so many tokens that this takes longer                       flops / matrix rate
    prefill     each prompt token meets every weight, and every token       flops / matrix rate
                before it

    seconds >= K and V + max(weights read, decoded tokens multiplied) + prefill

Steps are the fewest there can be: as many as the longest answer has tokens, or all answers together
divided by the sequences that run at once, whichever is more. Choosing tokens, writing K and V and
everything between layers count as free.

For Qwen3-0.6B in bfloat16 and the nano workload on an H200: 13.8 TB of K and V take 3.4 s, 1,024
times 1.2 GB of weights 0.3 s, prefill 0.2 s: 35,000 tokens a second. The idea is the roofline
(Williams et al., 2009). The three are added up, as they run in an engine that does one thing after
another; one that multiplies for some requests while it reads for others can hide part of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mie.bench.result import Result

if TYPE_CHECKING:
    import torch

    from mie.model.config import ModelConfig

RECORDINGS = Path(__file__).resolve().parents[2] / "book" / "results"  # of the checkout
MEASURED_BYTES = 2 << 30  # far more than any cache holds
MEASURED_SIDE = 8192  # of the square matrices
REPEATS = 10


@dataclass(frozen=True)
class Work(Result):
    """What has to be done, counted from shapes and lengths: the same on every machine."""

    output_tokens: int
    steps: int
    kv_bytes: int  # read by decoded tokens, all of them together
    weight_bytes: int  # of the weights that a step reads
    decode_flops: int  # products with weights
    prefill_flops: int  # products with weights and in attention


@dataclass(frozen=True)
class Limits(Result):
    """How fast a machine reads memory (bytes/s) and multiplies matrices (operations/s); ``source``
    says how one knows."""

    read_bytes_per_s: float
    matrix_flops_per_s: float
    source: str


@dataclass(frozen=True)
class Bound(Result):
    """``work`` at ``limits``, one thing after another."""

    work: Work
    limits: Limits

    @property
    def kv_seconds(self) -> float:
        return self.work.kv_bytes / self.limits.read_bytes_per_s

    @property
    def weight_seconds(self) -> float:
        """The weights once a step, or the products of decoded tokens with them."""
        read = self.work.steps * self.work.weight_bytes / self.limits.read_bytes_per_s
        return max(read, self.work.decode_flops / self.limits.matrix_flops_per_s)

    @property
    def prefill_seconds(self) -> float:
        return self.work.prefill_flops / self.limits.matrix_flops_per_s

    @property
    def seconds(self) -> float:
        return self.kv_seconds + self.weight_seconds + self.prefill_seconds

    @property
    def tokens_per_second(self) -> float:
        """Output tokens."""
        return self.work.output_tokens / self.seconds


def work_of(
    config: ModelConfig,
    dtype: torch.dtype,
    lengths: Sequence[tuple[int, int]],
    max_num_seqs: int,
) -> Work:
    """The work of requests with ``lengths`` (prompt, answer) in tokens.

    The first token of an answer comes out of its prefill; each of the others is computed from the
    one before and reads the K and V of everything before that. The embedding is a table: a token
    reads one row. A tied one is read as a whole where tokens are chosen.
    """
    from mie.model.weights import num_parameters

    head = config.vocab_size * config.hidden_size
    table = 0 if config.tie_word_embeddings else head
    answers = [answer for _, answer in lengths]
    decoded = sum(answer - 1 for answer in answers)
    read_tokens = sum((n - 1) * p + (n - 1) * (n - 2) // 2 for p, n in lengths)
    matrices = layer_matrices(config)
    pairs = sum(p * (p + 1) // 2 for p, _ in lengths)  # of a query and a key that it sees
    per_pair = 4 * config.num_layers * config.num_heads * config.head_dim
    prompt_tokens = sum(p for p, _ in lengths)
    return Work(
        output_tokens=sum(answers),
        steps=max(max(answers), -(-sum(answers) // max_num_seqs)),
        kv_bytes=read_tokens * config.kv_bytes_per_token(dtype),
        weight_bytes=(num_parameters(config) - table) * dtype.itemsize,
        decode_flops=2 * decoded * (matrices + head),
        prefill_flops=2 * (prompt_tokens * matrices + len(lengths) * head) + pairs * per_pair,
    )


def layer_matrices(config: ModelConfig) -> int:
    """Numbers in the matrices of all layers: what each token is multiplied with."""
    E, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * D, config.num_kv_heads * D
    return config.num_layers * (E * (queries + 2 * keys) + queries * E + 3 * E * F)


# -- what the machine can do ---------------------------------------------------------------------


def limits_of(device: torch.device, dtype: torch.dtype) -> Limits | None:
    """The limits of ``device`` for numbers of ``dtype``: recorded ones of that GPU where there are
    some, elsewhere measured now, which takes a second.

    None for a CPU: its caches hold part of what a step reads, so memory is no bound there.
    """
    import torch

    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_properties(device).name
    if dtype in (torch.bfloat16, torch.float16) and (known := recorded_limits(name)):
        return known
    return measured_limits(device, dtype)


def recorded_limits(gpu: str, folder: Path = RECORDINGS) -> Limits | None:
    """What a recording in ``book/results`` says of a GPU of that name, for 16-bit numbers."""
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        values = content.get("values", {})
        if content.get("gpu") == gpu and {"read_bytes_per_s", "matmul_bf16_flops"} <= {*values}:
            return Limits(
                values["read_bytes_per_s"],
                values["matmul_bf16_flops"],
                f"recorded on {gpu}, torch {content['torch']}, {content['date']}",
            )
    return None


def measured_limits(
    device: torch.device,
    dtype: torch.dtype,
    num_bytes: int = MEASURED_BYTES,
    side: int = MEASURED_SIDE,
) -> Limits:
    """Read ``num_bytes`` and multiply square matrices, the best of ten each."""
    import torch

    passed = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    read = num_bytes / _best(passed.sum, device)
    del passed
    square = torch.randn(side, side, device=device).to(dtype)
    product = torch.empty_like(square)
    rate = 2 * side**3 / _best(lambda: torch.mm(square, square, out=product), device)
    return Limits(read, rate, f"measured before the runs, on {device}")


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of ``REPEATS``, the first of them not counted."""
    import torch

    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
