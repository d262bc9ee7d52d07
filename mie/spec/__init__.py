"""What each part of the engine must do, as small functions that run against any implementation.

Invariant: a spec knows a part by its public protocol alone. The engine's own class has no advantage
over a reader's, and nothing in the engine imports this package.

- ``check("rope", my_rope)`` runs the cases and returns a report: TODO, FAIL or PASS
- ``rules("rope")`` shows them as a table, ``cases("rope")`` gives them to pytest
- ``mie.spec.rope`` is the definition itself, ``mie.spec.stubs`` is where to begin

To add a spec: write ``mie/spec/<part>.py`` with ``case_*`` functions, add its name to
``mie.spec.case.SPECS``, its stub to ``stubs.py``, and a mutant for every case to ``tests/mutants``.
"""

from mie.spec.case import Case, SpecError, UnknownSpecError, cases, names
from mie.spec.checker import check
from mie.spec.report import Outcome, Report, SpecFailure, State
from mie.spec.table import Rules, rules
from mie.spec.target import TargetError, implementation_of

__all__ = [
    "Case",
    "Outcome",
    "Report",
    "Rules",
    "SpecError",
    "SpecFailure",
    "State",
    "TargetError",
    "UnknownSpecError",
    "cases",
    "check",
    "implementation_of",
    "names",
    "rules",
]
