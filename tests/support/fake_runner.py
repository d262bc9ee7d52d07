"""A runner without a model: a device of plain dictionaries that notices every wrong byte.

Invariant: the "K and V" of a token are a link of a chain: a number for all tokens before it, and
one for all up to it. A step reads the whole context of each of its sequences, as attention does,
and finds every link unless a slot was never written, was written by somebody else, or was moved
wrongly. The next token is a function of the chain and the draw, and of nothing else: what a request
answers alone is known without any engine.

    slot        8        9        10       11           block_size = 4, block 2
    link     (0, a)   (a, ab)  (ab, abc)   .            a letter stands for a token

Steps take microseconds, so engines can be driven through thousands.
"""

from __future__ import annotations

from collections.abc import Sequence

from mie.request import Request
from mie.sampling.sampler import mix
from mie.sampling_params import Draw
from mie.scheduling.plan import ScheduledSequence, StepPlan, StepResult

VOCABULARY = 31
Link = tuple[int, int]


class StepFailedError(Exception):
    """The device broke off."""


class FakeRunner:
    """``run`` carries out a plan, as ``ModelRunner.run``. ``plans`` are those that it was given.

    ``max_model_len``: the longest text that the device can take, as tables of positions have an
    end. ``fail_next``: raise in the next step, "before" anything is done, "between" moving blocks
    and computing, or "after" all has been written.
    """

    def __init__(self, block_size: int, max_model_len: int = 1 << 30) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.device: dict[int, Link] = {}  # by slot
        self.host: dict[int, dict[int, Link]] = {}  # by host block, then offset
        self.plans: list[StepPlan] = []
        self.fail_next: str | None = None
        self.computed: dict[str, set[int]] = {}  # positions that were in memory, by name
        self.num_recomputed = 0  # tokens that were computed and had been before

    def run(self, plan: StepPlan) -> StepResult:
        """The tokens that ``plan`` asks for."""
        self.plans.append(plan)
        failing, self.fail_next = self.fail_next, None
        if failing == "before":
            raise StepFailedError
        self._move(plan)
        if failing == "between":
            raise StepFailedError
        written: set[int] = set()
        for scheduled in plan.scheduled:
            assert not written & {*scheduled.slots}, f"two write into one slot: {scheduled}"
            written.update(scheduled.slots)
        for scheduled in plan.scheduled:
            self._check(scheduled)
            self._write(scheduled)
        chains = {s.sequence_id: self._read(s) for s in plan.scheduled}
        if failing == "after":
            raise StepFailedError
        for s in plan.scheduled:
            positions = {*range(s.position, s.num_tokens)}
            seen = self.computed.setdefault(s.name, set())
            self.num_recomputed += len(seen & positions)
            seen |= {*range(s.num_tokens)}  # what was found has been computed too, by others
            for draw in s.draws[1:]:  # forks have what it has
                self.computed[f"{s.name.removesuffix('/0')}/{draw.index}"] = {*seen}
        return StepResult(
            {
                s.sequence_id: tuple(choose(chains[s.sequence_id], draw) for draw in s.draws)
                for s in plan.scheduled
                if s.draws
            }
        )

    def _move(self, plan: StepPlan) -> None:
        """Out, then copies, then in; each kind all at once."""
        for out in plan.swap_out:
            self.host[out.host] = self._block(out.device)
        copied = {copy.target: self._block(copy.source) for copy in plan.copies}
        brought = {move.device: self.host[move.host] for move in plan.swap_in}
        for block, content in [*copied.items(), *brought.items()]:
            for offset in range(self.block_size):
                self.device.pop(block * self.block_size + offset, None)
            for offset, link in content.items():
                self.device[block * self.block_size + offset] = link

    def _block(self, block: int) -> dict[int, Link]:
        first = block * self.block_size
        slots = ((offset, first + offset) for offset in range(self.block_size))
        return {offset: self.device[slot] for offset, slot in slots if slot in self.device}

    def _check(self, scheduled: ScheduledSequence) -> None:
        assert scheduled.num_new == len(scheduled.slots) > 0, f"{scheduled}: {scheduled.slots}"
        assert 0 not in scheduled.blocks, f"{scheduled} lies in the scratch block"
        if scheduled.num_tokens > self.max_model_len:
            raise IndexError(
                f"{scheduled.num_tokens} tokens; the device takes {self.max_model_len}"
            )
        for position, slot in enumerate(scheduled.slots, start=scheduled.position):
            assert slot == self._slot(scheduled.blocks, position)

    def _slot(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, scheduled: ScheduledSequence) -> None:
        chain = self._chain(scheduled.blocks, scheduled.position)
        for token, slot in zip(scheduled.token_ids, scheduled.slots, strict=True):
            chain, before = follow(chain, token), chain
            self.device[slot] = before, chain

    def _read(self, scheduled: ScheduledSequence) -> int:
        return self._chain(scheduled.blocks, scheduled.num_tokens)

    def _chain(self, blocks: Sequence[int], num_tokens: int) -> int:
        """The number of the text in the first ``num_tokens`` slots; every link has to fit."""
        chain = 0
        for position in range(num_tokens):
            before, after = self.device[self._slot(blocks, position)]
            assert before == chain, f"position {position} in {blocks} belongs to another text"
            chain = after
        return chain


def follow(chain: int, token: int) -> int:
    """The number of a text that goes on with ``token``."""
    return mix(chain, token + 1)


def choose(chain: int, draw: Draw) -> int:
    """The next token: for greedy draws the text alone decides."""
    if draw.temperature == 0:
        return mix(chain) % VOCABULARY
    return mix(chain, draw.seed, draw.index, draw.position) % VOCABULARY


def alone(request: Request, index: int, count: int) -> list[int]:
    """The first ``count`` tokens of an answer, without engine, memory or company."""
    chain = 0
    for token in request.prompt:
        chain = follow(chain, token)
    answer: list[int] = []
    for position in range(len(request.prompt), len(request.prompt) + count):
        answer.append(choose(chain, request.sampling.draw(position, index)))
        chain = follow(chain, answer[-1])
    return answer
