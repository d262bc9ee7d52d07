"""What came out of a check, for a terminal, a notebook and a test.

Invariant: the state is a word and a mark, never only a colour, and a page says the same as a
terminal. One broken rule is told in full, the first: one at a time is enough to think about.

=======  ====================================================================================
TODO     some rule ran into a ``raise NotImplementedError``, and none was found broken
FAIL     at least one rule is broken: the rule, and the first counter-example
PASS     every rule holds: which implementation, from which line, how many rules
=======  ====================================================================================
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from enum import StrEnum

from rich.text import Text

from mie.spec.case import Case, SpecError
from mie.spec.location import Location
from mie.spec.page import code, sentence, table, text

WIDTH = 100


class State(StrEnum):
    TODO = "TODO"
    FAIL = "FAIL"
    PASS = "PASS"

    @property
    def mark(self) -> str:
        return {"TODO": "○", "FAIL": "✗", "PASS": "✓"}[self]


class SpecFailure(SpecError, AssertionError):  # noqa: N818 (the failure is the implementation's)
    """An implementation is not what its spec asks for. Carries the whole report."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report

    def _render_traceback_(self) -> list[str]:
        """IPython shows this in place of a traceback, which would lead into the checker."""
        return str(self).splitlines()


@dataclass(frozen=True)
class Outcome:
    """How one case ended; for TODO and FAIL, what was found, and at which line it was raised."""

    case: Case
    state: State
    found: str = ""
    at: Location | None = None

    def details(self) -> list[tuple[str, str]]:
        """Everything there is to say of a broken rule, the counter-example first."""
        said = [("counter-example", self.found)]
        if self.at is not None:
            said.append(("raised at", str(self.at)))
        return [*said, ("otherwise", self.case.otherwise), ("case", str(self.case.location))]


@dataclass(frozen=True)
class Report:
    """The outcomes of all cases of spec ``name``, run against ``implementation``."""

    name: str
    implementation: str
    location: Location | None
    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def state(self) -> State:
        states = {outcome.state for outcome in self.outcomes}
        return next(state for state in (State.FAIL, State.TODO, State.PASS) if state in states)

    @property
    def passed(self) -> bool:
        return self.state is State.PASS

    def having(self, state: State) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.state is state)

    def require(self) -> Report:
        """This report, if it is a PASS. Raises ``SpecFailure`` otherwise: for finished work."""
        if not self.passed:
            raise SpecFailure(self)
        return self

    def raise_if_failed(self) -> Report:
        """This report, if it is no FAIL. Raises ``SpecFailure`` otherwise: for work in progress."""
        if self.state is State.FAIL:
            raise SpecFailure(self)
        return self

    @property
    def headline(self) -> str:
        """One line: whose work, where it stands, how far it is."""
        total, todo = len(self.outcomes), self.having(State.TODO)
        match self.state:
            case State.PASS:
                count = f"all {total} rules hold"
            case State.FAIL:
                count = f"{len(self.having(State.FAIL))} of {total} rules broken"
            case State.TODO:
                count = f"{len(todo)} of {total} rules wait for code at {todo[0].at}"
        where = f" ({self.location})" if self.location else ""
        return f"{self.name}: {self.implementation}{where}, {count}, {self.seconds:.2f} s"

    def __str__(self) -> str:
        lines = [f"{self.state.mark} {self.state}  {self.headline}"]
        for number, outcome in enumerate(self.having(State.FAIL)):
            lines += ["", *_wrapped(f"✗ {outcome.case.name}: {outcome.case.rule}", indent=2)]
            details = outcome.details() if number == 0 else outcome.details()[:1]
            for word, said in details:
                lines += _wrapped(f"{word}: {said}", indent=6)
        return "\n".join(lines)

    __repr__ = __str__

    def __rich__(self) -> Text:
        """The same words for a terminal, which rich colours or not as the terminal allows."""
        words = Text(str(self))
        words.highlight_regex(r"(?m)^✓ PASS", "bold green")
        words.highlight_regex(r"(?m)^○ TODO", "bold yellow")
        words.highlight_regex(r"(?m)^✗ FAIL|^  ✗ \w+", "bold red")
        words.highlight_regex(r"(?m)^ {6}(counter-example|raised at|otherwise|case):", "dim")
        return words

    def _repr_html_(self) -> str:
        broken = self.having(State.FAIL)
        told = [_item(outcome, outcome.details()) for outcome in broken[:1]]
        told += [_item(outcome, outcome.details()[:1]) for outcome in broken[1:]]
        rows = [
            (_badge(outcome.state), code(outcome.case.name), sentence(outcome.case.rule))
            for outcome in self.outcomes
        ]
        return (
            f'<div class="mie-output mie-check mie-{self.state.lower()}">'
            f"<p>{_badge(self.state)} {text(self.headline)}</p>"
            + (f"<ul>{''.join(told)}</ul>" if told else "")
            + f"<details><summary>{len(rows)} rules</summary>"
            + table(("state", "case", "rule"), rows)
            + "</details></div>"
        )


def _badge(state: State) -> str:
    return f'<strong class="mie-state">{state.mark}&nbsp;{state}</strong>'


def _item(outcome: Outcome, details: list[tuple[str, str]]) -> str:
    said = "".join(f"<br><em>{word}:</em> {sentence(what)}" for word, what in details)
    return f"<li>{code(outcome.case.name)}: {sentence(outcome.case.rule)}{said}</li>"


def _wrapped(words: str, indent: int) -> list[str]:
    return textwrap.wrap(
        words, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2)
    )
