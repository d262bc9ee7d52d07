"""How the engine launches each Triton kernel: what ``compile_kernels`` compiles.

Invariant: every kernel of ``kernels/`` has an entry. An entry is a tuple of launches, functions of
a model's shapes and a GPU's compute capability. A launch calls the kernel's public function on
tensors that have shapes and dtypes but no memory (torch's ``meta`` device), so it works only where
launches are caught. Kernels are imported then; reading the table takes no Triton.

Sizes are what a server sees: 40 sequences or tokens (not a multiple of 16, so Triton may not assume
one), bfloat16, blocks of 16 slots. To add a kernel: write a launch, name it in ``CASES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_SIZE = 16
SETTING = f"bfloat16, blocks of {BLOCK_SIZE} slots"
NUM_BLOCKS = 20_000  # so that offsets into the cache do not fit 32 bits
MAX_BLOCKS = 512  # columns of the block tables
MAX_POSITIONS = 8_192
TOKENS = 40
ROWS = 64  # sequences that the engine has room for
PROMPT = 500  # tokens of the longest prompt in a step
EPS = 1e-6


@dataclass(frozen=True)
class Model:
    """The shapes of a model that kernels see; letters as in ``mie.ops.reference``."""

    name: str
    E: int
    F: int
    H: int
    G: int
    D: int
    V: int
    layers: int
    head_norms: bool = False
    biases: bool = False  # of query, key and value

    @property
    def scale(self) -> float:
        return self.D**-0.5


MODELS = (
    Model("Qwen3-0.6B", 1024, 3072, 16, 8, 128, 151_936, 28, head_norms=True),
    Model("Qwen2.5-7B", 3584, 18_944, 28, 4, 128, 152_064, 28, biases=True),
    Model("SmolLM2-135M", 576, 1536, 9, 3, 64, 49_152, 30),
)
Launch = Callable[[Model, int], object]


def shaped(*shape: int, dtype: str = "bfloat16") -> Tensor:
    """A tensor without memory."""
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def ints(*shape: int) -> Tensor:
    return shaped(*shape, dtype="int32")


def longs(*shape: int) -> Tensor:
    return shaped(*shape, dtype="int64")


def floats(*shape: int) -> Tensor:
    return shaped(*shape, dtype="float32")


def cache(model: Model) -> tuple[Tensor, Tensor]:
    """K and V of one layer."""
    k_NBGD, v_NBGD = shaped(2, NUM_BLOCKS, BLOCK_SIZE, model.G, model.D)
    return k_NBGD, v_NBGD


def rms_norm(model: Model, capability: int) -> None:
    from mie.kernels.rms_norm import rms_norm

    rms_norm(shaped(TOKENS, model.E), shaped(model.E), EPS)


def add_rms_norm(model: Model, capability: int) -> None:
    from mie.kernels.rms_norm import add_rms_norm

    add_rms_norm(shaped(TOKENS, model.E), shaped(TOKENS, model.E), shaped(model.E), EPS)


def swiglu(model: Model, capability: int) -> None:
    from mie.kernels.swiglu import swiglu

    swiglu(shaped(TOKENS, 2 * model.F))


def rope(model: Model, capability: int) -> None:
    from mie.kernels.rope import rope

    angles_TR = floats(TOKENS, model.D // 2)
    rope(shaped(TOKENS, model.H, model.D), angles_TR, angles_TR)


def qk_norm_rope_write(model: Model, capability: int) -> None:
    from mie.kernels.qk_rope_write import qk_norm_rope_write

    norm_D = shaped(model.D) if model.head_norms else None
    table_PR = floats(MAX_POSITIONS, model.D // 2)
    qk_norm_rope_write(
        shaped(TOKENS, (model.H + 2 * model.G) * model.D), longs(TOKENS), longs(TOKENS),
        table_PR, table_PR, norm_D, norm_D, EPS, *cache(model), model.H,
    )  # fmt: skip


def kv_write(model: Model, capability: int) -> None:
    from mie.kernels.kv_write import kv_write

    new_TGD = shaped(TOKENS, model.G, model.D)
    kv_write(new_TGD, new_TGD, longs(TOKENS), *cache(model))


def copy_blocks(model: Model, capability: int) -> None:
    from mie.kernels.block_copy import copy_blocks

    kv_L2NBGD = shaped(model.layers, 2, NUM_BLOCKS, BLOCK_SIZE, model.G, model.D)
    copy_blocks(kv_L2NBGD, longs(TOKENS), longs(TOKENS))


def paged_decode(model: Model, capability: int) -> None:
    from mie.kernels.decode_plan import DecodePlan
    from mie.kernels.paged_decode import paged_decode

    plan = DecodePlan(ROWS, model.H, model.G, model.D, BLOCK_SIZE, "meta")
    lengths_X = ints(TOKENS)
    plan.update(lengths_X)
    paged_decode(
        shaped(TOKENS, model.H, model.D), *cache(model), ints(ROWS, MAX_BLOCKS), ints(TOKENS),
        lengths_X, model.scale, plan,
    )  # fmt: skip


def prompts(model: Model, capability: int) -> None:
    """Prompts, or chunks of them, and decodes beside them."""
    _prefill(model, capability, max_new=PROMPT)


def drafts(model: Model, capability: int) -> None:
    """A few tokens each: what a target verifies."""
    _prefill(model, capability, max_new=4)


def decodes(model: Model, capability: int) -> None:
    """One token each."""
    _prefill(model, capability, max_new=1)


def _prefill(model: Model, capability: int, max_new: int) -> None:
    from mie.kernels.paged_prefill import paged_prefill, prefill_config

    q_THD = shaped(TOKENS * max_new, model.H, model.D)
    config = prefill_config(model.H // model.G, model.D, q_THD.dtype, max_new, capability)
    paged_prefill(
        q_THD, *cache(model), ints(ROWS, MAX_BLOCKS), ints(TOKENS), ints(TOKENS + 1),
        ints(TOKENS), model.scale, max_new, config=config,
    )  # fmt: skip


def sample(model: Model, capability: int) -> None:
    from mie.kernels.sample import sample

    sample(
        floats(TOKENS, model.V), floats(TOKENS), longs(TOKENS), longs(TOKENS),
        last_token_R=longs(ROWS), rows_S=ints(TOKENS),
    )  # fmt: skip


def state() -> Tensor:
    """What the device knows of each sequence."""
    from mie.kernels.inputs import TABLE

    return ints(ROWS, TABLE + MAX_BLOCKS)


def qkv(model: Model, capability: int) -> None:
    """Norm, query, key and value of one row."""
    from mie.kernels.skinny_linear import norm_linear

    N = (model.H + 2 * model.G) * model.D
    bias_N = shaped(N) if model.biases else None
    norm_linear(shaped(1, model.E), shaped(model.E), EPS, shaped(N, model.E), bias_N)


def attention_out(model: Model, capability: int) -> None:
    from mie.kernels.skinny_linear import linear_residual

    K = model.H * model.D
    linear_residual(shaped(1, K), shaped(model.E, K), shaped(1, model.E))


def mlp_out(model: Model, capability: int) -> None:
    from mie.kernels.skinny_linear import linear_residual

    linear_residual(shaped(1, model.F), shaped(model.E, model.F), shaped(1, model.E))


def gate_up(model: Model, capability: int) -> None:
    from mie.kernels.skinny_linear import norm_linear_swiglu

    weight_NE = shaped(2 * model.F, model.E)
    norm_linear_swiglu(shaped(1, model.E), shaped(model.E), EPS, weight_NE)


def write_state(model: Model, capability: int) -> None:
    from mie.kernels.inputs import write_state

    write_state(state(), ints(3, TOKENS))


def decode_inputs(model: Model, capability: int) -> None:
    from mie.kernels.inputs import decode_inputs

    decode_inputs(
        state(), ints(TOKENS), longs(TOKENS), longs(TOKENS), longs(TOKENS), ints(TOKENS),
        floats(TOKENS), longs(TOKENS), ints(TOKENS), BLOCK_SIZE,
    )  # fmt: skip


def step_inputs(model: Model, capability: int) -> None:
    from mie.kernels.inputs import step_inputs

    T = TOKENS * PROMPT
    step_inputs(
        state(), ints(TOKENS), ints(TOKENS + 1), ints(TOKENS), ints(T), longs(T), longs(T),
        longs(T), ints(TOKENS), BLOCK_SIZE, PROMPT,
    )  # fmt: skip


CASES: dict[str, tuple[Launch, ...]] = {
    "_rms_norm_kernel": (rms_norm,),
    "_add_rms_norm_kernel": (add_rms_norm,),
    "_swiglu_kernel": (swiglu,),
    "_rope_kernel": (rope,),
    "_qk_rope_write_kernel": (qk_norm_rope_write,),
    "_kv_write_kernel": (kv_write,),
    "_copy_blocks_kernel": (copy_blocks,),
    "_plan_kernel": (paged_decode,),
    "_paged_decode_kernel": (paged_decode,),
    "_paged_prefill_kernel": (prompts, drafts, decodes),
    "_chunk_kernel": (sample,),
    "_choose_kernel": (sample,),
    "_skinny_kernel": (qkv, attention_out, mlp_out),
    "_skinny_swiglu_kernel": (gate_up,),
    "_write_state_kernel": (write_state,),
    "_decode_inputs_kernel": (decode_inputs,),
    "_step_inputs_kernel": (step_inputs,),
}

# Bytes of spilled stores and loads together that are known, and why they stay, by kernel and
# architecture: {("_some_kernel", 80): (112, "outside the loops; smaller tiles are slower")}.
EXPLAINED_SPILLS: dict[tuple[str, int], tuple[int, str]] = {
    ("_paged_prefill_kernel", 90): (
        160,
        "128 registers let two programs share a multiprocessor, 1.4 times as fast on an H200",
    ),
}
