"""A stream never shows half a character, and joined together it is the whole text."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models

from mie.text.detokenizer import Detokenizer
from mie.text.token_bytes import byte_alphabet
from mie.text.tokenizer import Tokenizer

FAMILY = "👩\u200d👩\u200d👧\u200d👦"
TEXTS = st.lists(
    st.sampled_from(
        [FAMILY, "🇫🇷", "é", "e\u0301", "\ufffd", "\ufffd\ufffd", "東京", " ", "ab", "\n"]
    )
    | st.text(max_size=4),
    max_size=8,
).map("".join)


def byte_level():
    """One token for each byte, one special token, and one for a whole U+FFFD."""
    spelling = {byte: character for character, byte in byte_alphabet().items()}
    tokens = [spelling[byte] for byte in range(256)]
    replacement = "".join(spelling[byte] for byte in "\ufffd".encode())
    vocabulary = {token: id for id, token in enumerate([*tokens, "<end>", replacement])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, {})


def pieces(*, strip):
    """Pieces of text with ``▁`` for a space, and one token for each byte."""
    words = ["▁", "▁▁", "▁the", "the", "▁caf", "é", "\ufffd", "東"]
    tokens = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, {})


TOKENIZERS = {
    "byte level": byte_level(),
    "pieces with a leading space": pieces(strip=True),
    "pieces": pieces(strip=False),
}


def stream(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(id) for id in ids] + [detokenizer.flush()]


@given(ids=st.lists(st.integers(0, 263), max_size=30))
@example(ids=[0xF0, 0x9F, 256, 0x99, 0x82])  # a special token inside a character
@example(ids=[0xE2, 0x82, 0x41, 0xE2, 0x82])  # broken in the middle, broken at the end
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_of_any_ids_join_to_the_decoded_whole(name, ids):
    tokenizer = TOKENIZERS[name]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@given(text=TEXTS)
def test_each_character_comes_whole_and_with_its_last_byte(text):
    """Fed byte by byte, every push gives nothing or exactly the character that it completes."""
    given_out = stream(TOKENIZERS["byte level"], text.encode())
    expected = [piece for c in text for piece in [""] * (len(c.encode()) - 1) + [c]]
    assert given_out == [*expected, ""]


@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=60))
def test_the_real_tokenizers_pieces_join_to_the_decoded_whole(smollm2_path, ids):
    tokenizer = load_once(smollm2_path)
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@given(text=TEXTS)
def test_the_real_tokenizer_streams_no_broken_character(smollm2_path, text):
    tokenizer = load_once(smollm2_path)
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    given_out = stream(tokenizer, ids)
    assert "".join(given_out) == whole
    assert sum(piece.count("\ufffd") for piece in given_out) == whole.count("\ufffd")


def test_an_emoji_waits_for_its_last_byte(smollm2_path):
    tokenizer = load_once(smollm2_path)
    ids = tokenizer.encode("ok 🫠!")
    given_out = stream(tokenizer, ids)
    assert "" in given_out[:-1] and "🫠" in given_out and given_out[-1] == ""


def test_a_true_replacement_character_is_not_withheld():
    assert stream(TOKENIZERS["byte level"], [257, 257]) == ["\ufffd", "\ufffd", ""]


def test_what_is_incomplete_at_the_end_comes_as_one_replacement_character():
    assert stream(TOKENIZERS["byte level"], [0x41, 0xF0, 0x9F, 0x99]) == ["A", "", "", "", "\ufffd"]


def test_only_the_first_space_of_the_text_is_the_tokenizers():
    tokenizer = TOKENIZERS["pieces with a leading space"]
    the = next(id for id in range(tokenizer.vocab_size) if tokenizer.token(id) == "▁the")
    assert stream(tokenizer, [0, the, the]) == ["", "the", " the", ""]


def test_nothing_but_the_beginning_of_one_character_is_kept():
    """The state stays under four bytes however long the stream is, so a push costs the same."""
    detokenizer = Detokenizer(TOKENIZERS["byte level"])
    for id in list("naïve 東京 🙂 ".encode() * 50):
        detokenizer.push(id)
        withheld, _ = detokenizer._utf8.getstate()
        assert len(withheld) <= 3


_LOADED: dict = {}


def load_once(path):
    """Hypothesis asks for the fixture in every example; loading takes a quarter of a second."""
    if path not in _LOADED:
        _LOADED[path] = Tokenizer.load(path)
    return _LOADED[path]
