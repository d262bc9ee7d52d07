"""rms_norm, add_rms_norm, swiglu and rope against their oracles: torch's, and the engine's.

Outputs are NaN before the launch and lie between two strips of NaN: an element that nobody wrote
shows, and so does one that nobody should have written.
"""

from __future__ import annotations

import pytest
import torch
from kernel_data import DEVICE, assert_close

from mie.kernels.rms_norm import add_rms_norm, add_rms_norm_torch, rms_norm, rms_norm_torch
from mie.kernels.rope import rope, rope_torch
from mie.kernels.swiglu import swiglu, swiglu_torch
from mie.model.rope import RopeConfig, rotary_angles
from mie.ops import reference

# Nothing here multiplies tiles of bfloat16, so the interpreter is right but for the last bit.
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS = [1, 3] if DEVICE == "cpu" else [1, 3, 259]
WIDTHS = [576, 1024, 3584, 80, 7, 1]
FEATURES = [1536, 3072, 18_944, 1100, 5, 1]
HEADS = [(16, 128), (28, 128), (9, 64), (3, 80), (5, 96), (1, 2), (71, 64)]
STRIP = 256  # more than a head
EPS = 1e-5


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


class Poisoned:
    """``out`` of ``shape``, all NaN, with a strip of NaN on either side."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = torch.Size(shape).numel()
        self.memory = torch.full((size + 2 * STRIP,), float("nan"), dtype=dtype, device=DEVICE)
        self.out = self.memory[STRIP : STRIP + size].view(shape)

    def check(self) -> None:
        """All of ``out`` was written, and nothing beside it."""
        assert not self.out.isnan().any(), "not every element was written"
        assert self.memory[:STRIP].isnan().all() and self.memory[-STRIP:].isnan().all()


def among_others(x: torch.Tensor, before: int, behind: int) -> torch.Tensor:
    """The same rows, as a slice of columns of a wider matrix whose other columns are NaN."""
    shape = (*x.shape[:-1], before + x.shape[-1] + behind)
    wide = torch.full(shape, float("nan"), dtype=x.dtype, device=x.device)
    part = wide[..., before : before + x.shape[-1]]
    part.copy_(x)
    return part


def angles(num_tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(num_tokens) * 37 + 5
    cos_TR, sin_TR = rotary_angles(positions, RopeConfig(10_000.0).frequencies(head_dim))
    return cos_TR.to(DEVICE), sin_TR.to(DEVICE)


def rounded_alike(got: torch.Tensor, expected: torch.Tensor) -> None:
    """float16 results that were rounded at the same places: only a value on an edge may differ.

    One more rounding would change about a third of them.
    """
    assert got.dtype == expected.dtype == torch.float16
    assert (got == expected).float().mean() > 0.98


# -- norms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("E", WIDTHS)
@pytest.mark.parametrize("T", TOKENS)
def test_rms_norm_equals_its_oracles(T, E, dtype):
    x_TE, weight_E = normal(T, E, dtype=dtype), normal(E, seed=1, dtype=dtype)
    y = Poisoned((T, E), dtype)
    assert rms_norm(x_TE, weight_E, EPS, out=y.out) is y.out
    y.check()
    assert_close(y.out, rms_norm_torch(x_TE, weight_E, EPS), dtype, E)
    assert_close(y.out, reference.rms_norm(x_TE, weight_E, EPS), dtype, E)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("E", WIDTHS)
@pytest.mark.parametrize("T", TOKENS)
def test_add_rms_norm_equals_its_oracles(T, E, dtype):
    x_TE, residual_TE = normal(T, E, dtype=dtype), normal(T, E, seed=1, dtype=dtype)
    weight_E = normal(E, seed=2, dtype=dtype)
    y, total = Poisoned((T, E), dtype), Poisoned((T, E), dtype)
    add_rms_norm(x_TE, residual_TE, weight_E, EPS, out=(y.out, total.out))
    y.check()
    total.check()
    _, expected_sum = add_rms_norm_torch(x_TE, residual_TE, weight_E, EPS)
    assert_close(total.out, expected_sum, dtype)
    assert_close(y.out, reference.rms_norm(total.out, weight_E, EPS), dtype, E)


def test_the_norm_is_that_of_the_rounded_sum():
    x_TE, residual_TE = normal(2, 3584).half(), normal(2, 3584, seed=1).half()
    weight_E = normal(3584, seed=2).half()
    got, sum_TE = add_rms_norm(x_TE, residual_TE, weight_E, EPS)
    expected, expected_sum = add_rms_norm_torch(x_TE, residual_TE, weight_E, EPS)
    assert torch.equal(sum_TE, expected_sum)
    rounded_alike(got, expected)
    of_exact_sum = reference.rms_norm(x_TE.float() + residual_TE.float(), weight_E, EPS).half()
    with pytest.raises(AssertionError):
        rounded_alike(of_exact_sum, expected)


def test_the_sum_may_replace_the_residual():
    x_TE, residual_TE, weight_E = normal(3, 576), normal(3, 576, seed=1), normal(576, seed=2)
    expected = add_rms_norm_torch(x_TE, residual_TE, weight_E, EPS)
    got = add_rms_norm(x_TE, residual_TE, weight_E, EPS, out=(x_TE, residual_TE))
    assert got[0] is x_TE and got[1] is residual_TE
    assert_close(x_TE, expected[0], torch.float32, 576)
    assert_close(residual_TE, expected[1], torch.float32)


def test_a_norm_of_a_weight_in_another_dtype():
    x_TE, weight_E = normal(2, 100).half(), normal(100, seed=1)
    got = rms_norm(x_TE, weight_E, EPS)
    assert got.dtype == torch.float16
    rounded_alike(got, reference.rms_norm(x_TE, weight_E, EPS))


def test_a_row_of_zeros_stays_zero_and_eps_counts():
    x_TE = torch.zeros(2, 96, device=DEVICE)
    x_TE[1] = 1e-3
    y_TE = rms_norm(x_TE, torch.ones(96, device=DEVICE), 3e-6)
    assert y_TE[0].tolist() == [0.0] * 96
    assert_close(y_TE[1], torch.full((96,), 0.5, device=DEVICE), torch.float32, 96)


def test_norms_of_leading_dimensions_and_of_a_slice_of_columns():
    x = normal(2, 3, 80)
    weight_E = normal(80, seed=1)
    expected = rms_norm_torch(x, weight_E, EPS)
    assert_close(rms_norm(x, weight_E, EPS), expected, torch.float32, 80)
    assert_close(rms_norm(x[0, 0], weight_E, EPS), expected[0, 0], torch.float32, 80)
    part = among_others(x, 16, 3)
    assert_close(rms_norm(part, weight_E, EPS), expected, torch.float32, 80)
    y, total = add_rms_norm(part, among_others(x, 5, 0), weight_E, EPS)
    assert_close(total, 2 * x, torch.float32)
    assert_close(y, rms_norm_torch(2 * x, weight_E, EPS), torch.float32, 80)


# -- swiglu ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("F", FEATURES)
@pytest.mark.parametrize("T", TOKENS)
def test_swiglu_equals_its_oracles(T, F, dtype):
    gate_up_T2F = normal(T, 2 * F, dtype=dtype)
    y = Poisoned((T, F), dtype)
    assert swiglu(gate_up_T2F, out=y.out) is y.out
    y.check()
    assert_close(y.out, swiglu_torch(gate_up_T2F), dtype)
    assert_close(y.out, reference.swiglu(*gate_up_T2F.chunk(2, dim=1)), dtype)


def test_swiglu_rounds_once():
    gate_up_T2F = normal(2, 2 * 1100).half()
    expected = reference.swiglu(*gate_up_T2F.chunk(2, dim=1))
    rounded_alike(swiglu(gate_up_T2F), expected)
    gate, up = gate_up_T2F.chunk(2, dim=1)
    with pytest.raises(AssertionError):
        rounded_alike(torch.nn.functional.silu(gate) * up, expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's NumPy
def test_a_gate_far_from_zero_is_open_or_closed():
    gate_up_T2F = torch.tensor([[100.0, -100.0, -1e30, 0.0, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    assert swiglu(gate_up_T2F).tolist() == [[200.0, 0.0, 0.0, 0.0]]


def test_swiglu_of_a_slice_of_columns():
    gate_up_T2F = normal(3, 2 * 100)
    got = swiglu(among_others(gate_up_T2F, 8, 5))
    assert_close(got, swiglu_torch(gate_up_T2F), torch.float32)


# -- rope -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "D"), HEADS)
@pytest.mark.parametrize("T", TOKENS)
def test_rope_equals_its_oracles(T, H, D, dtype):
    x_THD = normal(T, H, D, dtype=dtype)
    y = Poisoned((T, H, D), dtype)
    assert rope(x_THD, *angles(T, D), out=y.out) is y.out
    y.check()
    assert_close(y.out, rope_torch(x_THD, *angles(T, D)), dtype)
    assert_close(y.out, reference.rope(x_THD, *angles(T, D)), dtype)


def test_rope_rounds_once():
    x_THD = normal(2, 9, 64).half()
    rounded_alike(rope(x_THD, *angles(2, 64)), reference.rope(x_THD, *angles(2, 64)))


@pytest.mark.parametrize(("H", "D"), [(9, 64), (3, 80)])
def test_rope_of_the_queries_in_a_fused_projection(H, D):
    x_THD = normal(3, H, D)
    expected = rope_torch(x_THD, *angles(3, D))
    queries_TX = among_others(x_THD.flatten(1), 16, 40)
    cos_TR, sin_TR = (among_others(x, 4, 1) for x in angles(3, D))
    assert_close(rope(queries_TX.unflatten(1, (H, D)), cos_TR, sin_TR), expected, torch.float32)
    heads_first = x_THD.transpose(0, 1).contiguous().transpose(0, 1)
    assert_close(rope(heads_first, *angles(3, D)), expected, torch.float32)


def test_rope_in_place_and_back():
    x_THD = normal(2, 5, 96)
    before = x_THD.clone()
    cos_TR, sin_TR = angles(2, 96)
    assert rope(x_THD, cos_TR, sin_TR, out=x_THD) is x_THD
    assert not torch.allclose(x_THD, before)
    assert_close(rope(x_THD, cos_TR, -sin_TR), before, torch.float32)


# -- all of them ----------------------------------------------------------------------------------


def calls() -> dict[str, tuple]:
    """Each wrapper with its inputs and its oracle."""
    x_TE, weight_E = normal(3, 576), normal(576, seed=1)
    return {
        "rms_norm": (rms_norm, rms_norm_torch, x_TE, weight_E, EPS),
        "add_rms_norm": (add_rms_norm, add_rms_norm_torch, x_TE, x_TE * 2, weight_E, EPS),
        "swiglu": (swiglu, swiglu_torch, x_TE),
        "rope": (rope, rope_torch, x_TE.view(3, 9, 64), *angles(3, 64)),
    }


@pytest.mark.parametrize("name", calls())
def test_inputs_stay_as_they_are(name):
    function, _, *inputs = calls()[name]
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    function(*inputs)
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))


@pytest.mark.parametrize("name", calls())
def test_no_tokens_no_launch(name):
    function, _, *inputs = calls()[name]
    if name == "rope":
        inputs = [value[:0] for value in inputs]
    else:
        inputs = [value[:0] if getattr(value, "ndim", 0) == 2 else value for value in inputs]
    result = function(*inputs)
    for y in result if isinstance(result, tuple) else (result,):
        assert len(y) == 0


def test_rows_farther_apart_than_32_bits_count():
    memory = torch.empty(2**31 + 4096, dtype=torch.float16, device=DEVICE)
    rows = memory.as_strided((3, 1152), (2**30, 1))  # row 2 begins at element 2³¹
    x = normal(3, 1152).half()
    rows.copy_(x)
    weight = normal(1152, seed=1).half()
    assert_close(rms_norm(rows, weight, EPS), rms_norm_torch(x, weight, EPS), x.dtype, 1152)
    got, expected = add_rms_norm(rows, rows, weight, EPS), add_rms_norm_torch(x, x, weight, EPS)
    assert_close(got[0], expected[0], x.dtype, 1152)
    assert_close(got[1], expected[1], x.dtype)
    assert_close(swiglu(rows), swiglu_torch(x), x.dtype)
    got = rope(rows.unflatten(1, (9, 128)), *angles(3, 128))
    assert_close(got, rope_torch(x.unflatten(1, (9, 128)), *angles(3, 128)), x.dtype)


@pytest.mark.skipif(DEVICE == "cpu", reason="a CUDA graph needs a GPU")
@pytest.mark.parametrize("name", calls())
def test_a_graph_replays_them_on_new_inputs(name):
    function, oracle, x, *others = calls()[name]
    function(x, *others)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(x, *others)
    x.copy_(normal(*x.shape, seed=9))
    graph.replay()
    torch.cuda.synchronize()
    expected = oracle(x, *others)
    if not isinstance(result, tuple):
        result, expected = (result,), (expected,)
    for got, wanted in zip(result, expected, strict=True):
        assert_close(got, wanted, torch.float32, 576)


X, HEADS_2x2x4, ANGLES = torch.zeros(2, 8), torch.zeros(2, 2, 4), torch.zeros(2, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(X, torch.zeros(7), EPS), r"8 channels, a weight of \(7,\)"),
        (lambda: rms_norm(X.T, torch.zeros(2), EPS), "8 apart, not 1"),
        (lambda: rms_norm(X, torch.zeros(16)[::2], EPS), "2 apart, not 1"),
        (lambda: rms_norm(X.view(2, 2, 4)[:, :1].expand(2, 3, 4), torch.zeros(4), EPS), "several"),
        (lambda: rms_norm(torch.zeros(1, 40_000), torch.zeros(40_000), EPS), "40000 channels"),
        (lambda: rms_norm(X, torch.zeros(8), EPS, out=torch.zeros(2, 9)), r"\(2, 9\).*\(2, 8\)"),
        (lambda: rms_norm(X, torch.zeros(8), EPS, out=X.half()), "float16.*float32"),
        (lambda: rms_norm(X, torch.zeros(8), EPS, out=torch.zeros(8, 2).T), r"strides \(1, 2\)"),
        (lambda: add_rms_norm(X, X[:1], torch.zeros(8), EPS), r"\(2, 8\).*\(1, 8\)"),
        (lambda: add_rms_norm(X, X.half(), torch.zeros(8), EPS), "float32.*float16"),
        (lambda: swiglu(X[:, :5]), "5 columns"),
        (lambda: swiglu(X[:, ::2]), "2 apart, not 1"),
        (lambda: swiglu(X, out=torch.zeros(2, 8)), r"\(2, 8\).*\(2, 4\)"),
        (lambda: rope(HEADS_2x2x4, ANGLES[:1], ANGLES), "2 tokens, 1 rows of cos"),
        (lambda: rope(HEADS_2x2x4, ANGLES, ANGLES.half()), "sin is torch.float16"),
        (lambda: rope(HEADS_2x2x4, ANGLES, torch.zeros(2, 4)), r"sin is \(2, 4\), a head 4 wide"),
        (lambda: rope(HEADS_2x2x4[..., :3], ANGLES, ANGLES), "a head 3 wide"),
        (lambda: rope(HEADS_2x2x4.mT, torch.zeros(2, 1), torch.zeros(2, 1)), "4 apart, not 1"),
        (lambda: rope(HEADS_2x2x4, ANGLES, ANGLES, out=HEADS_2x2x4.half()), "float16.*float32"),
    ],
)
def test_what_disagrees_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
