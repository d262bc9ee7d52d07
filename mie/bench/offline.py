"""Output tokens a second of a standard workload, how near that is to the machine, and where a step
goes.

Invariant: every run is the whole way from requests to tokens on the host, with the engine's own
scheduler, cache and sampler: all requests are added, then ``step()`` until nothing is left. Nothing
else happens between the two readings of the clock but counting. Tokens are not turned into text.

    warm-up    the same workload once, so that kernels are compiled and memory has been asked for
    runs       as often as is wanted; the best counts, all are reported
    profile    on a GPU, some steps more under the profiler

The split of a step is taken where half of the output is out: ``WINDOW`` steps of the best run. An
engine with steps in flight returns the tokens of an earlier step, and sometimes none; over several
steps that is the same.

All runs share one engine. Prompts of different runs have different salts, so that a prefix cache is
there, costs what it costs and finds nothing. Blocks suffice for all sequences that run at once, as
far as memory goes. Needs nothing but torch: no terminal, no tokenizer.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.bench.bound import Bound, Limits, limits_of, work_of
from mie.bench.offline_result import OfflineRun, Split, Window, WorkloadResult
from mie.bench.standard_workloads import MAX_MODEL_LEN, StandardWorkload, standard_workload
from mie.bench.step_profile import GpuSteps, profile_steps, read_profile
from mie.config import EngineConfig
from mie.errors import ConfigError, MieError
from mie.memory.block_pool import blocks_needed
from mie.request import Request

if TYPE_CHECKING:
    from mie.engine.assemble import Engine
    from mie.model.decoder import Decoder

WINDOW = 20  # steps that the split is an average of
TOKEN_BUDGET = {"cuda": 16_384, "cpu": 512}
MEMORY_SHARE = {"cuda": 0.85, "cpu": 0.5}  # for K and V, where memory is short
TELL_EVERY = 0.5  # seconds: whoever draws takes time from the engine

Tell = Callable[[str, int, int], None]  # what is done, output tokens that are out, and of how many


# -- the whole measurement -----------------------------------------------------------------------


def measure_workload(
    decoder: Decoder,
    workload: StandardWorkload | str,
    *,
    model: str = "",
    runs: int = 3,
    profile: Path | None = None,
    limits: Limits | None = None,
    parts: Mapping[str, Any] | None = None,
    tell: Tell = lambda doing, out, total: None,
    **settings: Any,
) -> WorkloadResult:
    """Measure ``decoder`` on ``workload``, one warm-up and ``runs`` runs.

    ``settings`` are those of ``EngineConfig``; what is not given is chosen for the workload, and
    the trace is off. ``profile`` is a file for Perfetto: some steps of a further run. ``limits``
    are the machine's; None: see ``limits_of``. ``tell`` is called twice a second.

    Raises ConfigError for a workload that is none, or that the model or the settings have no room
    for, and MieError if tokens are missing at the end, or if ``profile`` cannot be written.
    """
    if isinstance(workload, str):
        workload = standard_workload(workload)
    if runs < 1:
        raise ConfigError(f"runs is {runs}; at least 1 is needed to measure something")
    limits = limits or limits_of(decoder.device, decoder.dtype)
    _tidy(decoder)
    config = config_for(decoder, workload, settings)
    clock = _Clock()
    engine = _engine(decoder, config, parts, clock)
    done = []
    with _no_old_garbage():
        for number in range(runs + 1):
            doing = f"run {number} of {runs}" if number else "warm-up"
            requests = workload.requests(f"run{number}")
            done.append(_run(engine, clock, requests, partial(tell, doing)))
    best = min(done[1:], key=lambda run: run.seconds)
    gpu = None
    if decoder.device.type == "cuda":
        gpu = _profile_gpu(engine, workload, decoder, profile, tell)
    elif profile:
        del engine  # the one that keeps a trace needs as much memory
        _tidy(decoder)
        _write(profile, _engine_trace(decoder, config, parts, workload, tell))
    bound = None
    says = f"no bound: on {decoder.device}, caches hold part of what a step reads"
    if limits:
        work = work_of(decoder.config, decoder.dtype, workload.lengths, config.max_num_seqs)
        bound, says = Bound(work, limits), limits.source
    return WorkloadResult(
        model=model or decoder.config.model_type,
        workload=workload.title,
        num_requests=len(workload.prompts),
        prompt_tokens=workload.prompt_tokens,
        settings=asdict(config),
        runs=tuple(done[1:]),
        bound=bound,
        bound_says=says,
        split=Split(best.window, gpu),
    )


def _tidy(decoder: Decoder) -> None:
    """Give back what engines of earlier measurements held: free memory decides how much K and V
    may take."""
    import torch

    gc.collect()
    if decoder.device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def _no_old_garbage() -> Iterator[None]:
    """What there is already is kept from the collector, which otherwise walks over all of it, torch
    included, in the middle of a step. Engines that serve do the same once they have started."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def config_for(
    decoder: Decoder, workload: StandardWorkload, settings: Mapping[str, Any]
) -> EngineConfig:
    """``settings``, and for the rest what suits ``workload``: its own ``max_num_seqs``, a large
    budget on a GPU, a context of 4,096 tokens or the model's, and blocks for all that run at once;
    a share of the memory where these would take more than half of it.

    Raises ConfigError for a model or a context in which the workload does not fit.
    """
    from mie.engine.sizing import device_memory

    kind = decoder.device.type
    at_once = settings.get("max_num_seqs") or workload.max_num_seqs
    context = min(MAX_MODEL_LEN, decoder.config.max_position_embeddings)
    chosen = {
        "max_num_seqs": at_once,
        "token_budget": max(TOKEN_BUDGET[kind], at_once),
        "max_model_len": context,
        "trace_steps": 0,
        **{name: value for name, value in settings.items() if value is not None},
    }
    _require_room(decoder, workload, chosen["max_model_len"])
    config = EngineConfig.of(None, chosen)
    if config.num_blocks is not None or config.memory_share is not None:
        return config
    blocks = blocks_for(workload, config.max_num_seqs, config.block_size)
    num_bytes = blocks * config.block_size * decoder.config.kv_bytes_per_token(decoder.dtype)
    memory = device_memory(decoder.device)
    plenty = memory is None or num_bytes <= memory // 2
    return EngineConfig.of(
        config, {"num_blocks": blocks} if plenty else {"memory_share": MEMORY_SHARE[kind]}
    )


def blocks_for(workload: StandardWorkload, max_num_seqs: int, block_size: int) -> int:
    """A pool for the longest ``max_num_seqs`` requests at once, with scratch, and two blocks more
    for each: one that the scheduler keeps free, one for a step that is planned ahead."""
    whole = sorted((prompt + answer for prompt, answer in workload.lengths), reverse=True)
    return 1 + sum(blocks_needed(tokens, block_size) + 2 for tokens in whole[:max_num_seqs])


def _require_room(decoder: Decoder, workload: StandardWorkload, context: int) -> None:
    longest = max(prompt + answer for prompt, answer in workload.lengths)
    if longest > context:
        raise ConfigError(
            f"the longest request of {workload.title} has {longest:,} tokens with its answer; the "
            f"engine reads {context:,}"
        )
    highest = max(max(prompt) for prompt in workload.prompts)
    if highest >= decoder.config.vocab_size:
        raise ConfigError(
            f"{workload.title} has token ids up to {highest:,}; the model's vocabulary has "
            f"{decoder.config.vocab_size:,}"
        )


# -- one run -------------------------------------------------------------------------------------


class _Clock:
    """Seconds that the scheduler's halves of a step have taken so far."""

    def __init__(self) -> None:
        self.seconds = {"schedule": 0.0, "update": 0.0}

    def around(self, half: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds[half] += time.perf_counter() - began

        return timed

    def watch(self, scheduler: Callable[..., Any]) -> Callable[..., Any]:
        """A part that makes what ``scheduler`` makes, with both halves timed."""

        def make(*arguments: Any, **named: Any) -> Any:
            made = scheduler(*arguments, **named)
            for half in self.seconds:
                setattr(made, half, self.around(half, getattr(made, half)))
            return made

        return make

    def read(self, steps: int) -> Window:
        """All that was until now."""
        now = time.perf_counter()
        return Window(steps, now, self.seconds["schedule"], self.seconds["update"])


def _engine(
    decoder: Decoder, config: EngineConfig, parts: Mapping[str, Any] | None, clock: _Clock
) -> Engine:
    from mie import parts as all_parts
    from mie.engine.assemble import assemble

    scheduler = clock.watch(all_parts.choose(parts)["scheduler"])
    return assemble(decoder, config, {**(parts or {}), "scheduler": scheduler})


def _run(
    engine: Engine, clock: _Clock, requests: Sequence[Request], tell: Callable[[int, int], None]
) -> OfflineRun:
    core, total = engine.core, _num_tokens(requests)
    steps = out = 0
    first = start = clock.read(0)
    last: Window | None = None
    tell_at = start.seconds
    for request in requests:
        core.add(request)
    while core.has_work:
        outputs = core.step()
        steps += 1
        out += sum(output.token_id is not None for output in outputs)
        if first is start and 2 * out >= total:
            first = clock.read(steps)
        elif first is not start and steps == first.steps + WINDOW:
            last = clock.read(steps)
        if (now := time.perf_counter()) >= tell_at:
            tell(out, total)
            tell_at = now + TELL_EVERY
    end = clock.read(steps)
    tell(out, total)
    if out != total:
        raise MieError(f"{out:,} tokens came out of a run, and {total:,} were asked for")
    last = last or end
    if last.steps == first.steps:  # half of the tokens came with the last step
        first = start
    return OfflineRun(end.seconds - start.seconds, out, steps, _between(first, last))


def _between(first: Window, last: Window) -> Window:
    return Window(
        last.steps - first.steps,
        last.seconds - first.seconds,
        last.schedule_seconds - first.schedule_seconds,
        last.update_seconds - first.update_seconds,
    )


def _num_tokens(requests: Sequence[Request]) -> int:
    return sum(request.sampling.max_tokens or 0 for request in requests)


# -- a look inside -------------------------------------------------------------------------------


def _advance(engine: Engine, workload: StandardWorkload, tell: Tell, salt: str = "profile") -> None:
    """To where half of the output is out: the window of a run begins there."""
    core, requests = engine.core, workload.requests(salt)
    total, out = _num_tokens(requests), 0
    tell("profile", 0, total)
    for request in requests:
        core.add(request)
    while core.has_work and 2 * out < total:
        out += len(core.step())


def _profile_gpu(
    engine: Engine, workload: StandardWorkload, decoder: Decoder, file: Path | None, tell: Tell
) -> GpuSteps | None:
    """The same steps as those of the window; None if a run is too short to have any left."""
    core = engine.core
    _advance(engine, workload, tell)
    recorded = profile_steps(core.step, lambda: core.has_work, WINDOW, decoder.device)
    if file:
        if not core.has_work:  # a short run, all of it recorded: the same steps once more
            _advance(engine, workload, tell, "look")
        look, *_ = profile_steps(
            core.step, lambda: core.has_work, WINDOW, decoder.device, operations=True
        )
        _write(file, look)
    return read_profile(*recorded) if recorded[1] else None


def _engine_trace(
    decoder: Decoder,
    config: EngineConfig,
    parts: Mapping[str, Any] | None,
    workload: StandardWorkload,
    tell: Tell,
) -> str:
    """The engine's own record of the window's steps, for Perfetto."""
    from mie.engine.assemble import assemble
    from mie.scheduling.trace import to_perfetto

    engine = assemble(decoder, EngineConfig.of(config, {"trace_steps": WINDOW}), parts)
    _advance(engine, workload, tell)
    for _ in range(WINDOW):
        if engine.core.has_work:
            engine.core.step()
    return to_perfetto(engine.core.trace.records)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise MieError(f"{file} cannot be written: {error.strerror}") from error
