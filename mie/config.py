"""Every setting of the engine, in one place.

Invariant: an ``EngineConfig`` that exists contradicts itself nowhere. What depends on the model or
the machine as well is derived from it once, by ``limits`` and ``mie.engine.sizing``, and written
nowhere else; so no two parts of the engine can disagree about a limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mie.errors import ConfigError
from mie.sampling_params import MAX_SEED
from mie.scheduling.limits import Limits

DTYPES = ("auto", "float32", "bfloat16", "float16")
PREFIX_CACHES = {
    "hash": "mie.memory.prefix_cache:HashPrefixCache",
    "radix": "mie.memory.radix_tree:RadixTree",
    "off": "mie.memory.prefix_cache:NoPrefixCache",
}
QUEUES = {
    "fcfs": "mie.scheduling.queue:FirstComeFirstServed",
    "priority": "mie.scheduling.queue:StrictPriority",
}
PREEMPTIONS = ("recompute", "swap")
KERNELS = ("auto", "torch", "triton")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Raises ConfigError for values that mean nothing or contradict each other.

    - ``dtype``: of weights, K and V: ``auto`` is bfloat16 for models of a billion
      parameters and more on a GPU, float32 elsewhere
    - ``device``: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, …
    - ``block_size``: tokens in a block
    - ``num_blocks``: of the device, one of them scratch; or
    - ``memory_share``: the share of its memory (on a GPU, of what is free beside the weights and
      a step's needs) that K and V may take; neither: see ``mie.engine.sizing``
    - ``max_num_seqs``: sequences that run at once
    - ``token_budget``: tokens that a step computes at most
    - ``max_model_len``: tokens of a prompt and its answer; None: as many as the model reads
    - ``prefix_cache``: ``hash``, ``radix`` or ``off``
    - ``preemption``: what becomes of a victim's K and V: ``recompute`` or ``swap``
    - ``num_host_blocks``: room to swap to; None: as many as the device has
    - ``policy``: ``fcfs`` (first come first served) or ``priority``
    - ``seed``: of the draws of requests that bring none
    - ``fast_ops``: False: the reference operations, which the fast ones must equal
    - ``kernels``: ``triton``, ``torch``, or ``auto``: Triton on a GPU if it is installed
    - ``cuda_graphs``: with Triton on a GPU: decode steps are recorded once and replayed
    - ``overlap``: with Triton: a step is launched before the tokens of the last one are known
    - ``trace_steps``: how many steps the trace keeps; 0: no trace
    """

    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    memory_share: float | None = None
    max_num_seqs: int = 64
    token_budget: int = 512
    max_model_len: int | None = None
    prefix_cache: str = "hash"
    preemption: str = "recompute"
    num_host_blocks: int | None = None
    policy: str = "fcfs"
    seed: int = 0
    fast_ops: bool = True
    kernels: str = "auto"
    cuda_graphs: bool = True
    overlap: bool = True
    trace_steps: int = 10_000

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("prefix_cache", self.prefix_cache, PREFIX_CACHES)
        _one_of("preemption", self.preemption, PREEMPTIONS)
        _one_of("policy", self.policy, QUEUES)
        _one_of("kernels", self.kernels, KERNELS)
        _at_least("block_size", self.block_size, 1)
        if self.kernels == "triton" and not self.fast_ops:
            raise ConfigError("kernels is 'triton' and fast_ops False: give one of them")
        if self.kernels == "triton" and self.block_size & (self.block_size - 1):
            raise ConfigError(f"kernels is 'triton': block_size {self.block_size} is no power of 2")
        _at_least("num_blocks", self.num_blocks, 2, "one of them is scratch")
        _at_least("num_host_blocks", self.num_host_blocks, 0)
        _at_least("trace_steps", self.trace_steps, 0)
        _at_least("seed", self.seed, 0)
        for name in ("max_num_seqs", "token_budget", "max_model_len"):
            _whole(name, getattr(self, name))
        if self.seed > MAX_SEED:
            raise ConfigError(f"seed is {self.seed}; it may be {MAX_SEED} at most")
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory_share is {self.memory_share}; it lies above 0, 1 at most")
        if self.num_blocks is not None and self.memory_share is not None:
            raise ConfigError(
                f"num_blocks is {self.num_blocks} and memory_share {self.memory_share}: give one"
            )
        if self.num_host_blocks and self.preemption != "swap":
            raise ConfigError(
                f"num_host_blocks is {self.num_host_blocks} and preemption {self.preemption!r}: "
                "only 'swap' needs room on the host"
            )
        length = 2 if self.max_model_len is None else self.max_model_len
        Limits(self.max_num_seqs, self.token_budget, length)

    @classmethod
    def of(cls, config: EngineConfig | None, settings: Mapping[str, Any]) -> EngineConfig:
        """``config`` (by default the default) with ``settings`` in place of its own.

        Raises ConfigError for a name that is no setting.
        """
        given = {} if config is None else {f.name: getattr(config, f.name) for f in fields(cls)}
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(settings) - set(names)):
            raise ConfigError(f"no setting called {unknown[0]}; there are {', '.join(names)}")
        return cls(**{**given, **settings})

    def limits(self, model_context: int) -> Limits:
        """What the scheduler may do with a model that reads ``model_context`` tokens.

        Raises ConfigError if ``max_model_len`` is more than that.
        """
        wanted = model_context if self.max_model_len is None else self.max_model_len
        if wanted > model_context:
            raise ConfigError(f"max_model_len is {wanted}; the model reads {model_context} tokens")
        return Limits(self.max_num_seqs, self.token_budget, wanted)


def _one_of(name: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise ConfigError(f"no {name} called {value!r}; there are {', '.join(allowed)}")


def _at_least(name: str, value: int | None, least: int, why: str = "") -> None:
    _whole(name, value)
    if value is not None and value < least:
        because = f": {why}" if why else ""
        raise ConfigError(f"{name} is {value}; it must be at least {least}{because}")


def _whole(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number")
