"""Random runs of a scheduler, next to answers that were made alone.

Invariant: an answer depends on its own text and on nothing else, so one function that never heard
of a batch gives it. Seeds are fixed: a run that fails does so again, at the same step.
"""

from __future__ import annotations

import random

from mie.errors import RequestError
from mie.request import FinishReason, Request
from mie.scheduling.policy import fewest_computed, last_admitted
from mie.scheduling.queue import FirstComeFirstServed, StrictPriority
from mie.spec.device import SIZE
from mie.spec.expect import CounterExample, equal
from mie.spec.fake_runner import VOCABULARY, asked, finished
from mie.spec.machine import Machine, SchedulerClass

NUM_TRACES = 16


def trace_of_scheduler(Scheduler: SchedulerClass) -> None:
    """Short runs, each on another machine, in which requests come, clients hang up, steps fail."""
    for seed in range(NUM_TRACES):
        try:
            one_trace(Scheduler, random.Random(seed))
        except CounterExample as error:
            raise CounterExample(f"trace {seed}: {error}") from error.__cause__


def one_trace(Scheduler: SchedulerClass, rng: random.Random) -> None:
    seqs, blocks = rng.randrange(2, 6), rng.randrange(4, 13)
    machine = Machine(
        Scheduler,
        seqs=seqs,
        budget=seqs + rng.randrange(20),
        context=48,
        blocks=blocks,
        host=rng.choice((0, 0, 3, 12)),
        queue=rng.choice((FirstComeFirstServed, StrictPriority)),
        policy=rng.choice((last_admitted, fewest_computed, lambda candidates: candidates[0])),
    )
    coming = [some_request(rng, number) for number in range(rng.randrange(4, 9))]
    served: dict[str, Request] = {}
    aborted: set[str] = set()
    while coming or machine.scheduler.has_work:
        if coming and (rng.random() < 0.7 or not machine.scheduler.has_work):
            request = coming.pop()
            try:
                machine.add(request)
                served[request.request_id] = request
            except RequestError:
                fits = len(request.prompt) + (request.sampling.max_tokens or 1) - 1 <= blocks * SIZE
                equal(fits and request.sampling.n <= seqs, False, f"whether {request} fits")
                continue
        if rng.random() < 0.03:
            machine.fail()
        plan = machine.plan()
        if rng.random() < 0.03:
            gone = rng.choice(list(served))
            machine.scheduler.abort(gone)
            aborted.add(gone)
        machine.finish(plan)
        if plan.num_tokens > machine.limits.token_budget:
            raise CounterExample(f"{plan} has more than the budget")
    machine.drain()
    for request in served.values():
        for index in range(request.sampling.n):
            as_alone(machine, request, index, aborted)


def as_alone(machine: Machine, request: Request, index: int, aborted: set[str]) -> None:
    """The answer is the one that it is without anybody else, or the beginning of it."""
    name, alone = request.name(index), finished(request, index, machine.limits.max_model_len)
    got, reason = machine.output(name), machine.ends[name]
    equal(got, alone.tokens[len(request.prompt) :][: len(got)], f"tokens of {name}")
    if reason is FinishReason.KV_EXHAUSTED:
        size, slots = len(machine.texts[name].tokens), machine.memory.num_tokens
        equal(size > slots, True, f"whether {name} has more than {slots} tokens and ends so")
    elif reason is FinishReason.ABORT:
        equal(request.request_id in aborted, True, f"whether {name} was aborted")
    else:
        equal((reason, len(got)), (alone.reason, alone.num_out), f"(reason, tokens) of {name}")


def some_request(rng: random.Random, number: int) -> Request:
    """Some begin alike, some want several answers, some are open-ended."""
    begin = asked("shared", 30).prompt[: rng.choice((0, 0, rng.randrange(20)))]
    return asked(
        f"r{number}",
        len(begin) + rng.randrange(1, 16),
        rng.choice((None, 1, *rng.choices(range(2, 25), k=3))),
        begin=begin,
        n=rng.choice((1, 1, 1, 2, 3)),
        eos_ids=frozenset(rng.sample(range(VOCABULARY), rng.choice((0, 4)))),
        priority=rng.randrange(3),
        salt=rng.choice(("", "", "red")),
    )
