"""The operations of the fast step: few launches a layer, K and V where their blocks lie.

Invariant: each equals a composition of ``mie.ops.reference`` within the rounding of its dtype, and
none needs a number that only the device knows: so a step of them can be recorded once and replayed.

    FastOps          a layer of the reference
    add_rms_norm     x + residual, rms_norm
    (product)        the same products, by torch
    qk_norm_rope_write   two norms, rope, K and V to their slots
    paged_decode     one query a sequence; or paged_prefill, any number
    swiglu           swiglu on both halves of one product
    norm_linear, linear_residual, norm_linear_swiglu
                     for a few tokens: the same, with the products
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class FastOps:
    """Signatures as in ``mie.kernels``; ``decode_plan`` makes what ``paged_decode`` is given last,
    once, and its ``update`` is called once a step. Without ``norm_linear``, a few tokens are
    computed as many are."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor], Tensor]
    norm_linear: Callable[..., Tensor] | None
    linear_residual: Callable[[Tensor, Tensor, Tensor], Tensor]
    norm_linear_swiglu: Callable[[Tensor, Tensor, float, Tensor], Tensor]
    qk_norm_rope_write: Callable[..., Tensor]
    decode_plan: Callable[..., Any]
    paged_decode: Callable[..., Tensor]
    paged_prefill: Callable[..., Tensor]
    sample: Callable[..., Tensor]
    decode_inputs: Callable[..., None]
    step_inputs: Callable[..., None]
    write_state: Callable[[Tensor, Tensor], None]
    copy_blocks: Callable[[Tensor, Tensor, Tensor], None]


NAMES = tuple(field.name for field in fields(FastOps))


def triton_ops(replacements: Mapping[str, Any] | None = None) -> FastOps:
    """The kernels of ``mie.kernels``, and ``replacements`` of a reader's in their place.

    Whoever replaces ``rms_norm`` alone has it called behind every addition as well. Raises KeyError
    for a name that is no operation, ImportError where Triton is not installed.
    """
    from mie.kernels import (
        block_copy,
        inputs,
        paged_decode,
        paged_prefill,
        qk_rope_write,
        skinny_linear,
    )
    from mie.kernels import rms_norm as norms
    from mie.kernels import sample as sampling
    from mie.kernels import swiglu as activation

    replacements = dict(replacements or {})
    if unknown := sorted(replacements.keys() - {*NAMES}):
        raise KeyError(f"no operation called {unknown[0]}; there are {', '.join(NAMES)}")
    if "rms_norm" in replacements and "add_rms_norm" not in replacements:
        replacements["add_rms_norm"] = _add_then(replacements["rms_norm"])
    chosen: dict[str, Any] = {
        "rms_norm": norms.rms_norm,
        "add_rms_norm": norms.add_rms_norm,
        "swiglu": activation.swiglu,
        "norm_linear": skinny_linear.norm_linear,
        "linear_residual": skinny_linear.linear_residual,
        "norm_linear_swiglu": skinny_linear.norm_linear_swiglu,
        "qk_norm_rope_write": qk_rope_write.qk_norm_rope_write,
        "decode_plan": paged_decode.DecodePlan,
        "paged_decode": paged_decode.paged_decode,
        "paged_prefill": paged_prefill.paged_prefill,
        "sample": sampling.sample,
        "decode_inputs": inputs.decode_inputs,
        "step_inputs": inputs.step_inputs,
        "write_state": inputs.write_state,
        "copy_blocks": block_copy.copy_blocks,
    }
    if {"rms_norm", "add_rms_norm", "swiglu"} & replacements.keys():
        chosen["norm_linear"] = None  # a product that norms by itself would pass them by
    return FastOps(**{**chosen, **replacements})


def adapted_paged_decode(paged_decode: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A reader's ``paged_decode``, of the spec's signature, where the engine calls its own: it is
    given the table of each sequence, some table for a row of padding, and no plan. To be recorded
    in a CUDA graph it must not ask the device for the lengths."""

    def adapted(
        q_XHD: Tensor,
        k_NBGD: Tensor,
        v_NBGD: Tensor,
        tables_RM: Tensor,
        rows_X: Tensor,
        lengths_X: Tensor,
        scale: float,
        plan: Any,
    ) -> Tensor:
        tables_XM = tables_RM.index_select(0, rows_X.clamp(min=0))  # padding has length 0
        return paged_decode(q_XHD, k_NBGD, v_NBGD, tables_XM, lengths_X, scale)

    return adapted


def adapted_paged_prefill(paged_prefill: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A reader's ``paged_prefill``, of the spec's signature, where the engine calls its own: it is
    given the table of each sequence that is computed, and not how many tokens a sequence brings."""

    def adapted(
        q_THD: Tensor,
        k_NBGD: Tensor,
        v_NBGD: Tensor,
        tables_RM: Tensor,
        rows_S: Tensor,
        starts_S1: Tensor,
        lengths_S: Tensor,
        scale: float,
        max_new: int,
    ) -> Tensor:
        tables_SM = tables_RM.index_select(0, rows_S)
        return paged_prefill(q_THD, k_NBGD, v_NBGD, tables_SM, starts_S1, lengths_S, scale)

    return adapted


def _add_then(rms_norm: Callable[[Tensor, Tensor, float], Tensor]) -> Any:
    def add_rms_norm(
        x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        sum_TE = x_TE + residual_TE
        return rms_norm(sum_TE, weight_E, eps), sum_TE

    return add_rms_norm
