"""Rotary positions: the angle that each pair of a head turns by, and how a context is stretched.

Invariant: frequencies and angles are float32 whatever the dtype of the model; at position 100,000 a
bfloat16 angle would be off by whole turns. One pair turns by ``position * frequency``; the
frequencies fall geometrically from 1 to about 1 / theta, so that early pairs tell neighbours apart
and late pairs tell chapters apart::

    frequency[i] = theta ** (-i / R)        i = 0 … R - 1,  R = D / 2

A model trained on short texts is stretched to longer ones by lowering frequencies. Each scaling
class below is one published way of doing that; ``stretch`` returns the new frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mie.errors import ConfigError, UnsupportedModelError
from mie.model.numbers import count, positive


class RopeScaling(Protocol):
    """A way of stretching the context. ``amplitude`` multiplies cosines and sines."""

    @property
    def amplitude(self) -> float: ...

    def stretch(self, frequencies_R: Tensor, theta: float) -> Tensor: ...


@dataclass(frozen=True)
class NoScaling:
    """The frequencies as they were trained."""

    amplitude: float = 1.0

    def stretch(self, frequencies_R: Tensor, theta: float) -> Tensor:
        return frequencies_R


@dataclass(frozen=True)
class LinearScaling:
    """Every position divided by ``factor``. Chen et al., 2023."""

    factor: float
    amplitude: float = 1.0

    def stretch(self, frequencies_R: Tensor, theta: float) -> Tensor:
        return frequencies_R / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Slow pairs are divided by ``factor``, fast ones kept, those between blended.

    What counts is how many turns a pair completes in the original context: fewer than
    ``low_freq_factor`` is slow, more than ``high_freq_factor`` is fast. Llama 3.1, 2024.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int
    amplitude: float = 1.0

    def stretch(self, frequencies_R: Tensor, theta: float) -> Tensor:
        turns_R = self.original_context * frequencies_R / (2 * math.pi)
        band = self.high_freq_factor - self.low_freq_factor
        keep_R = ((turns_R - self.low_freq_factor) / band).clamp(0, 1)
        return keep_R * frequencies_R + (1 - keep_R) * frequencies_R / self.factor


@dataclass(frozen=True)
class YarnScaling:
    """Like Llama3Scaling, but the blend is linear in the pair's *index*, between the pairs that
    complete ``beta_fast`` and ``beta_slow`` turns; and attention is sharpened through the
    amplitude. Peng et al., 2023."""

    factor: float
    original_context: int
    amplitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def stretch(self, frequencies_R: Tensor, theta: float) -> Tensor:
        R = len(frequencies_R)
        first, last = (
            self._pair_with(self.beta_fast, R, theta),
            self._pair_with(self.beta_slow, R, theta),
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * R - 1)
        width = max(last - first, 0.001)
        slow_R = ((torch.arange(R, dtype=torch.float32) - first) / width).clamp(0, 1)
        return (1 - slow_R) * frequencies_R + slow_R * frequencies_R / self.factor

    def _pair_with(self, turns: float, R: int, theta: float) -> float:
        """The (fractional) index of the pair that completes ``turns`` turns in the context."""
        return R * math.log(self.original_context / (turns * 2 * math.pi)) / math.log(theta)


@dataclass(frozen=True)
class RopeConfig:
    """Everything about rotary positions that a model's configuration says."""

    theta: float
    scaling: RopeScaling = NoScaling()

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read either spelling: ``rope_parameters``, or ``rope_theta`` beside ``rope_scaling``.

        Raises UnsupportedModelError for a scaling that is not one of ours, by name.
        """
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = positive({**config, **given}, "rope_theta", default=10_000.0)
        partial = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        if partial != 1.0:
            raise UnsupportedModelError(f"rotary positions on a part of the head ({partial})")
        kind = given.get("rope_type") or given.get("type") or "default"
        if kind not in _SCALINGS:
            raise UnsupportedModelError(
                f"rope scaling {kind!r}; supported are {', '.join(_SCALINGS)}"
            )
        return cls(theta, _SCALINGS[kind](given, config))

    def frequencies(self, head_dim: int) -> Tensor:
        """``frequencies_R`` in radians a position, float32, on the CPU."""
        exponents_R = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return self.scaling.stretch(1.0 / self.theta**exponents_R, self.theta)


def rotary_angles(
    positions_T: Tensor, frequencies_R: Tensor, amplitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """``cos_TR`` and ``sin_TR`` of each position's angles, float32; once a step, for all layers."""
    angles_TR = positions_T.float().unsqueeze(1) * frequencies_R
    return angles_TR.cos() * amplitude, angles_TR.sin() * amplitude


# -- reading each scaling from a configuration --------------------------------------------------


def _default(given: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    return NoScaling()


def _linear(given: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    return LinearScaling(positive(given, "factor"))


def _llama3(given: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    low, high = positive(given, "low_freq_factor"), positive(given, "high_freq_factor")
    if low >= high:
        raise ConfigError(f"low_freq_factor {low} is not below high_freq_factor {high}")
    return Llama3Scaling(positive(given, "factor"), low, high, _original_context(given, config))


def _yarn(given: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    original = _original_context(given, config)
    if given.get("factor") is None:
        factor = count(config, "max_position_embeddings") / original
    else:
        factor = positive(given, "factor")
    sharpening = _sharpening(factor, 1.0)
    if given.get("mscale") and given.get("mscale_all_dim"):
        over = _sharpening(factor, positive(given, "mscale_all_dim"))
        sharpening = _sharpening(factor, positive(given, "mscale")) / over
    return YarnScaling(
        factor=factor,
        original_context=original,
        amplitude=positive(given, "attention_factor", default=sharpening),
        beta_fast=positive(given, "beta_fast", default=32.0),
        beta_slow=positive(given, "beta_slow", default=1.0),
        truncate=bool(given.get("truncate", True)),
    )


def _original_context(given: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """The context that the frequencies were trained for, from the first place that names it."""
    for source in (given, config):
        if source.get("original_max_position_embeddings") is not None:
            return count(source, "original_max_position_embeddings")
    return count(config, "max_position_embeddings")


def _sharpening(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
