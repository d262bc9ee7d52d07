"""Mini Inference Engine: three names are the whole public surface.

    from mie import LLM, SamplingParams
    print(LLM().generate("The capital of France is", SamplingParams(max_tokens=8)).text)

``EngineConfig`` has the settings. Invariant: importing ``mie`` is cheap. Torch comes in when
``LLM`` is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mie.config import EngineConfig
    from mie.engine.llm import LLM
    from mie.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]
_WHERE = {
    "LLM": "mie.engine.llm",
    "EngineConfig": "mie.config",
    "SamplingParams": "mie.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'mie' has no attribute {name!r}")
