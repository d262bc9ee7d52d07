"""A model that talks: weights, text and the engine put together.

Invariant: a request is refused before anything is computed for it, or each of its answers runs to
exactly one finish reason. All that is asked of one ``LLM`` shares its steps: the prompts of one
``generate``, and streams that are open at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

from mie import parts as all_parts
from mie.config import EngineConfig
from mie.engine.assemble import ENGINE_PARTS, Engine, assemble
from mie.engine.outputs import AnswerBuilder, Piece, RequestOutput
from mie.engine.place import DTYPES, auto_dtype, choose_device
from mie.engine.progress import progress_bar
from mie.engine.prompts import checked_prompt, is_one_prompt
from mie.errors import ConfigError, MieError, RequestError
from mie.execution.device_runner import DeviceRunner
from mie.model import hub
from mie.model.config import ModelConfig
from mie.model.decoder import Decoder
from mie.model.gguf import GGUFFile
from mie.model.open import open_checkpoint
from mie.model.weights import load_weights, num_parameters
from mie.ops.dispatch import for_device
from mie.request import Request
from mie.sampling_params import SamplingParams, mix
from mie.scheduling.plan import SequenceOutput
from mie.scheduling.trace import Trace
from mie.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]  # a text, or token ids
OPS = ("rms_norm", "rope", "swiglu", "attention")
DEFAULT_MAX_TOKENS = 256


class LLM:
    """A loaded model with its tokenizer, and an engine that serves it.

    ``model`` is ``smollm2-135m``, a folder, a ``.gguf`` file or a Hugging Face id. Settings are
    those of ``EngineConfig``: in ``config``, or by name (``LLM(num_blocks=100)``). ``parts``
    replaces parts of the engine by name: see ``mie.parts``.

    All answers share the blocks, those of earlier prompts too as long as nobody else needs the
    room; ``prefix_cache="off"`` keeps none of them.
    """

    def __init__(
        self,
        model: str | Path = hub.DEFAULT_MODEL,
        config: EngineConfig | None = None,
        *,
        parts: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.engine_config = EngineConfig.of(config, settings)
        chosen = all_parts.choose(parts)
        device = choose_device(self.engine_config.device)
        self.path = hub.resolve(model)
        self.tokenizer = Tokenizer.load(self.path)
        checkpoint = open_checkpoint(self.path, chosen["safetensors_reader"])
        if isinstance(checkpoint, GGUFFile):
            self.config = ModelConfig.from_dict(checkpoint.hf_config())
        else:
            self.config = ModelConfig.from_folder(self.path)
        dtype = DTYPES.get(self.engine_config.dtype)
        self.engine_config.limits(self.config.max_position_embeddings)  # refused before loading
        ops = {name: part for name, part in (parts or {}).items() if name in OPS}
        self.decoder = Decoder(
            self.config,
            dtype or auto_dtype(device, num_parameters(self.config)),
            device,
            for_device(device, ops, fast=self.engine_config.fast_ops),
        )
        load_weights(self.decoder, checkpoint)
        self._parts = dict(parts or {})
        self._start_engine()

    def with_settings(self, *, parts: Mapping[str, Any] | None = None, **settings: Any) -> LLM:
        """The same weights and tokenizer with an engine of its own: other settings, other parts.

        Raises ConfigError for what belongs to the loaded weights: ``dtype``, ``device``,
        ``fast_ops`` and the operations.
        """
        if fixed := sorted({"dtype", "device", "fast_ops"} & {*settings}):
            raise ConfigError(f"{fixed[0]} belongs to the loaded model: make another LLM")
        all_parts.choose(parts)
        if fixed := sorted({*(parts or {})} - {*ENGINE_PARTS}):
            raise ConfigError(f"part {fixed[0]} belongs to the loaded model: make another LLM")
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.engine_config = EngineConfig.of(self.engine_config, settings)
        twin._parts = {**self._parts, **(parts or {})}
        twin._start_engine()
        return twin

    def _start_engine(self) -> None:
        self.engine: Engine = assemble(self.decoder, self.engine_config, self._parts)
        self.memory = self.engine.memory
        self._num_requests = 0
        self._inboxes: dict[str, deque[SequenceOutput]] = {}

    def close(self) -> None:
        """Give up recorded steps and what they hold of a GPU's memory. The model can still be used,
        but a step is launched in pieces then."""
        if isinstance(self.engine.runner, DeviceRunner):
            self.engine.runner.close()

    @property
    def trace(self) -> Trace:
        """What every step did: see ``mie.scheduling.trace``."""
        return self.engine.core.trace

    @property
    def max_context(self) -> int:
        """How many tokens a prompt and its answer may have: what the model reads, or what the
        memory holds and one more, since the last token of an answer needs no K and V."""
        limits = self.engine.core.scheduler.limits
        return min(limits.max_model_len, self.memory.num_tokens + 1)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens that ask the model to answer ``messages``, by its own chat template."""
        return self.tokenizer.encode_chat(messages)

    # -- asking ----------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        salt: str = "",
        priority: int = 0,
    ) -> Iterator[Piece]:
        """The answer, token by token, by default each the most likely one, as far as there is room.

        ``prompt`` is token ids, or text, to which only what the tokenizer begins every text with is
        added. What was computed for prompts of another ``salt`` is not used; a smaller ``priority``
        goes first where the engine's policy is ``priority``. Each piece takes as many steps as it
        needs; other streams that are open come forward in them too, and this one in theirs. Closing
        the iterator ends the request. Raises EmptyPromptError, ContextLengthError or RequestError
        at once, not at the first token.
        """
        if sampling_params is not None and max_tokens is not None:
            raise RequestError(_both(sampling_params.max_tokens, max_tokens))
        sampling = sampling_params or SamplingParams(max_tokens=max_tokens)
        return self._pieces(self._request(prompt, sampling, salt, priority))

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is also a sequence of texts
        self,
        prompts: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        salt: str = "",
        priority: int = 0,
        progress: bool | None = None,
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int | None = None,
        salt: str = "",
        priority: int = 0,
        progress: bool | None = None,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int | None = None,
        salt: str = "",
        priority: int = 0,
        progress: bool | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Whole answers: one for a prompt, a list in the same order for a list of prompts.

        ``sampling_params`` are for all prompts, or one for each; ``max_tokens`` alone is short for
        them, and without either an answer has at most 256 tokens. All prompts are checked before
        any is begun: errors as in ``stream``. ``progress`` shows a bar on standard error; None: if
        there are several prompts and somebody looks.
        """
        single = is_one_prompt(prompts)
        several = [prompts] if single else list(prompts)
        params = _for_each(sampling_params, max_tokens, len(several))
        requests = [
            self._request(prompt, sampling, salt, priority)
            for prompt, sampling in zip(several, params, strict=True)
        ]
        answers = self._answers(requests, progress)
        return answers[0] if single else answers

    # -- running ---------------------------------------------------------------------------------

    def _request(
        self, prompt: Prompt, sampling: SamplingParams | None, salt: str, priority: int
    ) -> Request:
        """A request that the engine can serve, with a length and a seed."""
        token_ids = checked_prompt(prompt, self.tokenizer, self.config.vocab_size)
        if not isinstance(salt, str):
            raise RequestError(f"salt is {salt!r}; it must be a text")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority is {priority!r}; it must be a whole number")
        if sampling is None:  # nobody has asked for a length: no reason to refuse one
            room = max(1, self.max_context - len(token_ids))
            sampling = SamplingParams(max_tokens=min(DEFAULT_MAX_TOKENS, room))
        number = self._num_requests + 1
        if sampling.seed is None:
            sampling = replace(sampling, seed=mix(self.engine_config.seed, number))
        eos_ids = frozenset(self.tokenizer.eos_ids)
        request = Request(str(number), token_ids, sampling, eos_ids, priority, salt)
        self.engine.core.check(request)
        self._num_requests = number
        return request

    def _pieces(self, request: Request) -> Iterator[Piece]:
        builder = AnswerBuilder(request, self.tokenizer)
        last: Piece | None = None
        try:
            inbox = self._submit([request])
            while not builder.result.is_finished:
                if last is not None:
                    yield last
                last = builder.push(self._next(inbox))
        finally:
            self._forget([request])
        assert last is not None
        yield last  # the blocks have gone back: nobody may ask for anything after this

    def _answers(self, requests: list[Request], progress: bool | None) -> list[RequestOutput]:
        builders = {r.request_id: AnswerBuilder(r, self.tokenizer) for r in requests}
        num_open = len(builders)
        try:
            inbox = self._submit(requests)
            with progress_bar(num_open, progress) as tell:
                while num_open:
                    output = self._next(inbox)
                    builder = builders[output.request_id]
                    builder.push(output)
                    finished = builder.result.is_finished
                    num_open -= finished
                    tell(finished, output.token_id is not None)
        finally:
            self._forget(requests)
        return [builder.result for builder in builders.values()]

    def _submit(self, requests: Sequence[Request]) -> deque[SequenceOutput]:
        """Queue the requests; what comes of them arrives in one inbox."""
        inbox: deque[SequenceOutput] = deque()
        for request in requests:
            self._inboxes[request.request_id] = inbox
            self.engine.core.add(request)
        return inbox

    def _next(self, inbox: deque[SequenceOutput]) -> SequenceOutput:
        """Take steps until something has arrived, for others on the way as well."""
        while not inbox:
            if not self.engine.core.has_work:
                raise MieError("a request's outputs have been taken by somebody else: no step left")
            for output in self.engine.core.step():
                if output.request_id in self._inboxes:
                    self._inboxes[output.request_id].append(output)
        return inbox.popleft()

    def _forget(self, requests: Sequence[Request]) -> None:
        """Nobody wants more of the requests. Those that have ended are not touched by this."""
        for request in requests:
            self._inboxes.pop(request.request_id, None)
            self.engine.core.abort(request.request_id)
        self.engine.core.settle()


def _for_each(
    given: SamplingParams | Sequence[SamplingParams] | None, max_tokens: int | None, count: int
) -> Sequence[SamplingParams | None]:
    """Sampling parameters for each of ``count`` prompts; None where nothing was asked for."""
    if given is None:
        return [None if max_tokens is None else SamplingParams(max_tokens=max_tokens)] * count
    params = [given] * count if isinstance(given, SamplingParams) else list(given)
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts")
    if max_tokens is not None:
        raise RequestError(_both(params[0].max_tokens, max_tokens))
    return params


def _both(in_params: int | None, beside: int) -> str:
    return f"max_tokens is {in_params} in sampling_params and {beside} beside them: give one"
