"""Random schedules: what is asked for, when, of which engine, and what goes wrong meanwhile.

Invariant: a ``Case`` is numbers and names alone. It prints as what it is, runs the same way every
time, and hypothesis can make it smaller.

The memory is cut to the requests: the longest of them that is to be served, and a few blocks more,
so that most cases run out of blocks and many of host blocks too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine_harness import Harness
from fake_runner import StepFailedError
from hypothesis import strategies as st

from mie.errors import RequestError
from mie.memory.block_pool import blocks_needed
from mie.memory.manager import BlockManager
from mie.memory.prefix_cache import HashPrefixCache, NoPrefixCache
from mie.memory.radix_tree import RadixTree
from mie.request import Request
from mie.sampling_params import SamplingParams
from mie.scheduling.limits import Limits
from mie.scheduling.policy import VictimPolicy, fewest_computed, last_admitted
from mie.scheduling.queue import FirstComeFirstServed, StrictPriority
from mie.scheduling.scheduler import Scheduler
from mie.scheduling.static import StaticScheduler

CACHES = {"hash": HashPrefixCache, "radix": RadixTree, "off": NoPrefixCache}
QUEUES = {"first come": FirstComeFirstServed, "priority": StrictPriority}
SCHEDULERS = {"continuous": Scheduler, "static": StaticScheduler}


def story(number: int) -> list[int]:
    """One of a few texts. All but one share their first ten tokens, two of them twenty."""
    own = random.Random(number)
    tokens = [own.randrange(29) for _ in range(40)]
    shared = random.Random("shared")
    beginning = [shared.randrange(29) for _ in range(20)]
    length = (0, 10, 20, 20)[number]
    return beginning[:length] + tokens[length:]


STORIES = [story(number) for number in range(4)]


@dataclass(frozen=True)
class Ask:
    """A request. It arrives ``pause`` steps after the one before, and is aborted ``gives_up`` steps
    later, if it is: between two steps, or ``in_flight``, while one is computed."""

    prompt: tuple[int, int]  # of which story the first how many tokens
    max_tokens: int | None
    temperature: float
    seed: int
    n: int
    eos: bool
    priority: int
    pause: int
    gives_up: int | None
    in_flight: bool
    salt: str

    def request(self, number: int) -> Request:
        which, length = self.prompt
        sampling = SamplingParams(self.max_tokens, self.temperature, self.seed, self.n)
        eos_ids = frozenset({3, 11, 17} if self.eos else ())
        tokens = tuple(STORIES[which][:length])
        return Request(f"r{number}", tokens, sampling, eos_ids, self.priority, self.salt)


@dataclass(frozen=True)
class Setting:
    """An engine. ``more_blocks``: beyond those of the longest request; below 0 it is refused."""

    block_size: int
    more_blocks: int
    host_blocks: int
    max_num_seqs: int
    more_budget: int
    max_model_len: int
    cache: str
    scheduler: str
    queue: str
    policy: str
    fused: bool
    depth: int = 1

    def limits(self) -> Limits:
        budget = self.max_num_seqs + self.more_budget
        return Limits(self.max_num_seqs, budget, self.max_model_len)

    def num_blocks(self, asks: tuple[Ask, ...]) -> int:
        """Scratch, what the longest needs, and a few more."""
        lengths = [ask.prompt[1] + (ask.max_tokens or 1) - 1 for ask in asks]
        needed = blocks_needed(min(max(lengths), self.max_model_len - 1), self.block_size)
        return max(2, 1 + needed + self.more_blocks)


@dataclass(frozen=True)
class Case:
    """``failures``: which step breaks off, and when in it; see ``FakeRunner``."""

    setting: Setting
    asks: tuple[Ask, ...]
    failures: tuple[tuple[int, str], ...] = ()

    def memory(self) -> BlockManager:
        setting = self.setting
        return BlockManager(
            setting.num_blocks(self.asks),
            setting.block_size,
            setting.host_blocks,
            prefix_cache=CACHES[setting.cache],
        )

    def harness(self, memory: BlockManager, run: Any = None, launch: Any = None) -> Harness:
        setting = self.setting
        return Harness(
            setting.limits(),
            memory,
            SCHEDULERS[setting.scheduler],
            run,
            setting.depth,
            launch,
            queue=QUEUES[setting.queue](),
            victim_policy=policy(setting.policy),
        )

    def drive(self, harness: Harness, fail: Callable[[str], None]) -> None:
        """Everything that happens, until nothing is left. ``fail`` lets the next step fail."""
        waiting = list(enumerate(self.asks))
        pause = waiting[0][1].pause
        leaving: list[tuple[int, str, bool]] = []  # at which step who is aborted
        failures = dict(self.failures)
        for step in range(3_000):
            while waiting and pause <= 0:
                number, ask = waiting.pop(0)
                self._add(harness, number, ask)
                if ask.gives_up is not None:
                    at = step + ask.gives_up, f"r{number}", ask.in_flight
                    leaving += [at, at]  # and once more
                    leaving.append((step, "unknown", ask.in_flight))
                pause = waiting[0][1].pause if waiting else 0
            for _, request_id, in_flight in [each for each in leaving if each[0] == step]:
                (harness.abort_in_flight if in_flight else harness.abort)(request_id)
            if not waiting and not harness.core.has_work:
                break
            pause -= 1
            if not harness.core.has_work:
                continue
            if step in failures:
                fail(failures[step])
            try:
                harness.step()
            except StepFailedError:
                harness.counts["failed"] += 1
        harness.drain(0)

    def _add(self, harness: Harness, number: int, ask: Ask) -> None:
        try:
            harness.add(ask.request(number))
            assert self.fits(ask), f"{ask} was accepted"
        except RequestError:
            assert not self.fits(ask), f"{ask} was refused"
            harness.counts["refused"] += 1

    def fits(self, ask: Ask) -> bool:
        """Whether it could be served alone, with all of the answer that it asks for by number."""
        setting, prompt = self.setting, ask.prompt[1]
        if ask.n > setting.max_num_seqs or prompt >= setting.max_model_len:
            return False
        output = 1 if ask.max_tokens is None else ask.max_tokens
        computed = min(prompt + output, setting.max_model_len) - 1  # all tokens but the last
        needed = blocks_needed(computed, setting.block_size)
        return needed <= setting.num_blocks(self.asks) - 1


def policy(name: str) -> VictimPolicy:
    """Two that the engine has; the worst; and one that makes no sense at all."""
    dice = random.Random(7)
    policies: dict[str, VictimPolicy] = {
        "last admitted": last_admitted,
        "fewest computed": fewest_computed,
        "first admitted": lambda candidates: candidates[0],
        "any": lambda candidates: dice.choice(candidates),
    }
    return policies[name]


ASKS = st.builds(
    Ask,
    prompt=st.tuples(st.integers(0, 3), st.integers(1, 32)),
    max_tokens=st.one_of(st.none(), st.integers(1, 24), st.integers(8, 24)),
    temperature=st.sampled_from([0.0, 1.0, 0.7, 1e-6]),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 2, 3]),
    eos=st.booleans(),
    priority=st.integers(0, 2),
    pause=st.sampled_from([0, 0, 1, 3, 9]),
    gives_up=st.sampled_from([None] * 9 + [0, 4, 8, 12, 20]),
    in_flight=st.booleans(),
    salt=st.sampled_from(["", "", "", "tenant"]),
)
SETTINGS = st.builds(
    Setting,
    block_size=st.sampled_from([1, 2, 3, 4, 8, 16]),
    more_blocks=st.sampled_from([0, 1, 1, 2, 4, 10, 40, -1]),
    host_blocks=st.sampled_from([0, 2, 6, 60, 60]),
    max_num_seqs=st.sampled_from([3, 5, 8, 8, 2, 1]),
    more_budget=st.sampled_from([0, 1, 5, 12, 40]),
    max_model_len=st.sampled_from([60, 60, 40, 15]),
    cache=st.sampled_from(sorted(CACHES)),
    scheduler=st.sampled_from(["continuous"] * 4 + ["static"]),
    queue=st.sampled_from(sorted(QUEUES)),
    policy=st.sampled_from(["last admitted", "fewest computed", "first admitted", "any"]),
    fused=st.booleans(),
    depth=st.sampled_from([1, 2, 2, 3]),
)
FAILURES = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from(["before", "between", "after"])), max_size=2
).map(tuple)
CASES = st.builds(
    Case,
    SETTINGS,
    st.lists(ASKS, min_size=2, max_size=8).map(tuple),
    st.one_of(st.just(()), FAILURES),
)
