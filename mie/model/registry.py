"""What tells one model family from another.

Invariant: the decoder is one and the same for all families; a family is a handful of yes-or-no
answers about it. A model whose answers are not all here is refused by name, never run roughly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mie.errors import UnsupportedModelError


@dataclass(frozen=True)
class Family:
    """Where a decoder has biases, and whether queries and keys are normed before they turn."""

    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool


def _llama(config: Mapping[str, Any]) -> Family:
    bias = bool(config.get("attention_bias", False))
    return Family(bias, bias, bool(config.get("mlp_bias", False)), qk_norm=False)


def _qwen2(config: Mapping[str, Any]) -> Family:
    return Family(qkv_bias=True, output_bias=False, mlp_bias=False, qk_norm=False)


def _qwen3(config: Mapping[str, Any]) -> Family:
    bias = bool(config.get("attention_bias", False))
    return Family(bias, bias, mlp_bias=False, qk_norm=True)


FAMILIES = {"llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3}


def family(config: Mapping[str, Any]) -> Family:
    """The family of a ``config.json``, by its ``model_type``.

    Raises UnsupportedModelError for another family, or for a feature of a known one that the
    decoder does not have: sliding windows, an activation other than silu, packed weights.
    """
    name = config.get("model_type")
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"model_type {name!r} is not supported; {', '.join(FAMILIES)} are"
        )
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"activation {activation!r}: the decoder has silu only")
    sliding = config.get("use_sliding_window") or "sliding_attention" in (
        config.get("layer_types") or ()
    )
    if sliding:
        raise UnsupportedModelError(f"sliding-window attention ({config.get('sliding_window')})")
    if quantisation := config.get("quantization_config"):
        method = quantisation.get("quant_method", "of an unnamed method")
        raise UnsupportedModelError(f"weights quantised as {method!r}; load bf16, or a GGUF file")
    return FAMILIES[name](config)
