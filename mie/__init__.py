"""Mini Inference Engine: ``LLM`` is the whole public surface so far.

    from mie import LLM
    print(LLM().generate("The capital of France is", max_tokens=8).text)

Invariant: importing ``mie`` is cheap. Torch comes in when ``LLM`` is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mie.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from mie.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'mie' has no attribute {name!r}")
