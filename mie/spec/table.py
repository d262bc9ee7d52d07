"""The rules of a part as a table: rule · what breaks without it · case.

Invariant: made from the cases themselves, so a chapter can't promise a rule that nothing checks.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from mie.spec.case import Case, cases
from mie.spec.page import code, sentence, table, text
from mie.spec.report import WIDTH


@dataclass(frozen=True)
class Rules:
    """All rules of one spec. Prints as a numbered list, shows as a table in a notebook."""

    name: str
    cases: tuple[Case, ...]

    @property
    def caption(self) -> str:
        return f"What any {self.name} must do: {len(self.cases)} rules"

    def __str__(self) -> str:
        lines = [self.caption]
        for number, case in enumerate(self.cases, start=1):
            said = f"{number}. {case.rule} Otherwise: {case.otherwise} [{case.name}]"
            lines += ["", *textwrap.wrap(said, WIDTH, subsequent_indent="   ")]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = (
            (sentence(case.rule), sentence(_capital(case.otherwise)), code(case.name))
            for case in self.cases
        )
        head = ("rule", "what breaks without it", "case")
        return f'<div class="mie-output mie-rules">{table(head, rows, text(self.caption))}</div>'


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def rules(name: str) -> Rules:
    """The rules of part ``name``. Raises ``UnknownSpecError`` where there is no such spec."""
    return Rules(name, cases(name))
