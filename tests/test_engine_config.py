"""Settings: what contradicts itself, the model or the machine is refused, naming both values."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mie import parts as all_parts
from mie.config import PREFIX_CACHES, QUEUES, EngineConfig
from mie.engine import sizing
from mie.engine.place import DTYPES
from mie.engine.sizing import choose_num_blocks
from mie.errors import ConfigError
from mie.model.config import ModelConfig

MODEL = ModelConfig.from_dict(
    {
        "model_type": "llama",
        "vocab_size": 31,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
)
TOKEN_BYTES = 192  # 2 layers, K and V, 2 heads of 6 numbers of 4 bytes
CPU = torch.device("cpu")


# -- one by one ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "int3"}, "no dtype called 'int3'; there are auto, float32, bfloat16, float16"),
        ({"prefix_cache": "tree"}, "no prefix_cache called 'tree'; there are hash, radix, off"),
        ({"preemption": "none"}, "no preemption called 'none'; there are recompute, swap"),
        ({"policy": "sjf"}, "no policy called 'sjf'; there are fcfs, priority"),
        ({"block_size": 0}, "block_size is 0; it must be at least 1"),
        ({"num_blocks": 1}, "num_blocks is 1; it must be at least 2: one of them is scratch"),
        ({"num_blocks": -4}, "num_blocks is -4; it must be at least 2: one of them is scratch"),
        ({"num_host_blocks": -1}, "num_host_blocks is -1; it must be at least 0"),
        ({"trace_steps": -1}, "trace_steps is -1; it must be at least 0"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"seed": 2**63}, f"seed is {2**63}; it may be {2**63 - 1} at most"),
        ({"memory_share": 0.0}, "memory_share is 0.0; it lies above 0, 1 at most"),
        ({"memory_share": 1.5}, "memory_share is 1.5; it lies above 0, 1 at most"),
        ({"num_blocks": 9, "memory_share": 0.5}, "num_blocks is 9 and memory_share 0.5: give one"),
        (
            {"num_host_blocks": 5},
            "num_host_blocks is 5 and preemption 'recompute': only 'swap' needs room on the host",
        ),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
        ({"max_model_len": 1}, "max_model_len is 1; a prompt and its answer are at least 2"),
        (
            {"token_budget": 63},
            "token_budget is 63 and max_num_seqs 64: each running sequence needs at least one "
            "token a step",
        ),
    ],
    ids=str,
)
def test_what_means_nothing_or_contradicts_itself_is_refused(settings, said):
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        EngineConfig(**settings)


def test_what_is_at_the_edge_is_allowed():
    EngineConfig(num_blocks=2, block_size=1, max_num_seqs=64, token_budget=64, max_model_len=2)
    EngineConfig(memory_share=1.0, seed=2**63 - 1, trace_steps=0, num_host_blocks=0)
    EngineConfig(preemption="swap", num_host_blocks=0)


def test_a_config_is_written_by_name_and_does_not_change():
    with pytest.raises(TypeError):
        EngineConfig("float32")  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().block_size = 4  # type: ignore[misc]


def test_every_name_that_a_setting_allows_leads_somewhere():
    assert {*DTYPES} | {"auto"} == {"auto", "float32", "bfloat16", "float16"}
    for where in (*PREFIX_CACHES.values(), *QUEUES.values()):
        assert callable(all_parts.load(where))
    assert PREFIX_CACHES[EngineConfig().prefix_cache] == all_parts.DEFAULTS["prefix_cache"]
    assert QUEUES[EngineConfig().policy] == all_parts.DEFAULTS["queue"]


# -- together -----------------------------------------------------------------------------------


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "block_size": st.integers(1, 64),
            "num_blocks": st.integers(2, 999),
            "max_num_seqs": st.integers(1, 64),
            "prefix_cache": st.sampled_from(sorted(PREFIX_CACHES)),
            "seed": st.integers(0, 99),
        },
    ),
    st.fixed_dictionaries({}, optional={"block_size": st.integers(1, 64), "seed": st.just(7)}),
)
def test_a_setting_by_name_wins_and_the_rest_is_the_configs(before, named):
    config = EngineConfig(**before)
    assert EngineConfig.of(None, before) == config
    assert EngineConfig.of(config, {}) == config
    assert EngineConfig.of(config, named) == EngineConfig(**{**before, **named})


def test_what_is_put_together_is_checked_too():
    with pytest.raises(ConfigError, match="token_budget is 512 and max_num_seqs 600"):
        EngineConfig.of(EngineConfig(), {"max_num_seqs": 600})
    with pytest.raises(ConfigError, match=r"no setting called blocks; there are dtype, device, "):
        EngineConfig.of(None, {"blocks": 5})


@pytest.mark.parametrize(("asked", "context"), [(None, 128), (2, 2), (128, 128)])
def test_the_context_is_the_models_unless_less_is_asked_for(asked, context):
    limits = EngineConfig(max_model_len=asked, max_num_seqs=3, token_budget=9).limits(128)
    assert (limits.max_num_seqs, limits.token_budget, limits.max_model_len) == (3, 9, context)


def test_more_than_the_model_reads_is_refused():
    with pytest.raises(ConfigError, match="max_model_len is 129; the model reads 128 tokens"):
        EngineConfig(max_model_len=129).limits(128)


# -- how many blocks ----------------------------------------------------------------------------


def blocks(monkeypatch, memory_bytes: int | None, **settings) -> int:
    monkeypatch.setattr(sizing, "device_memory", lambda device: memory_bytes)
    assert MODEL.kv_bytes_per_token(torch.float32) == TOKEN_BYTES
    return choose_num_blocks(MODEL, torch.float32, CPU, EngineConfig(**settings))


@pytest.mark.parametrize(
    ("memory_bytes", "block_size", "expected"),
    [
        (None, 16, 33),  # four times 128 tokens of context, and scratch
        (10**9, 16, 33),
        (10**9, 100, 9),
        (40 * 16 * TOKEN_BYTES, 16, 20),  # forty blocks, of which half
        (100, 16, 2),
    ],
)
def test_by_default_four_contexts_or_half_of_the_memory(
    monkeypatch, memory_bytes, block_size, expected
):
    assert blocks(monkeypatch, memory_bytes, block_size=block_size) == expected


def test_more_blocks_than_the_device_has_memory_for(monkeypatch):
    memory = 10 * 16 * TOKEN_BYTES
    assert blocks(monkeypatch, memory, num_blocks=10) == 10
    assert blocks(monkeypatch, None, num_blocks=77) == 77
    with pytest.raises(ConfigError, match=r"11 blocks of 16 tokens take 33,792 bytes.* 30,720"):
        blocks(monkeypatch, memory, num_blocks=11)


@pytest.mark.parametrize(("share", "expected"), [(1.0, 100), (0.5, 50), (0.29, 29), (0.02, 2)])
def test_a_share_of_the_memory_is_so_many_blocks(monkeypatch, share, expected):
    memory = 100 * 16 * TOKEN_BYTES
    assert blocks(monkeypatch, memory, memory_share=share) == pytest.approx(expected, abs=1)
    assert blocks(monkeypatch, memory, memory_share=share) * 16 * TOKEN_BYTES <= memory * share


def test_a_share_that_holds_no_block_or_of_nobody_knows_what(monkeypatch):
    with pytest.raises(ConfigError, match=r"memory_share 0.01 of 307,200 bytes holds 1 blocks of"):
        blocks(monkeypatch, 100 * 16 * TOKEN_BYTES, memory_share=0.01)
    with pytest.raises(ConfigError, match=r"memory_share is 0.5 of an unknown memory"):
        blocks(monkeypatch, None, memory_share=0.5)
