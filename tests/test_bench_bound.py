"""The bound: counts against loops over every token, shapes against what is published."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mie.bench.bound import (
    Bound,
    Limits,
    layer_matrices,
    limits_of,
    measured_limits,
    recorded_limits,
    work_of,
)
from mie.bench.model_shapes import SHAPES, random_decoder, shape
from mie.bench.standard_workloads import standard_workload
from mie.errors import ConfigError, UnsupportedModelError
from mie.model.config import ModelConfig
from mie.model.weights import num_parameters, placements

BF16 = torch.bfloat16
H200 = recorded_limits("NVIDIA H200")


def bound(model, workload, max_num_seqs=None):
    requests = standard_workload(workload)
    at_once = max_num_seqs or requests.max_num_seqs
    assert H200 is not None
    return Bound(work_of(shape(model), BF16, requests.lengths, at_once), H200)


# -- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [("qwen3-0.6b", 596_049_920, 114_688), ("qwen2.5-7b", 7_615_616_512, 57_344)],
)
def test_named_shapes_have_the_published_size(name, parameters, kv_bytes):
    config = shape(name)
    assert num_parameters(config) == parameters
    assert config.kv_bytes_per_token(BF16) == kv_bytes
    assert config.head_dim == 128 and config.rope.theta == 1e6


def test_named_shapes_differ_where_the_families_do():
    qwen3, qwen2 = (shape(name) for name in ("qwen3-0.6b", "qwen2.5-7b"))
    assert qwen3.family.qk_norm and not qwen3.family.qkv_bias and qwen3.tie_word_embeddings
    assert qwen2.family.qkv_bias and not qwen2.family.qk_norm and not qwen2.tie_word_embeddings
    assert (qwen3.max_position_embeddings, qwen2.max_position_embeddings) == (40_960, 32_768)


def test_a_shape_comes_from_a_file_or_its_folder(tmp_path):
    small = SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 2, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(small))
    assert shape(str(tmp_path)) == shape(str(tmp_path / "config.json"))
    assert shape(str(tmp_path)).num_layers == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [("[1]", "a list"), ("{", "JSON"), ('{"model_type": "llama"}', "file.json: .*attention_heads")],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content, says):
    file = tmp_path / "file.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=says):
        shape(str(file))


def test_what_is_no_shape_is_refused_with_a_list(tmp_path):
    with pytest.raises(ConfigError, match=r"'qwen9'; shapes are qwen3-0\.6b, qwen2\.5-7b"):
        shape("qwen9")
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    with pytest.raises(UnsupportedModelError, match="rwkv"):
        shape(str(tmp_path))


def test_random_weights_are_norms_near_one_and_noise():
    small = SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 1, "vocab_size": 99, "hidden_size": 256}
    decoder = random_decoder(ModelConfig.from_dict(small), BF16, "cpu")
    values = dict(decoder.named_parameters())
    assert decoder.dtype == values["embedding.weight"].dtype == BF16
    for name, value in values.items():
        assert float(value.float().mean()) == pytest.approx(float("norm" in name), abs=0.02), name
        assert 0.015 < float(value.float().std()) < 0.025, name


# -- counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_matrices_are_those_that_a_checkpoint_has(name):
    config = shape(name)
    tables = ("embedding.weight", "lm_head.weight")
    places = [p for p in placements(config).values() if p.parameter not in tables]
    in_layers = sum(math.prod(p.shape) for p in places if len(p.shape) == 2)
    assert layer_matrices(config) == in_layers


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5))
def test_counts_are_those_of_a_walk_through_all_tokens(lengths):
    config = shape("qwen2.5-7b")
    per_token, head = config.kv_bytes_per_token(BF16), config.vocab_size * config.hidden_size
    matrices = layer_matrices(config)
    kv_bytes = decode = prefill = 0
    for prompt, answer in lengths:
        for position in range(prompt):
            prefill += 2 * matrices
            prefill += 4 * config.num_layers * config.num_heads * config.head_dim * (position + 1)
        prefill += 2 * head
        for position in range(prompt, prompt + answer - 1):
            kv_bytes += position * per_token
            decode += 2 * (matrices + head)
    work = work_of(config, BF16, lengths, 2)
    assert (work.kv_bytes, work.decode_flops, work.prefill_flops) == (kv_bytes, decode, prefill)
    assert work.output_tokens == sum(answer for _, answer in lengths)


def test_steps_are_those_of_the_longest_answer_or_of_the_places():
    config, lengths = shape("qwen3-0.6b"), [(5, 10), (5, 4), (5, 4)]
    assert work_of(config, BF16, lengths, 3).steps == 10
    assert work_of(config, BF16, lengths, 1).steps == 18


def test_a_table_of_its_own_is_not_read_and_a_tied_one_is():
    tied, own = shape("qwen3-0.6b"), shape("qwen2.5-7b")
    assert work_of(tied, BF16, [(1, 1)], 1).weight_bytes == 2 * num_parameters(tied)
    rows = own.vocab_size * own.hidden_size
    assert work_of(own, BF16, [(1, 1)], 1).weight_bytes == 2 * (num_parameters(own) - rows)


# -- seconds -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "workload", "rate"),
    [("qwen3-0.6b", "nano", 35_000), ("qwen2.5-7b", "nano", 17_000), ("qwen2.5-7b", "single", 289)],
)
def test_the_bound_of_an_h200_is_the_one_that_was_worked_out_by_hand(model, workload, rate):
    assert bound(model, workload).tokens_per_second == pytest.approx(rate, rel=0.05)


def test_parts_add_up_and_each_has_its_limit():
    whole = bound("qwen3-0.6b", "nano")
    assert whole.seconds == whole.kv_seconds + whole.weight_seconds + whole.prefill_seconds
    work, limits = whole.work, whole.limits
    twice = Bound(work, Limits(2 * limits.read_bytes_per_s, limits.matrix_flops_per_s, ""))
    assert twice.kv_seconds == whole.kv_seconds / 2
    assert twice.prefill_seconds == whole.prefill_seconds
    assert json.loads(json.dumps(whole.as_dict()))["work"]["output_tokens"] == 133_966


def test_many_tokens_a_step_are_bound_by_products_and_few_by_weights():
    config = shape("qwen2.5-7b")
    limits = Limits(4e12, 800e12, "")
    few, many = (Bound(work_of(config, BF16, [(1, 100)] * n, n), limits) for n in (1, 1000))
    assert few.weight_seconds == few.work.steps * few.work.weight_bytes / 4e12
    assert many.weight_seconds == many.work.decode_flops / 800e12
    assert many.weight_seconds > 4 * few.weight_seconds


# -- limits --------------------------------------------------------------------------------------


def test_limits_are_recorded_for_one_gpu_and_not_for_another(tmp_path):
    assert Limits(4.11e12, 783e12, H200.source) == H200
    assert "NVIDIA H200" in H200.source and "2026" in H200.source
    assert recorded_limits("NVIDIA H100") is None
    (tmp_path / "a.json").write_text('{"gpu": "NVIDIA H100", "values": {"read_bytes_per_s": 1}}')
    assert recorded_limits("NVIDIA H100", tmp_path) is None


def test_a_cpu_has_no_bound():
    assert limits_of(torch.device("cpu"), torch.float32) is None


def test_limits_can_be_measured():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    limits = measured_limits(device, torch.float32, num_bytes=1 << 20, side=64)
    assert 0 < limits.read_bytes_per_s < math.inf and 0 < limits.matrix_flops_per_s < math.inf
    assert str(device) in limits.source
