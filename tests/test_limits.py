"""What is refused on arrival, against trying it out: whatever passes ends by itself."""

from __future__ import annotations

import pytest
from engine_harness import engine
from hypothesis import given
from hypothesis import strategies as st

from mie.errors import ConfigError, ContextLengthError, EmptyPromptError, RequestError
from mie.memory.prefix_cache import HashPrefixCache, NoPrefixCache
from mie.request import FinishReason, Request
from mie.sampling_params import SamplingParams
from mie.scheduling.limits import Limits, max_output
from mie.scheduling.scheduler import Scheduler
from mie.scheduling.static import StaticScheduler

LIMITS = Limits(max_num_seqs=2, token_budget=8, max_model_len=20)


def ask(prompt: int, **sampling) -> Request:
    return Request("r", (1,) * prompt, SamplingParams(**sampling))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 8, 20), "max_num_seqs is 0"),
        ((4, 3, 20), "token_budget is 3 and max_num_seqs 4"),
        ((4, 4, 1), "max_model_len is 1"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(numbers, message):
    with pytest.raises(ConfigError, match=message):
        Limits(*numbers)


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (ask(0), EmptyPromptError, "no tokens"),
        (ask(20), ContextLengthError, "the prompt has 20 tokens; with its answer it may have 20"),
        (ask(3, n=3), RequestError, "n is 3; max_num_seqs is 2"),
        (
            ask(3, max_tokens=15),
            ContextLengthError,
            "prompt of 3 tokens and an answer of 15 needs 5 blocks of 4; the K/V memory has 4",
        ),
        (
            ask(17, max_tokens=None),
            ContextLengthError,
            "prompt of 17 tokens needs 5 blocks of 4; the K/V memory has 4",
        ),
    ],
)
def test_a_refusal_names_both_numbers(request_, error, message):
    with pytest.raises(error, match=message) as refusal:
        max_output(request_, LIMITS, num_blocks=4, block_size=4)
    assert refusal.value.http_status == 400


@given(
    prompt=st.integers(1, 25),
    max_tokens=st.one_of(st.none(), st.integers(1, 30)),
    num_blocks=st.integers(1, 9),
    block_size=st.integers(1, 5),
    n=st.integers(1, 2),
    scheduler=st.sampled_from([Scheduler, StaticScheduler]),
    cache=st.sampled_from([HashPrefixCache, NoPrefixCache]),
)
def test_what_passes_is_served_and_nothing_else_is_refused(
    prompt, max_tokens, num_blocks, block_size, n, scheduler, cache
):
    """The last token of an answer needs no slot; a context that is too short cuts the answer."""
    harness = engine(
        num_blocks,
        block_size,
        max_num_seqs=2,
        token_budget=8,
        max_model_len=20,
        scheduler=scheduler,
        memory={"prefix_cache": cache},
    )
    slots = num_blocks * block_size
    room = 20 - prompt
    output = room if max_tokens is None else min(max_tokens, room)
    fits = prompt + (1 if max_tokens is None else output) - 1 <= slots
    if room < 1 or not fits:
        with pytest.raises(ContextLengthError):
            harness.ask("r", prompt, max_tokens, n=n)
        assert not harness.core.has_work
        return
    harness.ask("r", prompt, max_tokens, n=n)
    harness.drain(500)
    harness.is_right()
    for index in range(n):
        assert len(harness.answer("r", index)) == min(output, slots - prompt + 1)
        full = output > slots - prompt + 1
        reason = FinishReason.KV_EXHAUSTED if full else FinishReason.LENGTH
        assert harness.ends["r", index] == reason


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("scheduler", [Scheduler, StaticScheduler])
def test_the_smallest_pool_plus_one_block_finishes_a_mixed_workload(block_size, scheduler):
    """And with one block fewer than the longest needs, that one is refused when it arrives."""
    sizes = [(33, 8), (1, 20), (20, 4), (8, 8), (2, 1), (16, 16), (30, 11), (5, 30)]
    longest = max(-(-(prompt + output - 1) // block_size) for prompt, output in sizes)
    for num_blocks in (longest - 1, longest, longest + 1):
        harness = engine(num_blocks, block_size, 8, 16, scheduler=scheduler)
        refused = 0
        for number, (prompt, output) in enumerate(sizes):
            try:
                harness.ask(f"r{number}", prompt, output, n=1 + number % 2)
            except ContextLengthError:
                refused += 1
        assert (refused > 0) == (num_blocks < longest)
        harness.drain()
        harness.is_right()
        assert {*harness.ends.values()} == {FinishReason.LENGTH}
