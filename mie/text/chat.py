"""A conversation becomes one text, by the template that came with the model.

    [{"role": "user", "content": "Hi"}]   ->   <|im_start|>user
                                               Hi<|im_end|>
                                               <|im_start|>assistant

A template is a program that a stranger wrote: it is part of the downloaded model.

Invariant: it runs in Jinja's immutable sandbox, can reach nothing but what it is given here, and
whatever goes wrong inside it is a ``ChatTemplateError`` with the template's own message, never a
crash of the engine.

What a template may use was set by Hugging Face's ``apply_chat_template``, and models need all of
it: ``break``, ``continue``, ``raise_exception``, ``strftime_now``, a ``tojson`` that leaves ``é``
alone, and the block ``generation``, which marks answers for training and is plain text here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mie.errors import ChatTemplateError

Message = Mapping[str, Any]
"""``role`` (system, user, assistant) and ``content``; a template may read more."""


class ChatTemplate:
    """One model's template. ``special_tokens`` are given to it by name, as ``bos_token`` and so on.

    ``source`` is None for a model without one: that is an error only when somebody renders.
    """

    def __init__(
        self, source: str | None, special_tokens: Mapping[str, str], name: str = "this model"
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._name = name

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text for ``messages``; ``add_generation_prompt`` ends it where the answer begins."""
        if self.source is None:
            raise ChatTemplateError(
                f"{self._name} has no chat template: it continues text and does not chat. "
                "Give it a plain prompt (mie generate --raw), or take a model trained for chat"
            )
        try:
            return _compile(self.source).render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # whatever a stranger's program raises is its refusal
            raise ChatTemplateError(f"the chat template refuses: {error}") from error


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}`` renders as what stands between."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
