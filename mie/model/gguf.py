"""A GGUF file as a Hugging Face checkpoint: other names, packed weights, rows in another order.

Invariant: whoever asks for ``model.layers.0.self_attn.q_proj.weight`` gets the same rows from a
GGUF file as from the safetensors file it was made of; only rounding to a few bits is between them.

Three things are translated:

- names: ``blk.0.attn_q.weight`` is ``model.layers.0.self_attn.q_proj.weight``;
- blocks: in Q4_1, 32 weights share a scale d and a minimum m (two float16), and each keeps four
  bits: w = d * q + m, 20 bytes for 32 weights. The ``gguf`` package unpacks this and other types;
- rows: llama.cpp rotates neighbouring elements (0,1), (2,3), ... of a head, Hugging Face rotates
  elements D/2 apart. Files of the ``llama`` architecture therefore hold the rows of Q and K
  interleaved, and ``load`` puts them back. Qwen's files keep Hugging Face's order.

Cost: ``load`` unpacks one tensor into float32; nothing is unpacked on opening.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from mie.errors import UnsupportedModelError
from mie.model.checkpoint import TensorInfo
from mie.model.gguf_format import read_table
from mie.model.safetensors import broken, map_file

# GGUF's word for an architecture -> the class name in a config.json
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFFile:
    """One ``.gguf`` file under Hugging Face's names.

    Raises ``CheckpointError`` if the file is unsound, ``UnsupportedModelError`` if it is sound but
    holds a model that the decoder does not do.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._bytes = map_file(self.path)
        settings, tensors = read_table(self._bytes, self.path)
        self.metadata: Mapping[str, Any] = settings
        self.architecture: str = self.setting("general.architecture", str)
        if self.architecture not in ARCHITECTURES:
            raise self._unsupported(
                f"architecture {self.architecture!r}, not of {list(ARCHITECTURES)}"
            )
        if settings.get("split.count", 1) != 1:
            raise self._unsupported(
                f"one part of a model that is split over {settings['split.count']} files"
            )
        self.tensors: Mapping[str, TensorInfo] = {
            self._hf_name(name): info for name, info in tensors.items()
        }

    def load(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor ``name``, unpacked into float32 and its rows in Hugging Face's order; or
        converted to ``dtype`` after that. Raises ``KeyError`` for an unknown name."""
        info = self.tensors[name]
        kind = GGMLQuantizationType[info.dtype]
        packed = np.frombuffer(self._bytes, np.uint8, info.nbytes, info.begin)
        rows = packed.reshape(*info.shape[:-1], -1)
        try:
            unpacked = dequantize(rows, kind).reshape(info.shape)
        except NotImplementedError:
            raise self._unsupported(
                f"{name} is packed as {info.dtype}, which the gguf package cannot unpack"
            ) from None
        tensor = torch.from_numpy(unpacked)
        if heads := self._interleaved_heads(name):
            if len(tensor) % (2 * heads) != 0:
                raise broken(self.path, f"{name}: {len(tensor)} rows, {heads} heads of pairs")
            tensor = deinterleave_rows(tensor, heads)
        return tensor if dtype is None else tensor.to(dtype)

    def setting(self, key: str, kind: type, default: Any = None) -> Any:
        """The setting ``key``, which must be a ``kind``; ``{arch}`` stands for the architecture."""
        if "{arch}" in key:
            key = key.replace("{arch}", self.architecture)
        value = self.metadata.get(key, default)
        if type(value) is not kind:
            raise broken(self.path, f"{key} is {value!r}, expected a value of type {kind.__name__}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """The setting ``key``, which must be a whole number of at least 1."""
        value = self.setting(key, int, default)
        if value < 1:
            raise broken(self.path, f"{key} is {value}, expected at least 1")
        return value

    def hf_config(self) -> dict[str, Any]:
        """The model's shape and constants, in the words of a Hugging Face ``config.json``."""
        hidden_size = self.size("{arch}.embedding_length")
        heads = self.size("{arch}.attention.head_count")
        head_dim = self.size("{arch}.attention.key_length", hidden_size // heads)
        rotated = self.size("{arch}.rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise self._unsupported(f"rotates {rotated} of the {head_dim} elements of a head")
        if "model.embed_tokens.weight" not in self.tensors:
            raise broken(self.path, "has no token_embd.weight, so no vocabulary")
        epsilon = self.setting("{arch}.attention.layer_norm_rms_epsilon", float)
        return {
            "model_type": self.architecture,
            "architectures": [ARCHITECTURES[self.architecture]],
            "hidden_size": hidden_size,
            "intermediate_size": self.size("{arch}.feed_forward_length"),
            "num_hidden_layers": self.size("{arch}.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.size("{arch}.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self.tensors,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in self.tensors,
            "rms_norm_eps": shortest(epsilon),
            "rope_theta": shortest(self.setting("{arch}.rope.freq_base", float, 10000.0)),
            "rope_scaling": self._rope_scaling(),
            "max_position_embeddings": self.size("{arch}.context_length"),
            "vocab_size": self.tensors["model.embed_tokens.weight"].shape[0],
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.metadata.get("tokenizer.ggml.eos_token_id"),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        del self._bytes  # the mapping ends with the last tensor that views it

    def _hf_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if kind in ("weight", "bias"):
            if stem in TOP_NAMES:
                return f"{TOP_NAMES[stem]}.{kind}"
            block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
            if block and block[2] in BLOCK_NAMES:
                return f"model.layers.{block[1]}.{BLOCK_NAMES[block[2]]}.{kind}"
        if name == "rope_freqs.weight":
            raise self._unsupported(
                f"{name}: rotary frequencies from a table (llama3 scaling in GGUF)"
            )
        raise self._unsupported(f"the tensor {name} has no place in a {self.architecture} model")

    def _interleaved_heads(self, name: str) -> int:
        """How many heads the rows of ``name`` are interleaved in; 0 if they are in order."""
        is_query, is_key = ".self_attn.q_proj." in name, ".self_attn.k_proj." in name
        if self.architecture != "llama" or not (is_query or is_key):
            return 0
        heads = self.size("{arch}.attention.head_count")
        return heads if is_query else self.size("{arch}.attention.head_count_kv", heads)

    def _rope_scaling(self) -> dict[str, Any] | None:
        scaling = self.setting("{arch}.rope.scaling.type", str, "none")
        if scaling == "none":
            return None
        prefix = f"{self.architecture}.rope.scaling."
        words = {"type": "rope_type", "factor": "factor"}
        if scaling == "yarn":
            words["original_context_length"] = "original_max_position_embeddings"
            words["yarn_beta_fast"] = "beta_fast"
            words["yarn_beta_slow"] = "beta_slow"
        elif scaling != "linear":
            raise self._unsupported(f"rope scaling {scaling!r}")
        config = {}
        for key, value in self.metadata.items():
            if key.startswith(prefix) and key != prefix + "finetuned":  # a remark, not a constant
                word = key.removeprefix(prefix)
                if word not in words:
                    raise self._unsupported(f"{key} = {value!r} in {scaling} rope scaling")
                config[words[word]] = shortest(value) if isinstance(value, float) else value
        return config

    def _unsupported(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.path}: {what}")


def deinterleave_rows(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Within each head: rows 0, 2, 4, … first, then 1, 3, 5, … (of a weight or a bias)."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # head, pair, which of the two
    return pairs.transpose(1, 2).reshape(rows.shape)


def shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
