"""Many prompts, many answers, many streams on one engine: each comes out as it would alone."""

from __future__ import annotations

import pytest
import torch

from mie import LLM, EngineConfig, SamplingParams
from mie.errors import (
    ConfigError,
    ContextLengthError,
    EmptyPromptError,
    MieError,
    RequestError,
    UnknownPartError,
)
from mie.memory.radix_tree import RadixTree
from mie.ops import reference
from mie.scheduling.scheduler import Scheduler
from mie.scheduling.static import StaticScheduler

PROMPTS = [
    "the first of several",
    "a",
    "the first of several, and longer than the others by a good deal",
    "Number four: é, ü and 🐙",
    "the first of several",
]


@pytest.fixture(scope="module")
def loaded(small_path):
    return LLM(small_path, device="cpu", num_blocks=200, block_size=4)


@pytest.fixture
def llm(loaded):
    """An engine for each test, around the same weights."""
    return loaded.with_settings()


def idle(llm) -> bool:
    """Nothing waits or runs, every block has come back, and the pool is whole."""
    llm.memory.check([])
    return llm.memory.pool.num_used == 0 and not llm.engine.core.has_work


def alone(llm, prompt, sampling):
    """What ``prompt`` is answered by an engine that has nothing else to do."""
    return llm.with_settings(max_num_seqs=max(1, sampling.n)).generate(prompt, sampling)


# -- many prompts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 2},
        {"max_num_seqs": 4, "token_budget": 7},
        {"num_blocks": 24, "max_num_seqs": 5},
        {"num_blocks": 24, "max_num_seqs": 5, "preemption": "swap"},
        {"prefix_cache": "off"},
        {"policy": "priority"},
    ],
    ids=str,
)
def test_a_list_of_prompts_gives_their_answers_in_order(llm, settings):
    llm = llm.with_settings(**settings)
    sampling = SamplingParams(max_tokens=20)
    answers = llm.generate(PROMPTS, sampling)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        one = alone(llm, prompt, sampling)
        assert answer.token_ids == one.token_ids and answer.text == one.text
        assert list(answer.prompt_token_ids) == llm.tokenizer.encode_prompt(prompt)
        assert (answer.finish_reason, answer.num_output_tokens) == ("length", 20)
        assert answer.time_to_first_token > 0 and answer.decode_tokens_per_second > 0
    assert idle(llm)


def test_prompts_share_the_steps(llm):
    """Nineteen steps after the prompts for 20 tokens of each of five answers."""
    llm.generate(PROMPTS, max_tokens=20)
    assert [record.num_running for record in llm.trace.records] == [5] * 20


def test_token_ids_are_prompts_too(llm):
    ids = [llm.tokenizer.encode_prompt(prompt) for prompt in PROMPTS]
    expected = [answer.token_ids for answer in llm.generate(PROMPTS, max_tokens=3)]
    assert [answer.token_ids for answer in llm.generate(ids, max_tokens=3)] == expected
    assert llm.generate(ids[1], max_tokens=3).token_ids == expected[1]
    assert [a.token_ids for a in llm.generate([tuple(ids[1])], max_tokens=3)] == [expected[1]]


def test_each_prompt_can_have_its_own_parameters(llm):
    params = [SamplingParams(max_tokens=1 + 3 * place) for place in range(len(PROMPTS))]
    answers = llm.generate(PROMPTS, params)
    assert [len(answer.token_ids) for answer in answers] == [1, 4, 7, 10, 13]
    for prompt, sampling, answer in zip(PROMPTS, params, answers, strict=True):
        assert answer.token_ids == alone(llm, prompt, sampling).token_ids


def test_what_is_asked_for_twice_or_not_for_all_is_refused_with_both_numbers(llm):
    params = SamplingParams(max_tokens=3)
    with pytest.raises(RequestError, match="4 sampling_params for 5 prompts"):
        llm.generate(PROMPTS, [params] * 4)
    for refused in (
        lambda: llm.generate(PROMPTS, params, max_tokens=5),
        lambda: llm.generate(PROMPTS, [params] * 5, max_tokens=5),
        lambda: llm.stream(PROMPTS[0], params, max_tokens=5),
    ):
        with pytest.raises(RequestError, match="max_tokens is 3 in sampling_params and 5 beside"):
            refused()
    with pytest.raises(RequestError, match="n is 65; max_num_seqs is 64"):
        llm.generate(PROMPTS[0], SamplingParams(n=65))
    assert idle(llm) and not llm.trace.records


@pytest.mark.parametrize(
    ("bad", "error"),
    [("", EmptyPromptError), ([5] * 128, ContextLengthError), ([5, 256], RequestError)],
    ids=["empty", "long", "strange"],
)
def test_one_bad_prompt_among_many_and_none_is_begun(llm, bad, error):
    with pytest.raises(error):
        llm.generate([*PROMPTS, bad], max_tokens=3)
    assert idle(llm) and not llm.trace.records
    assert len(llm.generate(PROMPTS, max_tokens=3)) == 5


def test_an_answer_that_finds_no_block_more_says_so_among_others_too(llm):
    """Alone or not: 24 blocks of 4 hold 96 tokens, less than the context of 128."""
    llm = llm.with_settings(num_blocks=25)
    params = [SamplingParams(max_tokens=None), SamplingParams(max_tokens=30)]
    answers = llm.generate(PROMPTS[:2], params)
    assert [answer.finish_reason for answer in answers] == ["kv_exhausted", "length"]
    first = answers[0]
    assert first.num_prompt_tokens + len(first.token_ids) == 97 == llm.max_context
    assert idle(llm)


def test_the_more_urgent_prompt_comes_first_where_the_policy_says_so(llm):
    llm = llm.with_settings(policy="priority", max_num_seqs=1)
    one = llm.stream(PROMPTS[0], max_tokens=12, priority=1)
    next(one)
    assert len(llm.generate(PROMPTS[1], max_tokens=3, priority=0).token_ids) == 3
    preempted = [name for record in llm.trace.records for name in record.preempted]
    assert preempted == ["1"]
    rest = [piece.token_id for piece in one]
    assert len(rest) == 11 and idle(llm)


# -- interruptions ------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 9])
def test_ctrl_c_inside_generate_leaves_an_engine_that_works(llm, monkeypatch, at):
    expected = [answer.token_ids for answer in llm.generate(PROMPTS, max_tokens=12)]
    calls = 0
    sample = llm.engine.runner.sample

    def interrupted(*arguments):
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return sample(*arguments)

    beside = llm.stream(PROMPTS[3], max_tokens=12)
    tokens = [next(beside).token_id]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine.runner, "sample", interrupted)
        llm.generate(PROMPTS, max_tokens=12)
    tokens += [piece.token_id for piece in beside]
    assert tokens == expected[3], "the stream beside it has lost nothing"
    assert idle(llm)
    assert [answer.token_ids for answer in llm.generate(PROMPTS, max_tokens=12)] == expected


# -- streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [200, 24])
def test_streams_in_turns_are_each_what_they_are_alone(llm, num_blocks):
    llm = llm.with_settings(num_blocks=num_blocks)
    sampling = SamplingParams(max_tokens=15)
    streams = [llm.stream(prompt, sampling) for prompt in PROMPTS[:3]]
    in_turns = [list(pieces) for pieces in zip(*streams, strict=True)]
    for prompt, pieces in zip(PROMPTS, zip(*in_turns, strict=True), strict=False):
        one = alone(llm, prompt, sampling)
        assert [piece.token_id for piece in pieces] == one.token_ids
        assert "".join(piece.text for piece in pieces) == one.text
        assert pieces[-1].finish_reason == "length"
    assert idle(llm)


def test_streams_come_forward_in_each_others_steps(llm):
    """Ten tokens of the first and then ten of the second: the second waits for nothing more."""
    first, second = (llm.stream(prompt, max_tokens=10) for prompt in PROMPTS[:2])
    next(first), next(second)
    list(first)
    steps = len(llm.trace.records)
    list(second)
    assert len(llm.trace.records) - steps <= 1


def test_generate_beside_an_open_stream(llm):
    stream = llm.stream(PROMPTS[0], max_tokens=15)
    tokens = [next(stream).token_id]
    answers = llm.generate(PROMPTS[1:], max_tokens=5)
    tokens += [piece.token_id for piece in stream]
    assert tokens == alone(llm, PROMPTS[0], SamplingParams(max_tokens=15)).token_ids
    for prompt, answer in zip(PROMPTS[1:], answers, strict=True):
        assert answer.token_ids == alone(llm, prompt, SamplingParams(max_tokens=5)).token_ids
    assert idle(llm)


def test_a_stream_that_is_closed_gives_its_blocks_to_the_others(llm):
    first, second = (llm.stream(prompt, max_tokens=10) for prompt in PROMPTS[:2])
    next(first), next(second)
    first.close()
    first.close()
    assert len(llm.engine.core.scheduler.running) == 1
    assert len(list(second)) == 9 and idle(llm)


# -- draws --------------------------------------------------------------------------------------

WARM = SamplingParams(max_tokens=12, temperature=0.8, seed=7)


def test_a_seed_repeats_an_answer_whatever_runs_beside_it(llm):
    expected = alone(llm, PROMPTS[0], WARM).token_ids
    assert llm.generate(PROMPTS[0], WARM).token_ids == expected
    mates = [SamplingParams(max_tokens=20, temperature=1.5, seed=seed) for seed in range(4)]
    for place in range(5):
        prompts, params = PROMPTS[1:], list(mates)
        prompts.insert(place, PROMPTS[0])
        params.insert(place, WARM)
        assert llm.generate(prompts, params)[place].token_ids == expected
    tight = llm.with_settings(num_blocks=30, token_budget=30, max_num_seqs=5)
    assert tight.generate(PROMPTS, [WARM, *mates])[0].token_ids == expected
    assert any(record.preempted for record in tight.trace.records)
    other = SamplingParams(max_tokens=12, temperature=0.8, seed=8)
    assert llm.generate(PROMPTS[0], other).token_ids != expected


def test_without_a_seed_the_engines_own_repeats_a_whole_program(llm):
    params = SamplingParams(max_tokens=12, temperature=0.8)
    one, two = ([a.token_ids for a in llm.with_settings(seed=3).generate(PROMPTS, params)]
                for _ in range(2))  # fmt: skip
    assert one == two
    assert one[0] != one[4], "the same prompt twice, and two draws"
    assert [a.token_ids for a in llm.with_settings(seed=4).generate(PROMPTS, params)] != one


def test_a_temperature_of_nothing_is_the_most_likely_token(llm):
    greedy = llm.generate(PROMPTS[0], max_tokens=12).token_ids
    cold = SamplingParams(max_tokens=12, temperature=1e-6, seed=1)
    assert llm.generate(PROMPTS[0], cold).token_ids == greedy
    assert llm.generate(PROMPTS[0], WARM).token_ids != greedy


def test_n_answers_of_one_prompt_that_is_computed_once(llm):
    three = SamplingParams(max_tokens=12, temperature=0.8, seed=7, n=3)
    answer = llm.generate(PROMPTS[0], three)
    assert [len(completion.token_ids) for completion in answer.completions] == [12] * 3
    assert len({tuple(completion.token_ids) for completion in answer.completions}) == 3
    assert answer.token_ids == alone(llm, PROMPTS[0], WARM).token_ids, "the first is that of n = 1"
    assert answer.num_output_tokens == 36
    assert (answer.text, answer.finish_reason) == (answer.completions[0].text, "length")
    computed = sum(record.num_tokens for record in llm.trace.records)
    assert computed == answer.num_prompt_tokens + 3 * 11
    assert idle(llm)


def test_a_stream_of_n_answers_says_whose_each_piece_is(llm):
    three = SamplingParams(max_tokens=12, temperature=0.8, seed=7, n=3)
    answer = llm.generate(PROMPTS[3], three)
    pieces = list(llm.stream(PROMPTS[3], three))
    for index, completion in enumerate(answer.completions):
        mine = [piece for piece in pieces if piece.index == index]
        assert [piece.token_id for piece in mine] == completion.token_ids
        assert "".join(piece.text for piece in mine) == completion.text
        assert [piece.finish_reason for piece in mine] == [None] * 11 + ["length"]


# -- the bar ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "wanted", "shown"),
    [
        (PROMPTS, True, True),
        (PROMPTS[:1], True, True),
        (PROMPTS, False, False),
        (PROMPTS, None, False),  # nobody looks: standard error is no terminal here
    ],
    ids=["on", "for one", "off", "not asked for"],
)
def test_progress_is_shown_on_standard_error_where_it_is_wanted(llm, capfd, prompts, wanted, shown):
    answers = llm.generate(prompts, max_tokens=2, progress=wanted)
    said = capfd.readouterr()
    assert said.out == ""
    assert ("answers" in said.err and f"{len(prompts)}/{len(prompts)}" in said.err) == shown
    assert shown or said.err == ""
    assert len(answers) == len(prompts)


# -- settings -----------------------------------------------------------------------------------


def test_settings_by_name_win_over_those_of_a_config(small_path):
    config = EngineConfig(num_blocks=50, block_size=8, max_num_seqs=3)
    llm = LLM(small_path, config, device="cpu", block_size=4)
    assert llm.engine_config == EngineConfig(
        num_blocks=50, block_size=4, max_num_seqs=3, device="cpu"
    )
    assert (llm.memory.pool.num_blocks, llm.memory.pool.block_size) == (50, 4)
    assert llm.engine.core.scheduler.limits.max_num_seqs == 3


def test_what_contradicts_the_model_is_refused_with_both_numbers(small_path, llm):
    for make in (lambda **s: LLM(small_path, device="cpu", **s), llm.with_settings):
        with pytest.raises(ConfigError, match="max_model_len is 129; the model reads 128 tokens"):
            make(max_model_len=129)
        with pytest.raises(ConfigError, match="token_budget is 8 and max_num_seqs 9"):
            make(token_budget=8, max_num_seqs=9)
        with pytest.raises(ConfigError, match=r"no setting called num_block;.*num_blocks"):
            make(num_block=3)


def test_with_settings_keeps_the_weights_and_starts_anew(llm):
    sampling = SamplingParams(max_tokens=5)
    expected = llm.generate(PROMPTS[2], sampling).token_ids
    twin = llm.with_settings(block_size=8, preemption="swap", num_host_blocks=5)
    assert twin.decoder is llm.decoder and twin.tokenizer is llm.tokenizer
    assert twin.memory is not llm.memory and twin.memory.host.num_blocks == 5
    assert twin.memory.pool.num_blocks == 200, "what was not named stays"
    assert llm.memory.pool.block_size == 4, "and the first is untouched"
    answer = twin.generate(PROMPTS[2], sampling)
    assert (answer.token_ids, answer.num_cached_tokens) == (expected, 0)
    assert len(twin.trace.records) == 5 and len(llm.trace.records) == 5


def test_with_settings_replaces_parts_of_the_engine(llm):
    static = llm.with_settings(parts={"scheduler": StaticScheduler, "prefix_cache": RadixTree})
    assert type(static.engine.core.scheduler) is StaticScheduler
    assert type(static.memory.prefix_cache) is RadixTree
    again = static.with_settings(num_blocks=100)
    assert type(again.engine.core.scheduler) is StaticScheduler, "a part stays as settings do"
    assert type(llm.engine.core.scheduler) is Scheduler
    answers = static.generate(PROMPTS, max_tokens=6)
    assert [a.token_ids for a in answers] == [
        a.token_ids for a in llm.generate(PROMPTS, max_tokens=6)
    ]
    assert sum(record.num_padding for record in static.trace.records) > 0


def test_with_settings_refuses_what_belongs_to_the_loaded_weights(llm):
    for fixed in ({"dtype": "float16"}, {"device": "cpu"}, {"fast_ops": False}):
        with pytest.raises(ConfigError, match=f"{next(iter(fixed))} belongs to the loaded model"):
            llm.with_settings(**fixed)
    with pytest.raises(ConfigError, match="part rope belongs to the loaded model"):
        llm.with_settings(parts={"rope": reference.rope})
    with pytest.raises(UnknownPartError, match="softmax"):
        llm.with_settings(parts={"softmax": max})


def test_without_a_trace_the_same_tokens(llm):
    untraced = llm.with_settings(trace_steps=0)
    expected = [answer.token_ids for answer in llm.generate(PROMPTS, max_tokens=4)]
    assert [a.token_ids for a in untraced.generate(PROMPTS, max_tokens=4)] == expected
    assert len(untraced.trace.records) == 0


def test_the_reference_operations_give_the_same_tokens(small_path, llm):
    slow = LLM(small_path, device="cpu", num_blocks=200, block_size=4, fast_ops=False)
    expected = [answer.token_ids for answer in llm.generate(PROMPTS, max_tokens=8)]
    assert [a.token_ids for a in slow.generate(PROMPTS, max_tokens=8)] == expected


# -- what may stand for a prompt ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([1, 2.5], "2.5 is no token id"),
        ([True, False], "True is no token id"),
        ([1, "a"], "'a' is no token id"),
        (b"bytes", "not b'bytes'"),
        ([7, 256], "token 256 is outside the vocabulary of 256"),
        ([-1], "token -1 is outside"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(llm, prompt, said):
    with pytest.raises(RequestError, match=said):
        llm.stream(prompt)
    assert not llm.engine.core.has_work


def test_token_ids_may_come_in_any_kind_of_sequence(llm):
    import numpy as np

    ids = [5, 6, 7]
    expected = llm.generate(ids, max_tokens=4).token_ids
    for same in (tuple(ids), np.array(ids), torch.tensor(ids), [np.int64(i) for i in ids]):
        assert llm.generate(same, max_tokens=4).token_ids == expected
    several = llm.generate([ids, np.array(ids), tuple(ids)], max_tokens=4)
    assert [answer.token_ids for answer in several] == [expected] * 3


@pytest.mark.parametrize("salt", [None, 3])
def test_a_salt_is_a_text(llm, salt):
    with pytest.raises(RequestError, match=f"salt is {salt}"):
        llm.generate([1], salt=salt)


def test_an_answer_whose_length_nobody_asked_for_fits_what_there_is(llm):
    tiny = llm.with_settings(num_blocks=4, block_size=4)
    answer = tiny.generate([1, 2, 3])
    assert answer.finish_reason == "length" and len(answer.token_ids) == 10


def test_a_request_whose_outputs_somebody_else_took_does_not_wait_for_ever(llm):
    pieces = llm.stream([1, 2, 3], max_tokens=3)
    next(pieces)
    while llm.engine.core.has_work:
        llm.engine.core.step()
    with pytest.raises(MieError, match="taken by somebody else"):
        list(pieces)
