"""The decoder against transformers: the same weights, the same tokens, the same logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mie.execution.contiguous_cache import ContiguousCache
from mie.model.config import ModelConfig
from mie.model.decoder import Decoder
from mie.model.kv_cache import NoCache
from mie.model.safetensors import SafetensorsFile
from mie.model.weights import load_weights, num_parameters

SHAPE = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rope_theta=10_000.0,
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, dict(tie_word_embeddings=True)),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, dict(attention_bias=True, mlp_bias=True)),
    "llama-one-kv-head": (LlamaForCausalLM, LlamaConfig, dict(num_key_value_heads=1)),
    "llama-all-kv-heads": (LlamaForCausalLM, LlamaConfig, dict(num_key_value_heads=6)),
    "llama-wide-heads": (LlamaForCausalLM, LlamaConfig, dict(head_dim=20)),
    "llama-linear": (
        LlamaForCausalLM,
        LlamaConfig,
        dict(rope_scaling=dict(rope_type="linear", factor=3.0)),
    ),
    "llama-llama3": (LlamaForCausalLM, LlamaConfig, dict(rope_scaling=LLAMA3)),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig, dict(rope_scaling=YARN)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config, dict(tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, dict(head_dim=16)),
    "qwen3-tied-yarn": (
        Qwen3ForCausalLM,
        Qwen3Config,
        dict(head_dim=16, tie_word_embeddings=True, rope_scaling=YARN),
    ),
}


DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def build(name: str, folder, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    """A random model of theirs, and ours with the same weights, through a file."""
    model_class, config_class, changes = MODELS[name]
    torch.manual_seed(0)
    theirs = model_class(config_class(**{**SHAPE, **changes}))
    with torch.no_grad():  # transformers starts biases at 0 and norms at 1, which would hide them
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    theirs = theirs.to(dtype).eval()
    theirs.save_pretrained(folder)
    config = ModelConfig.from_folder(folder)
    ours = Decoder(config, dtype, device)
    load_weights(ours, SafetensorsFile(folder / "model.safetensors"))
    return theirs, ours


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    """Theirs always runs on the CPU; ours on each device that this machine has."""
    return request.param


@pytest.fixture(params=list(MODELS), scope="module")
def pair(request, device, tmp_path_factory):
    return build(request.param, tmp_path_factory.mktemp(request.param), device=device)


@torch.inference_mode()
def our_logits(decoder: Decoder, tokens: torch.Tensor, chunks: list[int] | None = None):
    """Logits of every position, computed at once, or in steps of the given sizes."""
    tokens = tokens.to(decoder.device)
    positions = torch.arange(len(tokens), device=decoder.device)
    if chunks is None:
        return decoder.logits(decoder(tokens, positions, NoCache())).cpu()
    cache = ContiguousCache.for_decoder(decoder, len(tokens))
    rows = []
    for step, where in zip(tokens.split(chunks), positions.split(chunks), strict=True):
        rows.append(decoder.logits(decoder(step, where, cache)).cpu())
        cache.advance(len(step))
    return torch.cat(rows)


@torch.inference_mode()
def their_logits(model, tokens: torch.Tensor):
    return model(tokens.unsqueeze(0)).logits[0].float()


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("length", [1, 2, 7, 64, 130])
def test_whole_prompts_equal_transformers(pair, length):
    theirs, ours = pair
    tokens = torch.randint(97, (length,), generator=torch.Generator().manual_seed(length))
    assert relative(our_logits(ours, tokens), their_logits(theirs, tokens)) < 1e-4


def test_token_by_token_equals_transformers(pair):
    theirs, ours = pair
    tokens = torch.randint(97, (70,), generator=torch.Generator().manual_seed(1))
    assert relative(our_logits(ours, tokens, [1] * 70), their_logits(theirs, tokens)) < 1e-4


@settings(max_examples=10)
@given(chunks=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_any_chunks_equal_the_whole(pair, chunks):
    _, ours = pair
    tokens = torch.arange(sum(chunks)) % 97
    assert relative(our_logits(ours, tokens, chunks), our_logits(ours, tokens)) < 1e-5


def test_same_number_of_parameters(pair):
    theirs, ours = pair
    assert num_parameters(ours.config) == theirs.num_parameters()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_rounding_allows(name, device, tmp_path):
    """bfloat16 keeps 8 bits: one rounding is off by at most u = 2⁻⁸ of the value.

    A layer rounds in eleven places one after another (norm, qkv, rope, attention, output, sum,
    norm, gate and up, swiglu, down, sum), each relative to values of the stream's size, and errors
    of independent roundings add up as the root of their number. Three layers, the embedding and
    the head make n = 3 · 11 + 2 roundings; relative to the largest logit we allow three standard
    deviations, 3 · u · √n. Transformers rounds in other places, so it is held to the same bound.
    """
    theirs, ours = build(name, tmp_path, torch.bfloat16, device)
    exact = Decoder(ours.config)
    load_weights(exact, SafetensorsFile(tmp_path / "model.safetensors"))
    tokens = torch.randint(97, (50,), generator=torch.Generator().manual_seed(2))
    truth = our_logits(exact, tokens)
    bound = 3 * 2**-8 * (3 * 11 + 2) ** 0.5
    assert relative(our_logits(ours, tokens), truth) < bound
    assert relative(their_logits(theirs, tokens), truth) < bound
    assert relative(our_logits(ours, tokens, [1] * 50), truth) < bound


def test_positions_beyond_the_original_context_use_the_stretched_frequencies(tmp_path):
    theirs, ours = build("llama-llama3", tmp_path)
    tokens = torch.randint(97, (200,), generator=torch.Generator().manual_seed(3))
    assert relative(our_logits(ours, tokens), their_logits(theirs, tokens)) < 1e-4


def test_sharded_checkpoint_equals_whole(tmp_path):
    from mie.model.open import open_checkpoint

    theirs, ours = build("qwen3", tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    sharded = Decoder(ours.config)
    load_weights(sharded, open_checkpoint(tmp_path / "shards"))
    for (name, a), (_, b) in zip(ours.named_parameters(), sharded.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_part_of_the_readers_own_is_used_everywhere(tmp_path):
    """The seam: every norm of the model goes through the replacement, and only norms change."""
    from mie.ops import reference
    from mie.ops.dispatch import Ops

    _, ours = build("qwen3", tmp_path)
    calls = []

    def counted(x_TE, weight_E, eps):
        calls.append(x_TE.shape)
        return reference.rms_norm(x_TE, weight_E, eps)

    mine = Decoder(ours.config, ops=Ops(rms_norm=counted))
    load_weights(mine, SafetensorsFile(tmp_path / "model.safetensors"))
    tokens = torch.arange(5)
    assert torch.equal(our_logits(mine, tokens), our_logits(ours, tokens))
    assert len(calls) == 3 * 4 + 1  # two norms of the stream, q and k; three layers; the last one


def test_no_tensor_of_a_file_on_disk_is_written_through(tmp_path):
    """Weights are copies: changing the model never changes the file it came from."""
    _, ours = build("llama", tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    for parameter in ours.parameters():
        parameter.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_saved_by_hand_with_a_stored_tied_head_loads(tmp_path):
    """Some exporters write the tied head out again; it is not a surplus tensor."""
    _, ours = build("llama-tied", tmp_path)
    file = SafetensorsFile(tmp_path / "model.safetensors")
    tensors = {name: file.load(name) for name in file.tensors}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "again.safetensors")
    load_weights(Decoder(ours.config), SafetensorsFile(tmp_path / "again.safetensors"))
