"""The next token: greedy where it must be, drawn by the right distribution, and repeatable."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mie.sampling.sampler import gumbel_noise, mix, noise_key, sample
from mie.sampling_params import GREEDY_BELOW, MAX_SEED, Draw, SamplingParams

# What a chi-square with so many degrees of freedom exceeds once in 10,000 times.
ONE_IN_TEN_THOUSAND = {4: 23.5}
KEY_3_1 = 8513542685296429273
NOISE_3_7_1 = [3.62614, 2.18724, 0.81116, 1.81590, -0.21725, 0.31098]
LOGITS = torch.tensor([2.0, 0.0, 1.0, -1.0, 1.5])


def chi_square(counts: Counter[int], probabilities: list[float]) -> float:
    total = sum(counts.values())
    return sum((counts[v] - total * p) ** 2 / (total * p) for v, p in enumerate(probabilities))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("vary", ["position", "seed", "index"])
def test_tokens_are_drawn_by_the_probabilities_of_the_model(temperature, vary):
    """Whichever of the three numbers of the noise changes from draw to draw."""
    numbers = {"seed": 3, "position": 7, "index": 1}
    draws = [Draw(temperature, **numbers | {vary: number}) for number in range(8_000)]
    counts = Counter(sample(LOGITS.expand(len(draws), -1), draws))
    probabilities = (LOGITS / temperature).softmax(dim=-1).tolist()
    assert chi_square(counts, probabilities) < ONE_IN_TEN_THOUSAND[4]
    other = (LOGITS / (temperature * 1.6)).softmax(dim=-1).tolist()
    assert chi_square(counts, other) > ONE_IN_TEN_THOUSAND[4], "and not by any others"


def test_neighbouring_draws_have_nothing_to_do_with_each_other():
    """Pairs of tokens at positions p and p + 1 are as frequent as if they were independent."""
    draws = [Draw(1.0, 5, position, 0) for position in range(20_001)]
    tokens = sample(torch.zeros(len(draws), 2), draws)
    pairs = Counter(2 * one + two for one, two in zip(tokens[::2], tokens[1::2], strict=False))
    assert chi_square(pairs, [0.25] * 4) < 21.1  # 3 degrees of freedom, one in 10,000


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 2.0]),
            st.integers(0, MAX_SEED),
            st.integers(0, 10_000),
            st.integers(0, 7),
        ),
        min_size=1,
        max_size=6,
    ),
    data=st.data(),
)
def test_company_and_order_change_nothing(rows, data):
    draws = [Draw(*row) for row in rows]
    logits = torch.randn(len(draws), 11, generator=torch.Generator().manual_seed(len(draws)))
    together = sample(logits, draws)
    assert together == [
        sample(logits[row : row + 1], draws[row : row + 1])[0] for row in range(len(draws))
    ]
    order = data.draw(st.permutations(range(len(draws))))
    shuffled = sample(logits[order], [draws[row] for row in order])
    assert shuffled == [together[row] for row in order]


def test_greedy_rows_are_never_divided():
    """Beside drawn ones, at temperature 0, with logits that are no numbers to divide by."""
    logits = torch.tensor([[0.0, 1e30, -1e30], [1.0, 3.0, 2.0], [0.0, 0.0, 0.0]])
    assert sample(logits, [Draw(0.0, 1, 1, 0)] * 3) == [1, 1, 0]
    assert sample(logits, [Draw(0.0, 1, 1, 0), Draw(1e-5, 1, 1, 0), Draw(0.0, 1, 1, 0)]) == [
        1,
        1,
        0,
    ]


def test_a_tiny_temperature_is_greedy():
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(2))
    greedy = sample(logits, [Draw(0.0, 0, 0, 0)] * 200)
    tiny = SamplingParams(temperature=GREEDY_BELOW / 10, seed=1)
    assert sample(logits, [tiny.draw(position, 0) for position in range(200)]) == greedy
    least = SamplingParams(temperature=GREEDY_BELOW, seed=1)
    assert sample(logits, [least.draw(position, 0) for position in range(200)]) == greedy


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([0.0, float("-inf"), 0.0]).expand(2_000, -1)
    assert {*sample(logits, [Draw(5.0, 1, position, 0) for position in range(2_000)])} == {0, 2}


def test_an_infinite_temperature_draws_among_the_possible():
    """As a float32 has no larger one. Minus infinity over infinity is no number: it never wins."""
    logits = torch.tensor([0.0, float("-inf"), 5.0]).expand(400, -1)
    tokens = Counter(sample(logits, [Draw(1e300, 1, position, 0) for position in range(400)]))
    assert {*tokens} == {0, 2} and min(tokens.values()) > 130


def test_of_equal_scores_the_lowest_token_wins():
    infinity = float("inf")
    logits = torch.tensor([[0.0, infinity, 0.0, infinity], [0.0, 7.0, 7.0, 0.0]])
    assert sample(logits, [Draw(1.0, 1, 1, 0), Draw(0.0, 1, 1, 0)]) == [1, 1]


def noise(*numbers: int, temperature: float = 1.0, size: int = 1_000) -> torch.Tensor:
    return gumbel_noise([Draw(temperature, *numbers)], size)[0]


def test_noise_is_a_function_of_three_numbers_and_finite():
    one = noise(3, 7, 1)
    assert torch.equal(one, noise(3, 7, 1, temperature=0.2))
    assert one.shape == (1_000,) and one.dtype == torch.float32 and one.isfinite().all()
    for other in ((4, 7, 1), (3, 8, 1), (3, 7, 2), (7, 3, 1), (1, 7, 3)):
        assert not torch.equal(one, noise(*other))
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    noise(3, 7, 1)
    assert torch.equal(before, torch.random.get_rng_state()), "the generator of all is not touched"


def test_noise_is_the_same_on_every_machine_and_in_every_version():
    """Written down once: whoever changes these numbers changes every answer that has a seed."""
    assert noise_key(Draw(1.0, 3, 7, 1)) == mix(3, 1) == KEY_3_1
    assert (noise(3, 7, 1, size=6) - torch.tensor(NOISE_3_7_1)).abs().max() < 1e-5


def test_noise_of_many_draws_is_the_noise_of_each():
    draws = [Draw(1.0, seed, 90 - seed, seed % 3) for seed in range(40)]
    together = gumbel_noise(draws, 1_001)
    assert together.shape == (40, 1_001)
    for row, draw in enumerate(draws):
        assert torch.equal(together[row], noise(draw.seed, draw.position, draw.index, size=1_001))


def test_mixing_keeps_apart_what_is_near():
    seen = {
        mix(seed, index, position)
        for seed in range(30)
        for index in range(8)
        for position in range(60)
    }
    assert len(seen) == 30 * 8 * 60 and all(0 <= number < 2**63 for number in seen)
    assert mix(1, 2) != mix(2, 1) and mix(0) != mix(0, 0)
    assert mix(MAX_SEED, 0, 0) != mix(MAX_SEED - 1, 0, 0)


def test_as_many_draws_as_rows():
    with pytest.raises(AssertionError, match="2 rows for 1 draws"):
        sample(torch.zeros(2, 3), [Draw(0.0, 0, 0, 0)])
