"""Three schedules on a small model: the same tokens, and counts that arithmetic knows before."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hash_seeds import outputs_of
from hypothesis import given
from hypothesis import strategies as st
from tiny_decoder import VOCABULARY, count_near_ties, tiny_decoder

from mie.bench.throughput import StepCost, Throughput, mixed_workload, offline, room_for, throughput
from mie.bench.workloads import Kind

KINDS = (Kind("short", 75, (2, 9), (1, 4), 4), Kind("long", 25, (5, 30), (8, 12), 12))
WORKLOAD = mixed_workload(VOCABULARY, 10, 0, KINDS)
ANSWERS = [request.sampling.max_tokens for request in WORKLOAD]
PROMPTS = [len(request.prompt) for request in WORKLOAD]


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def result(told):
    return throughput(tiny_decoder(), WORKLOAD, 3, 4, told.append)


def test_every_request_completes_with_its_own_length(result):
    for run in result.runs:
        lengths = ANSWERS[: run.num_requests]
        assert [len(answer) for answer in run.answers] == lengths
        assert run.output_tokens == run.sequence_steps == sum(lengths)
        assert len(run.records) == run.steps
        assert run.preemptions == run.recomputed_tokens == 0
        assert run.computed_tokens == run.prompt_tokens + run.output_tokens - run.num_requests


def test_steps_and_padding_are_those_of_the_arithmetic(result):
    alone, static, continuous = result.runs
    assert alone.steps == sum(ANSWERS[:4]) and alone.num_requests == 4
    waves = [range(10)[start : start + 3] for start in range(0, 10, 3)]
    assert static.steps == sum(max(ANSWERS[i] for i in wave) for wave in waves)
    area = sum(
        len(wave) * (max(PROMPTS[i] for i in wave) + max(ANSWERS[i] for i in wave) - 1)
        for wave in waves
    )
    assert static.padding_tokens == area - static.computed_tokens > 0
    assert continuous.padding_tokens == alone.padding_tokens == 0
    assert max(ANSWERS) <= continuous.steps < static.steps


def test_answers_are_those_of_the_definition(result):
    for run in result.runs:
        for request, answer in zip(WORKLOAD, run.answers, strict=False):
            count_near_ties(request, 0, answer)
    assert 0 <= result.same_answers <= 4


def test_times_are_ordered(result):
    for run in result.runs:
        assert all(0 < first <= run.seconds for first in run.first_token_seconds)
        assert len(run.first_token_seconds) == run.num_requests
    alone = result.run("one at a time").first_token_seconds
    assert all(before < after for before, after in pairwise(alone))


@given(st.floats(0, 1), st.floats(0.001, 1))
def test_expected_ratios_follow_from_counts(result, per_step, per_token):
    cost = StepCost(per_step, per_token)
    slow, fast = result.run("static"), result.run("continuous")
    seconds = [
        run.steps * per_step + (run.computed_tokens + run.padding_tokens) * per_token
        for run in (slow, fast)
    ]
    expected = Throughput(cost, result.runs)
    assert expected.predicted_ratio("static") == pytest.approx(seconds[0] / seconds[1])
    assert result.measured_ratio("static") == pytest.approx(slow.seconds / fast.seconds)


def test_the_numbers_are_json_and_leave_out_tokens(result, told):
    numbers = json.loads(json.dumps(result.as_dict()))
    assert [run["steps"] for run in numbers["runs"]] == [run.steps for run in result.runs]
    assert not any({"answers", "records"} & run.keys() for run in numbers["runs"])
    total = sum(ANSWERS)
    assert told[-1] == f"continuous: {total} of {total} tokens"


def test_less_memory_changes_counts_and_no_length():
    long = mixed_workload(VOCABULARY, 4, 0, [Kind("long", 100, (2, 2), (12, 12), 12)])
    tight = offline(tiny_decoder(), long, num_blocks=room_for(long, 1, 1), block_size=1)
    assert tight.preemptions > 0 and tight.recomputed_tokens > 0
    assert [len(answer) for answer in tight.answers] == [12] * 4


def test_another_hash_seed_is_the_same_workload():
    one, other = outputs_of(
        "from mie.bench.throughput import mixed_workload\nprint(mixed_workload(99, 20, 3))"
    )
    assert one == other != ""
