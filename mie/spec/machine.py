"""A scheduler at work: memory, a fake runner, and the texts that must come out.

Invariant: whatever a case does, each step is checked for what holds in every step: the slots hold
what the plan reads, the tokens go to whom they were chosen for, each answer ends once and for its
own reason, and each block has the owners that list it. A case adds its own rule to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mie.memory.manager import BlockManager
from mie.request import FinishReason, Request
from mie.scheduling.limits import Limits
from mie.scheduling.plan import SequenceOutput, StepPlan, StepResult
from mie.scheduling.policy import VictimPolicy, last_admitted
from mie.scheduling.queue import FirstComeFirstServed, WaitingQueue
from mie.spec.device import SIZE
from mie.spec.expect import CounterExample, equal
from mie.spec.fake_runner import FakeRunner, Text

SchedulerClass = Callable[..., Any]
ENOUGH = 400  # steps; no case comes near
NO_TOKEN = {FinishReason.ABORT, FinishReason.KV_EXHAUSTED}  # ends that no token brings


class Machine:
    """``seqs`` sequences at once, ``budget`` tokens a step, ``context`` tokens a sequence,
    ``blocks`` blocks of four slots, scratch not counted, and ``host`` blocks to swap to."""

    def __init__(
        self,
        Scheduler: SchedulerClass,
        *,
        seqs: int = 4,
        budget: int = 16,
        context: int = 64,
        blocks: int = 40,
        host: int = 0,
        queue: Callable[[], WaitingQueue] = FirstComeFirstServed,
        policy: VictimPolicy = last_admitted,
    ) -> None:
        self.limits = Limits(seqs, budget, context)
        self.memory = BlockManager(blocks + 1, SIZE, host)
        self.scheduler = Scheduler(self.limits, self.memory, queue(), policy)
        self.runner = FakeRunner()
        self.texts: dict[str, Text] = {}
        self.ends: dict[str, FinishReason] = {}
        self.outputs: list[SequenceOutput] = []  # of the step that came back last
        self.plans: list[StepPlan] = []

    # -- what comes from outside -----------------------------------------------------------------

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            for index in range(request.sampling.n):
                text = Text(request, index, self.limits.max_model_len)
                self.texts[text.name] = text

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> StepPlan:
        """One step, from its plan to what came of it."""
        plan = self.plan()
        self.finish(plan)
        return plan

    def plan(self) -> StepPlan:
        """The first half of a step. Raises where there have been so many that it will never end."""
        if len(self.plans) == ENOUGH:
            raise CounterExample(f"after {ENOUGH} steps there is work left: {self.plans[-1]}")
        plan: StepPlan = self.scheduler.schedule()
        self.plans.append(plan)
        at_work = names(plan)
        if len(at_work) != len({*at_work}):
            raise CounterExample(f"{plan}: somebody is in it twice")
        if ended := [name for name in at_work if name in self.ends]:
            raise CounterExample(f"{plan}: {ended[0]} has ended")
        return plan

    def finish(self, plan: StepPlan) -> None:
        """The second half of a step."""
        result = StepResult() if plan.is_empty else self.runner.run(plan, self.texts)
        self.outputs = self.scheduler.update(plan, result)
        for output in self.outputs:
            self._take(output)
        chosen = [output.name for output in self.outputs if output.token_id is not None]
        drawn = [p.name for p in plan.scheduled if p.draws and p.name not in self.ends]
        if missing := {*drawn} - {*chosen}:
            raise CounterExample(f"{plan}: tokens of {sorted(missing)} were chosen and lost")
        self.check_memory(plan)

    def fail(self) -> StepPlan:
        """A step that breaks off half way, and leaves garbage where it wrote."""
        plan = self.plan()
        self.runner.break_off(plan)
        self.scheduler.failed(plan)
        self.check_memory(plan)
        return plan

    def steps(self, count: int) -> list[StepPlan]:
        return [self.step() for _ in range(count)]

    def until(self, name: str) -> list[StepPlan]:
        """Steps until ``name`` has ended."""
        return self._while(lambda: name not in self.ends, f"until {name} ends")

    def until_preempted(self) -> StepPlan:
        """Steps until one that preempts."""
        self._while(lambda: not (self.plans and self.plans[-1].preempted), "until one preempts")
        return self.plans[-1]

    def drain(self) -> list[StepPlan]:
        """Steps until nobody waits for anything; then all have ended, and nobody owns a block."""
        plans = self._while(lambda: self.scheduler.has_work, "until all is done")
        equal(sorted(self.texts.keys() - self.ends.keys()), [], "answers that never ended")
        left = (len(self.scheduler.running), len(self.scheduler.waiting))
        equal(left, (0, 0), "(running, waiting) with no work left")
        memory = self.memory
        free = (memory.pool.num_free, memory.host.num_free, len(memory.copies))
        everything = (memory.num_usable_blocks, memory.host.num_blocks, 0)
        equal(free, everything, "(free blocks, free host blocks, copies) with no work left")
        return plans

    def _while(self, go_on: Callable[[], bool], what: str) -> list[StepPlan]:
        plans: list[StepPlan] = []
        while go_on():
            equal(self.scheduler.has_work, True, f"has_work, in steps {what}")
            plan = self.step()
            plans.append(plan)
            if not (plan.scheduled or plan.preempted or self.outputs):
                raise CounterExample(f"{plan} did nothing, in steps {what}")
        return plans

    # -- what holds in every step ----------------------------------------------------------------

    def _take(self, output: SequenceOutput) -> None:
        name, said = output.name, f"{output.name} after step {len(self.plans)}"
        if name not in self.texts or name in self.ends:
            raise CounterExample(f"{said}: nobody waits for {output}")
        text = self.texts[name]
        equal(
            (output.request_id, output.index),
            (text.request.request_id, text.index),
            f"(request, index) of {said}",
        )
        if output.token_id is not None:
            text.tokens.append(output.token_id)
        equal(output.num_output_tokens, text.num_out, f"number of tokens of {said}")
        if output.finish_reason is not None:
            self.ends[name] = output.finish_reason
        if output.token_id is not None:
            equal(output.finish_reason, text.reason, f"finish reason of {said}")
        else:
            equal(output.finish_reason in NO_TOKEN, True, f"a reason to end {said} with no token")

    def check_memory(self, plan: StepPlan) -> None:
        """Each block has the owners that list it, on the device and on the host."""
        tables = [s.table for s in self.scheduler.running if s.table is not None]
        host = [s.host_blocks for s in self.scheduler.waiting if s.host_blocks]
        try:
            self.memory.check(tables, host)
        except AssertionError as error:
            raise CounterExample(f"blocks after {plan}: {error}") from error

    # -- what cases ask --------------------------------------------------------------------------

    def running(self) -> list[str]:
        return [sequence.name for sequence in self.scheduler.running]

    def waiting(self) -> list[str]:
        return [sequence.name for sequence in self.scheduler.waiting]

    def output(self, name: str) -> list[int]:
        text = self.texts[name]
        return text.tokens[len(text.request.prompt) :]


def names(plan: StepPlan) -> list[str]:
    """Who computes something in ``plan``."""
    return [part.name for part in plan.scheduled]


def first_step(plans: Iterable[StepPlan], name: str) -> int:
    """In which of ``plans`` ``name`` computes something for the first time."""
    for number, plan in enumerate(plans):
        if name in names(plan):
            return number
    raise CounterExample(f"{name} never computed anything")
