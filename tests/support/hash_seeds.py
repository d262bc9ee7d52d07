"""A program in two fresh processes with different hash seeds: what differs depends on an order of
sets or dictionaries that nobody chose."""

from __future__ import annotations

import subprocess
import sys


def outputs_of(program: str) -> list[str]:
    """What each of the two prints. CalledProcessError where one fails."""
    return [
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
