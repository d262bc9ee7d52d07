"""Which device a model runs on, and in which numbers."""

from __future__ import annotations

import torch

from mie.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """``auto`` is a CUDA device where there is one. Raises ConfigError for a device that is not."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise ConfigError(f"no device called {name!r}; there are auto, cpu, cuda, cuda:1, …")
    if int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} was asked for, and torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return torch.device(name)


def auto_dtype(device: torch.device, num_parameters: int) -> torch.dtype:
    """bfloat16 for models of a billion parameters or more on a CUDA device, float32 elsewhere.

    Half the bytes are worth a lot where a step waits for them. A small model has few, and its best
    two tokens are often nearer than bfloat16 can tell: asked for the capital of France, SmolLM2
    prefers its first token to the second by 0.1 at 25, where two bfloat16 are 0.125 apart.
    """
    large = num_parameters >= 1_000_000_000
    return torch.bfloat16 if large and device.type == "cuda" else torch.float32
