"""A reader's ``add_rms_norm`` inside the engine: where it is called, and where it is refused."""

from __future__ import annotations

import pytest
import torch
from kernel_data import DEVICE

from mie.bench.model_shapes import SHAPES, random_decoder
from mie.config import EngineConfig
from mie.engine.assemble import assemble
from mie.errors import ConfigError
from mie.kernels.rms_norm import add_rms_norm
from mie.model.config import ModelConfig
from mie.request import Request
from mie.sampling_params import SamplingParams

LAYERS, STEPS = 2, 3
SHAPE = {
    **SHAPES["qwen3-0.6b"],
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(ModelConfig.from_dict(SHAPE), torch.float32, DEVICE)


def config(**settings) -> EngineConfig:
    return EngineConfig(
        num_blocks=4, max_num_seqs=1, max_model_len=16, cuda_graphs=False, **settings
    )


def tokens(decoder, kernels, parts=None) -> list[int | None]:
    return answer(assemble(decoder, config(kernels=kernels), parts).core)


def answer(core) -> list[int | None]:
    core.add(Request("a", (3, 1, 4, 1, 5), SamplingParams(max_tokens=STEPS)))
    outputs = []
    while core.has_work:
        outputs += core.step()
    return [output.token_id for output in outputs]


def test_it_is_called_behind_every_addition_and_the_tokens_stay(decoder):
    calls = []

    def mine(x_TE, residual_TE, weight_E, eps):
        calls.append(len(x_TE))
        return add_rms_norm(x_TE, residual_TE, weight_E, eps)

    expected = tokens(decoder, "torch")
    assert len(expected) == STEPS
    core = assemble(decoder, config(kernels="triton"), {"add_rms_norm": mine}).core
    calls.clear()  # on a GPU the engine tries its largest step before it starts
    assert answer(core) == expected
    assert calls == [5] * 2 * LAYERS + [1] * 2 * LAYERS * (STEPS - 1)


def test_what_it_returns_is_what_the_engine_goes_on_with(decoder):
    def wrong(x_TE, residual_TE, weight_E, eps):
        return add_rms_norm(-x_TE, residual_TE, weight_E, eps)

    assert tokens(decoder, "triton", {"add_rms_norm": wrong}) != tokens(decoder, "torch")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kernels": "torch"}, "kernels is 'torch'"),
        ({"fast_ops": False}, "fast_ops is False"),
    ],
)
def test_it_is_refused_where_nothing_would_call_it(decoder, settings, reason):
    with pytest.raises(ConfigError, match=f"the part add_rms_norm, but {reason}"):
        assemble(decoder, config(**settings), {"add_rms_norm": add_rms_norm})
