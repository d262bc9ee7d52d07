"""How many tokens a second a schedule gets out of a model: all requests are there from the start.

Invariant: model, requests, pool and runner are the same in every run; the scheduler differs and
nothing else. Answers have fixed lengths (``ignore_eos``), so that all runs compute the same tokens.
Static waves are told these lengths, which no engine knows in time: that flatters the baseline.

    one at a time    one sequence, then the next         a step for each token
    static           waves of ``max_num_seqs``           a step for each token of the longest
    continuous       whoever waits takes a free place    fewest steps, no padding

Counts are exact and the same on every machine. Times are of this machine, in this run. What a step
costs, ``step_cost`` measures on two kinds of steps; with it, counts predict times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any

from mie.bench.result import Result
from mie.bench.workloads import Kind, draw, requests_of
from mie.config import EngineConfig
from mie.memory.block_pool import blocks_needed
from mie.request import Request
from mie.sampling_params import SamplingParams
from mie.scheduling.scheduler import Scheduler
from mie.scheduling.static import StaticScheduler
from mie.scheduling.trace import StepRecord

if TYPE_CHECKING:
    from mie.model.decoder import Decoder

NUM_REQUESTS = 32
MAX_NUM_SEQS = 8
TOKEN_BUDGET = 128
BLOCK_SIZE = 16

# Small enough for a CPU, and mixed: a wave of eight has two long answers, and six wait for them.
KINDS = (
    Kind("short", 75, (16, 64), (4, 16), 16),
    Kind("long", 25, (32, 128), (32, 64), 64),
)


@dataclass(frozen=True)
class Run(Result):
    """One schedule on one workload. Times are in seconds, from the start of the run."""

    scheduler: str
    num_requests: int
    max_num_seqs: int
    steps: int
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int  # by the model, for somebody
    padding_tokens: int  # for nobody
    recomputed_tokens: int
    sequence_steps: int  # sequences that compute something, summed over all steps
    preemptions: int
    seconds: float
    first_token_seconds: tuple[float, ...]  # when each request had its first token
    answers: tuple[tuple[int, ...], ...] = field(repr=False)  # token ids, request by request
    records: tuple[StepRecord, ...] = field(repr=False)  # one for each step

    @property
    def tokens_per_second(self) -> float:
        """Output tokens."""
        return self.output_tokens / self.seconds

    @property
    def mean_batch(self) -> float:
        """Sequences that compute something in a step."""
        return self.sequence_steps / self.steps

    @property
    def padding_share(self) -> float:
        """Tokens computed for nobody, among all that are computed."""
        return self.padding_tokens / (self.computed_tokens + self.padding_tokens)

    @property
    def median_first_token_seconds(self) -> float:
        return median(self.first_token_seconds)

    def as_dict(self) -> dict[str, Any]:
        """Without tokens and records, which have forms of their own (``mie.scheduling.trace``)."""
        numbers = super().as_dict()
        return {name: numbers[name] for name in numbers if name not in ("answers", "records")}


@dataclass(frozen=True)
class StepCost(Result):
    """A step costs something by itself (all weights are read), and something for each token."""

    seconds_per_step: float
    seconds_per_token: float

    def seconds(self, run: Run) -> float:
        """What the counts of ``run`` let expect."""
        tokens = run.computed_tokens + run.padding_tokens
        return run.steps * self.seconds_per_step + tokens * self.seconds_per_token


@dataclass(frozen=True)
class Throughput(Result):
    """All schedules on one workload, and what the two kinds of work cost by themselves."""

    cost: StepCost
    runs: tuple[Run, ...]

    def run(self, scheduler: str) -> Run:
        """The run of that name."""
        return next(run for run in self.runs if run.scheduler == scheduler)

    def measured_ratio(self, slow: str, fast: str = "continuous") -> float:
        """How many times as many tokens a second ``fast`` gets out."""
        return self.run(fast).tokens_per_second / self.run(slow).tokens_per_second

    def predicted_ratio(self, slow: str, fast: str = "continuous") -> float:
        """The same from counts and the cost of a step."""
        per_token = [
            self.cost.seconds(run) / run.output_tokens for run in (self.run(slow), self.run(fast))
        ]
        return per_token[0] / per_token[1]

    @property
    def same_answers(self) -> int:
        """To how many requests all runs gave the same tokens. In float32 usually to all: sums that
        are added up in another order may round differently, and choose another token."""
        shortest = min(run.num_requests for run in self.runs)
        return sum(
            len({run.answers[number] for run in self.runs}) == 1 for number in range(shortest)
        )


# -- the workload --------------------------------------------------------------------------------


def mixed_workload(
    vocab_size: int, count: int = NUM_REQUESTS, seed: int = 0, kinds: Sequence[Kind] = KINDS
) -> list[Request]:
    """``count`` requests of mixed length with random token ids; their answers do not stop early."""
    lengths = requests_of(kinds, seed, count)
    rng = Random(seed)
    return [
        fixed_request(f"r{number}", rng, vocab_size, each.prompt_tokens, each.answer_tokens)
        for number, each in enumerate(lengths)
    ]


def fixed_request(name: str, rng: Random, vocab_size: int, prompt: int, answer: int) -> Request:
    """A prompt and an answer of exactly so many tokens."""
    token_ids = tuple(draw(rng, 0, vocab_size - 1) for _ in range(prompt))
    return Request(name, token_ids, SamplingParams(answer, ignore_eos=True))


def room_for(requests: Iterable[Request], max_num_seqs: int, block_size: int = BLOCK_SIZE) -> int:
    """A pool in which ``max_num_seqs`` of the longest request fit, scratch included."""
    longest = max(len(r.prompt) + (r.sampling.max_tokens or 1) for r in requests)
    return 1 + max_num_seqs * blocks_needed(longest, block_size)


# -- one run -------------------------------------------------------------------------------------


def offline(
    decoder: Decoder,
    requests: Sequence[Request],
    scheduler: type[Scheduler] = Scheduler,
    *,
    name: str = "",
    tell: Callable[[int], None] = lambda output_tokens: None,
    **settings: Any,
) -> Run:
    """Run ``requests`` to their ends on ``decoder``: counts, times, tokens and the trace.

    ``settings`` are those of ``EngineConfig``; by default eight sequences at once, 128 tokens a
    step, room for eight of the longest, and no prefix cache. ``tell`` is called after each step
    with the number of tokens that are out. Raises what ``EngineCore.add`` raises.
    """
    from mie.engine.assemble import assemble

    at_once = settings.get("max_num_seqs", MAX_NUM_SEQS)
    settings = {
        "max_num_seqs": at_once,
        "token_budget": max(TOKEN_BUDGET, at_once),
        "block_size": BLOCK_SIZE,
        "num_blocks": room_for(requests, at_once, settings.get("block_size", BLOCK_SIZE)),
        "prefix_cache": "off",
        "trace_steps": sum(len(r.prompt) + (r.sampling.max_tokens or 1) for r in requests) + 1000,
        **settings,
    }
    config = EngineConfig(**settings)
    core = assemble(decoder, config, {"scheduler": scheduler}).core
    for request in requests:
        core.add(request)
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    first: dict[str, float] = {}
    core.trace.clear()
    out, began = 0, time.perf_counter()
    while core.has_work:
        outputs = core.step()
        now = time.perf_counter() - began  # a step ends with tokens on the host: nothing is pending
        for output in outputs:
            assert output.token_id is not None, f"{output} ended without a token"
            answers[output.request_id].append(output.token_id)
            first.setdefault(output.request_id, now)
        out += len(outputs)
        tell(out)
    seconds = time.perf_counter() - began
    records = tuple(core.trace.records)
    return Run(
        scheduler=name or scheduler.__name__,
        num_requests=len(requests),
        max_num_seqs=at_once,
        steps=len(records),
        prompt_tokens=sum(len(request.prompt) for request in requests),
        output_tokens=out,
        computed_tokens=sum(record.num_tokens for record in records),
        padding_tokens=sum(record.num_padding for record in records),
        recomputed_tokens=sum(record.num_recomputed for record in records),
        sequence_steps=sum(record.num_running for record in records),
        preemptions=sum(len(record.preempted) for record in records),
        seconds=seconds,
        first_token_seconds=tuple(first[request.request_id] for request in requests),
        answers=tuple(tuple(answers[request.request_id]) for request in requests),
        records=records,
    )


# -- all of them ---------------------------------------------------------------------------------


def step_cost(decoder: Decoder, chunk: int = 64, repeats: int = 5) -> StepCost:
    """Time steps of one token and steps of ``chunk`` tokens, medians of ``repeats``, and draw the
    line through both. The first step of either kind is not counted: it makes room."""
    rng, size = Random(0), decoder.config.vocab_size
    one = offline(decoder, [fixed_request("one", rng, size, 4, repeats + 2)])
    prompts = [fixed_request(f"{number}", rng, size, chunk, 1) for number in range(repeats + 1)]
    many = offline(decoder, prompts, max_num_seqs=1, token_budget=chunk)
    short, long = (
        median(record.times.total for record in records)
        for records in (one.records[2:], many.records[1:])
    )
    slope = max(0.0, (long - short) / (chunk - 1))
    return StepCost(max(0.0, short - slope), slope)


def throughput(
    decoder: Decoder,
    requests: Sequence[Request],
    max_num_seqs: int = MAX_NUM_SEQS,
    num_alone: int | None = None,
    tell: Callable[[str], None] = lambda doing: None,
) -> Throughput:
    """The three schedules, in the order of the docstring. ``num_alone``: one at a time, only the
    first so many requests run, since a rate needs no more of them; None: all."""
    tell("what a step costs")
    cost = step_cost(decoder)
    num_blocks = room_for(requests, max_num_seqs)
    ways: tuple[tuple[str, type[Scheduler], Sequence[Request], int], ...] = (
        ("one at a time", Scheduler, requests[:num_alone], 1),
        ("static", StaticScheduler, requests, max_num_seqs),
        ("continuous", Scheduler, requests, max_num_seqs),
    )
    runs = []
    for name, scheduler, those, at_once in ways:
        total = sum(request.sampling.max_tokens or 0 for request in those)

        def progress(out: int, name: str = name, total: int = total) -> None:
            tell(f"{name}: {out:,} of {total:,} tokens")

        settings: dict[str, Any] = dict(max_num_seqs=at_once, num_blocks=num_blocks)
        runs.append(offline(decoder, those, scheduler, name=name, tell=progress, **settings))
    return Throughput(cost, tuple(runs))
