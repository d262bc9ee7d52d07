"""An engine under observation: what must be true between any two steps is looked at after each.

Invariant: nothing here decides anything. ``Harness`` passes requests on, collects what comes out,
and after every step holds the engine against its promises: no block leaks, no token comes out
twice or after the end, no plan breaks a limit, nobody has work left while the budget has room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from fake_runner import FakeRunner, alone
from late_device import LateDevice

from mie.engine.core import EngineCore
from mie.engine.overlapped_core import OverlappedCore
from mie.memory.block_pool import blocks_needed
from mie.memory.manager import BlockManager
from mie.request import FinishReason, Request
from mie.sampling_params import SamplingParams
from mie.scheduling.limits import Limits
from mie.scheduling.plan import SequenceOutput, StepPlan, StepResult
from mie.scheduling.scheduler import Scheduler
from mie.scheduling.static import StaticScheduler

Answer = tuple[str, int]  # the id of a request, and which of its answers
NO_EOS: frozenset[int] = frozenset()


class Harness:
    """``run`` carries out the plans; without one a ``FakeRunner`` does, which is ``self.fake``.

    ``depth``: with more than 1, so many steps are out at once, on a device that is late, or that
    ``launch`` begins to work.
    """

    def __init__(
        self,
        limits: Limits,
        memory: BlockManager,
        scheduler: Callable[..., Scheduler] = Scheduler,
        run: Callable[[StepPlan], StepResult] | None = None,
        depth: int = 1,
        launch: Callable[[StepPlan], Any] | None = None,
        **options: Any,
    ) -> None:
        self.fake = FakeRunner(memory.pool.block_size)
        self.memory = memory
        self.scheduler = scheduler(limits, memory, **options)
        self.run = run or self.fake.run
        if depth == 1 and launch is None:
            self.core = EngineCore(self.scheduler, self._run)
        else:
            self._launch = launch or LateDevice(self._run).launch
            launch = self._launch_and_abort if launch else self._launch
            self.core = OverlappedCore(self.scheduler, launch, depth=depth)
        self._schedule, self.scheduler.schedule = self.scheduler.schedule, self._observed  # type: ignore[method-assign]
        self.requests: dict[str, Request] = {}
        self.tokens: dict[Answer, list[int]] = {}
        self.ends: dict[Answer, FinishReason] = {}
        self.aborted: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.plans: list[StepPlan] = []
        self._leaving: list[str] = []

    # -- driving ---------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Raises what the engine raises; then the request has never been."""
        self.core.add(request)
        self.requests[request.request_id] = request

    def ask(
        self,
        request_id: str,
        prompt: int | tuple[int, ...],
        max_tokens: int | None = 4,
        priority: int = 0,
        eos_ids: frozenset[int] = NO_EOS,
        **sampling: Any,
    ) -> Request:
        """Add a request; ``prompt`` is its tokens, or how many of its own it has."""
        if isinstance(prompt, int):
            first = sum(map(ord, request_id))  # a text of its own
            prompt = tuple((first + 7 * position) % 29 for position in range(prompt))
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        request = Request(request_id, prompt, params, eos_ids, priority)
        self.add(request)
        return request

    def abort(self, request_id: str) -> None:
        self.aborted.add(request_id)
        self.core.abort(request_id)
        self.check()

    def abort_in_flight(self, request_id: str) -> None:
        """Abort it while the next step is computed."""
        self._leaving.append(request_id)

    def step(self) -> list[SequenceOutput]:
        """A step of the engine, and a look at everything."""
        try:
            outputs = self.core.step()
        finally:
            self.check()
        for output in outputs:
            self._take(output)
        return outputs

    def drain(self, max_steps: int = 2_000) -> None:
        """Step until nothing is left to do. Then nothing may be left."""
        for _ in range(max_steps):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, f"not done after {max_steps} steps: {self.scheduler.running}"
        self.is_empty()

    # -- looking ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Every block, on the device and on the host, has exactly the owners it should have."""
        scheduler = self.scheduler
        tables = [sequence.table for sequence in scheduler.running if sequence.table]
        assert len(tables) == len(scheduler.running)
        waiting = list(scheduler.waiting)
        assert all(sequence.table is None for sequence in waiting)
        self.memory.check(tables, [s.host_blocks for s in waiting if s.host_blocks])
        check_cache = getattr(self.memory.prefix_cache, "check", None)
        if check_cache is not None:
            check_cache()
        for sequence in scheduler.running:
            assert sequence.table is not None
            assert sequence.table.num_tokens == sequence.num_computed
            assert sequence.num_to_compute > 0 or sequence.finish_reason is not None

    def is_empty(self) -> None:
        """Everything was given back, and every accepted request has ended: each answer once."""
        self.memory.check([])
        assert self.memory.pool.num_used == 0 and len(self.memory.copies) == 0
        assert self.memory.host.num_free == self.memory.host.num_blocks
        expected = {(r.request_id, i) for r in self.requests.values() for i in range(r.sampling.n)}
        assert {*self.ends} == expected

    def answer(self, request_id: str, index: int = 0) -> list[int]:
        return self.tokens.get((request_id, index), [])

    def is_right(self) -> None:
        """Every answer is as the fake device gives it alone, and stops where and why it should."""
        for (request_id, index), reason in self.ends.items():
            request, answer = self.requests[request_id], self.answer(request_id, index)
            assert answer == alone(request, index, len(answer)), f"{request_id}/{index}"
            self.ends_rightly(request, answer, reason)

    def ends_rightly(self, request: Request, answer: list[int], reason: FinishReason) -> None:
        """``reason`` is true, and nothing before was a reason to end."""
        limits, pool, sampling = self.scheduler.limits, self.memory.pool, request.sampling
        eos_ids = NO_EOS if sampling.ignore_eos else request.eos_ids
        room = limits.max_model_len - len(request.prompt)
        most = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        stops = [token in eos_ids for token in answer]
        assert True not in stops[:-1] and len(answer) <= most
        if reason is FinishReason.STOP:
            assert stops[-1]
            return
        assert True not in stops
        if reason is FinishReason.LENGTH:
            assert len(answer) == most
        elif reason is FinishReason.KV_EXHAUSTED:
            assert sampling.max_tokens is None, "what was asked for and accepted is given"
            needed = blocks_needed(len(request.prompt) + len(answer), pool.block_size)
            assert needed > self.memory.num_usable_blocks, "it would have fitted"
        else:
            assert request.request_id in self.aborted

    def _take(self, output: SequenceOutput) -> None:
        answer = output.request_id, output.index
        assert answer not in self.ends, f"{answer} has ended already"
        tokens = self.tokens.setdefault(answer, [])
        if output.token_id is not None:
            tokens.append(output.token_id)
        assert output.num_output_tokens == len(tokens), f"{output}, {len(tokens)} came out"
        if output.finish_reason is not None:
            self.ends[answer] = output.finish_reason
            self.counts[output.finish_reason] += 1
        else:
            assert output.token_id is not None, "an output that says nothing"

    def _observed(self) -> StepPlan:
        plan = self._schedule()
        self.plans.append(plan)
        self.counts["steps"] += 1
        self.counts["preempted"] += len(plan.preempted)
        self.counts["recomputed"] += sum(s.num_recomputed for s in plan.scheduled)
        self.counts["blocks out"] += len(plan.swap_out)
        self.counts["blocks in"] += len(plan.swap_in)
        self.counts["blocks copied"] += len(plan.copies)
        self._keeps_limits(plan)
        return plan

    def _run(self, plan: StepPlan) -> StepResult:
        self._abort_leaving()
        return self.run(plan)

    def _launch_and_abort(self, plan: StepPlan) -> Any:
        launched = self._launch(plan)
        self._abort_leaving()
        return launched

    def _abort_leaving(self) -> None:
        leaving, self._leaving = self._leaving, []
        for request_id in leaving:
            self.aborted.add(request_id)
            self.core.abort(request_id)

    def _keeps_limits(self, plan: StepPlan) -> None:
        running, limits = self.scheduler.running, self.scheduler.limits
        assert sum(sequence.num_seats for sequence in running) <= limits.max_num_seqs
        planned = {scheduled.sequence_id: scheduled.num_new for scheduled in plan.scheduled}
        assert {*planned} <= {sequence.sequence_id for sequence in running}
        assert not {*plan.preempted} & {scheduled.name for scheduled in plan.scheduled}
        if not isinstance(self.scheduler, StaticScheduler):
            assert plan.num_tokens <= plan.token_budget == limits.token_budget
            draws = {scheduled.sequence_id: bool(scheduled.draws) for scheduled in plan.scheduled}
            left = [
                s
                for s in running
                if s.finish_reason is None
                and s.num_to_compute > draws.get(s.sequence_id, 0)
                and not (s.sequence_id not in planned and s.waits_for_a_step)
            ]
            assert plan.num_tokens == plan.token_budget or not left or plan.preempted, (
                f"{plan} leaves {left}"
            )


def engine(
    num_blocks: int = 20,
    block_size: int = 4,
    max_num_seqs: int = 4,
    token_budget: int = 16,
    max_model_len: int = 64,
    host_blocks: int = 0,
    scheduler: Callable[..., Scheduler] = Scheduler,
    memory: dict[str, Any] | None = None,
    **options: Any,
) -> Harness:
    """A small engine on a fake device. ``num_blocks`` can be used; the scratch block comes on top.

    ``memory`` are options of ``BlockManager``, ``options`` those of the scheduler.
    """
    limits = Limits(max_num_seqs, token_budget, max_model_len)
    manager = BlockManager(num_blocks + 1, block_size, host_blocks, **(memory or {}))
    return Harness(limits, manager, scheduler, **options)
