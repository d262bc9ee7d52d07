"""The numbers that shape a decoder, read once from a ``config.json`` and checked there.

Invariant: a ``ModelConfig`` that exists describes a decoder that can be built. Every derived size
(head size, bytes of K/V a token) is computed here and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mie.errors import ConfigError, ModelNotFoundError
from mie.model.numbers import count, positive
from mie.model.registry import Family, family
from mie.model.rope import RopeConfig


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape. Lengths are in elements, ``max_position_embeddings`` in tokens."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeConfig
    family: Family

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary pairs need an even number")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """From the content of a ``config.json`` in Hugging Face's spelling.

        Raises UnsupportedModelError for what the decoder cannot do and ConfigError for numbers that
        are missing or contradict each other.
        """
        this_family = family(config)
        heads, hidden = count(config, "num_attention_heads"), count(config, "hidden_size")
        if config.get("head_dim") is None and hidden % heads:
            raise ConfigError(f"hidden_size {hidden} is no multiple of {heads} heads")
        return cls(
            model_type=config["model_type"],
            vocab_size=count(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=count(config, "intermediate_size"),
            num_layers=count(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=count(config, "num_key_value_heads", default=heads),
            head_dim=count(config, "head_dim", default=hidden // heads),
            rms_norm_eps=positive(config, "rms_norm_eps", default=1e-6),
            max_position_embeddings=count(config, "max_position_embeddings"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope=RopeConfig.from_dict(config),
            family=this_family,
        )

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """From ``folder/config.json``."""
        path = folder / "config.json"
        if not path.is_file():
            raise ModelNotFoundError(f"{folder} has no config.json")
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"{path} holds a {type(config).__name__}, not an object")
        try:
            return cls.from_dict(config)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by: one over the root of the head size."""
        return self.head_dim**-0.5

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of K and V that one token leaves behind, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize
