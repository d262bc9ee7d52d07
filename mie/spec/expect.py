"""What a case expects of plain Python values, and the first place where it is not so.

Invariant: nothing here knows an engine, and nothing here needs torch: what the specs of the memory
parts compare is numbers and lists. What is wrong is reported as one counter-example, because one is
easier to think about than all of them. ``mie.spec.tensors`` does the same for tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class CounterExample(AssertionError):  # noqa: N818 (it is no mistake of ours)
    """A rule does not hold. The message says where, what was expected there and what came."""


def equal(got: Any, expected: Any, what: str) -> None:
    """Two plain Python values are the same."""
    if got != expected:
        raise CounterExample(f"{what}: expected {expected!r}, got {got!r}")


def refuses(
    what: str,
    call: Callable[..., object],
    *arguments: object,
    error: type[Exception] = Exception,
) -> None:
    """The call raises an ``error``, which is anything unless said otherwise."""
    wanted = "an error" if error is Exception else f"a {error.__name__}"
    try:
        call(*arguments)
    except (NotImplementedError, CounterExample):
        raise  # not written yet is not wrong, and what is wrong has been said
    except error:
        return
    except Exception as other:
        raise CounterExample(f"{what}: expected {wanted}, got {other!r}") from other
    raise CounterExample(f"{what}: expected {wanted}, and there was none")
