"""The decoder: token ids in, hidden states out, and from those the logits of the next token.

Invariant: ``forward`` is one flat batch of T tokens with no padding. Where a token stands is in
``positions_T``; which sequence it belongs to, and which earlier tokens it may see, is the cache's
business.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mie.model.config import ModelConfig
from mie.model.kv_cache import KVCache
from mie.model.layers import DecoderLayer, Linear, RMSNorm
from mie.model.rope import rotary_angles
from mie.ops.dispatch import Ops


class Embedding(nn.Embedding):
    """A row of numbers for each token. No value is drawn at first: all come from a checkpoint."""

    def reset_parameters(self) -> None:
        pass


class Decoder(nn.Module):
    """A Llama-, Qwen2- or Qwen3-shaped decoder on one device in one dtype.

    A new one owns its memory but no values: ``mie.model.weights`` fills every element.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        ops: Ops | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.ops = ops or Ops()
        self.dtype = dtype
        self.device = torch.device(device)
        with torch.device("meta"):  # shapes first, without memory: nothing is initialised in vain
            self.embedding = Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(
                DecoderLayer(config, layer, self.ops) for layer in range(config.num_layers)
            )
            self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, self.ops)
            self.lm_head: Linear | None = None
            if not config.tie_word_embeddings:
                self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.requires_grad_(False).to(dtype).to_empty(device=self.device)
        # No buffer: a change of dtype must never round the frequencies.
        self.frequencies_R = config.rope.frequencies(config.head_dim).to(self.device)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, cache: KVCache) -> Tensor:
        """``hidden_TE`` after the final norm, ready for ``logits``.

        ``token_ids_T`` and ``positions_T`` are integers, shape (T,), on the decoder's device.
        """
        amplitude = self.config.rope.scaling.amplitude
        cos_TR, sin_TR = rotary_angles(positions_T, self.frequencies_R, amplitude)
        x_TE = self.embedding(token_ids_T)
        for layer in self.layers:
            x_TE = layer(x_TE, cos_TR, sin_TR, cache)
        return self.final_norm(x_TE)

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """``logits_TV`` in float32: a score for every token of the vocabulary.

        Ask only for the rows that a token is chosen from: for SmolLM2 one row costs a fifth of all
        the multiplications of a token.
        """
        head = self.embedding if self.lm_head is None else self.lm_head
        if self.device.type == "cuda" and self.dtype != torch.float32:
            # The product adds up in float32 anyway. Rounded to bfloat16, logits near 25 would lie
            # 1/8 apart, and ties would choose the token.
            return torch.mm(hidden_TE, head.weight.T, out_dtype=torch.float32)
        return nn.functional.linear(hidden_TE, head.weight).float()
