"""Less and less memory, down to one long sequence: what preemption costs, counted.

Invariant: every request comes to its own end in every pool. What a smaller pool changes is how many
run at once, how many of them are thrown out, and what is computed or moved twice for it.

Answers here are far longer than prompts. That is where memory runs out: at admission a sequence
shows its prompt, and what it will come to need nobody knows. The largest pool is what the workload
takes at most if nothing bounds it; the smallest holds its longest request and nothing beside it.

    recompute    a victim's K and V are thrown away, and its tokens computed again
    swap         they wait in a second pool, which is large enough for everybody

The requests are those of kind *writing*, with an eighth of their lengths: shares come out alike,
and twenty runs take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mie.bench.counted_run import RunCounts, counted_run
from mie.bench.generous_pool import BLOCK_SIZE
from mie.bench.result import Result
from mie.bench.workloads import BYTES_PER_TOKEN, CONTEXT_LENGTH, Request
from mie.memory.block_pool import blocks_needed
from mie.memory.manager import BlockManager
from mie.memory.prefix_cache import NoPrefixCache
from mie.scheduling.limits import Limits
from mie.scheduling.policy import VictimPolicy, fewest_computed, last_admitted
from mie.scheduling.scheduler import Scheduler

KIND = "writing"
NUM_REQUESTS = 24
SHORTER = 8  # so many times
MAX_NUM_SEQS = 16
TOKEN_BUDGET = 64
PERCENT = (100, 75, 50, 25)  # of what the workload takes at most; then the longest request alone
POLICIES: dict[str, VictimPolicy] = {
    "last_admitted": last_admitted,
    "fewest_computed": fewest_computed,
}


@dataclass(frozen=True)
class PressureRun(Result):
    """The workload in a pool of ``usable_blocks``, scratch left out."""

    usable_blocks: int
    preemption: str  # recompute or swap
    victim_policy: str
    counts: RunCounts

    @property
    def recomputed_share(self) -> float:
        """Tokens that are computed again, for each that has to be computed once."""
        counts = self.counts
        return counts.recomputed_tokens / (counts.computed_tokens - counts.recomputed_tokens)

    @property
    def swapped_bytes(self) -> int:
        """Over the bus, out and in."""
        moved = self.counts.blocks_swapped_out + self.counts.blocks_swapped_in
        return moved * BLOCK_SIZE * BYTES_PER_TOKEN


@dataclass(frozen=True)
class Pressure(Result):
    """All pools, from the largest to the smallest."""

    num_requests: int
    block_size: int
    max_num_seqs: int
    token_budget: int
    needed_blocks: int  # in use at most where nothing bounds it
    longest_blocks: int  # of the longest request
    host_blocks: int
    runs: tuple[PressureRun, ...]

    @property
    def pools(self) -> tuple[int, ...]:
        """Usable blocks of every pool."""
        return tuple(dict.fromkeys(run.usable_blocks for run in self.runs))

    def run(self, usable_blocks: int, preemption: str, victim_policy: str) -> PressureRun:
        """The one of that pool, in that way."""
        wanted = usable_blocks, preemption, victim_policy
        return next(
            r for r in self.runs if (r.usable_blocks, r.preemption, r.victim_policy) == wanted
        )


def shorter(request: Request, times: int = SHORTER) -> Request:
    """The same kind of request, ``times`` shorter, rounded up."""
    prompt, answer, most = (
        -(-tokens // times)
        for tokens in (request.prompt_tokens, request.answer_tokens, request.max_tokens)
    )
    return Request(request.kind, prompt, answer, most)


def pressure(
    requests: Sequence[Request], tell: Callable[[str], None] = lambda doing: None
) -> Pressure:
    """Run the first ``NUM_REQUESTS`` of kind ``KIND`` in ever smaller pools, in four ways each.

    Their ``max_tokens`` is what they need: an engine refuses what the pool could never hold, and
    the smallest pool holds the longest request and not what a client might have allowed it.
    """
    chosen = [shorter(request) for request in requests if request.kind == KIND][:NUM_REQUESTS]
    asked = [Request(r.kind, r.prompt_tokens, r.answer_tokens, r.answer_tokens) for r in chosen]
    blocks = [blocks_needed(request.num_tokens - 1, BLOCK_SIZE) for request in asked]
    needed = _run(asked, sum(blocks) + MAX_NUM_SEQS, 0, last_admitted).most_blocks
    pools = [needed * percent // 100 for percent in PERCENT]
    pools = [*[pool for pool in pools if pool > max(blocks)], max(blocks)]
    runs = []
    for pool in pools:
        tell(f"memory pressure: {pool} blocks")
        for preemption, host_blocks in (("recompute", 0), ("swap", sum(blocks))):
            for name, policy in POLICIES.items():
                counts = _run(asked, pool, host_blocks, policy)
                runs.append(PressureRun(pool, preemption, name, counts))
    return Pressure(
        num_requests=len(asked),
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        token_budget=TOKEN_BUDGET,
        needed_blocks=needed,
        longest_blocks=max(blocks),
        host_blocks=sum(blocks),
        runs=tuple(runs),
    )


def _run(
    requests: Sequence[Request], usable_blocks: int, host_blocks: int, policy: VictimPolicy
) -> RunCounts:
    memory = BlockManager(usable_blocks + 1, BLOCK_SIZE, host_blocks, prefix_cache=NoPrefixCache)
    limits = Limits(MAX_NUM_SEQS, TOKEN_BUDGET, CONTEXT_LENGTH)
    return counted_run(Scheduler(limits, memory, victim_policy=policy), requests)
