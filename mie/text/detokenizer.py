"""Tokens to text, one token at a time.

    tokens      "ok"      f0 9f      99 82        " é"         c3      end
    push()      "ok"      ""         "🙂"         " é"         ""
    flush()                                                            "\N{REPLACEMENT CHARACTER}"
    withheld              f0 9f                                c3

Invariant: all that has been pushed so far = the bytes of the text already given out + at most three
withheld bytes, and those three are the beginning of one character. So no piece ever holds half a
character, and the pieces of a stream joined together equal ``Tokenizer.decode`` of all its tokens.

A character is a Unicode code point. An emoji of several (a family, a flag) may come in several
pieces: each is text, and a terminal or browser joins them.

Cost: O(bytes of the token). Nothing is decoded twice, however long the answer is. A U+FFFD that the
text really contains is three ordinary bytes and goes straight through.
"""

from __future__ import annotations

import codecs

from mie.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one stream of tokens, given out as early as it is certain."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_space = tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes: often a word, sometimes nothing yet."""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is withheld when the stream ends: nothing, or U+FFFD for a broken character."""
        return self._utf8.decode(b"", final=True)
