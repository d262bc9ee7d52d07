"""The tokenizer inside a GGUF file, rebuilt as the one it was made from.

A GGUF file carries a vocabulary, merges and token types, but only the name of the rule that cuts a
text into words before any merge happens (``tokenizer.ggml.pre``). That rule decides tokens:

    "a  9"     GPT-2's rule       "a", " ", " 9"
               SmolLM's rule      "a", "  ", "9"       digits are split off first, one by one

Invariant: a name is mapped to its rule or refused. A wrong rule would not fail, it would feed the
model tokens that it has never seen in such a place.

The rules are those that the models' own ``tokenizer.json`` files state; the names are llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from mie.errors import CheckpointError, MieError, UnsupportedModelError

# gguf.TokenType
CONTROL, USER_DEFINED = 3, 4

# Words with their leading space, runs of digits, punctuation, line ends, other white space.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
    r"|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def read_gguf_tokenizer(
    path: Path,
) -> tuple[tokenizers.Tokenizer, dict[str, Any], dict[str, Any]]:
    """What ``tokenizer_from_metadata`` makes of the ``.gguf`` file at ``path``."""
    from mie.model.gguf import GGUFFile

    return tokenizer_from_metadata(GGUFFile(path).metadata)


def tokenizer_from_metadata(
    metadata: Mapping[str, Any],
) -> tuple[tokenizers.Tokenizer, dict[str, Any], dict[str, Any]]:
    """The contents of ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

    Raises ``UnsupportedModelError`` naming the vocabulary or pre-tokenizer that is not known here,
    and ``CheckpointError`` for keys that are missing or contradict each other.
    """
    try:
        return _build(metadata), _settings(metadata), _generation(metadata)
    except MieError:
        raise
    except KeyError as missing:
        raise CheckpointError(
            f"the GGUF file has no {missing}, which its tokenizer needs"
        ) from None
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"the GGUF file's tokenizer is broken: {error}") from error


def _settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {
        role: metadata.get(f"tokenizer.ggml.{key}_token_id")
        for role, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items()
    }
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": tokens[id] for role, id in ids.items() if id is not None},
    }
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        settings["chat_template"] = template
    return settings


def _generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ends = {metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")} - {None}
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted(ends),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _build(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    model = metadata["tokenizer.ggml.model"]
    if model != "gpt2":
        raise UnsupportedModelError(
            f"the GGUF file's vocabulary is of the kind '{model}'; only 'gpt2' (byte-level BPE) is "
            "rebuilt. Take the model as a Hugging Face folder with its tokenizer.json"
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"the GGUF file's pre-tokenizer '{pre}' is not known; "
            f"known are {', '.join(PRE_TOKENIZERS)}"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: id for id, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
            ignore_merges=pre in WHOLE_WORDS_FIRST,
        )
    )
    backend.normalizer = normalizers.NFC() if pre in COMPOSES_UNICODE else None
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    backend.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    if metadata.get("tokenizer.ggml.add_bos_token", pre in WHOLE_WORDS_FIRST):
        bos_id = metadata["tokenizer.ggml.bos_token_id"]
        backend.post_processor = processors.TemplateProcessing(
            single=[tokens[bos_id], "$A"], special_tokens=[(tokens[bos_id], bos_id)]
        )
    return backend


# -- the rules by name --------------------------------------------------------------------------


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(WORDS.format(digits=digits)), behavior="isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _words("{1,3}")


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _words("")


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "smollm2": _digits_then_gpt2,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "qwen2": _qwen2,
}
# Llama 3 looks a whole word up before it merges anything, and begins a text with its BOS.
WHOLE_WORDS_FIRST = {"llama-bpe", "llama3"}
# Qwen reads e + ´ as é.
COMPOSES_UNICODE = {"qwen2"}
