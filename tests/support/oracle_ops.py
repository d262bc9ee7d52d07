"""The operations of the fast step from the torch functions that the kernels must equal.

Invariant: signatures and effects are those of ``mie.ops.fast.triton_ops``; nothing is launched. So
what a runner does around its kernels can be tested on thousands of steps without interpreting one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mie.kernels.block_copy import copy_blocks_torch
from mie.kernels.inputs import decode_inputs_torch, step_inputs_torch, write_state_torch
from mie.kernels.paged_decode import paged_decode_torch
from mie.kernels.paged_prefill import paged_prefill_torch
from mie.kernels.qk_rope_write import qk_norm_rope_write_torch
from mie.kernels.rms_norm import add_rms_norm_torch, rms_norm_torch
from mie.kernels.sample import sample_torch
from mie.kernels.skinny_linear import (
    linear_residual_torch,
    norm_linear_swiglu_torch,
    norm_linear_torch,
)
from mie.kernels.swiglu import swiglu_torch
from mie.ops.fast import FastOps


class NoPlan:
    """Whoever reads all of a context in one piece divides nothing."""

    def __init__(self, *shape: Any) -> None:
        self.lengths_X: Tensor | None = None

    def update(self, lengths_X: Tensor) -> None:
        self.lengths_X = lengths_X


def _decode_inputs(state_RC: Tensor, rows_X: Tensor, *outputs: Any) -> None:
    *tensors, block_size = outputs
    made = decode_inputs_torch(state_RC, rows_X, block_size)
    for tensor, value in zip(tensors, made, strict=True):
        tensor.copy_(value)


def _step_inputs(state_RC: Tensor, rows_S: Tensor, *rest: Any) -> None:
    starts_S1, firsts_S, given_T, *outputs, block_size, most = rest
    assert int(starts_S1.diff().max()) == most
    made = step_inputs_torch(state_RC, rows_S, starts_S1, firsts_S, given_T, block_size)
    for tensor, value in zip(outputs, made, strict=True):
        tensor.copy_(value)


def _paged_decode(
    q_XHD: Tensor,
    k_NBGD: Tensor,
    v_NBGD: Tensor,
    tables_RM: Tensor,
    rows_X: Tensor,
    lengths_X: Tensor,
    scale: float,
    plan: NoPlan,
) -> Tensor:
    assert plan.lengths_X is not None and plan.lengths_X.data_ptr() == lengths_X.data_ptr()
    return paged_decode_torch(q_XHD, k_NBGD, v_NBGD, tables_RM, rows_X, lengths_X, scale)


def _paged_prefill(*arguments: Any) -> Tensor:
    *rest, most = arguments
    assert int(rest[5].diff().max()) == most
    return paged_prefill_torch(*rest)


def _sample(
    logits_SV: Tensor,
    temperatures_S: Tensor,
    keys_S: Tensor,
    positions_S: Tensor,
    out_S: Tensor,
    *,
    last_token_R: Tensor,
    rows_S: Tensor,
) -> Tensor:
    out_S.copy_(sample_torch(logits_SV, temperatures_S, keys_S, positions_S))
    known = rows_S >= 0
    last_token_R[rows_S[known].long()] = out_S[known].to(last_token_R.dtype)
    return out_S


def oracle_ops() -> FastOps:
    return FastOps(
        rms_norm=rms_norm_torch,
        add_rms_norm=add_rms_norm_torch,
        swiglu=swiglu_torch,
        norm_linear=norm_linear_torch,
        linear_residual=linear_residual_torch,
        norm_linear_swiglu=norm_linear_swiglu_torch,
        qk_norm_rope_write=qk_norm_rope_write_torch,
        decode_plan=NoPlan,
        paged_decode=_paged_decode,
        paged_prefill=_paged_prefill,
        sample=_sample,
        decode_inputs=_decode_inputs,
        step_inputs=_step_inputs,
        write_state=write_state_torch,
        copy_blocks=copy_blocks_torch,
    )
