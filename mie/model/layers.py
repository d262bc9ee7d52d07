"""One layer of the decoder: attention and a gated MLP, each behind a norm.

Invariant: a layer adds to the residual stream ``x_TE`` and hands K and V to the cache; it changes
nothing else. It has no idea how many sequences the T tokens belong to: everything except
``cache.attend`` treats tokens one by one.

::

    x ──┬─ norm ─ q k v ─ (norm q, k) ─ rope ─ attend ─ o ─┬── + ──┬─ norm ─ gate·up ─ down ─┬── +
        └──────────────────────────────────────────────────┘       └─────────────────────────┘
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mie.model.config import ModelConfig
from mie.model.kv_cache import KVCache
from mie.ops.dispatch import Ops


class Linear(nn.Linear):
    """A product with a stored matrix. No value is drawn at first: all come from a checkpoint."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """``ops.rms_norm`` with its weight."""

    def __init__(self, size: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.ops = ops

    def forward(self, x_TE: Tensor) -> Tensor:
        return self.ops.rms_norm(x_TE, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention. Q, K and V come from one product over their stacked weights."""

    def __init__(self, config: ModelConfig, layer: int, ops: Ops) -> None:
        super().__init__()
        self.layer = layer
        self.ops = ops
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.H, self.G = config.num_heads, config.num_kv_heads
        q_size, kv_size = self.H * config.head_dim, self.G * config.head_dim
        family = config.family

        self.qkv = Linear(config.hidden_size, q_size + 2 * kv_size, family.qkv_bias)
        self.output = Linear(q_size, config.hidden_size, family.output_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if family.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, ops)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, ops)

    def forward(self, x_TE: Tensor, cos_TR: Tensor, sin_TR: Tensor, cache: KVCache) -> Tensor:
        H, G = self.H, self.G
        qkv = self.qkv(x_TE).view(-1, H + 2 * G, self.head_dim)
        qk, v_TGD = qkv.split((H + G, G), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :H]), self.k_norm(qk[:, H:])), dim=1)
        qk = self.ops.rope(qk, cos_TR, sin_TR)  # keys turn as queries do: one call for both
        q_THD, k_TGD = qk.split((H, G), dim=1)
        out_THD = cache.attend(self.layer, q_THD, k_TGD, v_TGD, self.scale)
        return self.output(out_THD.flatten(-2))


class MLP(nn.Module):
    """The gated feed-forward network. Gate and up come from one product."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        bias = config.family.mlp_bias
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias)

    def forward(self, x_TE: Tensor) -> Tensor:
        gate_TF, up_TF = self.gate_up(x_TE).chunk(2, dim=-1)
        return self.down(self.ops.swiglu(gate_TF, up_TF))


class DecoderLayer(nn.Module):
    """Attention, then MLP; each reads a normed copy of the stream and adds to the stream."""

    def __init__(self, config: ModelConfig, layer: int, ops: Ops) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.attention = Attention(config, layer, ops)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.mlp = MLP(config, ops)

    def forward(self, x_TE: Tensor, cos_TR: Tensor, sin_TR: Tensor, cache: KVCache) -> Tensor:
        x_TE = x_TE + self.attention(self.attention_norm(x_TE), cos_TR, sin_TR, cache)
        return x_TE + self.mlp(self.mlp_norm(x_TE))
