"""A schedule without a model: answers of known length, and everything that can be counted.

Invariant: scheduler, queue, tables and pool are the engine's own, under its own core. What is left
out is the model: a token costs nothing, and says only whether the answer goes on. The engine cannot
know how long an answer will be; the runner knows, and ends it with the token that ends answers.

    position            0 … 49  |  50 … 68   69
    chosen token        prompt  |  MORE      END          a prompt of 50 and an answer of 20
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mie.bench.result import Result
from mie.bench.workloads import Request
from mie.engine.core import EngineCore
from mie.request import FinishReason
from mie.request import Request as EngineRequest
from mie.sampling_params import SamplingParams
from mie.scheduling.plan import StepPlan, StepResult
from mie.scheduling.scheduler import Scheduler
from mie.scheduling.trace import Trace

MORE, END = 0, 1  # the two tokens of this vocabulary


@dataclass(frozen=True)
class RunCounts(Result):
    """What a schedule did with a workload. Tokens are counted as they are computed: those of a
    prompt, one for each step of an answer, and again those that were lost."""

    max_num_seqs: int
    completed: int
    steps: int
    computed_tokens: int  # for somebody
    padding_tokens: int  # for nobody
    output_tokens: int
    recomputed_tokens: int  # among the computed
    sequence_steps: int  # sequences that compute something, summed over all steps
    context_tokens: int  # tokens whose K and V a sequence reads, summed over all steps
    preemptions: int
    blocks_swapped_out: int
    blocks_swapped_in: int
    most_blocks: int  # in use at once

    @property
    def mean_running(self) -> float:
        """Sequences that compute something in a step."""
        return self.sequence_steps / self.steps

    @property
    def slot_use(self) -> float:
        """Of ``max_num_seqs`` places in every step, the share that computes for somebody."""
        return self.sequence_steps / (self.steps * self.max_num_seqs)

    @property
    def padding_share(self) -> float:
        """Tokens computed for nobody, among all that are computed."""
        return self.padding_tokens / (self.computed_tokens + self.padding_tokens)


class CountingRunner:
    """``run`` gives a token for each draw. ``ends`` maps a name to the position of its last."""

    def __init__(self, ends: Mapping[str, int], scheduler: Scheduler) -> None:
        self.ends = ends
        self.scheduler = scheduler
        self.counts: Counter[str] = Counter()
        self.most_blocks = 0

    def run(self, plan: StepPlan) -> StepResult:
        """Count ``plan``, whose blocks are allocated by now, and choose its tokens."""
        tokens = {}
        computed = recomputed = context = 0
        for part in plan.scheduled:
            computed += part.num_new
            recomputed += part.num_recomputed
            context += part.num_tokens
            if part.draws:
                last = self.ends[part.name]
                tokens[part.sequence_id] = tuple(
                    END if draw.position == last else MORE for draw in part.draws
                )
        self.counts.update(
            computed_tokens=computed,
            padding_tokens=plan.num_padding,
            output_tokens=sum(map(len, tokens.values())),
            recomputed_tokens=recomputed,
            sequence_steps=len(plan.scheduled),
            context_tokens=context,
            preemptions=len(plan.preempted),
            blocks_swapped_out=len(plan.swap_out),
            blocks_swapped_in=len(plan.swap_in),
        )
        self.most_blocks = max(self.most_blocks, self.scheduler.memory.pool.num_used)
        return StepResult(tokens)


def counted_run(scheduler: Scheduler, requests: Sequence[Request]) -> RunCounts:
    """Queue all ``requests`` at once and run them to their ends. The pool is whole afterwards.

    Raises what ``Scheduler.add`` raises, for a request that the pool can never hold.
    """
    names = [f"r{number}" for number in range(len(requests))]
    lengths = zip(names, requests, strict=True)
    runner = CountingRunner({name: each.num_tokens - 1 for name, each in lengths}, scheduler)
    core = EngineCore(scheduler, runner.run, Trace(capacity=0))
    for name, each in zip(names, requests, strict=True):
        prompt, sampling = (MORE,) * each.prompt_tokens, SamplingParams(each.max_tokens)
        core.add(EngineRequest(name, prompt, sampling, frozenset({END})))
    steps = 0
    ends: dict[str, int] = {}
    while core.has_work:
        steps += 1
        for output in core.step():
            if output.finish_reason is not None:
                assert output.finish_reason is FinishReason.STOP, f"{output} was cut"
                assert output.name not in ends, f"{output.name} ended twice"
                ends[output.name] = output.num_output_tokens
    assert ends == {name: each.answer_tokens for name, each in zip(names, requests, strict=True)}, (
        "every answer has its own length"
    )
    scheduler.memory.check([])
    return RunCounts(
        max_num_seqs=scheduler.limits.max_num_seqs,
        completed=len(ends),
        steps=steps,
        most_blocks=runner.most_blocks,
        **{name: runner.counts[name] for name in COUNTED},
    )


COUNTED = (
    "computed_tokens",
    "padding_tokens",
    "output_tokens",
    "recomputed_tokens",
    "sequence_steps",
    "context_tokens",
    "preemptions",
    "blocks_swapped_out",
    "blocks_swapped_in",
)
