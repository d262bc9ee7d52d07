"""One at a time, in waves, continuously: the same requests in the same memory, counted.

Invariant: the schedulers differ and nothing else: same requests in the same order, same pool, same
``max_num_seqs``. Clients ask for their ``max_tokens`` and answers end earlier, when the model says
so; nobody knows that length in time. Waves reserve what clients ask for. In one of the runs they
are told the exact lengths, so that what the reservations cost can be told from what waiting costs.

How long a run would take is derived from its counts and never measured. A step reads all weights
and, for each of its sequences, all K and V of its context; each token is multiplied with all
weights of the layers, and each chosen one with those of the head::

    reading      steps x WEIGHT_BYTES + context tokens x BYTES_PER_TOKEN    / READ_BYTES_PER_S
    computing    2 x LAYER_WEIGHTS x (computed + padding) + 2 x HEAD_WEIGHTS x output    / FLOPS

Both are added up: nothing overlaps, no kernel is launched and no token copied. So seconds are good
for a ratio. Weights are those of Qwen2-0.5B in bfloat16; bytes and operations a second were
measured on one NVIDIA H200 (book/results/h200-limits.json).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mie.bench.counted_run import RunCounts, counted_run
from mie.bench.generous_pool import BLOCK_SIZE
from mie.bench.result import Result
from mie.bench.workloads import BYTES_PER_TOKEN, CONTEXT_LENGTH, Request
from mie.memory.manager import BlockManager
from mie.memory.prefix_cache import NoPrefixCache
from mie.scheduling.limits import Limits
from mie.scheduling.scheduler import Scheduler
from mie.scheduling.static import StaticScheduler

NUM_REQUESTS = 64  # the first of the workload
BUDGET_BYTES = 512 * 2**20  # for K and V: about eight requests of mean length
MAX_NUM_SEQS = 8
TOKEN_BUDGET = 512  # of a step of continuous batching

# Qwen2-0.5B: 24 layers of 14,912,384 weights and a norm; the head, which is the embedding.
LAYER_WEIGHTS = 24 * 14_912_384 + 896
HEAD_WEIGHTS = 151_936 * 896
WEIGHT_BYTES = 2 * (LAYER_WEIGHTS + HEAD_WEIGHTS)
READ_BYTES_PER_S = 4_110_000_000_000
FLOPS = 783_000_000_000_000


@dataclass(frozen=True)
class BatchingRun(Result):
    """One scheduler on the workload."""

    scheduler: str
    counts: RunCounts

    @property
    def reading_seconds(self) -> float:
        """Derived: weights in every step, and the K and V of every context."""
        counts = self.counts
        read = counts.steps * WEIGHT_BYTES + counts.context_tokens * BYTES_PER_TOKEN
        return read / READ_BYTES_PER_S

    @property
    def computing_seconds(self) -> float:
        """Derived: products with the weights, for padding too."""
        counts = self.counts
        tokens = counts.computed_tokens + counts.padding_tokens
        products = tokens * LAYER_WEIGHTS + counts.output_tokens * HEAD_WEIGHTS
        return 2 * products / FLOPS

    @property
    def derived_seconds(self) -> float:
        return self.reading_seconds + self.computing_seconds

    @property
    def derived_tokens_per_second(self) -> float:
        """Output tokens."""
        return self.counts.output_tokens / self.derived_seconds


@dataclass(frozen=True)
class Batching(Result):
    """All schedulers on one workload and one pool, of which one block is scratch."""

    num_requests: int
    budget_bytes: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    token_budget: int
    runs: tuple[BatchingRun, ...]

    def run(self, scheduler: str) -> BatchingRun:
        """The run of that name."""
        return next(run for run in self.runs if run.scheduler == scheduler)


def batching(
    requests: Sequence[Request],
    budget_bytes: int = BUDGET_BYTES,
    tell: Callable[[str], None] = lambda doing: None,
) -> Batching:
    """Run the first ``NUM_REQUESTS`` of ``requests``, all there from the start, in four ways."""
    requests = requests[:NUM_REQUESTS]
    known = [replace(request, max_tokens=request.answer_tokens) for request in requests]
    num_blocks = budget_bytes // (BLOCK_SIZE * BYTES_PER_TOKEN)
    ways: tuple[tuple[str, type[Scheduler], int, Sequence[Request]], ...] = (
        ("one at a time", Scheduler, 1, requests),
        ("static", StaticScheduler, MAX_NUM_SEQS, requests),
        ("static, exact", StaticScheduler, MAX_NUM_SEQS, known),
        ("continuous", Scheduler, MAX_NUM_SEQS, requests),
    )
    runs = []
    for name, scheduler, max_num_seqs, asked in ways:
        tell(f"batching: {name}")
        limits = Limits(max_num_seqs, TOKEN_BUDGET, CONTEXT_LENGTH)
        memory = BlockManager(num_blocks, BLOCK_SIZE, prefix_cache=NoPrefixCache)
        runs.append(BatchingRun(name, counted_run(scheduler(limits, memory), asked)))
    return Batching(
        num_requests=len(requests),
        budget_bytes=budget_bytes,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        token_budget=TOKEN_BUDGET,
        runs=tuple(runs),
    )
