"""The forward pass for a few tokens: six launches a layer, each as long as its weights.

Invariant: as ``FusedForward``, of which it is the other half: up to ``MOST_ROWS`` tokens a step is
nothing but weights that are read, and what stands between two products costs more to launch than to
compute. So each product takes the norm before it, or the addition behind it, along.

::

    FusedForward     qkv  norm·rope·write  attend  o  +·norm  gate-up  ·  down  +·norm
    SkinnyForward    norm·qkv  norm·rope·write  attend  o·+  norm·gate-up·swiglu  down·+
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from mie.execution.fused_forward import Attend, FusedForward

FEW = 16  # sequences, whose contexts have to be cut to keep a GPU busy: see mie.kernels.decode_plan
MOST_ROWS = 2  # with three, products by tensor cores are as fast: see mie.kernels.skinny_linear


class SkinnyForward(FusedForward):
    """``decoder`` on the blocks of ``cache``; ``MOST_ROWS`` tokens at most."""

    def __call__(
        self, token_ids_T: Tensor, positions_T: Tensor, slots_T: Tensor, attend: Attend
    ) -> Tensor:
        """As ``FusedForward``."""
        decoder, ops = self.decoder, self.ops
        eps = decoder.config.rms_norm_eps
        assert ops.norm_linear is not None, "can_be_skinny was not asked"
        x_TE = functional.embedding(token_ids_T, decoder.embedding.weight)
        for number, layer in enumerate(self.layers):
            attention, mlp = layer.attention, layer.mlp
            qkv = attention.qkv
            qkv_TX = ops.norm_linear(x_TE, layer.attention_norm.weight, eps, qkv.weight, qkv.bias)
            q_THD = self.write(number, qkv_TX, positions_T, slots_T)
            out_TX = attend(number, q_THD).flatten(-2)
            x_TE = ops.linear_residual(out_TX, attention.output.weight, x_TE)
            y_TF = ops.norm_linear_swiglu(x_TE, layer.mlp_norm.weight, eps, mlp.gate_up.weight)
            x_TE = ops.linear_residual(y_TF, mlp.down.weight, x_TE)
        return ops.rms_norm(x_TE, decoder.final_norm.weight, eps)


def can_be_skinny(forward: FusedForward) -> bool:
    """Whether ``SkinnyForward`` has all that its products need: output and MLP bring no bias."""
    family = forward.decoder.config.family
    return forward.ops.norm_linear is not None and not (family.output_bias or family.mlp_bias)
