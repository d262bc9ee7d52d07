"""What comes back from the engine: pieces of an answer while it is made, and whole answers.

Invariant: the pieces of an answer joined together are its text, whichever way it is asked for; both
ways go through ``AnswerBuilder``. Token ids include the token that ended an answer; text does not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from mie.request import FinishReason, Request
from mie.scheduling.plan import SequenceOutput
from mie.text.detokenizer import Detokenizer
from mie.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """What one step adds: a token, the text that became certain with it, and perhaps the end.

    ``index`` says which of the n answers it belongs to. ``token_id`` is None where an answer ends
    without a token. ``num_cached_tokens``: how much of the prompt was in memory already.
    """

    text: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    index: int = 0


@dataclass
class Completion:
    """One of the n answers to a prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass
class RequestOutput:
    """All answers to one prompt; ``text``, ``token_ids`` and ``finish_reason`` are the first one's.

    ``num_cached_tokens`` of the prompt were in memory already and have not been computed.
    ``time_to_first_token`` includes the time that the request waited for its turn.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    completions: list[Completion]
    num_cached_tokens: int = 0
    time_to_first_token: float = 0.0  # seconds
    decode_seconds: float = 0.0  # from the first token to the last

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.completions[0].finish_reason

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Of all answers together."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def decode_tokens_per_second(self) -> float:
        """Every token after the first of each answer, over the time that they took."""
        tokens = self.num_output_tokens - len(self.completions)
        return tokens / self.decode_seconds if tokens > 0 and self.decode_seconds > 0 else 0.0

    @property
    def is_finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)


class AnswerBuilder:
    """Puts the outputs of one request together, as they come."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        count = request.sampling.n
        self._detokenizers = [Detokenizer(tokenizer) for _ in range(count)]
        self._start = self._first = time.perf_counter()
        self.result = RequestOutput(
            request.request_id, request.prompt, [Completion() for _ in range(count)]
        )

    def push(self, output: SequenceOutput) -> Piece:
        """One more output; what it adds."""
        completion = self.result.completions[output.index]
        detokenizer = self._detokenizers[output.index]
        now = time.perf_counter()
        if not any(each.token_ids for each in self.result.completions):
            self._first = now
            self.result.time_to_first_token = now - self._start
        self.result.decode_seconds = now - self._first
        self.result.num_cached_tokens = output.num_cached_tokens
        text = ""
        if output.token_id is not None:
            completion.token_ids.append(output.token_id)
            if output.finish_reason is not FinishReason.STOP:
                text = detokenizer.push(output.token_id)
        if output.finish_reason is not None:
            text += detokenizer.flush()
            completion.finish_reason = output.finish_reason
        completion.text += text
        return Piece(
            text, output.token_id, output.finish_reason, output.num_cached_tokens, output.index
        )
