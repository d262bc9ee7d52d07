"""A reader's ``paged_decode`` inside the engine: what it is given, and where it is refused."""

from __future__ import annotations

import pytest
import torch
from kernel_data import DEVICE, assert_close

from mie.bench.model_shapes import SHAPES, random_decoder
from mie.config import EngineConfig
from mie.engine.assemble import assemble
from mie.errors import ConfigError
from mie.model.config import ModelConfig
from mie.ops import reference
from mie.ops.fast import adapted_paged_decode
from mie.request import Request
from mie.sampling_params import SamplingParams

LAYERS = 2
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


def tokens(decoder, parts=None, **settings) -> list[tuple[str, int | None]]:
    config = EngineConfig(
        num_blocks=6, max_num_seqs=2, max_model_len=32, cuda_graphs=False, **settings
    )
    core = assemble(decoder, config, parts).core
    for name, length in (("short", 3), ("long", 15)):
        core.add(Request(name, tuple(range(length)), SamplingParams(max_tokens=3)))
    outputs = []
    while core.has_work:
        outputs += core.step()
    return [(output.request_id, output.token_id) for output in outputs]


def test_it_is_called_for_decodes_and_the_tokens_stay(decoder):
    lengths = []

    def mine(q_XHD, k_NBGD, v_NBGD, tables_XM, lengths_X, scale):
        assert len(q_XHD) == len(tables_XM) == len(lengths_X)
        lengths.append(lengths_X.tolist())
        return reference.paged_decode(q_XHD, k_NBGD, v_NBGD, tables_XM, lengths_X, scale)

    got = tokens(decoder, {"paged_decode": mine}, kernels="triton")
    assert got == tokens(decoder, kernels="torch")
    assert lengths == [[4, 16]] * LAYERS + [[5, 17]] * LAYERS


def test_a_row_of_padding_has_some_table_and_no_tokens():
    k_NBGD, v_NBGD = torch.randn(2, 4, 4, 1, 8, device=DEVICE)
    q_XHD = torch.randn(2, 2, 8, device=DEVICE)
    tables_RM = torch.tensor([[0, 0], [3, 1]], dtype=torch.int32, device=DEVICE)
    rows_X = torch.tensor([1, -1], dtype=torch.int32, device=DEVICE)
    lengths_X = torch.tensor([6, 0], dtype=torch.int32, device=DEVICE)
    adapted = adapted_paged_decode(reference.paged_decode)
    got = adapted(q_XHD, k_NBGD, v_NBGD, tables_RM, rows_X, lengths_X, 0.5, None)
    expected = reference.paged_attention(q_XHD[:1], k_NBGD, v_NBGD, tables_RM[1], 6, 0.5)
    assert_close(got[:1], expected, torch.float32, 6)
    assert not got[1].any()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kernels": "torch"}, "kernels is 'torch'"),
        ({"fast_ops": False}, "fast_ops is False"),
    ],
)
def test_it_is_refused_where_nothing_would_call_it(decoder, settings, reason):
    with pytest.raises(ConfigError, match=f"the part paged_decode, but {reason}"):
        tokens(decoder, {"paged_decode": reference.paged_decode}, **settings)
