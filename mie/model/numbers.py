"""Numbers out of a configuration that somebody else wrote.

Invariant: what comes back is a number in the range that was asked for; everything else is a
ConfigError that names the key and the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mie.errors import ConfigError


def count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """``config[key]`` as a whole number of at least 1; an absent or null key gives ``default``."""
    value = _get(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} is {value!r}; it must be a whole number of at least 1")
    return value


def positive(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """``config[key]`` as a finite number above 0; an absent or null key gives ``default``."""
    value = _get(config, key, default)
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{key} is {value!r}; it must be a number above 0")
    return float(value)


def _get(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    if value is None and default is None:
        raise ConfigError(f"the model's configuration lacks {key}")
    return default if value is None else value
