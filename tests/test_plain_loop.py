"""The loop that the engine is measured against computes the same: in float32, the same tokens."""

from __future__ import annotations

import pytest
import torch

from mie.bench.decode import EngineLoop, decode_speed
from mie.bench.plain_loop import PlainLoop
from mie.engine.plain import greedy_with_cache
from mie.execution.contiguous_cache import ContiguousCache
from mie.model.config import ModelConfig
from mie.model.decoder import Decoder
from mie.ops import dispatch

NUM_NEW = 12
FAMILIES = {
    "llama": dict(model_type="llama", num_key_value_heads=2),
    "llama-all-kv-heads": dict(model_type="llama", num_key_value_heads=6),
    "qwen2": dict(model_type="qwen2", num_key_value_heads=3, tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", num_key_value_heads=2, head_dim=20),
}


def decoder(family: str, dtype: torch.dtype = torch.float32, fast: bool = True) -> Decoder:
    """A small one with random weights."""
    config = ModelConfig.from_dict(
        {
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "max_position_embeddings": 256,
            **FAMILIES[family],
        }
    )
    made = Decoder(config, dtype, ops=dispatch.for_device("cpu", fast=fast))
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return made


def prompts(batch_size: int, length: int) -> torch.Tensor:
    return torch.randint(97, (batch_size, length), generator=torch.Generator().manual_seed(1))


def on_blocks(made: Decoder, prompts_BT: torch.Tensor) -> list[list[int]]:
    loop = EngineLoop(made, prompts_BT.tolist(), NUM_NEW, block_size=4)
    tokens = [loop.step() for _ in range(NUM_NEW)]
    return [list(each) for each in zip(*tokens, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fast", [False, True], ids=["reference", "fused"])
def test_same_tokens_as_the_engine_on_blocks_and_one_after_another(family, fast):
    made = decoder(family, fast=fast)
    prompts_BT = prompts(3, 7)
    plain = PlainLoop(made, 3, 7 + NUM_NEW).generate(prompts_BT, NUM_NEW).tolist()
    assert plain == on_blocks(made, prompts_BT)
    for prompt, tokens in zip(prompts_BT.tolist(), plain, strict=True):
        cache = ContiguousCache.for_decoder(made, 7 + NUM_NEW)
        alone = greedy_with_cache(made, prompt, cache)
        assert tokens == [next(alone) for _ in range(NUM_NEW)]
    assert len({*map(tuple, plain)}) == 3, "the same answer to every prompt tests nothing"


def test_same_tokens_with_the_books_model(smollm2):
    made = Decoder(smollm2.config, ops=dispatch.for_device("cpu"))
    made.load_state_dict(smollm2.decoder.state_dict())
    texts = ["The capital of France is", "Once upon a time there"]
    ids = [smollm2.tokenizer.encode(text)[:5] for text in texts]
    prompts_BT = torch.tensor(ids)
    plain = PlainLoop(made, 2, 5 + NUM_NEW).generate(prompts_BT, NUM_NEW)
    assert plain.tolist() == on_blocks(made, prompts_BT)


def test_several_tokens_come_first_and_all_at_once():
    loop = PlainLoop(decoder("llama"), 1, 9)
    loop.step(prompts(1, 4))
    with pytest.raises(AssertionError, match="come first"):
        loop.step(prompts(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_speed_of_both_is_measured_side_by_side(dtype):
    speed = decode_speed(decoder("llama", dtype), num_sequences=2, context=6, num_steps=3)
    assert (speed.num_sequences, speed.context, speed.num_steps) == (2, 6, 3)
    assert speed.dtype == str(dtype).removeprefix("torch.")
    assert speed.engine_to_plain == speed.plain_nanoseconds / speed.engine_nanoseconds
    told = speed.as_dict()
    assert told["engine_tokens_per_second"] == 2e9 / speed.engine_nanoseconds
    assert told["plain_tokens_per_second"] == 2e9 / speed.plain_nanoseconds
