"""Every element of every parameter is set exactly once, or nothing is set at all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mie.errors import WeightMismatchError
from mie.model.checkpoint import TensorInfo
from mie.model.config import ModelConfig
from mie.model.decoder import Decoder
from mie.model.weights import load_weights, num_parameters, placements, random_weights


def config(**changes) -> ModelConfig:
    return ModelConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": 11,
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
            **changes,
        }
    )


configs = st.builds(
    config,
    model_type=st.sampled_from(["llama", "qwen2", "qwen3"]),
    num_hidden_layers=st.integers(1, 3),
    num_key_value_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([2, 4, 6]),
    attention_bias=st.booleans(),
    mlp_bias=st.booleans(),
    tie_word_embeddings=st.booleans(),
)


class InMemory:
    """A checkpoint of the tensors that ``placements`` asks for, each filled with its own number."""

    path = Path("memory")

    def __init__(self, config: ModelConfig) -> None:
        self.values = {
            name: torch.full(place.shape, float(number))
            for number, (name, place) in enumerate(placements(config).items())
        }

    @property
    def tensors(self):
        return {
            name: TensorInfo("I8" if value.dtype == torch.int8 else "F32", tuple(value.shape), 0, 0)
            for name, value in self.values.items()
        }

    def load(self, name, dtype=None):
        return self.values[name]


@given(configs)
def test_every_element_is_set_exactly_once(config):
    decoder = Decoder(config)
    written = Counter()
    shapes = {name: parameter.shape for name, parameter in decoder.named_parameters()}
    for place in placements(config).values():
        assert place.shape[1:] == shapes[place.parameter][1:]
        for row in range(place.first_row, place.first_row + place.shape[0]):
            written[place.parameter, row] += 1
    wanted = {(name, row) for name, shape in shapes.items() for row in range(shape[0])}
    assert set(written) == wanted
    assert set(written.values()) == {1}
    assert num_parameters(config) == sum(parameter.numel() for parameter in decoder.parameters())


@given(configs)
def test_each_tensor_lands_where_its_placement_says(config):
    checkpoint = InMemory(config)
    decoder = Decoder(config)
    for parameter in decoder.parameters():
        parameter.fill_(float("nan"))
    load_weights(decoder, checkpoint)
    parameters = dict(decoder.named_parameters())
    for number, place in enumerate(placements(config).values()):
        rows = parameters[place.parameter][place.first_row : place.first_row + place.shape[0]]
        assert (rows == number).all()
    assert not any(parameter.isnan().any() for parameter in decoder.parameters())


def refused(checkpoint: InMemory, config: ModelConfig) -> str:
    """The message of the refusal; and nothing was written."""
    decoder = Decoder(config)
    for parameter in decoder.parameters():
        parameter.fill_(7.0)
    with pytest.raises(WeightMismatchError) as refusal:
        load_weights(decoder, checkpoint)
    assert all((parameter == 7).all() for parameter in decoder.parameters())
    return str(refusal.value)


@given(configs, st.data())
def test_a_missing_tensor_is_named(config, data):
    checkpoint = InMemory(config)
    name = data.draw(st.sampled_from(sorted(checkpoint.values)))
    del checkpoint.values[name]
    assert "1 missing" in (message := refused(checkpoint, config))
    assert name in message


def test_a_surplus_tensor_is_named():
    checkpoint = InMemory(config())
    checkpoint.values["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(8)
    assert "1 not wanted: model.layers.0.self_attn.q_proj.bias" in refused(checkpoint, config())


def test_a_tensor_of_another_shape_is_named_with_both():
    checkpoint = InMemory(config())
    checkpoint.values["model.norm.weight"] = torch.zeros(9)
    assert "model.norm.weight is [9], wanted [8]" in refused(checkpoint, config())


def test_integers_are_refused():
    checkpoint = InMemory(config())
    checkpoint.values["model.norm.weight"] = torch.zeros(8, dtype=torch.int8)
    assert "model.norm.weight (I8)" in refused(checkpoint, config())


def test_all_faults_are_told_at_once_and_long_lists_are_counted():
    checkpoint = InMemory(config(num_hidden_layers=1))
    checkpoint.values["strange"] = torch.zeros(1)
    message = refused(checkpoint, config(num_hidden_layers=2))
    assert "9 missing" in message
    assert "and 4 more" in message
    assert "1 not wanted: strange" in message


def test_frequencies_that_follow_from_the_configuration_are_no_surplus():
    checkpoint = InMemory(config())
    checkpoint.values["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(1)
    load_weights(Decoder(config()), checkpoint)


def test_an_untied_head_must_be_there():
    checkpoint = InMemory(config(tie_word_embeddings=True))
    assert "lm_head.weight" in refused(checkpoint, config(tie_word_embeddings=False))


def test_random_weights_are_the_same_for_the_same_seed():
    one, two, other = (Decoder(config()) for _ in range(3))
    random_weights(one, seed=1)
    random_weights(two, seed=1)
    random_weights(other, seed=2)
    for (name, a), b, c in zip(
        one.named_parameters(), two.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert a.mean().item() == pytest.approx(1.0 if "norm" in name else 0.0, abs=0.05)
