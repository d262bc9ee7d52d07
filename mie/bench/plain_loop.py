"""A loop of torch calls around the same weights: the speed that an engine must not fall below.

Invariant: a batch of prompts of one length, one memory of fixed size, the most likely token each
time; no blocks, no tables, no scheduler, no module. In float32 its tokens are the engine's.

Nothing is done badly here so that something else looks good: Q, K, V and gate, up are one product
each, angles are tabulated, attention is torch's own. What remains is the products, which the engine
has too. What it cannot do is the subject of the book: every sequence begins and ends with the
others, and each owns room for the longest.

    kv_L2BGSD    layer, K or V, sequence, key/value head, position, head size
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mie.model.decoder import Decoder
from mie.model.layers import DecoderLayer, RMSNorm
from mie.model.rope import rotary_angles


class PlainLoop:
    """``batch_size`` sequences of at most ``max_length`` tokens on the weights of ``decoder``."""

    def __init__(self, decoder: Decoder, batch_size: int, max_length: int) -> None:
        config = decoder.config
        self.decoder = decoder
        self.H, self.G, self.D = config.num_heads, config.num_kv_heads, config.head_dim
        self.kv_L2BGSD = torch.zeros(
            (config.num_layers, 2, batch_size, self.G, max_length, self.D),
            dtype=decoder.dtype,
            device=decoder.device,
        )
        positions_S = torch.arange(max_length, device=decoder.device)
        amplitude = config.rope.scaling.amplitude
        cos_SR, sin_SR = rotary_angles(positions_S, decoder.frequencies_R, amplitude)
        self.cos_S1D = torch.cat((cos_SR, cos_SR), dim=-1).unsqueeze(1).to(decoder.dtype)
        self.sin_S1D = torch.cat((-sin_SR, sin_SR), dim=-1).unsqueeze(1).to(decoder.dtype)
        self.scale = config.attention_scale
        self.length = 0

    @torch.inference_mode()
    def step(self, token_ids_BT: Tensor) -> Tensor:
        """Put T tokens of each sequence behind those before; the most likely next one of each."""
        decoder, start, end = self.decoder, self.length, self.length + token_ids_BT.shape[1]
        x_BTE = functional.embedding(token_ids_BT, decoder.embedding.weight)
        angles = self.cos_S1D[start:end], self.sin_S1D[start:end]
        for layer, kv_2BGSD in zip(decoder.layers, self.kv_L2BGSD, strict=True):
            assert isinstance(layer, DecoderLayer)
            x_BTE = self._layer(layer, x_BTE, angles, kv_2BGSD)
        self.length = end
        head = decoder.embedding if decoder.lm_head is None else decoder.lm_head
        hidden_BE = _norm(decoder.final_norm, x_BTE[:, -1])
        return functional.linear(hidden_BE, head.weight).argmax(dim=-1)

    def generate(self, prompts_BT: Tensor, num_new: int) -> Tensor:
        """``num_new`` tokens after each prompt: shape (B, num_new)."""
        tokens = [self.step(prompts_BT)]
        while len(tokens) < num_new:
            tokens.append(self.step(tokens[-1].unsqueeze(1)))
        return torch.stack(tokens, dim=1)

    def _layer(
        self, layer: DecoderLayer, x_BTE: Tensor, angles: tuple[Tensor, Tensor], kv_2BGSD: Tensor
    ) -> Tensor:
        H, G, D, part, mlp = self.H, self.G, self.D, layer.attention, layer.mlp
        B, T, _ = x_BTE.shape
        normed = _norm(layer.attention_norm, x_BTE)
        qkv = functional.linear(normed, part.qkv.weight, part.qkv.bias).view(B, T, H + 2 * G, D)
        qk, v_BTGD = qkv.split((H + G, G), dim=2)
        if part.q_norm is not None and part.k_norm is not None:
            q, k = qk.split((H, G), dim=2)
            qk = torch.cat((_norm(part.q_norm, q), _norm(part.k_norm, k)), dim=2)
        first, second = qk.chunk(2, dim=-1)
        qk = torch.addcmul(qk * angles[0], torch.cat((second, first), dim=-1), angles[1])
        q_BHTD, k_BGTD = qk.transpose(1, 2).split((H, G), dim=1)
        kv_2BGSD[0, :, :, self.length : self.length + T] = k_BGTD
        kv_2BGSD[1, :, :, self.length : self.length + T] = v_BTGD.transpose(1, 2)
        out_BTE = self._attention(q_BHTD, *kv_2BGSD[:, :, :, : self.length + T])
        x_BTE = x_BTE + functional.linear(out_BTE, part.output.weight, part.output.bias)
        normed = _norm(layer.mlp_norm, x_BTE)
        gate, up = functional.linear(normed, mlp.gate_up.weight, mlp.gate_up.bias).chunk(2, dim=-1)
        return x_BTE + functional.linear(functional.silu(gate) * up, mlp.down.weight, mlp.down.bias)

    def _attention(self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> Tensor:
        B, H, T, D = q_BHTD.shape
        if T > 1:
            assert k_BGSD.shape[2] == T, "several tokens come first, and all at once"
        elif q_BHTD.dtype != torch.float32:
            # For one query, torch's grouped attention in bfloat16 takes five times as long on a
            # CPU without such products as the heads of a group as rows.
            q_BHTD = q_BHTD.reshape(B, self.G, H // self.G, D)
        out = functional.scaled_dot_product_attention(
            q_BHTD, k_BGSD, v_BGSD, is_causal=T > 1, scale=self.scale,
            enable_gqa=q_BHTD.shape[1] != self.G,
        )  # fmt: skip
        return out.reshape(B, 1, H * D) if T == 1 else out.transpose(1, 2).flatten(2)


def _norm(norm: RMSNorm, x: Tensor) -> Tensor:
    return functional.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
