"""A folder that ``LLM`` can load in a moment: random weights, and a byte for a token.

Invariant: its answers wander and never end by themselves: it has no end-of-sequence token.
"""

from __future__ import annotations

from pathlib import Path

import torch

CONTEXT = 128


def write_small_model(folder: Path) -> None:
    """Weights, configuration and tokenizer of a model of two layers."""
    import tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = {letter: number for number, letter in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(bytes_alone, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
