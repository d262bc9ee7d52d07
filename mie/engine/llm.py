"""A model that talks: weights, text and the loop put together.

Invariant: a request is refused before anything is computed for it, or it runs to exactly one finish
reason: ``stop`` (the model said that it is done) or ``length`` (it reached a limit).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from mie import parts as all_parts
from mie.engine.paged import KVMemory, choose_num_blocks, greedy_paged
from mie.errors import ConfigError, ContextLengthError, EmptyPromptError, RequestError
from mie.model import hub
from mie.model.config import ModelConfig
from mie.model.decoder import Decoder
from mie.model.gguf import GGUFFile
from mie.model.open import open_checkpoint
from mie.model.weights import load_weights, num_parameters
from mie.ops.dispatch import Ops
from mie.text.detokenizer import Detokenizer
from mie.text.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MEMORY_PARTS = ("block_pool", "block_table", "prefix_cache")
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Piece:
    """What one step adds: a token, the text that became certain with it, and perhaps the end.

    ``num_cached_tokens``: how much of the prompt was in memory already; the same in every piece.
    """

    text: str
    token_id: int
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0


@dataclass
class Completion:
    """A whole answer. ``token_ids`` include the token that ended it; ``text`` does not.

    ``num_cached_tokens`` of the prompt were in memory already and have not been computed.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Every token after the first, over the time that they took; 0 when there are none."""
        steps = len(self.token_ids) - 1
        return steps / self.decode_seconds if steps > 0 else 0.0


class LLM:
    """A loaded model with its tokenizer.

    ``model`` is ``smollm2-135m``, a folder, a ``.gguf`` file or a Hugging Face id. ``device`` is
    by default a CUDA device where there is one; for the default of ``dtype`` see ``auto_dtype``.
    ``parts`` replaces parts of the engine by name: see ``mie.parts``.

    K and V lie in ``num_blocks`` blocks of ``block_size`` tokens, one of them scratch; for the
    default see ``choose_num_blocks``. All answers share them, those of earlier prompts too as long
    as nobody else needs the room; ``parts={"prefix_cache": NoPrefixCache}`` keeps none of them.
    """

    def __init__(
        self,
        model: str | Path = hub.DEFAULT_MODEL,
        *,
        dtype: str = "auto",
        device: str = "auto",
        num_blocks: int | None = None,
        block_size: int = 16,
        parts: Mapping[str, Any] | None = None,
    ) -> None:
        chosen = all_parts.choose(parts)
        place = _device(device)
        if dtype not in ("auto", *DTYPES):
            raise ConfigError(f"no dtype called {dtype!r}; there are auto, {', '.join(DTYPES)}")
        if block_size < 1 or (num_blocks is not None and num_blocks < 2):
            raise ConfigError(
                f"num_blocks is {num_blocks} and block_size {block_size}; at least 2, one of them "
                "scratch, and 1 are needed"
            )
        self.path = hub.resolve(model)
        self.tokenizer = Tokenizer.load(self.path)
        checkpoint = open_checkpoint(self.path, chosen.pop("safetensors_reader"))
        if isinstance(checkpoint, GGUFFile):
            self.config = ModelConfig.from_dict(checkpoint.hf_config())
        else:
            self.config = ModelConfig.from_folder(self.path)
        number = DTYPES.get(dtype) or auto_dtype(place, num_parameters(self.config))
        memory_parts = {name: chosen.pop(name) for name in MEMORY_PARTS}
        self.decoder = Decoder(self.config, number, place, Ops(**chosen))
        load_weights(self.decoder, checkpoint)
        num_blocks = choose_num_blocks(self.config, number, place, block_size, num_blocks)
        self.memory = KVMemory(self.decoder, num_blocks, block_size, **memory_parts)

    @property
    def max_context(self) -> int:
        """How many tokens a prompt and its answer may have: what the model reads, or what the
        memory holds and one more, since the last token of an answer needs no K and V."""
        return min(self.config.max_position_embeddings, self.memory.num_tokens + 1)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens that ask the model to answer ``messages``, by its own chat template."""
        return self.tokenizer.encode_chat(messages)

    def stream(
        self, prompt: str | Sequence[int], max_tokens: int | None = None, salt: str = ""
    ) -> Iterator[Piece]:
        """The answer, token by token, each the most likely one.

        ``prompt`` is token ids, or text, to which only what the tokenizer begins every text with is
        added. ``max_tokens`` bounds the answer, and ``None`` lets it fill the context. What was
        computed for prompts of another ``salt`` is not used. Raises
        EmptyPromptError, ContextLengthError or RequestError at once, not at the first token; and
        OutOfBlocksError at any token, if other streams that are still open hold the memory.
        """
        return self._pieces(self._checked(prompt, max_tokens), max_tokens, salt)

    def generate(
        self, prompt: str | Sequence[int], max_tokens: int | None = 256, salt: str = ""
    ) -> Completion:
        """The whole answer, with what it took. Arguments and errors as in ``stream``."""
        token_ids = self._checked(prompt, max_tokens)
        answer = Completion(num_prompt_tokens=len(token_ids))
        start = time.perf_counter()
        for piece in self._pieces(token_ids, max_tokens, salt):
            if not answer.token_ids:
                answer.prefill_seconds = time.perf_counter() - start
            answer.text += piece.text
            answer.token_ids.append(piece.token_id)
            answer.num_cached_tokens = piece.num_cached_tokens
            answer.finish_reason = piece.finish_reason
        answer.decode_seconds = time.perf_counter() - start - answer.prefill_seconds
        return answer

    def _checked(self, prompt: str | Sequence[int], max_tokens: int | None) -> list[int]:
        tokenizer = self.tokenizer
        token_ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)
        limit, size = self.config.max_position_embeddings, self.config.vocab_size
        pool = self.memory.pool
        if not token_ids:
            raise EmptyPromptError("the prompt has no tokens")
        if len(token_ids) >= limit:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens; the model reads {limit}, answer included"
            )
        if len(token_ids) >= self.max_context:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens; the K/V memory has room for "
                f"{self.max_context}, answer included: shorten the prompt, or load the model with "
                f"more blocks of {pool.block_size} than num_blocks={pool.num_blocks}"
            )
        if strange := [token for token in token_ids if not 0 <= token < size]:
            raise RequestError(f"token {strange[0]} is outside the vocabulary of {size}")
        if max_tokens is not None and max_tokens < 1:
            raise RequestError(f"max_tokens is {max_tokens}; it must be at least 1")
        return token_ids

    def _pieces(self, token_ids: list[int], max_tokens: int | None, salt: str) -> Iterator[Piece]:
        room = self.max_context - len(token_ids)
        max_tokens = room if max_tokens is None else min(max_tokens, room)
        detokenizer = Detokenizer(self.tokenizer)
        with self.memory.table(token_ids, salt) as table:
            cached = table.num_tokens
            tokens = greedy_paged(self.decoder, self.memory, table, token_ids, salt)
            for count, token in enumerate(tokens, start=1):
                if token in self.tokenizer.eos_ids:
                    last = Piece(detokenizer.flush(), token, "stop", cached)
                    break
                text = detokenizer.push(token)
                if count == max_tokens:
                    last = Piece(text + detokenizer.flush(), token, "length", cached)
                    break
                yield Piece(text, token, None, cached)
        yield last  # the blocks have gone back: nobody may ask for anything after this


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise ConfigError(f"no device called {name!r}; there are auto, cpu, cuda, cuda:1, …")
    if int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} was asked for, and torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return torch.device(name)


def auto_dtype(device: torch.device, num_parameters: int) -> torch.dtype:
    """bfloat16 for models of a billion parameters or more on a CUDA device, float32 elsewhere.

    Half the bytes are worth a lot where a step waits for them. A small model has few, and its best
    two tokens are often nearer than bfloat16 can tell: asked for the capital of France, SmolLM2
    prefers its first token to the second by 0.1 at 25, where two bfloat16 are 0.125 apart.
    """
    large = num_parameters >= 1_000_000_000
    return torch.bfloat16 if large and device.type == "cuda" else torch.float32
