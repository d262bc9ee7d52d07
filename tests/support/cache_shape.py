"""The shape of the small model whose K and V both caches keep in their tests."""

from __future__ import annotations

from mie.model.config import ModelConfig

LAYERS, G, D, H = 2, 2, 4, 6  # layers, key/value heads, head size, query heads


def config() -> ModelConfig:
    return ModelConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": 11,
            "hidden_size": H * D,
            "intermediate_size": 12,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": H,
            "num_key_value_heads": G,
            "max_position_embeddings": 64,
        }
    )
