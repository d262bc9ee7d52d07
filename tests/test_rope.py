"""Rotary frequencies against transformers' own formulas, for every scaling and both spellings."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mie.errors import ConfigError, UnsupportedModelError
from mie.model.rope import RopeConfig, rotary_angles

factors = st.floats(1.0, 40.0)
contexts = st.sampled_from([32, 512, 4096, 8192])
thetas = st.sampled_from([10_000.0, 100_000.0, 500_000.0, 1_000_000.0])


def scalings():
    return st.one_of(
        st.just({"rope_type": "default"}),
        st.builds(lambda f: {"rope_type": "linear", "factor": f}, factors),
        st.builds(
            lambda f, low, band, c: {
                "rope_type": "llama3",
                "factor": f,
                "low_freq_factor": low,
                "high_freq_factor": low + band,
                "original_max_position_embeddings": c,
            },
            factors,
            st.floats(0.5, 2.0),
            st.floats(0.5, 8.0),
            contexts,
        ),
        st.builds(
            lambda f, c, extra: {
                "rope_type": "yarn",
                "factor": f,
                "original_max_position_embeddings": c,
                **extra,
            },
            factors,
            contexts,
            st.sampled_from(
                [
                    {},
                    {"attention_factor": 1.3},
                    {"mscale": 1.0, "mscale_all_dim": 0.8},
                    {"beta_fast": 20.0, "beta_slow": 2.0},
                    {"truncate": False},
                ]
            ),
        ),
    )


@given(scaling=scalings(), theta=thetas, head_dim=st.sampled_from([16, 64, 80, 128]))
def test_frequencies_equal_transformers(scaling, theta, head_dim):
    parameters = {**scaling, "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=16_384,
        rope_parameters=dict(parameters),
    )
    if scaling["rope_type"] == "default":
        theirs, amplitude = 1.0 / theta ** (torch.arange(0, head_dim, 2) / head_dim), 1.0
    else:
        theirs, amplitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    ours = RopeConfig.from_dict({"rope_parameters": parameters, "max_position_embeddings": 16_384})
    torch.testing.assert_close(ours.frequencies(head_dim), theirs.float(), rtol=2e-5, atol=1e-9)
    assert ours.scaling.amplitude == pytest.approx(amplitude)


@given(scaling=scalings(), theta=thetas)
def test_both_spellings_mean_the_same(scaling, theta):
    old = dict(scaling)
    old["type"] = old.pop("rope_type")
    shared = {"max_position_embeddings": 16_384}
    new_way = RopeConfig.from_dict({**shared, "rope_parameters": {**scaling, "rope_theta": theta}})
    old_way = RopeConfig.from_dict({**shared, "rope_theta": theta, "rope_scaling": old})
    assert new_way == old_way


def test_yarn_without_a_factor_takes_the_ratio_of_the_contexts():
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 2048}
    config = {"rope_scaling": scaling, "rope_theta": 1e4, "max_position_embeddings": 8192}
    rope = RopeConfig.from_dict(config)
    assert rope.scaling.factor == 4.0
    assert rope.scaling.amplitude == pytest.approx(0.1 * math.log(4) + 1)


def test_the_original_context_may_stand_beside_the_scaling():
    scaling = {"rope_type": "yarn", "factor": 2.0}
    config = {
        "rope_scaling": scaling,
        "max_position_embeddings": 8192,
        "original_max_position_embeddings": 4096,
    }
    assert RopeConfig.from_dict(config).scaling.original_context == 4096


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
def test_an_unknown_scaling_is_refused_by_name(kind):
    with pytest.raises(UnsupportedModelError, match=kind):
        RopeConfig.from_dict({"rope_scaling": {"rope_type": kind, "factor": 2.0}})


def test_rotating_a_part_of_the_head_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"0\.5"):
        RopeConfig.from_dict({"rope_parameters": {"partial_rotary_factor": 0.5}})


def test_a_missing_number_is_named():
    with pytest.raises(ConfigError, match="factor"):
        RopeConfig.from_dict({"rope_scaling": {"rope_type": "linear"}})


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=5))
def test_angles_are_position_times_frequency(positions):
    frequencies = RopeConfig(100_000.0).frequencies(64)
    cos, sin = rotary_angles(torch.tensor(positions), frequencies, amplitude=0.5)
    assert cos.dtype == sin.dtype == torch.float32
    for row, position in enumerate(positions):
        for pair in (0, 13, 31):
            angle = torch.tensor(float(position)) * frequencies[pair]
            assert cos[row, pair] == pytest.approx(0.5 * math.cos(angle), abs=1e-6)
            assert sin[row, pair] == pytest.approx(0.5 * math.sin(angle), abs=1e-6)
