"""Run every case of a spec against one implementation.

Invariant: ``check`` returns a report, whatever the implementation does. A failing version is
something that a chapter shows on purpose, so raising is left to the report: ``.require()`` where a
version is meant to be right, ``.raise_if_failed()`` where it may still be a stub.
"""

from __future__ import annotations

import dis
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mie.spec.case import Case, cases
from mie.spec.expect import CounterExample
from mie.spec.location import location_of, location_of_error, name_of
from mie.spec.report import Outcome, Report, State

RAISE = dis.opmap["RAISE_VARARGS"]


def check(name: str, implementation: Any) -> Report:
    """Hold ``implementation`` against the spec of part ``name``, on the CPU.

    Raises ``UnknownSpecError`` for a part without a spec, and nothing that the implementation does.
    """
    rules = cases(name)
    begin = time.perf_counter()
    with on_the_cpu():
        outcomes = tuple(run(case, implementation) for case in rules)
    seconds = time.perf_counter() - begin
    location = location_of(implementation)
    return Report(name, name_of(implementation), location, outcomes, seconds)


def on_the_cpu() -> AbstractContextManager[object]:
    """In here torch makes its tensors on the CPU. A part that needs no torch doesn't wait for it.

    Whatever needs it, the spec or the implementation, has brought it by now.
    """
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None else torch.device("cpu")


def run(case: Case, implementation: Any) -> Outcome:
    """One case, to one of three ends."""
    try:
        case(implementation)
    except CounterExample as error:
        # What the implementation itself raised, if that is what the case objects to.
        at = location_of_error(error.__cause__, implementation) if error.__cause__ else None
        return Outcome(case, State.FAIL, str(error), at)
    except Exception as error:
        state = State.TODO if says_todo(error) else State.FAIL
        at = location_of_error(error, implementation)
        return Outcome(case, state, f"{type(error).__name__}: {error}", at)
    return Outcome(case, State.PASS)


def says_todo(error: Exception) -> bool:
    """Whether a ``raise NotImplementedError`` statement is behind it.

    torch raises the same class where it has no kernel for a dtype. That is a broken rule, not one
    that waits for its code; but it comes out of a call and not out of a ``raise``.
    """
    if not isinstance(error, NotImplementedError) or error.__traceback__ is None:
        return False
    innermost = error.__traceback__
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    return innermost.tb_frame.f_code.co_code[innermost.tb_lasti] == RAISE
