"""Which files of a folder are its weights.

    model.safetensors                      goes before everything beside it
    model.safetensors.index.json           names the files that belong together
    one .safetensors file, of any name
    one .gguf file, of any name

Invariant: at most one file answers. Where a folder leaves two choices we refuse rather than guess,
and whoever looks for weights (the hub before loading, the reader when loading) asks here. Nothing
but the index is read, and torch is not needed.
"""

from __future__ import annotations

import json
from pathlib import Path

from mie.errors import CheckpointError

INDEX = "model.safetensors.index.json"


def find_weights(folder: Path) -> Path | None:
    """The file of ``folder`` to start from, in the order in which Hugging Face's loaders look;
    None if there is none. Raises ``CheckpointError`` if several could be meant."""
    for name in ("model.safetensors", INDEX):
        if (folder / name).is_file():
            return folder / name
    for suffix in (".safetensors", ".gguf"):
        found = sorted(file for file in folder.iterdir() if file.name.endswith(suffix))
        if len(found) > 1:
            choices = ", ".join(file.name for file in found[:3])
            raise CheckpointError(
                f"{folder}: has {len(found)} {suffix} files and no index that says which: {choices}"
            )
        if found:
            return found[0]
    return None


def files_behind(start: Path) -> list[Path]:
    """``start`` itself, or the files that it joins if it is an index, whether they are there or
    not. Raises ``CheckpointError`` if it is an index that names none."""
    if start.name != INDEX:
        return [start]
    try:
        names = set(json.loads(start.read_text(encoding="utf-8"))["weight_map"].values())
        return [start.parent / name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{start} is not an index of weight files: {error!r}") from error
