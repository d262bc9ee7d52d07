"""Paged decode attention in CUDA C++: on a GPU as it is, else its source under an emulated warp."""

from __future__ import annotations

import sys

import emulated_cuda
import kernel_data
import pytest
import torch
from emulated_cuda import EmulatedKernel
from kernel_data import DEVICE

from mie.kernels.cuda import paged_decode as module
from mie.kernels.cuda.paged_decode import CudaConfig, compile_kernel, paged_decode_cuda, template
from mie.kernels.decode_plan import DecodeConfig, DecodePlan
from mie.kernels.paged_decode import paged_decode, paged_decode_torch

HALVES = [torch.bfloat16, torch.float16]
CUT = DecodeConfig(tile=32, warps=4, stages=3, programs=4, min_chunk=32)
WHOLE = DecodeConfig(tile=32, warps=4, stages=2, programs=1, min_chunk=4096)


def has_cuda_core() -> bool:
    try:
        module.load_cuda_core()
    except ImportError:
        return False
    return True


needs_cuda_core = pytest.mark.skipif(
    not has_cuda_core(), reason="cuda.core is not installed: pip install cuda-core[cu13]"
)
needs_a_gpu = pytest.mark.skipif(
    DEVICE != "cuda" or not has_cuda_core(),
    reason="thread blocks run at the same time on a GPU alone: needs one, and cuda-core[cu13]",
)
emulated_alone = pytest.mark.skipif(
    DEVICE == "cuda" or emulated_cuda.COMPILER is None,
    reason="counted by the emulator: needs g++ or clang++, and no GPU",
)


@pytest.fixture
def emulated(monkeypatch):
    """Launches go to the emulator, where there is no GPU."""
    if DEVICE == "cuda":
        if not has_cuda_core():
            pytest.skip("cuda.core is not installed: pip install cuda-core[cu13]")
    else:
        if emulated_cuda.COMPILER is None:
            pytest.skip("without a GPU the kernel needs a C++ compiler: install g++ or clang++")
        monkeypatch.setattr(module, "_Kernel", EmulatedKernel)
        monkeypatch.setattr(module, "_kernels", {})


def paged(lengths, num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.bfloat16, **more):
    return kernel_data.paged(
        lengths,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        seed=sum(lengths),
        **more,
    )


def make_plan(data, num_heads, config=CUT) -> DecodePlan:
    _, B, G, D = data.k_NBGD.shape
    return DecodePlan(len(data.lengths_S), num_heads, G, D, B, DEVICE, data.k_NBGD.dtype, config)


def queries(data, num_heads):
    X, D = len(data.lengths_S), data.k_NBGD.shape[3]
    generator = torch.Generator().manual_seed(7)
    return torch.randn(X, num_heads, D, generator=generator).to(data.k_NBGD.dtype).to(DEVICE)


def decode(q_XHD, data, plan, rows=None, tables=None, kernel=paged_decode_cuda, **more):
    plan.update(data.lengths_S)
    tables = data.tables_RM if tables is None else tables
    scale = q_XHD.shape[2] ** -0.5
    return kernel(
        q_XHD, data.k_NBGD, data.v_NBGD, tables, rows, data.lengths_S, scale, plan, **more
    )


def expected(q_XHD, data, rows=None, tables=None):
    tables = data.tables_RM if tables is None else tables
    scale = q_XHD.shape[2] ** -0.5
    return paged_decode_torch(q_XHD, data.k_NBGD, data.v_NBGD, tables, rows, data.lengths_S, scale)


def check(data, num_heads, plan=None, **more):
    q_XHD = queries(data, num_heads)
    plan = plan or make_plan(data, num_heads)
    got = decode(q_XHD, data, plan, **more)
    longest = int(data.lengths_S.max())
    kernel_data.assert_close(got, expected(q_XHD, data), q_XHD.dtype, longest)
    assert not plan.arrived_XG.any()
    return got


SHAPES = pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        (2, 2, 64, 8),
        (4, 2, 128, 16),
        (3, 1, 64, 1),
        (4, 1, 128, 32),
        (5, 1, 64, 64),
        (6, 1, 128, 8),
        (14, 2, 128, 16),
        (8, 1, 64, 16),
    ],
)


@SHAPES
@pytest.mark.parametrize("dtype", HALVES)
def test_equals_the_reference(emulated, num_heads, num_kv_heads, head_dim, block_size, dtype):
    """Every group size; lengths around a block and over several parts. Free slots hold NaN."""
    B = block_size
    data = paged([0, 1, max(B - 1, 2), B, B + 1, 100], num_kv_heads, head_dim, B, dtype)
    plan = make_plan(data, num_heads)
    got = check(data, num_heads, plan)
    assert not got[0].any()
    assert len(plan.items()) > len(data.lengths_S)  # the longest has parts to merge


@SHAPES
def test_equals_the_triton_kernel(emulated, num_heads, num_kv_heads, head_dim, block_size):
    """The interpreter computes float16 as a GPU does."""
    data = paged([40, 1, 100], num_kv_heads, head_dim, block_size, torch.float16)
    q_XHD = queries(data, num_heads)
    got = decode(q_XHD, data, make_plan(data, num_heads))
    triton = decode(q_XHD, data, make_plan(data, num_heads), kernel=paged_decode)
    kernel_data.assert_close(got, triton, torch.float16, 100)


@pytest.mark.parametrize("length", [15, 16, 17, 63, 64, 65, 129, 193])
def test_lengths_around_the_tiles_of_a_warp_and_of_all_warps(emulated, length):
    data = paged([length])
    check(data, 2, make_plan(data, 2, WHOLE))


@pytest.mark.parametrize(("warps", "stages"), [(1, 2), (2, 4), (8, 2)])
def test_warps_and_stages_change_nothing_but_the_time(emulated, warps, stages):
    data = paged([200, 31, 0], 2, 64, 16)
    check(data, 4, config=CudaConfig(warps, stages))
    check(data, 4, make_plan(data, 4, WHOLE), config=CudaConfig(warps, stages))


def test_heads_before_slots_in_memory(emulated):
    check(paged([37, 80], 2, heads_outside=True), 4)


def test_rows_name_the_lines_of_the_tables(emulated):
    data = paged([40, 0, 75])
    rows = torch.tensor([5, 1, 3], dtype=torch.int32, device=DEVICE)
    tables = torch.full((6, data.tables_RM.shape[1]), -1, dtype=torch.int32, device=DEVICE)
    tables[rows.long()] = data.tables_RM
    q_XHD = queries(data, 2)
    got = decode(q_XHD, data, make_plan(data, 2), rows, tables)
    kernel_data.assert_close(got, expected(q_XHD, data, rows, tables), torch.bfloat16, 75)


def test_more_parts_than_are_merged_at_once(emulated):
    data = paged([600], 1, 128)
    plan = make_plan(data, 7, DecodeConfig(tile=32, warps=4, stages=3, programs=8, min_chunk=32))
    check(data, 7, plan)
    assert len(plan.items()) > 16


def test_large_scores_neither_overflow_nor_lose_a_part(emulated):
    data = paged([128])
    q_XHD = queries(data, 2) * 1000
    got = decode(q_XHD, data, make_plan(data, 2))
    torch.testing.assert_close(got, expected(q_XHD, data), atol=2e-2, rtol=2e-2)


def test_a_strided_query_is_read_where_it_lies(emulated):
    data = paged([20, 50])
    q_XHD = queries(data, 4)
    qkv = torch.full((2, 6 * 64), float("nan"), dtype=q_XHD.dtype, device=DEVICE)
    qkv[:, : 4 * 64] = q_XHD.flatten(1)
    got = decode(qkv[:, : 4 * 64].unflatten(1, (4, 64)), data, make_plan(data, 4))
    assert torch.equal(got, decode(q_XHD, data, make_plan(data, 4)))


# What the emulator counts


@emulated_alone
@pytest.mark.parametrize("head_dim", [64, 128])
def test_each_byte_is_copied_once_and_no_bank_is_asked_twice(emulated, head_dim):
    data = paged([0, 1, 50, 300], 2, head_dim)
    check(data, 4)
    assert EmulatedKernel.copied_bytes == 351 * 2 * head_dim * 2 * 2
    assert EmulatedKernel.extra_cycles == 0


MUTANTS = {
    "a tile is read before it is there": ("wait_for_groups<STAGES - 1>", "wait_for_groups<STAGES>"),
    "a tile is overwritten too early": ("copy(free_stage, start", "copy(stage, start"),
    "what is behind the end is read": ("token < count)", "true)"),
    "what is behind the end counts": ("token + 8 < end ?", "true ?"),
    "the counter stays": ("*counter = 0", "*counter = 1"),
    "sums keep their old maximum": ("*= fade[r % 2]", "*= fade[0]"),
    "one warp is not merged": ("warp_sum + j, WARPS,", "warp_sum + j, WARPS - 1,"),
}


@emulated_alone
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_kernel_is_noticed(emulated, monkeypatch, mutant):
    right, wrong = MUTANTS[mutant]
    assert right in EmulatedKernel.source
    monkeypatch.setattr(EmulatedKernel, "source", EmulatedKernel.source.replace(right, wrong))
    data = paged([1, 200, 250])
    with pytest.raises(AssertionError):
        check(data, 4)
        check(data, 4, make_plan(data, 4, WHOLE))


@emulated_alone
def test_rows_that_are_not_turned_cost_cycles(emulated, monkeypatch):
    straight = EmulatedKernel.source.replace("(chunk ^ (token % 8))", "chunk")
    monkeypatch.setattr(EmulatedKernel, "source", straight)
    check(paged([50]), 4)
    # Eight rows of 128 bytes start in one bank: each of a tile's 8 loads takes 4 · 7 cycles more.
    assert EmulatedKernel.extra_cycles == 4 * 8 * 4 * 7


# NVIDIA's own compiler


@needs_cuda_core
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", HALVES)
def test_compiles_for_gpus_that_are_not_here(arch, head_dim, dtype):
    name = template(dtype, head_dim, CudaConfig())
    assert len(compile_kernel(name, arch).code) > 1000


def test_without_cuda_core_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(ImportError, match="pip install cuda-core"):
        module.load_cuda_core()


# What is refused


def test_shapes_that_the_kernel_does_not_take_are_refused():
    for num_heads, head_dim, dtype, message in [
        (2, 96, torch.float16, "head size 96"),
        (9, 64, torch.float16, "groups of 9"),
        (2, 64, torch.float32, "float32"),
    ]:
        data = paged([20], head_dim=head_dim, dtype=dtype)
        with pytest.raises(ValueError, match=message):
            decode(queries(data, num_heads), data, make_plan(data, num_heads))
    with pytest.raises(ValueError, match="stages 1"):
        CudaConfig(4, 1)


def test_a_plan_for_something_else_is_refused():
    data = paged([20, 50])
    q_XHD = queries(data, 2)
    plan = make_plan(data, 2)
    rest = (data.k_NBGD, data.v_NBGD, data.tables_RM, None)
    with pytest.raises(ValueError, match="update"):
        paged_decode_cuda(q_XHD, *rest, data.lengths_S, 0.125, plan)
    plan.update(data.lengths_S)
    with pytest.raises(ValueError, match="other lengths"):
        paged_decode_cuda(q_XHD, *rest, data.lengths_S.clone(), 0.125, plan)
    with pytest.raises(ValueError, match="1 queries"):
        paged_decode_cuda(q_XHD[:1], *rest, data.lengths_S, 0.125, plan)
    with pytest.raises(ValueError, match=r"\(4, 1, 64, 16\)"):
        paged_decode_cuda(q_XHD.repeat(1, 2, 1), *rest, data.lengths_S, 0.125, plan)
    with pytest.raises(ValueError, match="strides"):
        sparse_NBGD = data.v_NBGD.repeat(2, 1, 1, 1)[::2]
        paged_decode_cuda(q_XHD, rest[0], sparse_NBGD, *rest[2:], data.lengths_S, 0.125, plan)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        odd = torch.zeros(*data.k_NBGD.shape[:3], 68, dtype=q_XHD.dtype, device=DEVICE)[..., :64]
        paged_decode_cuda(q_XHD, odd, odd, *rest[2:], data.lengths_S, 0.125, plan)


# On a GPU: what an emulator, which runs thread blocks one after another, cannot show


@needs_a_gpu
def test_a_captured_graph_follows_the_lengths():
    data = paged([3000, 900, 500, 1], 2, 128)
    config = DecodeConfig(tile=64, warps=4, stages=3, programs=4, min_chunk=64)
    plan = make_plan(data, 8, config)
    q_XHD = queries(data, 8)
    decode(q_XHD, data, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = decode(q_XHD, data, plan)
    for lengths in ([3000, 900, 500, 1], [1, 0, 0, 0], [2999, 0, 17, 1], [64, 900, 500, 1]):
        data.lengths_S.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        kernel_data.assert_close(got, expected(q_XHD, data), torch.bfloat16, 3000)
        assert not plan.arrived_XG.any()


@needs_a_gpu
def test_whoever_arrives_last_the_result_is_the_same():
    """Many parts, many launches: a merge that read a part too early would differ."""
    data = paged([4096, 4000, 2000], 4, 128)
    config = DecodeConfig(tile=64, warps=4, stages=3, programs=8, min_chunk=64)
    plan = make_plan(data, 28, config)
    q_XHD = queries(data, 28)
    first = decode(q_XHD, data, plan)
    kernel_data.assert_close(first, expected(q_XHD, data), torch.bfloat16, 4096)
    for _ in range(300):
        plan.partial_WHD.fill_(float("nan"))
        assert torch.equal(decode(q_XHD, data, plan), first)
