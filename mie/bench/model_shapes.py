"""Models without their weights: two shapes by name, any other from a ``config.json``.

Invariant: a decoder made here costs a step what the real one costs. Time depends on shapes and
dtype and not on values, so random weights measure the same and need no download. Its answers are
noise.

    qwen3-0.6b    28 layers of 1,024, 16 query heads on 8 K/V heads of 128   596 million numbers
    qwen2.5-7b    28 layers of 3,584, 28 query heads on 4 K/V heads of 128   7.6 billion

The values are drawn on the device, where writing 15 GB takes a moment; nothing crosses the bus.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from mie.model.config import ModelConfig
    from mie.model.decoder import Decoder
    from mie.ops.dispatch import Ops

# The config.json of Qwen/Qwen3-0.6B and Qwen/Qwen2.5-7B, as far as it shapes the decoder.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
        "attention_bias": False,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": False,
    },
}


def shape(name: str) -> ModelConfig:
    """A shape by its name, or from a ``config.json`` or the folder of one.

    Raises ConfigError, with all names, for what is neither, and for a file that is no configuration
    of a decoder; UnsupportedModelError for what the decoder cannot do.
    """
    from mie.model.config import ModelConfig

    if name in SHAPES:
        return ModelConfig.from_dict(SHAPES[name])
    path = Path(name)
    if path.is_dir():
        return ModelConfig.from_folder(path)
    if not path.is_file():
        raise ConfigError(f"no shape and no file called {name!r}; shapes are {', '.join(SHAPES)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, not an object")
    try:
        return ModelConfig.from_dict(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def random_decoder(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    ops: Ops | None = None,
    seed: int = 0,
) -> Decoder:
    """A decoder of that shape, its values drawn on ``device``: norms near 1, all else near 0.

    ``ops`` None: those that are fast on ``device``.
    """
    from mie.model.decoder import Decoder
    from mie.model.weights import random_weights
    from mie.ops.dispatch import for_device

    decoder = Decoder(config, dtype, device, ops or for_device(device))
    random_weights(decoder, seed)
    return decoder
