"""A conversation in a terminal: ask, answer, keep both, ask again.

Invariant: ``messages`` is what the model is shown, and it alternates: a question enters together
with its answer or not at all. A question that is refused (it does not fit the context, the template
does not want it) leaves the conversation as it was, and the program running.

    Ctrl-C   while an answer comes: ends the answer, what was said stays said
             at the prompt: throws away the line
    Ctrl-D   leaves

Cost: the prompt of a turn is the whole conversation, of which the prefix cache has all but the last
block and what is new: a turn computes about as much as it adds.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mie.errors import RequestError
from mie.sampling_params import SamplingParams
from mie.terminal.answer import Answer, show_answer

if TYPE_CHECKING:
    from mie.engine.llm import LLM

COMMANDS = {
    "/reset": "forget everything said so far",
    "/stats": "what the last answer took, and how full the context is",
    "/help": "this list",
    "/exit": "leave (as does Ctrl-D); Ctrl-C stops an answer",
}


class Conversation:
    """One conversation with ``llm``. ``console`` is for all that is not an answer."""

    def __init__(
        self,
        llm: LLM,
        console: Console,
        *,
        system: str | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> None:
        self._llm = llm
        self._console = console
        self._max_tokens = max_tokens
        self._temperature, self._seed = temperature, seed
        self._opening: list[dict[str, Any]] = (
            [{"role": "system", "content": system}] if system is not None else []
        )
        self.messages = list(self._opening)
        self.last: Answer | None = None

    def run(self) -> None:
        """Until ``/exit`` or the end of the input."""
        while True:
            try:
                line = self._read().strip()
            except KeyboardInterrupt:
                self._say("\n/exit or Ctrl-D leaves")
                continue
            except EOFError:
                return
            if line == "/exit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self.ask(line)

    def ask(self, question: str) -> None:
        """One turn: show the answer to ``question``, and keep both."""
        turn = [*self.messages, {"role": "user", "content": question}]
        try:
            prompt = self._llm.chat_prompt(turn)
            pieces = self._llm.stream(prompt, self._sampling(len(prompt)))
        except RequestError as error:
            self._say(f"{error}\n/reset starts a new conversation")
            return
        self.last = show_answer(pieces, len(prompt), sys.stdout)
        self.messages = [*turn, {"role": "assistant", "content": self.last.text}]
        if self.last.ending in ("length", "kv_exhausted"):
            self._say(self._why_cut(self.last.ending))

    def _sampling(self, num_prompt_tokens: int) -> SamplingParams:
        """As far as there is room: an answer that is cut is better than a question refused."""
        room = max(1, self._limit() - num_prompt_tokens)
        longest = room if self._max_tokens is None else min(self._max_tokens, room)
        return SamplingParams(longest, self._temperature, self._seed)

    def _why_cut(self, ending: str) -> str:
        used, limit = self._used(), self._limit()
        if used >= limit or ending == "kv_exhausted":
            return f"the context of {limit} tokens is full: /reset starts a new conversation"
        return f"cut after {self._max_tokens} tokens (--max-tokens)"

    def _used(self) -> int:
        return self.last.num_prompt_tokens + self.last.num_tokens if self.last else 0

    def _limit(self) -> int:
        return self._llm.max_context

    def _command(self, line: str) -> None:
        match line:
            case "/reset":
                self.messages, self.last = list(self._opening), None
                self._say("a new conversation")
            case "/stats" if self.last is None:
                self._say("no answer yet")
            case "/stats":
                assert self.last is not None
                context = f"context: {self._used()} of {self._limit()} tokens"
                self._say(f"{self.last.summary()}\n{context}")
            case "/help":
                width = max(map(len, COMMANDS))
                self._say("\n".join(f"{name:{width}}  {what}" for name, what in COMMANDS.items()))
            case _:
                self._say(f"there is no {line}; there are {', '.join(COMMANDS)}")

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)

    def _read(self) -> str:
        """The next line; with a prompt and line editing where somebody sits at a terminal."""
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            return input()
        try:
            import readline  # noqa: F401 (input() uses it once it is imported)
        except ImportError:  # not on every system
            prompt = "› "
        else:
            prompt = "› " if self._console.no_color else "\001\033[1;36m\002› \001\033[0m\002"
        try:
            return input(prompt)
        except EOFError:
            sys.stdout.write("\n")
            raise
