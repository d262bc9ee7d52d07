"""One door to every weight file: a folder, a ``.safetensors`` file or a ``.gguf`` file.

Invariant: exactly one checkpoint answers to a path. Which file of a folder that is, ``folder.py``
says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mie.model.checkpoint import Checkpoint
from mie.model.folder import find_weights
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
    if file is None:
        raise broken(path, "holds no .safetensors and no .gguf file")
    if file.name.endswith(".safetensors"):
        return safetensors_reader(file)
    if file.name.endswith(".safetensors.index.json"):
        return ShardedSafetensors(file, safetensors_reader)
    if file.name.endswith(".gguf"):
        return GGUFFile(file)
    raise broken(
        path, "is neither a folder nor a .safetensors, .safetensors.index.json or .gguf file"
    )
