"""What is refused when it arrives, because no schedule could ever serve it.

Invariant: whatever passes here ends by itself. Alone on an empty machine its prompt fits, and its
answer fits or was left open; so nobody in the queue waits for something that cannot happen.

Memory is counted in blocks, converted in one place. The last token of an answer needs no K and V:
nobody computes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mie.errors import ConfigError, ContextLengthError, EmptyPromptError, RequestError
from mie.memory.block_pool import blocks_needed
from mie.request import Request


@dataclass(frozen=True)
class Limits:
    """``max_num_seqs`` sequences run at once, a step computes at most ``token_budget`` tokens, and
    a sequence has at most ``max_model_len`` of them, prompt and answer. The only places where these
    numbers are written.

    Raises ConfigError unless every running sequence gets at least one token a step.
    """

    max_num_seqs: int
    token_budget: int
    max_model_len: int

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs is {self.max_num_seqs}; it must be at least 1")
        if self.token_budget < self.max_num_seqs:
            raise ConfigError(
                f"token_budget is {self.token_budget} and max_num_seqs {self.max_num_seqs}: each "
                "running sequence needs at least one token a step"
            )
        if self.max_model_len < 2:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}; a prompt and its answer are at least 2"
            )


def max_output(request: Request, limits: Limits, num_blocks: int, block_size: int) -> int:
    """How many tokens the answer may have. ``num_blocks`` is all that there are, scratch left out.

    A ``max_tokens`` beyond the context ends there. Raises EmptyPromptError, ContextLengthError or
    RequestError, naming both numbers, for a request that can never be served as it was asked.
    """
    prompt, sampling = len(request.prompt), request.sampling
    if prompt == 0:
        raise EmptyPromptError("the prompt has no tokens")
    if prompt >= limits.max_model_len:
        raise ContextLengthError(
            f"the prompt has {prompt} tokens; with its answer it may have {limits.max_model_len}"
        )
    if sampling.n > limits.max_num_seqs:
        raise RequestError(f"n is {sampling.n}; max_num_seqs is {limits.max_num_seqs}")
    room = limits.max_model_len - prompt
    output = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    certain = 1 if sampling.max_tokens is None else output  # what was asked for explicitly
    needed = blocks_needed(prompt + certain - 1, block_size)
    if needed > num_blocks:
        answer = "" if sampling.max_tokens is None else f" and an answer of {output}"
        raise ContextLengthError(
            f"a prompt of {prompt} tokens{answer} needs {needed} blocks of {block_size}; the "
            f"K/V memory has {num_blocks}: ask for less, or give the engine more num_blocks"
        )
    return output
