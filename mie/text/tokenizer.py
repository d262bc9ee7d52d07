"""Text to tokens and back, exactly as the model was trained to see them.

Invariant: a tokenizer never adds a token of its own. ``encode`` gives the tokens of the text and
nothing else; what has to stand around it (a BOS, the roles of a chat) comes from the chat template,
or is asked for by ``encode_prompt``. So there is never a second BOS.

    text --encode--> [ids] --token_bytes--> bytes --UTF-8--> text

The work of splitting and merging is done by the ``tokenizers`` library. This file reads which
tokenizer a model has, and which of its tokens end an answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from mie.errors import CheckpointError, ModelNotFoundError, RequestError
from mie.text.chat import ChatTemplate, Message
from mie.text.token_bytes import alphabet_of


class Tokenizer:
    """A model's vocabulary and the rules around it.

    ``settings`` is the content of a ``tokenizer_config.json``. ``configs`` are the other files that
    may name an EOS (``config.json``, ``generation_config.json``): they disagree in practice, and an
    answer ends at a token that any of them names.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Mapping[str, Any],
        *configs: Mapping[str, Any],
        name: str = "this model",
    ) -> None:
        self._backend = backend
        decoder = backend.decoder
        self._alphabet = alphabet_of(decoder and json.loads(decoder.__getstate__()))
        self._special_ids = frozenset(
            id for id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] = {}
        special_tokens = _special_tokens(settings)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id: int | None = _first(_token_ids("bos", backend, special_tokens, configs))
        self.eos_ids: frozenset[int] = frozenset(
            _token_ids("eos", backend, special_tokens, configs)
        )
        self.chat_template = ChatTemplate(settings.get("chat_template"), special_tokens, name)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a Hugging Face folder or a ``.gguf`` file.

        Raises ``ModelNotFoundError`` if the folder has no ``tokenizer.json``, ``CheckpointError``
        for a broken file, ``UnsupportedModelError`` for a tokenizer that cannot be rebuilt.
        """
        path = Path(path)
        if path.suffix == ".gguf":
            from mie.text.gguf_tokenizer import read_gguf_tokenizer

            return cls(*read_gguf_tokenizer(path), name=path.name)
        if not (path / "tokenizer.json").is_file():
            raise ModelNotFoundError(
                f"{path} has no tokenizer.json (a tokenizer.model alone is not read)"
            )
        return cls(
            _read_backend(path / "tokenizer.json"),
            _read_settings(path),
            _read_json(path / "generation_config.json"),
            _read_json(path / "config.json"),
            name=path.name,
        )

    # -- text to tokens ------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``. A special token spelled out in it becomes that one token."""
        return self._encode(text, adding_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a whole prompt without a chat template: ``encode``, and around it what the
        tokenizer was set up to add (Llama 3 begins with its BOS; SmolLM2 and Qwen add nothing)."""
        ids = self._encode(text, adding_special_tokens=True)
        doubled = self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]
        return ids[1:] if doubled else ids

    def _encode(self, text: str, *, adding_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode: U+{ord(text[error.start]):04X} at {error.start}"
            ) from None
        return self._backend.encode(text, add_special_tokens=adding_special_tokens).ids

    # -- tokens to text ------------------------------------------------------------------------

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``, special tokens left out; U+FFFD where bytes are no character."""
        data = b"".join(map(self.token_bytes, ids))
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What ``token_id`` adds to a text: nothing for a special token or an id that has none."""
        known = self._bytes.get(token_id)
        if known is None:
            token = None if token_id in self._special_ids else self._backend.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if token is None else self._alphabet.read(token)
        return known

    def token(self, token_id: int) -> str | None:
        """How the vocabulary spells ``token_id``: to look at a token, not to read a text."""
        return self._backend.id_to_token(token_id)

    @property
    def strips_leading_space(self) -> bool:
        """Whether a text's first space is the tokenizer's and not the text's."""
        return self._alphabet.strips_leading_space

    # -- chats ---------------------------------------------------------------------------------

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The conversation as the one text that the model was trained on. ``ChatTemplateError``
        if there is no template, or if it refuses these messages."""
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The tokens after which the model answers. The template writes its own BOS, if any."""
        return self.encode(self.render_chat(messages))


# -- the files of a folder ----------------------------------------------------------------------


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise CheckpointError(f"{path} is not a tokenizer: {error}") from error


def _read_settings(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json``, with the chat template in it wherever the folder keeps that."""
    settings = _read_json(folder / "tokenizer_config.json")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several templates by name
        settings["chat_template"] = {entry["name"]: entry["template"] for entry in template}.get(
            "default"
        )
    if (own_file := folder / "chat_template.jinja").is_file():
        settings["chat_template"] = own_file.read_text(encoding="utf-8")
    return settings


def _read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object")
    return content


# -- which tokens are special -------------------------------------------------------------------


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """``{"eos_token": "<|im_end|>", ...}``; files write a token as a string or as an object."""
    tokens = {}
    for key, value in settings.items():
        if key.endswith("_token") and value is not None and not isinstance(value, bool):
            tokens[key] = value["content"] if isinstance(value, dict) else value
    return tokens


def _token_ids(
    role: str,
    backend: tokenizers.Tokenizer,
    special_tokens: Mapping[str, str],
    configs: Iterable[Mapping[str, Any]],
) -> list[int]:
    """Every id that any source gives the ``role`` (``bos``, ``eos``): one, a list, or null each."""
    ids = []
    if (token := special_tokens.get(f"{role}_token")) is not None:
        ids.append(backend.token_to_id(token))
    for config in configs:
        named = config.get(f"{role}_token_id")
        ids.extend(named if isinstance(named, list) else [named])
    return [id for id in ids if id is not None]


def _first(ids: Sequence[int]) -> int | None:
    return ids[0] if ids else None
