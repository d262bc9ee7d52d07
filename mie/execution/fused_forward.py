"""The decoder's forward pass in nine launches a layer: the same weights, fused operations.

Invariant: the hidden states are those of ``Decoder.forward`` within the rounding of the dtype. The
residual stream is rounded to it after each addition, as there.

::

    Decoder         norm qkv q-norm k-norm cat rope write attend o + norm gate-up · down +
    FusedForward         qkv norm·rope·write attend o +·norm gate-up · down +·norm

An addition is left to the norm behind it, which reads the sum anyway. What stands between two
products is one launch; a step of a small batch is as long as its launches, and that of a large one
reads and writes the stream once where it did so three times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from mie.execution.kv_cache import PagedKVCache
from mie.model.decoder import Decoder
from mie.model.layers import DecoderLayer
from mie.model.rope import rotary_angles
from mie.ops.fast import FastOps

# layer, q_THD -> out_THD
Attend = Callable[[int, Tensor], Tensor]


class FusedForward:
    """``decoder`` on the blocks of ``cache``, for positions below ``max_model_len``."""

    def __init__(
        self, decoder: Decoder, cache: PagedKVCache, ops: FastOps, max_model_len: int
    ) -> None:
        self.decoder, self.cache, self.ops = decoder, cache, ops
        self.layers = cast(list[DecoderLayer], list(decoder.layers))
        positions_P = torch.arange(max_model_len, device=decoder.device)
        amplitude = decoder.config.rope.scaling.amplitude
        angles = rotary_angles(positions_P, decoder.frequencies_R, amplitude)
        self.cos_PR, self.sin_PR = (angle.contiguous() for angle in angles)

    def __call__(
        self, token_ids_T: Tensor, positions_T: Tensor, slots_T: Tensor, attend: Attend
    ) -> Tensor:
        """``hidden_TE`` after the final norm. K and V of the tokens go to ``slots_T``, a negative
        one to none, before ``attend`` is called for a layer."""
        decoder, ops = self.decoder, self.ops
        eps = decoder.config.rms_norm_eps
        residual_TE = functional.embedding(token_ids_T, decoder.embedding.weight)
        norms = [layer.attention_norm for layer in self.layers] + [decoder.final_norm]
        x_TE = ops.rms_norm(residual_TE, norms[0].weight, eps)
        for number, layer in enumerate(self.layers):
            attention, mlp = layer.attention, layer.mlp
            q_THD = self.write(number, attention.qkv(x_TE), positions_T, slots_T)
            x_TE = attention.output(attend(number, q_THD).flatten(-2))
            x_TE, residual_TE = ops.add_rms_norm(x_TE, residual_TE, layer.mlp_norm.weight, eps)
            x_TE = mlp.down(ops.swiglu(mlp.gate_up(x_TE)))
            next_norm = norms[number + 1]
            x_TE, residual_TE = ops.add_rms_norm(x_TE, residual_TE, next_norm.weight, eps)
        return x_TE

    def write(self, number: int, qkv_TX: Tensor, positions_T: Tensor, slots_T: Tensor) -> Tensor:
        """Norm and turn queries and keys of layer ``number``, and put K and V into their slots.
        Returns ``q_THD``."""
        attention = self.layers[number].attention
        return self.ops.qk_norm_rope_write(
            qkv_TX,
            positions_T,
            slots_T,
            self.cos_PR,
            self.sin_PR,
            None if attention.q_norm is None else attention.q_norm.weight,
            None if attention.k_norm is None else attention.k_norm.weight,
            self.decoder.config.rms_norm_eps,
            *self.cache.layers[number],
            attention.H,
        )
