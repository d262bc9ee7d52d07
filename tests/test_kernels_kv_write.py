"""qk_rope_write, kv_write and block_copy: what must be in a cache afterwards, and what must not.

A cache holds random numbers and NaN before the launch. Whatever should not have been written is
compared bit for bit, in all of the memory that the cache is a view of.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_data import DEVICE, assert_close

from mie.kernels.block_copy import copy_blocks, copy_blocks_torch
from mie.kernels.kv_write import kv_write, kv_write_torch
from mie.kernels.qk_rope_write import qk_norm_rope_write, qk_norm_rope_write_torch
from mie.model.rope import RopeConfig, rotary_angles
from mie.ops import reference

# No product of bfloat16 tiles: the interpreter is right but for the last bit, and in copies exact.
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# H, G, D, and whether heads are normed: the book's models, and sizes that are no power of two.
MODELS = {
    "qwen3-0.6b": (16, 8, 128, True),
    "qwen2.5-7b": (28, 4, 128, False),
    "smollm2-135m": (9, 3, 64, False),
    "one-key-head": (7, 1, 80, True),
    "many-key-heads": (20, 20, 96, True),
    "two-wide": (1, 1, 2, True),
}
P, EPS = 97, 1e-6
BITS = {2: torch.int16, 4: torch.int32}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(BITS[x.element_size()])


def integers(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def contiguous(N: int, B: int, G: int, D: int, dtype: torch.dtype) -> torch.Tensor:
    """``[2, N, B, G, D]``, every other block NaN, between blocks that belong to somebody else."""
    kv_2NBGD = normal(2, N + 2, B, G, D, seed=7, dtype=dtype)
    kv_2NBGD[:, ::2] = float("nan")
    return kv_2NBGD[:, 1:-1]


def heads_outside(N: int, B: int, G: int, D: int, dtype: torch.dtype) -> torch.Tensor:
    """The same shape, with the slots of one head together in memory."""
    kv_2NGBD = normal(2, N + 2, G, B, D, seed=8, dtype=dtype)
    return kv_2NGBD[:, 1:-1].transpose(2, 3)


def among_layers(N: int, B: int, G: int, D: int, dtype: torch.dtype) -> torch.Tensor:
    """The same shape, with all layers of a block together in memory."""
    kv_N2BLGD = normal(N + 2, 2, B, 3, G, D, seed=9, dtype=dtype)
    return kv_N2BLGD[1:-1, :, :, 1].transpose(0, 1)


Layout = Callable[[int, int, int, int, torch.dtype], torch.Tensor]
LAYOUTS = [contiguous, heads_outside, among_layers]


def memory(view: torch.Tensor) -> torch.Tensor:
    """All elements of the storage behind a view."""
    storage = view.untyped_storage()
    size = storage.nbytes() // view.element_size()
    return view.as_strided((size,), (1,), 0)


def twice(kv: torch.Tensor) -> torch.Tensor:
    """A copy of a view and all of its memory."""
    return memory(kv).clone().as_strided(kv.shape, kv.stride(), kv.storage_offset())


def tables(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies_R = RopeConfig(10_000.0).frequencies(head_dim)
    cos_PR, sin_PR = rotary_angles(torch.arange(P), frequencies_R)
    return cos_PR.to(DEVICE), sin_PR.to(DEVICE)


# -- qk_norm_rope_write ---------------------------------------------------------------------------


class Step:
    """Inputs of ``qk_norm_rope_write`` for tokens of one model, and what must come out."""

    def __init__(
        self,
        model: str,
        dtype: torch.dtype,
        slots: list[int],
        layout: Layout = contiguous,
        B: int = 8,
        index_dtype: torch.dtype = torch.int64,
    ) -> None:
        self.H, self.G, self.D, normed = MODELS[model]
        self.dtype, T = dtype, len(slots)
        self.qkv_TX = normal(T, (self.H + 2 * self.G) * self.D, dtype=dtype)
        self.positions_T = integers(*[(11 * t + 90) % P for t in range(T)], dtype=index_dtype)
        self.slots_T = integers(*slots, dtype=index_dtype)
        self.cos_PR, self.sin_PR = tables(self.D)
        self.q_norm_D = 1 + normal(self.D, seed=1, dtype=dtype) / 4 if normed else None
        self.k_norm_D = 1 + normal(self.D, seed=2, dtype=dtype) / 4 if normed else None
        self.kv_2NBGD = layout(5, B, self.G, self.D, dtype)

    def inputs(self, kv_2NBGD: torch.Tensor) -> tuple:
        return (
            *(self.qkv_TX, self.positions_T, self.slots_T, self.cos_PR, self.sin_PR),
            *(self.q_norm_D, self.k_norm_D, EPS, kv_2NBGD[0], kv_2NBGD[1], self.H),
        )

    def by_reference(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``q_THD``, ``k_TGD``, ``v_TGD`` of the engine's oracle, rounded once."""
        heads = self.qkv_TX.unflatten(1, (-1, self.D)).float()
        q, k, v_TGD = heads.split((self.H, self.G, self.G), dim=1)
        if self.q_norm_D is not None:
            q = reference.rms_norm(q, self.q_norm_D, EPS)
        if self.k_norm_D is not None:
            k = reference.rms_norm(k, self.k_norm_D, EPS)
        angles = self.cos_PR[self.positions_T.long()], self.sin_PR[self.positions_T.long()]
        return (
            reference.rope(q, *angles).to(self.dtype),
            reference.rope(k, *angles).to(self.dtype),
            v_TGD.to(self.dtype),
        )

    def check(self) -> None:
        """Run the kernel and its oracle on two copies of the caches and compare everything."""
        T, shape = len(self.slots_T), (len(self.slots_T), self.H, self.D)
        before, expected_kv = twice(self.kv_2NBGD), twice(self.kv_2NBGD)
        q_memory = torch.full((T + 2, *shape[1:]), float("nan"), dtype=self.dtype, device=DEVICE)
        q_THD = q_memory[1:-1]
        got = qk_norm_rope_write(*self.inputs(self.kv_2NBGD), out=q_THD)
        assert got is q_THD
        assert q_memory[0].isnan().all() and q_memory[-1].isnan().all()
        expected_q = qk_norm_rope_write_torch(*self.inputs(expected_kv))
        assert_close(q_THD, expected_q, self.dtype, self.D)

        q, k, v = self.by_reference()
        assert_close(q_THD, q, self.dtype, self.D)
        written = self.slots_T >= 0
        slots = self.slots_T[written].long()
        k_slots, v_slots = (cache.flatten(0, 1)[slots] for cache in self.kv_2NBGD)
        assert_close(k_slots, k[written], self.dtype, self.D)
        assert torch.equal(bits(v_slots), bits(v[written]))
        k_oracle, v_oracle = (cache.flatten(0, 1)[slots] for cache in expected_kv)
        assert_close(k_slots, k_oracle, self.dtype, self.D)
        assert torch.equal(bits(v_slots), bits(v_oracle))

        B = before.shape[2]
        for kv in (
            self.kv_2NBGD,
            expected_kv,
        ):  # put back what belongs there: all must be as it was
            kv[:, slots // B, slots % B] = before[:, slots // B, slots % B]
            assert torch.equal(bits(memory(kv)), bits(memory(before)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_queries_keys_and_values_of_each_model(model, dtype):
    Step(model, dtype, [39, -1, 8]).check()


@pytest.mark.parametrize("slot", [0, 17, -1, -5])
def test_one_token(slot):
    Step("smollm2-135m", torch.float32, [slot]).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_caches_in_other_orders(layout, index_dtype):
    Step("one-key-head", torch.float32, [6, 5, -1], layout, 4, index_dtype).check()
    Step("smollm2-135m", torch.float16, [14, 0], layout, 3, index_dtype).check()


def test_one_norm_without_the_other():
    for missing in ("q_norm_D", "k_norm_D"):
        step = Step("one-key-head", torch.float32, [9, 2])
        setattr(step, missing, None)
        step.check()


def test_a_projection_inside_a_wider_buffer():
    step = Step("smollm2-135m", torch.float32, [3, 12, -1])
    wide = torch.full((3, step.qkv_TX.shape[1] + 24), float("nan"), device=DEVICE)
    wide[:, 8:-16] = step.qkv_TX
    step.qkv_TX = wide[:, 8:-16]
    step.check()


def test_everything_is_rounded_once():
    """Norm and rotation stay in float32 in between: nearly all results round alike."""
    step = Step("qwen3-0.6b", torch.float16, [1, 2])
    q_THD = qk_norm_rope_write(*step.inputs(step.kv_2NBGD))
    q, k, _ = step.by_reference()
    assert (q_THD == q).float().mean() > 0.98
    assert (step.kv_2NBGD[0].flatten(0, 1)[1:3] == k).float().mean() > 0.98
    normed = reference.rms_norm(step.qkv_TX.unflatten(1, (-1, step.D)), step.q_norm_D, EPS)
    angles = step.cos_PR[step.positions_T], step.sin_PR[step.positions_T]
    twice_rounded = reference.rope(normed[:, : step.H], *angles)
    assert (twice_rounded == q).float().mean() < 0.9


# -- kv_write -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("G", "D"), [(8, 128), (3, 64), (1, 80), (20, 96), (1, 2)])
def test_k_and_v_lie_in_their_slots(G, D, layout, dtype):
    slots_T = integers(5, -1, 12, 0, -7, dtype=torch.int32)
    k_TGD, v_TGD = normal(5, G, D, dtype=dtype), normal(5, G, D, seed=1, dtype=dtype)
    k_TGD[0, 0, 0] = float("nan")  # a NaN is copied like anything else
    got = layout(4, 4, G, D, dtype)
    expected = twice(got)
    kv_write(k_TGD, v_TGD, slots_T, *got)
    kv_write_torch(k_TGD, v_TGD, slots_T, *expected)
    assert torch.equal(bits(memory(got)), bits(memory(expected)))
    assert torch.equal(bits(got[0, 3, 0]), bits(k_TGD[2]))
    assert torch.equal(bits(got[1, 1, 1]), bits(v_TGD[0]))


@pytest.mark.parametrize("slot", [0, 15, -1])
@pytest.mark.parametrize("others", [[], [9, 3]])
def test_k_and_v_in_a_fused_projection(slot, others):
    slots_T = integers(slot, *others)
    qkv_TX = normal(len(slots_T), 15 * 64)
    _, k_TGD, v_TGD = qkv_TX.unflatten(1, (15, 64)).split((9, 3, 3), dim=1)
    got = contiguous(2, 8, 3, 64, torch.float32)
    expected = twice(got)
    kv_write(k_TGD, v_TGD, slots_T, *got)
    kv_write_torch(k_TGD, v_TGD, slots_T, *expected)
    assert torch.equal(bits(memory(got)), bits(memory(expected)))


# -- copy_blocks ----------------------------------------------------------------------------------


def layers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    kv_L2NBGD = normal(*shape, seed=3, dtype=dtype)
    kv_L2NBGD[:, :, 2] = float("nan")
    return kv_L2NBGD


# Layers, blocks, slots, heads, head size: a tile, a part of one, one and a bit, several.
SHAPES = [(2, 6, 16, 3, 64), (1, 6, 4, 1, 2), (2, 6, 7, 5, 120), (1, 6, 16, 8, 128)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pairs", [[(1, 4)], [(2, 5), (2, 3), (0, 0), (0, 0), (1, 4)]])
def test_targets_become_their_sources(shape, pairs, dtype):
    L, *rest = shape
    got = layers(L, 2, *rest, dtype=dtype)
    expected = got.clone()
    sources, targets = (integers(*numbers) for numbers in zip(*pairs, strict=True))
    copy_blocks(got, sources.int(), targets)
    copy_blocks_torch(expected, sources.int(), targets)
    assert torch.equal(bits(got), bits(expected))
    for source, target in pairs:
        assert torch.equal(bits(got[:, :, target]), bits(got[:, :, source]))


def test_other_orders_of_blocks_and_inside_them():
    orders = [(0, 1, 2, 4, 3, 5), (2, 0, 1, 3, 4, 5), (1, 2, 0, 5, 4, 3)]
    for order in orders:
        kv_L2NBGD = layers(3, 2, 6, 4, 2, 8, dtype=torch.float32)
        back = [order.index(dimension) for dimension in range(6)]
        got = kv_L2NBGD.permute(order).contiguous().permute(back)
        assert not got.is_contiguous()
        copy_blocks(got, integers(2, 1), integers(4, 0))
        copy_blocks_torch(kv_L2NBGD, integers(2, 1), integers(4, 0))
        assert torch.equal(bits(got), bits(kv_L2NBGD))


def test_a_part_of_the_blocks_of_a_larger_cache():
    whole = layers(2, 2, 8, 4, 2, 8, dtype=torch.float16)
    expected = whole.clone()
    copy_blocks(whole[:, :, 2:], integers(0), integers(3))
    copy_blocks_torch(expected, integers(2), integers(5))
    assert torch.equal(bits(whole), bits(expected))


# -- all of them ----------------------------------------------------------------------------------


def test_nothing_to_do_changes_nothing():
    kv_L2NBGD = layers(1, 2, 4, 4, 2, 8, dtype=torch.float32)
    before, none = kv_L2NBGD.clone(), integers()
    copy_blocks(kv_L2NBGD, none, none)
    kv_write(normal(0, 2, 8), normal(0, 2, 8), none, *kv_L2NBGD[0])
    q = qk_norm_rope_write(
        normal(0, 7 * 8), none, none, *tables(8), None, None, EPS, *kv_L2NBGD[0], 3
    )
    assert q.shape == (0, 3, 8)
    assert torch.equal(bits(kv_L2NBGD), bits(before))


def test_caches_larger_than_32_bits_count():
    """Block 2 begins at element 2³¹, and so does the third token; their numbers are int32."""
    B, G, D = 4, 3, 64
    room = torch.empty(2**31 + 65_536, dtype=torch.float16, device=DEVICE)
    strides = (8192, 4096, 2**30, G * D, D, 1)
    huge_L2NBGD = room.as_strided((2, 2, 3, B, G, D), strides)
    small = layers(2, 2, 3, B, G, D, dtype=torch.float16)
    huge_L2NBGD.copy_(small)

    step = Step("smollm2-135m", torch.float16, [9, 1, 10], index_dtype=torch.int32)
    X = step.qkv_TX.shape[1]
    far_TX = room[32_768:].as_strided((3, X), (2**30, 1), 32_768)
    far_TX.copy_(step.qkv_TX)
    expected_q = qk_norm_rope_write(*step.inputs(small[0]))
    step.qkv_TX = far_TX
    assert torch.equal(qk_norm_rope_write(*step.inputs(huge_L2NBGD[0])), expected_q)

    _, k_TGD, v_TGD = far_TX.unflatten(1, (15, D)).split((9, G, G), dim=1)
    slots_T = integers(8, -1, 11, dtype=torch.int32)
    kv_write(k_TGD, v_TGD, slots_T, *huge_L2NBGD[1])
    kv_write_torch(k_TGD, v_TGD, slots_T, *small[1])
    for kv_L2NBGD in (huge_L2NBGD, small):
        copy_blocks(kv_L2NBGD, integers(2).int(), integers(1).int())
    assert torch.equal(bits(huge_L2NBGD), bits(small))
    assert torch.equal(bits(small[:, :, 1]), bits(small[:, :, 2]))


@pytest.mark.skipif(DEVICE == "cpu", reason="a CUDA graph needs a GPU")
def test_a_graph_replays_them_on_new_inputs():
    step = Step("qwen3-0.6b", torch.bfloat16, [39, -1, 8])
    kv_12NBGD = step.kv_2NBGD.unsqueeze(0)
    sources, targets = integers(1), integers(3)
    _, k_TGD, v_TGD = step.qkv_TX.unflatten(1, (-1, 128)).split((16, 8, 8), dim=1)
    other_slots_T = integers(16, 17, -1)

    def launch() -> torch.Tensor:
        q_THD = qk_norm_rope_write(*step.inputs(step.kv_2NBGD))
        kv_write(k_TGD, v_TGD, other_slots_T, *step.kv_2NBGD)
        copy_blocks(kv_12NBGD, sources, targets)
        return q_THD

    launch()  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q_THD = launch()
    step.qkv_TX.copy_(normal(*step.qkv_TX.shape, seed=9))
    step.positions_T.copy_(integers(3, 4, 5))
    step.slots_T.copy_(integers(-1, 20, 21))
    expected = twice(step.kv_2NBGD)
    graph.replay()
    torch.cuda.synchronize()
    expected_q = qk_norm_rope_write_torch(*step.inputs(expected))
    kv_write_torch(k_TGD, v_TGD, other_slots_T, *expected)
    copy_blocks_torch(expected.unsqueeze(0), sources, targets)
    assert_close(q_THD, expected_q, torch.bfloat16, 128)
    torch.testing.assert_close(step.kv_2NBGD, expected, atol=0.02, rtol=0.02, equal_nan=True)


def refused_step(**changes: object) -> None:
    given: dict = {
        "qkv_TX": torch.zeros(2, 5 * 4),
        "positions_T": torch.zeros(2, dtype=torch.int64),
        "slots_T": torch.zeros(2, dtype=torch.int64),
        "cos_PR": torch.zeros(9, 2),
        "sin_PR": torch.zeros(9, 2),
        "q_norm_D": None,
        "k_norm_D": None,
        "eps": EPS,
        "k_slots_NBGD": torch.zeros(3, 4, 1, 4),
        "v_slots_NBGD": torch.zeros(3, 4, 1, 4),
        "num_heads": 3,
    }
    qk_norm_rope_write(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 4}, r"20 columns, not \(4 \+ 2 x 1\) heads of 4"),
        ({"qkv_TX": torch.zeros(20, 2).T}, "2 apart, not 1"),
        ({"qkv_TX": torch.zeros(2, 20).half()}, "float32.*float16"),
        ({"positions_T": torch.zeros(3)}, r"2 tokens, positions of shape \(3,\)"),
        ({"slots_T": torch.zeros(3)}, r"2 tokens, slots of shape \(3,\)"),
        ({"cos_PR": torch.zeros(9, 4)}, r"cos is \(9, 4\), a head 4 wide"),
        ({"sin_PR": torch.zeros(9, 2).half()}, "sin is torch.float16, not torch.float32"),
        ({"q_norm_D": torch.zeros(3)}, r"q_norm is \(3,\), a head 4 wide"),
        ({"k_norm_D": torch.zeros(5)}, r"k_norm is \(5,\), a head 4 wide"),
        ({"v_slots_NBGD": torch.zeros(3, 4, 2, 4)}, r"\(3, 4, 1, 4\).*\(3, 4, 2, 4\)"),
        ({"v_slots_NBGD": torch.zeros(3, 4, 1, 8)[..., ::2]}, "of V are 2 apart, not 1"),
        ({"out": torch.zeros(2, 4, 4)}, r"\(2, 4, 4\).*\(2, 3, 4\)"),
    ],
)
def test_a_step_that_disagrees_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        refused_step(**changes)


K, CACHE, SLOTS = torch.zeros(2, 3, 4), torch.zeros(2, 2, 3, 4), torch.zeros(2, dtype=torch.int64)
KV = torch.zeros(1, 2, 4, 2, 3, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kv_write(K[:, :2], K, SLOTS, CACHE, CACHE), r"k is \(2, 2, 4\).*\(2, 3, 4\)"),
        (lambda: kv_write(K, K[:1], SLOTS, CACHE, CACHE), r"v is \(1, 3, 4\).*\(2, 3, 4\)"),
        (lambda: kv_write(K, K.half(), SLOTS, CACHE, CACHE), "float16.*float32"),
        (lambda: kv_write(K, K, SLOTS[:1], CACHE, CACHE), r"2 tokens, slots of shape \(1,\)"),
        (lambda: kv_write(K, K.mT.contiguous().mT, SLOTS, CACHE, CACHE), "of v are 3 apart"),
        (lambda: copy_blocks(KV, SLOTS, SLOTS[:1]), r"\(2,\) sources, \(1,\) targets"),
        (lambda: copy_blocks(KV, SLOTS, torch.zeros(4).long()[::2]), "strides"),
        (lambda: copy_blocks(KV[:, :, :, :, :2], SLOTS, SLOTS), "12 apart where 8 is expected"),
    ],
)
def test_what_disagrees_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
