"""A model's configuration: what is read, what is derived, what is refused and how it is said."""

from __future__ import annotations

import json

import pytest
import torch

from mie.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from mie.model.config import ModelConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def test_head_size_follows_from_the_width_unless_it_is_given():
    assert ModelConfig.from_dict(LLAMA).head_dim == 8
    assert ModelConfig.from_dict({**LLAMA, "head_dim": 20}).head_dim == 20


def test_every_query_head_has_its_own_key_head_unless_told_otherwise():
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_dict(config).num_kv_heads == 6


def test_kv_bytes_per_token_of_qwen2_half_a_billion():
    """The figure that the memory chapters start from: 24 layers, 2 key/value heads of 64, bf16."""
    config = ModelConfig.from_dict(
        {
            **LLAMA,
            "model_type": "qwen2",
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
        }
    )
    assert config.kv_bytes_per_token(torch.bfloat16) == 12_288
    assert config.kv_bytes_per_token(torch.float32) == 24_576


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gemma"}, "gemma"),
        ({"model_type": None}, "None"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"type": "dynamic"}}, "dynamic"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(changes, says):
    with pytest.raises(UnsupportedModelError, match=says):
        ModelConfig.from_dict({**LLAMA, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_key_value_heads": 4}, "6 query heads cannot share 4"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "48 is no multiple of 5"),
        ({"head_dim": 7}, "7"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": {"type": "yarn", "factor": "x"}}, "factor is 'x'"),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "low_freq_factor 4.0 is not below high_freq_factor 4.0",
        ),
    ],
)
def test_numbers_that_contradict_each_other_are_both_named(changes, says):
    with pytest.raises(ConfigError, match=says):
        ModelConfig.from_dict({**LLAMA, **changes})


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "max_position_embeddings"])
def test_a_missing_number_is_named(key):
    with pytest.raises(ConfigError, match=key):
        ModelConfig.from_dict({k: v for k, v in LLAMA.items() if k != key})


def test_from_folder(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        ModelConfig.from_folder(tmp_path)
    for content, says in [("{", "not JSON"), ("[]", "a list, not an object"), ("{}", "None")]:
        (tmp_path / "config.json").write_text(content)
        with pytest.raises((ConfigError, UnsupportedModelError), match=says):
            ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 0}))
    with pytest.raises(ConfigError, match=r"config\.json: vocab_size is 0"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.from_folder(tmp_path) == ModelConfig.from_dict(LLAMA)
