"""One door to every weight file: a folder, a ``.safetensors`` file or a ``.gguf`` file.

Invariant: exactly one checkpoint answers to a path. Where a folder leaves two choices, we refuse
rather than guess, except that a whole ``model.safetensors`` goes before everything beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mie.model.checkpoint import Checkpoint
from mie.model.gguf import GGUFFile
from mie.model.safetensors import SafetensorsFile, broken
from mie.model.sharded import ShardedSafetensors


def open_checkpoint(
    path: str | Path, safetensors_reader: Callable[[Path], Checkpoint] = SafetensorsFile
) -> Checkpoint:
    """Open what lies at ``path``; ``safetensors_reader`` reads each ``.safetensors`` file of it.

    Raises ``CheckpointError`` if there is no weight file, or if the one there is unsound.
    """
    path = Path(path)
    file = find_weights(path) if path.is_dir() else path
    if file.name.endswith(".safetensors"):
        return safetensors_reader(file)
    if file.name.endswith(".safetensors.index.json"):
        return ShardedSafetensors(file, safetensors_reader)
    if file.name.endswith(".gguf"):
        return GGUFFile(file)
    raise broken(
        path, "is neither a folder nor a .safetensors, .safetensors.index.json or .gguf file"
    )


def find_weights(folder: Path) -> Path:
    """The file of ``folder`` to start from, in the order in which Hugging Face's loaders look."""
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (folder / name).is_file():
            return folder / name
    for suffix in (".safetensors", ".gguf"):
        found = sorted(file for file in folder.iterdir() if file.name.endswith(suffix))
        if len(found) > 1:
            raise broken(folder, f"has {len(found)} {suffix} files and no index, name one of them")
        if found:
            return found[0]
    raise broken(folder, "holds no .safetensors and no .gguf file")
