"""A runner without a model: what stands in a slot says which text was computed there.

Invariant: a slot holds the whole text up to its token, as K and V do, and the next token depends on
the whole text. So a block that was copied, shared, moved or computed again wrongly shows at the
first step that reads it, with the slot, the position and the name.

    text of a               5 6 7 8 | 9
    slot of position 3      ("", (5, 6, 7, 8))          a salt, and all tokens up to there
    token after position 4  a checksum of 5 6 7 8 9     the same on every machine

It moves blocks in the order that ``StepPlan`` promises: out, copied, in; then it writes all new
tokens, then it reads.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

from mie.request import FinishReason, Request
from mie.sampling_params import Draw, SamplingParams
from mie.scheduling.plan import ScheduledSequence, StepPlan, StepResult
from mie.spec.device import SIZE
from mie.spec.expect import CounterExample, equal

VOCABULARY = 97  # tokens are bytes
GARBAGE = "written by a step that broke off"


def asked(
    name: str, length: int, out: int | None = 4, *, begin: Sequence[int] = (), **options: Any
) -> Request:
    """A request for ``out`` tokens after a prompt of ``length``, another one for each name.

    ``begin`` is how the prompt begins; ``options`` are those of Request and of SamplingParams.
    """
    of_request = {k: options.pop(k) for k in ("eos_ids", "priority", "salt") if k in options}
    rest = random.Random(name).choices(range(VOCABULARY), k=length - len(begin))
    return Request(name, (*begin, *rest), SamplingParams(max_tokens=out, **options), **of_request)


def next_token(text: Iterable[int], index: int) -> int:
    """What comes after ``text`` in a request's answer number ``index``."""
    return crc32(bytes((index, *text))) % VOCABULARY


class Text:
    """One answer to ``request`` as it must be: its tokens so far, and what belongs into its slots.

    ``most`` tokens at most, if it fits the memory.
    """

    def __init__(self, request: Request, index: int, context: int) -> None:
        self.request, self.index = request, index
        self.tokens = list(request.prompt)
        room, wanted = context - len(request.prompt), request.sampling.max_tokens
        self.most = room if wanted is None else min(wanted, room)
        self._marks: list[tuple[str, tuple[int, ...]]] = []

    @property
    def name(self) -> str:
        return self.request.name(self.index)

    @property
    def num_out(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def reason(self) -> FinishReason | None:
        """Why it ends after the tokens that it has; None if it goes on."""
        if not self.num_out:
            return None
        if self.tokens[-1] in self.request.eos_ids and not self.request.sampling.ignore_eos:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_out >= self.most else None

    def mark(self, position: int) -> tuple[str, tuple[int, ...]]:
        """What the computation of the token at ``position`` writes."""
        for end in range(len(self._marks) + 1, position + 2):
            self._marks.append((self.request.salt, tuple(self.tokens[:end])))
        return self._marks[position]

    def draws(self, end: int) -> tuple[Draw, ...]:
        """What is to be chosen once the first ``end`` tokens are computed."""
        if end < len(self.tokens):
            return ()
        forks = self.index == 0 and self.num_out == 0
        indices = range(self.request.sampling.n) if forks else [self.index]
        return tuple(self.request.sampling.draw(end, index) for index in indices)


def finished(request: Request, index: int = 0, context: int = 64) -> Text:
    """The whole answer, as it comes out where there is memory enough."""
    text = Text(request, index, context)
    while text.reason is None:
        text.tokens.append(next_token(text.tokens, index))
    return text


class FakeRunner:
    """``run`` computes a plan, or raises what is wrong with it."""

    def __init__(self) -> None:
        self.slots: dict[int, object] = {}
        self.host: dict[int, list[object]] = {}

    def run(self, plan: StepPlan, texts: Mapping[str, Text]) -> StepResult:
        """The tokens that ``plan`` asks for. ``texts`` are all answers by name."""
        try:
            self._move(plan)
            self._write(plan, texts)
            for part in plan.scheduled:
                self._read(part, texts[part.name])
        except CounterExample as error:
            raise CounterExample(f"{plan}: {error}") from None
        return StepResult(
            {
                part.sequence_id: tuple(
                    next_token(texts[part.name].tokens, draw.index) for draw in part.draws
                )
                for part in plan.scheduled
                if part.draws
            }
        )

    def break_off(self, plan: StepPlan) -> None:
        """Leave garbage wherever ``plan`` was going to write."""
        slots = [slot for part in plan.scheduled for slot in part.slots]
        targets = [move.target for move in plan.copies] + [move.device for move in plan.swap_in]
        slots += [block * SIZE + offset for block in targets for offset in range(SIZE)]
        self.slots |= dict.fromkeys(slots, GARBAGE)
        for move in plan.swap_out:
            self.host[move.host] = [GARBAGE] * SIZE

    def _move(self, plan: StepPlan) -> None:
        for out in plan.swap_out:
            self.host[out.host] = self._block(out.device)
        for target, content in [(copy.target, self._block(copy.source)) for copy in plan.copies]:
            self._fill(target, content)
        for into in plan.swap_in:
            self._fill(into.device, self.host.get(into.host, [None] * SIZE))

    def _block(self, block: int) -> list[object]:
        return [self.slots.get(block * SIZE + offset) for offset in range(SIZE)]

    def _fill(self, block: int, content: list[object]) -> None:
        self.slots |= {block * SIZE + offset: mark for offset, mark in enumerate(content)}

    def _write(self, plan: StepPlan, texts: Mapping[str, Text]) -> None:
        """New tokens go to the slots that are named for them; no slot is named twice."""
        written: dict[int, ScheduledSequence] = {}
        for part in plan.scheduled:
            text = _text_of(part, texts)
            for position, slot in enumerate(part.slots, part.position):
                if slot in written:
                    raise CounterExample(f"{part} and {written[slot]} write slot {slot}")
                written[slot] = part
                self.slots[slot] = text.mark(position)

    def _read(self, part: ScheduledSequence, text: Text) -> None:
        """Every slot that the queries of ``part`` may see holds what was computed for its text."""
        for position in range(part.num_tokens):
            slot = _slot(part.blocks, position)
            got, expected = self.slots.get(slot), text.mark(position)
            if got is not expected and got != expected:
                where = f"slot {slot}, position {position} of {part.name}"
                raise CounterExample(f"{where}: expected {expected!r}, got {got!r}")


def _slot(blocks: Sequence[int], position: int) -> int:
    return blocks[position // SIZE] * SIZE + position % SIZE


def _text_of(part: ScheduledSequence, texts: Mapping[str, Text]) -> Text:
    """Whose tokens these are; they must be its next ones, in blocks of its own."""
    if part.name not in texts:
        raise CounterExample(f"nobody who was accepted is called {part.name}")
    text, said = texts[part.name], repr(part)
    begin, end = part.position, part.num_tokens
    equal(list(part.token_ids), text.tokens[begin:end], f"tokens of {said}")
    equal(part.num_new > 0, True, f"whether {said} computes something")
    if len(part.blocks) * SIZE < end or 0 in part.blocks:
        raise CounterExample(f"{said}: {end} tokens do not lie in blocks {list(part.blocks)}")
    slots = [_slot(part.blocks, position) for position in range(begin, end)]
    equal(list(part.slots), slots, f"slots of {said}")
    equal(part.draws, text.draws(end), f"what is to be chosen after {said}")
    return text
