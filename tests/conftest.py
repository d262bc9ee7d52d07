"""What several test files share: small random models, and the real one where it is in the cache."""

from __future__ import annotations

import os

# Before the first import of triton, which decides then whether kernels are interpreted.
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

# Short: the same examples everywhere and every time. Long: new ones, to find what short does not.
settings.register_profile("short", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("MIE_PROFILE", "short"))


@pytest.fixture(scope="session")
def smollm2_path():
    """The folder of the book's model. ``make test`` fetches it first."""
    from mie.model import hub

    if not hub.is_cached(hub.DEFAULT_MODEL):
        pytest.skip("smollm2-135m is not in the cache; `mie doctor --fetch` puts it there")
    return hub.resolve(hub.DEFAULT_MODEL)


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    """The book's model, loaded in float32."""
    from mie import LLM

    return LLM(smollm2_path, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def small_path(tmp_path_factory):
    """The folder of a small model of random weights: see ``small_model``."""
    from small_model import write_small_model

    folder = tmp_path_factory.mktemp("small")
    write_small_model(folder)
    return folder
