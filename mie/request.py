"""What was asked for, and the streams of tokens that answer it.

Invariant: ``token_ids`` of a sequence only grows, whatever happens to its K and V. They may be
thrown away and computed again, or moved to another memory; the tokens, and the line between prompt
and answer, stay where they are.

    token_ids        t0 t1 t2 t3 t4 | t5 t6          num_prompt_tokens = 5, num_output_tokens = 2
    K and V          x  x  x  x  x    x              num_computed = 6
    to compute                           t6          num_tokens - num_computed = 1

There are no phases. A prompt that waits, a chunk of one, a decode, a sequence that lost its K and V
and a prefix hit differ in ``num_computed`` alone, and a step computes some of the difference. After
the scheduler of vLLM V1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from mie.memory.block_table import BlockTable
from mie.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended. Each sequence ends once."""

    STOP = "stop"  # the model said that it is done
    LENGTH = "length"  # max_tokens, or the end of the context
    KV_EXHAUSTED = "kv_exhausted"  # alone, and all K/V memory is full
    ABORT = "abort"  # the client does not want it any longer


@dataclass(frozen=True)
class Request:
    """A prompt and what to make of it. ``salt`` keeps prefixes apart that must not be shared.

    ``priority``: less is more urgent, if the engine schedules by priority. ``eos_ids`` end an
    answer unless ``sampling.ignore_eos``.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: frozenset[int] = frozenset()
    priority: int = 0
    salt: str = ""

    def name(self, index: int) -> str:
        """What its answer number ``index`` is called: with the number only if there are several."""
        return f"{self.request_id}/{index}" if self.sampling.n > 1 else self.request_id


class Sequence:
    """One answer to a request: its tokens, how many of them are computed, and where they lie.

    ``sequence_id`` is its number in the engine, ``index`` says which of the request's n answers it
    is, and ``arrival`` is the number of the request. ``max_output`` tokens end it. Where a sequence
    is (waiting, running, gone) is not written here: it is the container that holds it.
    """

    def __init__(
        self,
        request: Request,
        sequence_id: int,
        arrival: int,
        max_output: int,
        index: int = 0,
    ) -> None:
        self.request = request
        self.name = request.name(index)  # the request's id; with the index if it has several
        self.num_prompt_tokens = len(request.prompt)
        self.sequence_id = sequence_id
        self.arrival = arrival
        self.index = index
        self.max_output = max_output
        self.token_ids = list(request.prompt)
        self.num_computed = 0  # the first so many tokens have K and V, or get them in flight
        self.num_pending = 0  # tokens that a step in flight chooses: counted, not yet known
        self.num_in_flight = 0  # steps that have been planned with it and not come back
        self.table: BlockTable | None = None  # while it runs
        self.host_blocks: list[int] | None = None  # while it is swapped out
        self.num_cached_tokens: int | None = None  # found when it was first admitted
        self.num_preemptions = 0
        self.num_ever_computed = 0  # the largest num_computed that there was
        self.to_fork = request.sampling.n - 1 if index == 0 else 0
        self.finish_reason: FinishReason | None = None

    def __repr__(self) -> str:
        state = f"{self.num_computed} of {self.num_tokens} computed"
        return f"Sequence({self.name}: {state}, {self.num_output_tokens} of {self.max_output} out)"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Those that are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_to_compute(self) -> int:
        """What the steps to come have to compute before the next token can be chosen."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def waits_for_a_step(self) -> bool:
        """Whether only a step in flight can tell what is to be computed next: it chooses the last
        token, or the one after which the answers to this prompt part."""
        if not self.num_pending:
            return False
        return self.to_fork > 0 or self.num_output_tokens + self.num_pending >= self.max_output

    @property
    def num_seats(self) -> int:
        """How many places of ``max_num_seqs`` it takes: its forks to come need theirs too."""
        return 1 + self.to_fork

    @property
    def priority(self) -> int:
        return self.request.priority

    def append(self, token_id: int) -> None:
        """The next token of the answer has been chosen."""
        assert self.finish_reason is None, f"{self.name} has ended: {self.finish_reason}"
        self.token_ids.append(token_id)
        if token_id in self.request.eos_ids and not self.request.sampling.ignore_eos:
            self.finish_reason = FinishReason.STOP
        elif len(self.token_ids) - self.num_prompt_tokens >= self.max_output:
            self.finish_reason = FinishReason.LENGTH

    def fork(self, sequence_id: int, index: int) -> Sequence:
        """Another answer to the same prompt, on the same blocks. Nothing has been chosen yet."""
        assert self.table is not None and self.num_output_tokens == 0
        twin = Sequence(self.request, sequence_id, self.arrival, self.max_output, index)
        twin.table = self.table.fork()
        twin.num_computed = self.num_computed
        twin.num_ever_computed = self.num_ever_computed
        twin.num_cached_tokens = self.num_cached_tokens
        return twin


def count_seats(sequences: Iterable[Sequence]) -> int:
    """How many places of ``max_num_seqs`` the sequences take together."""
    return sum(sequence.num_seats for sequence in sequences)
