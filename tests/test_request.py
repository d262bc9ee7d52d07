"""Requests, sequences and sampling parameters: what grows, what ends, what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mie.errors import RequestError
from mie.memory.manager import BlockManager
from mie.request import FinishReason, Request, Sequence, count_seats
from mie.sampling_params import GREEDY_BELOW, MAX_SEED, Draw, SamplingParams

PROMPT = (5, 6, 7)


def sequence(max_output: int = 4, eos=(), **sampling) -> Sequence:
    request = Request("r", PROMPT, SamplingParams(**sampling), frozenset(eos))
    return Sequence(request, sequence_id=1, arrival=1, max_output=max_output)


@given(tokens=st.lists(st.integers(0, 5), min_size=1, max_size=9), ignore_eos=st.booleans())
def test_an_answer_ends_with_its_first_reason_and_keeps_every_token(tokens, ignore_eos):
    one = sequence(5, eos=(2, 3), ignore_eos=ignore_eos)
    stops = [place for place, token in enumerate(tokens) if token in (2, 3) and not ignore_eos]
    for token in tokens:
        if one.finish_reason is None:
            one.append(token)
    length = min([len(tokens), 5, *(place + 1 for place in stops)])
    assert one.output == tokens[:length] and one.num_output_tokens == length
    assert one.token_ids == [*PROMPT, *tokens[:length]]
    stopped = bool(stops) and stops[0] < length
    ended = FinishReason.LENGTH if length == 5 else None
    assert one.finish_reason == (FinishReason.STOP if stopped else ended)


def test_an_answer_that_has_ended_takes_no_more():
    one = sequence(1)
    one.append(9)
    with pytest.raises(AssertionError, match="r has ended: length"):
        one.append(9)


def test_what_is_left_to_compute_is_a_difference():
    one = sequence()
    assert (one.num_tokens, one.num_prompt_tokens, one.num_to_compute) == (3, 3, 3)
    one.num_computed = 3
    one.append(9)
    assert (one.num_tokens, one.num_prompt_tokens, one.num_to_compute) == (4, 3, 1)
    one.num_computed = 0  # its K and V are gone
    assert one.num_to_compute == 4
    assert repr(one) == "Sequence(r: 0 of 4 computed, 1 of 4 out)"


def test_answers_are_numbered_where_there_are_several():
    assert sequence().name == "r"
    several = sequence(n=3)
    assert several.name == "r/0" and several.num_seats == 3
    assert count_seats([several, sequence()]) == 4


def test_a_fork_has_the_same_past_and_its_own_future():
    memory = BlockManager(9, 4)
    one = sequence(n=2)
    one.table = memory.empty_table()
    one.table.append(3)
    one.num_computed = one.num_ever_computed = 3
    one.num_cached_tokens = 0
    twin = one.fork(sequence_id=2, index=1)
    one.to_fork = 0
    assert twin.table is not None and twin.table.blocks == one.table.blocks
    assert (twin.name, twin.arrival, twin.num_computed, twin.num_seats) == ("r/1", 1, 3, 1)
    assert twin.num_cached_tokens == 0 and twin.num_ever_computed == 3
    twin.append(8)
    assert twin.output == [8] and one.output == []
    with pytest.raises(AssertionError):
        twin.fork(3, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": MAX_SEED + 1}, f"between 0 and {MAX_SEED}"),
        ({"n": 0}, "n is 0; it must be at least 1"),
    ],
)
def test_what_means_nothing_is_refused_when_it_is_made(options, message):
    with pytest.raises(RequestError, match=message) as refusal:
        SamplingParams(**options)
    assert refusal.value.http_status == 400


def test_a_temperature_next_to_nothing_is_greedy():
    tiny = SamplingParams(temperature=GREEDY_BELOW / 2, seed=4)
    assert tiny.is_greedy and tiny.draw(7, 1).temperature == 0.0
    assert SamplingParams(temperature=GREEDY_BELOW).draw(7, 1) == Draw(GREEDY_BELOW, 0, 7, 1)
    assert SamplingParams(max_tokens=None, seed=MAX_SEED, temperature=2).draw(3, 0).seed == MAX_SEED
