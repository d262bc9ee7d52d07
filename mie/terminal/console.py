"""What all commands share: the stream for everything but the answer, and common options.

Invariant: nothing heavy is imported; ``--help`` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A built-in name, a folder, a .gguf file, or org/name on Hugging Face.",
    ),
]
Dtype = Annotated[
    str, typer.Option(help="float32, bfloat16, float16; auto: bfloat16 for 1B and more on a GPU.")
]
Temperature = Annotated[
    float,
    typer.Option(min=0, help="0: always the most likely token; 1: drawn as the model has it."),
]
DrawSeed = Annotated[
    int | None, typer.Option("--seed", min=0, help="Repeat the draws of an earlier answer.")
]
NumBlocks = Annotated[
    int | None,
    typer.Option(min=2, help="Blocks of K/V memory, 16 tokens each. By default four contexts."),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1; auto: a GPU where there is one.")]


def stderr() -> Console:
    """Standard error, looked up anew: tests and shells put another stream there."""
    return Console(stderr=True, highlight=False)
