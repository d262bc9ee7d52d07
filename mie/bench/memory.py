"""What paging, sharing and scheduling save, counted: the same numbers on every machine.

Invariant: what is said about blocks was counted on the engine's own pool, tables and caches, and
what is said about steps on its own schedulers; no formula stands in for them. Every benchmark ends
with a whole pool and nothing left in use. No clock is read.

    reservations   how much is set aside for nothing, and how many requests fit at once
    sharing        blocks and tokens that one common system prompt saves
    block_sizes    empty slots in the last blocks, against the length of the tables
    churn          holes that requests leave behind which come and go
    batching       steps and padding: one at a time, in waves, continuously
    pressure       what is computed or moved twice where memory is short

All of them take the requests of ``workloads`` at the footprint of Qwen2-0.5B in bfloat16: 12,288
bytes a token. A further benchmark is a function that returns a ``Result``, and a field here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mie.bench.batching import Batching, batching
from mie.bench.block_sizes import BlockSizes, block_sizes
from mie.bench.churn import Churn, churn
from mie.bench.pressure import Pressure, pressure
from mie.bench.reservations import Reservations, paged_against_contiguous
from mie.bench.result import Result
from mie.bench.sharing import PrefixSharing, prefix_sharing
from mie.bench.workloads import BYTES_PER_TOKEN, CONTEXT_LENGTH, KINDS, Request, mixed_requests

__all__ = [
    "MemoryReport",
    "batching",
    "block_sizes",
    "churn",
    "memory_report",
    "mixed_requests",
    "paged_against_contiguous",
    "prefix_sharing",
    "pressure",
]


@dataclass(frozen=True)
class KindCount(Result):
    """How many requests of a kind the workload has, and how long they are together."""

    kind: str
    num_requests: int
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class MemoryReport(Result):
    """Every memory benchmark on one workload."""

    seed: int
    bytes_per_token: int
    context_length: int
    kinds: tuple[KindCount, ...]
    reservations: Reservations
    sharing: PrefixSharing
    block_sizes: BlockSizes
    churn: Churn
    batching: Batching
    pressure: Pressure


def count_kinds(requests: Sequence[Request]) -> tuple[KindCount, ...]:
    """The workload in three lines."""
    counts = []
    for kind in KINDS:
        those = [request for request in requests if request.kind == kind.name]
        prompts = sum(request.prompt_tokens for request in those)
        answers = sum(request.answer_tokens for request in those)
        counts.append(KindCount(kind.name, len(those), prompts, answers))
    return tuple(counts)


def memory_report(seed: int = 0, tell: Callable[[str], None] = lambda doing: None) -> MemoryReport:
    """Run everything. ``tell`` is called with what begins."""
    requests = mixed_requests(seed)
    tell("paged against contiguous")
    reservations = paged_against_contiguous(requests)
    tell("prefix sharing")
    sharing = prefix_sharing(requests, seed)
    tell("block sizes")
    sizes = block_sizes(requests)
    tell("requests that come and go")
    holes = churn(requests, seed)
    batches = batching(requests, tell=tell)
    pools = pressure(requests, tell)
    return MemoryReport(
        seed=seed,
        bytes_per_token=BYTES_PER_TOKEN,
        context_length=CONTEXT_LENGTH,
        kinds=count_kinds(requests),
        reservations=reservations,
        sharing=sharing,
        block_sizes=sizes,
        churn=holes,
        batching=batches,
        pressure=pools,
    )
