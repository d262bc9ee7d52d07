"""What may stand for a prompt: a text, or token ids in any kind of sequence.

Invariant: behind this line a prompt is a tuple of Python integers, each in the vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from mie.errors import RequestError
from mie.text.tokenizer import Tokenizer


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is a prompt and not a list of them: a text, token ids, or nothing at all."""
    if isinstance(prompts, str):
        return True
    if hasattr(prompts, "ndim"):  # an array or a tensor
        return prompts.ndim < 2
    return not prompts or not isinstance(prompts[0], str | Iterable)


def checked_prompt(prompt: Any, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """The token ids of ``prompt``; a text gets what the tokenizer begins every text with.

    Raises RequestError for what is no token id, naming it.
    """
    if isinstance(prompt, str):
        return tuple(tokenizer.encode_prompt(prompt))
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise RequestError(f"a prompt is a text or token ids, not {prompt!r}")
    return tuple(_token_id(token, vocab_size) for token in prompt)


def _token_id(token: Any, vocab_size: int) -> int:
    try:
        if isinstance(token, bool):
            raise TypeError
        number = operator.index(token)
    except TypeError:
        raise RequestError(f"{token!r} is no token id; those are whole numbers") from None
    if not 0 <= number < vocab_size:
        raise RequestError(f"token {number} is outside the vocabulary of {vocab_size}")
    return number
