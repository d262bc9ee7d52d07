"""What a token stands for: bytes, not characters.

A vocabulary spells each token in printable characters, in one of two alphabets:

    byte level (GPT-2, Llama 3, Qwen, SmolLM2)      pieces (SentencePiece: Llama 2, Gemma)
        "Ġcaf"  ->  20 63 61 66                         "▁caf"   ->  20 63 61 66
        "Ã©"    ->  c3 a9                               "<0xC3>" ->  c3

One character may need several tokens (most emoji do), and then no token of them is text by itself.

Invariant: the text of a list of tokens is the UTF-8 reading of their bytes laid end to end, with
U+FFFD where the bytes are not UTF-8. Whole answers and streams are both read by this one rule, so
they cannot differ.

The byte alphabet is GPT-2's (Radford et al., 2019, the code published with it): bytes that print as
one visible Latin-1 character stand for themselves, the other 68 are moved up to U+0100 and beyond.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mie.errors import UnsupportedModelError


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes: visible character -> byte."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return alphabet


_BYTE_OF = byte_alphabet()
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class ByteLevelAlphabet:
    """Each character of a token is one byte. A token with any other character is plain text: that
    is how added tokens such as ``<|im_start|>`` and non-Latin ones come through."""

    strips_leading_space: bool = False

    def read(self, token: str) -> bytes:
        """The bytes that ``token`` stands for."""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:
            return token.encode("utf-8")


@dataclass(frozen=True)
class PieceAlphabet:
    """Tokens are text with ``▁`` for a space; ``<0xC3>`` is the byte C3, for what has no piece.

    ``strips_leading_space``: the encoder put a space before the text, so the first one is not the
    text's own.
    """

    strips_leading_space: bool

    def read(self, token: str) -> bytes:
        """The bytes that ``token`` stands for."""
        if match := _BYTE_PIECE.fullmatch(token):
            return bytes.fromhex(match[1])
        return token.replace("▁", " ").encode("utf-8")


Alphabet = ByteLevelAlphabet | PieceAlphabet


def alphabet_of(decoder: Mapping[str, Any] | None) -> Alphabet:
    """The alphabet that the ``decoder`` entry of a ``tokenizer.json`` describes.

    Raises ``UnsupportedModelError`` for a decoder that is neither of the two.
    """
    steps = _flatten(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelAlphabet()
    if kinds == ["Metaspace"]:
        return PieceAlphabet(strips_leading_space=steps[0].get("prepend_scheme") != "never")
    if "ByteFallback" in kinds and {*kinds} <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return PieceAlphabet(strips_leading_space="Strip" in kinds)
    raise UnsupportedModelError(
        f"the tokenizer's decoder is {' + '.join(kinds) or 'missing'}; "
        "byte-level and SentencePiece decoders are read"
    )


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]
