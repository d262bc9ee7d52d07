"""An answer, shown while it is made, and what it took.

Invariant: what is shown is the text itself and nothing else, each piece the moment it exists. So
standard output can be piped anywhere; what is said *about* the answer goes to standard error.

Two bounds show in the times (chapter 03). The prompt, or what of it is not cached, is computed
before the first token: arithmetic. Every later token reads all the weights again: memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from mie.engine.outputs import Piece, RequestOutput

# A model can produce any character. These would move a terminal's cursor or change its colours.
_CONTROLS = {code: None for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\n\t"}

ENDINGS = {
    "stop": "the model ended it",
    "length": "cut at the limit of tokens",
    "kv_exhausted": "cut where the K/V memory ended",
    "abort": "given up",
    "interrupted": "you stopped it",
}


@dataclass
class Answer:
    """What came, and in which time. ``ending`` is a key of ``ENDINGS``."""

    num_prompt_tokens: int
    text: str = ""
    num_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt: found in memory, not computed
    time_to_first_token: float = 0.0  # seconds
    decode_seconds: float = 0.0
    ending: str = "stop"

    def summary(self) -> str:
        """One line: prompt and time to the first token, tokens and their rate, how it ended."""
        tokens = "1 token" if self.num_tokens == 1 else f"{self.num_tokens} tokens"
        if self.num_tokens > 1 and self.decode_seconds > 0:
            tokens += f" at {(self.num_tokens - 1) / self.decode_seconds:.1f} a second"
        cached = f", {self.num_cached_tokens} cached," if self.num_cached_tokens else ""
        return (
            f"{self.num_prompt_tokens} prompt tokens{cached} in {self.time_to_first_token:.2f} s · "
            f"{tokens} · {ENDINGS[self.ending]}"
        )


def show_answer(pieces: Iterator[Piece], num_prompt_tokens: int, output: TextIO) -> Answer:
    """Write the pieces to ``output`` as they come, then a line end.

    Ctrl-C ends the answer, not the program: what has come until then is kept.
    """
    answer = Answer(num_prompt_tokens)
    controls = _CONTROLS if output.isatty() else {}
    start = time.perf_counter()
    try:
        for piece in pieces:
            if answer.num_tokens == 0:
                answer.time_to_first_token = time.perf_counter() - start
                answer.num_cached_tokens = piece.num_cached_tokens
            answer.text += piece.text
            answer.num_tokens += piece.token_id is not None
            answer.ending = piece.finish_reason or answer.ending
            output.write(piece.text.translate(controls))
            output.flush()
    except KeyboardInterrupt:
        answer.ending = "interrupted"
    answer.decode_seconds = time.perf_counter() - start - answer.time_to_first_token
    output.write("\n")
    output.flush()
    return answer


def show_answers(result: RequestOutput, output: TextIO, tell: Callable[[str], None]) -> str:
    """Write all answers to one prompt, whole, one after the other, and say between them which.

    ``tell`` gets what is said about them: a heading before each. Returns a summary of all.
    """
    controls = _CONTROLS if output.isatty() else {}
    for number, completion in enumerate(result.completions, 1):
        assert completion.finish_reason is not None
        tell(f"{number} of {len(result.completions)}, {ENDINGS[completion.finish_reason]}")
        output.write(completion.text.translate(controls) + "\n")
        output.flush()
    cached = f", {result.num_cached_tokens} cached," if result.num_cached_tokens else ""
    return (
        f"{result.num_prompt_tokens} prompt tokens{cached} in {result.time_to_first_token:.2f} s · "
        f"{result.num_output_tokens} tokens at {result.decode_tokens_per_second:.1f} a second"
    )
