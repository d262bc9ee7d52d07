"""The noise bit for bit, and the tokens that a kernel chooses with it against torch.

What stands behind a row of logits is plus infinity, so a token that was read there wins, and what
the two stages hand each other starts as pairs that would win too.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import triton
import triton.language as tl
from kernel_data import DEVICE

from mie.kernels import philox
from mie.kernels import sample as kernel
from mie.kernels.launch import INTERPRETED
from mie.kernels.philox import gumbel, philox_4x32, philox_uniform, philox_uniforms
from mie.kernels.sample import divide, sample, sample_torch
from mie.sampling import sampler
from mie.sampling_params import MAX_SEED, Draw

INF, NAN = float("inf"), float("nan")
TILE = 4 * kernel.QUADS
WORD = 0xFFFFFFFF
# Chi-square with 4 degrees of freedom exceeds this once in 10,000 times.
ONE_IN_TEN_THOUSAND = 23.5
# From the known answers of Random123: counter, key, result.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
KEYS = [0, 1, MAX_SEED, 2**63, 2**64 - 1, 0x123456789ABCDEF0]


def as_int64(keys: list[int]) -> torch.Tensor:
    return torch.tensor([key - 2**64 if key >= 2**63 else key for key in keys], device=DEVICE)


# -- the numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_philox_gives_the_known_answers(counter, key, expected):
    words = philox_4x32(
        tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([word]) for word in key)
    )
    assert [int(word) for word in words] == expected
    many = philox_4x32(
        tuple(torch.tensor([0, word, 5]) for word in counter),
        tuple(torch.tensor([7, word, 9]) for word in key),
    )
    assert [int(word[1]) for word in many] == expected


def by_the_book(key: int, position: int, token: int) -> float:
    """One number, in Python's integers, as the paper writes a round."""
    word_0, word_1, word_2, word_3 = token // 4, position, 0, 0
    key_0, key_1 = key & WORD, key >> 32
    for _ in range(10):
        a, b = 0xD2511F53 * word_0, 0xCD9E8D57 * word_2
        word_0, word_1, word_2, word_3 = (
            b >> 32 ^ word_1 ^ key_0,
            b & WORD,
            a >> 32 ^ word_3 ^ key_1,
            a & WORD,
        )
        key_0, key_1 = key_0 + 0x9E3779B9 & WORD, key_1 + 0xBB67AE85 & WORD
    return ((word_0, word_1, word_2, word_3)[token % 4] // 2**9 + 0.5) / 2**23


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("position", [0, 1, 131_071, 2**32 - 1])
def test_a_uniform_number_is_the_word_of_its_counter(key, position):
    got = philox_uniform(key, position, 11)
    assert got.dtype == torch.float32
    assert got.tolist() == [by_the_book(key, position, token) for token in range(11)]


def test_how_many_are_asked_for_and_at_once_changes_no_number(monkeypatch):
    positions = [3, 0, 9, 2, 2, 7]
    all_SV = philox_uniforms(KEYS, positions, 37)
    for size in (0, 1, 4, 36):
        assert torch.equal(philox_uniforms(KEYS, positions, size), all_SV[:, :size])
    for row, (key, position) in enumerate(zip(KEYS, positions, strict=True)):
        assert torch.equal(philox_uniform(key, position, 37), all_SV[row])
    for most in (1, 10, 20, 45):
        monkeypatch.setitem(philox.MOST_COUNTERS, "cpu", most)
        assert torch.equal(philox_uniforms(KEYS, positions, 37), all_SV)
    assert philox_uniforms([], [], 5).shape == (0, 5)
    with pytest.raises(ValueError, match="2 keys for 1 positions"):
        philox_uniforms([1, 2], [1], 5)


def test_the_largest_and_the_smallest_word_give_finite_noise(monkeypatch):
    def extremes(counter, key):
        return tuple(torch.tensor([[word]]) for word in (0, WORD, 0x1FF, WORD - 0x200))

    monkeypatch.setattr(philox, "philox_4x32", extremes)
    uniform = philox_uniform(1, 1, 4)
    assert uniform.tolist() == [2**-24, 1 - 2**-24, 2**-24, 1 - 3 * 2**-24]
    noise = gumbel(uniform.clone())
    assert noise.isfinite().all() and noise.min() > -2.9 and noise.max() < 16.7


@triton.jit
def _uniforms_kernel(key_ptr, position_ptr, out_ptr, QUADS: tl.constexpr):
    quad = tl.arange(0, QUADS)
    position = tl.load(position_ptr).to(tl.int32)
    u_0, u_1, u_2, u_3 = kernel._uniforms(tl.load(key_ptr), position, quad)
    tl.store(out_ptr + 4 * quad, u_0)
    tl.store(out_ptr + 4 * quad + 1, u_1)
    tl.store(out_ptr + 4 * quad + 2, u_2)
    tl.store(out_ptr + 4 * quad + 3, u_3)


@pytest.mark.parametrize(
    "key, position", [*zip(KEYS, [5, 2**32 - 1, 131_071, 0, 2**31, 2**31 - 1], strict=True)]
)
def test_the_numbers_of_the_kernel_have_the_same_bits(key, position):
    out = torch.full((4_096,), NAN, device=DEVICE)
    positions = torch.tensor([position], device=DEVICE)
    _uniforms_kernel[(1,)](as_int64([key]), positions, out, QUADS=1_024)
    assert torch.equal(out.cpu(), philox_uniform(key, position, 4_096))


@triton.jit
def _uniform_kernel(word_ptr, out_ptr):
    tl.store(out_ptr, kernel._uniform(tl.load(word_ptr).to(tl.uint32)))


@pytest.mark.parametrize("word", [0, 0x1FF, 0x200, 0x7FFFFFFF, 0x80000000, WORD - 0x200, WORD])
def test_every_word_is_a_number_between_0_and_1(word):
    out = torch.full((1,), NAN, device=DEVICE)
    _uniform_kernel[(1,)](torch.tensor([word], device=DEVICE), out)
    assert out.item() == (word // 512 + 0.5) / 2**23 and 0 < out.item() < 1


# -- the tokens -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """What ``torch.empty`` gives out holds the largest scores, and tokens that do not exist."""
    empty = torch.empty

    def poisoned(*shape, **options):
        memory = empty(*shape, **options)
        return memory.fill_(INF if memory.is_floating_point() else 2**31 - 2)

    monkeypatch.setattr(torch, "empty", poisoned)


class Rows:
    """Logits between plus infinities, with temperatures, keys and positions for each row."""

    def __init__(self, num_rows: int, vocabulary: int, temperatures: list[float], seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        wide = torch.full((num_rows, vocabulary + 24), INF, device=DEVICE)
        self.logits = wide[:, 16 : 16 + vocabulary]
        self.logits.copy_(4 * torch.randn(num_rows, vocabulary, generator=generator))
        several = temperatures * (num_rows // len(temperatures) + 1)
        self.temperatures = torch.tensor(several[:num_rows], device=DEVICE)
        numbers = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
        self.keys = numbers.to(DEVICE)
        self.positions = torch.arange(num_rows, device=DEVICE) * 1_000 + seed

    @property
    def draw(self) -> tuple[torch.Tensor, ...]:
        return self.logits, self.temperatures, self.keys, self.positions

    def check(self, tokens: torch.Tensor) -> None:
        """Each is the oracle's, or has a score that rounding cannot tell from the best.

        Products, sums and logarithms are off by a few units in the last place of the largest."""
        assert tokens.dtype == torch.int64 and tokens.device == self.logits.device
        expected = sample_torch(*self.draw)
        uniform = philox_uniforms(
            self.keys.tolist(), self.positions.tolist(), self.logits.shape[1], DEVICE
        )
        temperatures = self.temperatures.unsqueeze(1).double()
        scores = self.logits / temperatures + gumbel(uniform.double())
        scores = torch.where(temperatures > 0, scores, self.logits.double())
        rows = range(len(tokens))
        behind = scores[rows, expected] - scores[rows, tokens]
        allowed = 8 * torch.finfo(torch.float32).eps * (scores[rows, expected].abs() + 20)
        same = tokens == expected
        assert (same | (behind.abs() <= allowed)).all(), f"{tokens} {expected} {behind}"
        assert same[self.temperatures == 0].all()
        assert same.float().mean() >= 0.9 or len(rows) < 10


MIXED = [0.0, 1.0, 0.3, 0.0, 7.0]


@pytest.mark.parametrize(
    "num_rows, vocabulary",
    [(1, 1), (2, 3), (3, 5), (4, 1_023), (5, TILE + 1), (6, TILE), (7, 2 * TILE + 455)],
)
def test_tokens_are_those_of_torch(num_rows, vocabulary):
    rows = Rows(num_rows, vocabulary, MIXED, seed=vocabulary)
    rows.check(sample(*rows.draw))
    one = Rows(1, vocabulary, [0.8], seed=vocabulary + 1)
    one.check(sample(*one.draw))


@pytest.mark.skipif(DEVICE == "cpu", reason="takes the interpreter minutes")
@pytest.mark.parametrize("num_rows", [1, 8, 100, 1_024])
@pytest.mark.parametrize("vocabulary", [49_152, 151_936, 50_257])
def test_tokens_of_large_batches_are_those_of_torch(num_rows, vocabulary):
    rows = Rows(num_rows, vocabulary, MIXED, seed=vocabulary)
    rows.check(sample(*rows.draw))


@pytest.mark.parametrize("programs", [1, 4, 5, 8])
def test_how_a_row_is_cut_changes_nothing(programs, monkeypatch):
    rows = Rows(2, 2 * TILE + 77, [1.0, 0.0], seed=4)
    whole = sample(*rows.draw)
    rows.check(whole)
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    assert torch.equal(sample(*rows.draw), whole)


def test_company_changes_nothing():
    rows = Rows(5, 300, MIXED, seed=8)
    together = sample(*rows.draw)
    for row in range(5):
        alone = sample(*(tensor[row : row + 1] for tensor in rows.draw))
        assert torch.equal(alone, together[row : row + 1])


@pytest.mark.parametrize("row", range(5))
def test_chunks_cover_a_row_and_none_is_empty(row):
    vocabulary = [1, TILE, TILE + 1, 49_152, 151_936][row]
    for num_rows in range(1, 1_025):
        tiles, chunks = divide(num_rows, vocabulary)
        assert tiles >= 1 and chunks >= 1
        assert (chunks - 1) * tiles * TILE < vocabulary <= chunks * tiles * TILE
        assert num_rows * chunks <= max(kernel.PROGRAMS, num_rows)


@pytest.mark.parametrize(
    "places",
    [(2, 3), (1, 2), (0, 3), (3, 4), (7, 9), (5, TILE + 1), (TILE - 1, TILE), (6, TILE + 2)],
)
def test_of_equal_scores_the_lowest_token_wins(places, monkeypatch):
    """In a quad, a tile, a chunk, and across them; drawn ones are equal at infinity alone."""
    rows = Rows(2, TILE + 9, [0.0, 1.0])
    rows.logits[0, list(places)] = 99.0
    rows.logits[1, list(places)] = INF
    for programs in (2, 4):
        monkeypatch.setattr(kernel, "PROGRAMS", programs)
        assert sample(*rows.draw).tolist() == [places[0]] * 2


def test_all_equal_logits_give_token_0():
    for value in (0.0, -3.0, INF, -INF, torch.finfo(torch.float32).min):
        rows = Rows(1, TILE + 5, [0.0])
        rows.logits.fill_(value)
        assert sample(*rows.draw).tolist() == [0]


def test_a_token_of_probability_zero_is_never_drawn():
    rows = Rows(5, 206, [0.0, 1.0, 50.0, 1e38])
    rows.logits.fill_(-INF)
    possible = [row * 97 % 206 for row in range(5)]
    rows.logits[range(5), possible] = -1e30
    assert sample(*rows.draw).tolist() == possible


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 1e38, INF])
def test_what_is_no_number_never_wins(temperature):
    rows = Rows(5, TILE + 7, [temperature])
    rows.logits[0] = NAN
    rows.logits[1] = NAN
    rows.logits[1, TILE + 6] = -1.0
    rows.logits[2, ::2] = NAN
    rows.logits[3] = -INF
    rows.logits[4, 1:] = -INF
    rows.logits[4, 1] = NAN
    tokens = sample(*rows.draw).tolist()
    assert tokens[:2] == [0, TILE + 6] and tokens[2] % 2 == 1 and tokens[3:] == [0, 0]
    assert max(tokens) < TILE + 7
    assert tokens == sample_torch(*rows.draw).tolist()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_huge_temperatures_leave_the_noise_alone():
    rows = Rows(3, 1_001, [3e38, INF, 1e30], seed=3)
    uniform = philox_uniforms(rows.keys.tolist(), rows.positions.tolist(), 1_001)
    assert sample(*rows.draw).tolist() == uniform.argmax(dim=-1).tolist()


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel cannot be watched")
def test_greedy_rows_compute_no_noise(monkeypatch):
    rows = Rows(2, 9, [0.0, -1.0])
    drawn = Rows(1, 9, [1.0])
    monkeypatch.delattr(kernel, "_uniforms")
    assert torch.equal(sample(*rows.draw), rows.logits.argmax(dim=-1))
    with pytest.raises(Exception, match="_uniforms"):
        sample(*drawn.draw)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_next_step_finds_its_tokens_on_the_device(dtype):
    rows = Rows(4, 20, MIXED)
    state = torch.full((8,), -7, device=DEVICE)
    targets = torch.tensor([6, -1, 0, 3], dtype=dtype, device=DEVICE)
    memory = torch.full((12,), -9, device=DEVICE)
    out = memory[4:8]
    tokens = sample(*rows.draw[:3], rows.positions.int(), out, last_token_R=state, rows_S=targets)
    assert tokens is out and torch.equal(tokens, sample(*rows.draw))
    first, _, third, fourth = tokens.tolist()
    assert state.tolist() == [third, -7, -7, fourth, -7, -7, first, -7]
    assert memory.tolist() == [-9] * 4 + tokens.tolist() + [-9] * 4


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_tokens_of_the_next_step_may_be_a_column_of_a_matrix(dtype):
    rows = Rows(2, 20, [0.0])
    state = torch.full((3, 4), -7, dtype=dtype, device=DEVICE)
    targets = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    first, second = sample(*rows.draw, last_token_R=state[:, 1], rows_S=targets).tolist()
    assert state.tolist() == [[-7, second, -7, -7], [-7] * 4, [-7, first, -7, -7]]


def test_no_rows_are_no_launch():
    rows = Rows(0, 20, MIXED)
    assert sample(*rows.draw).shape == (0,)


@pytest.mark.parametrize("draw", [sample, sample_torch])
def test_tokens_are_drawn_by_the_probabilities_of_the_model(draw):
    count = 60 if INTERPRETED and draw is sample else 20_000
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, 1.5], device=DEVICE)
    tokens = draw(
        logits.expand(count, -1),
        torch.full((count,), 2.5, device=DEVICE),
        torch.full((count,), 77, device=DEVICE),
        torch.arange(count, device=DEVICE),
    )
    counts = Counter(tokens.tolist())

    def chi_square(temperature: float) -> float:
        means = (count * (logits / temperature).softmax(dim=-1)).tolist()
        return sum((counts[v] - mean) ** 2 / mean for v, mean in enumerate(means))

    assert chi_square(2.5) < ONE_IN_TEN_THOUSAND < chi_square(0.7)


def test_the_engine_on_a_cpu_draws_the_same_tokens():
    draws = [
        Draw([0.0, 0.9, 1.3][number % 3], 10**number, 50 * number, number % 2)
        for number in range(8)
    ]
    logits = 3 * torch.randn(8, 901, generator=torch.Generator().manual_seed(6))
    tokens = sample(
        logits.to(DEVICE),
        torch.tensor([draw.temperature for draw in draws], device=DEVICE),
        torch.tensor([sampler.noise_key(draw) for draw in draws], device=DEVICE),
        torch.tensor([draw.position for draw in draws], device=DEVICE),
    )
    assert tokens.tolist() == sampler.sample(logits, draws)


def test_tensors_that_do_not_fit_are_refused():
    logits, temperatures, keys, positions = Rows(3, 8, [1.0]).draw
    state, targets = torch.zeros(4).long(), torch.zeros(3).int()
    with pytest.raises(ValueError, match=r"logits are torch.float16 with strides \(8, 1\)"):
        sample(logits.half(), temperatures, keys, positions)
    with pytest.raises(ValueError, match="float32 with rows in one piece are needed"):
        sample(logits[:, ::2], temperatures, keys, positions)
    with pytest.raises(ValueError, match=r"temperatures are torch.float32 \(2,\).*\(3,\)"):
        sample(logits, temperatures[:2], keys, positions)
    with pytest.raises(ValueError, match=r"keys are torch.int32.*torch.int64 \(3,\)"):
        sample(logits, temperatures, keys.int(), positions)
    with pytest.raises(ValueError, match=r"positions are .* strides \(2,\)"):
        sample(logits, temperatures, keys, torch.zeros(6).long()[::2])
    with pytest.raises(ValueError, match=r"out are torch.int32"):
        sample(logits, temperatures, keys, positions, targets)
    with pytest.raises(ValueError, match="rows without last_token"):
        sample(logits, temperatures, keys, positions, rows_S=targets)
    with pytest.raises(ValueError, match="last_token without rows"):
        sample(logits, temperatures, keys, positions, last_token_R=state)
    with pytest.raises(ValueError, match=r"last_token is torch.float32 \(4,\)"):
        sample(logits, temperatures, keys, positions, last_token_R=state.float(), rows_S=targets)
    with pytest.raises(ValueError, match=r"rows are torch.int32 \(2,\)"):
        sample(logits, temperatures, keys, positions, last_token_R=state, rows_S=targets[:2])


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_graph_draws_anew_when_its_inputs_change():
    rows = Rows(6, 49_152, MIXED)
    out = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    sample(*rows.draw, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(*rows.draw, out)
    for _ in range(3):
        rows.positions += 1
        rows.logits.copy_(rows.logits.flip(1))
        graph.replay()
        rows.check(out)
