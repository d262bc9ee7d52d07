"""A checkpoint cut into several safetensors files, held together by an index::

    model.safetensors.index.json        {"weight_map": {"model.norm.weight": "model-00002-of-..."}}
    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors

Invariant: index and files agree exactly. Each tensor lies in the one file that the index names for
it, no file holds another, and no name in the index leads out of its folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch

from mie.model.checkpoint import Checkpoint, TensorInfo
from mie.model.safetensors import (
    MAX_HEADER_BYTES,
    SafetensorsFile,
    broken,
    is_text,
    map_file,
    parse_json,
)


class ShardedSafetensors:
    """Several files that act as one. Raises ``CheckpointError`` unless all of them are sound.

    ``reader`` opens each file and can be any class with ``SafetensorsFile``'s interface.
    """

    def __init__(
        self, index_path: str | Path, reader: Callable[[Path], Checkpoint] = SafetensorsFile
    ) -> None:
        self.path = Path(index_path)
        index_bytes = map_file(self.path)
        if len(index_bytes) > MAX_HEADER_BYTES:
            raise broken(self.path, f"{len(index_bytes)} bytes, {MAX_HEADER_BYTES} are allowed")
        index = parse_json(index_bytes[:], self.path)
        weight_map = read_weight_map(index, self.path)
        metadata = index.get("metadata", {})
        if not isinstance(metadata, dict):
            raise broken(self.path, f"metadata is {metadata!r}, not an object")
        self.metadata: Mapping[str, str] = {key: str(value) for key, value in metadata.items()}

        shards = {}
        for file_name in sorted(set(weight_map.values())):
            shard_path = self.path.parent / file_name
            if not shard_path.is_file():
                raise broken(self.path, f"names the shard {file_name!r}, which is not there")
            shards[file_name] = reader(shard_path)
            check_shard(file_name, shards[file_name], weight_map, self.path)

        self._shard_of = {name: shards[file_name] for name, file_name in weight_map.items()}
        self.tensors: Mapping[str, TensorInfo] = {
            name: shard.tensors[name] for name, shard in self._shard_of.items()
        }

    def load(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor ``name``, from the shard that holds it; see ``SafetensorsFile.load``."""
        return self._shard_of[name].load(name, dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._shard_of = {}


def read_weight_map(index: dict[str, Any], path: Path) -> dict[str, str]:
    """Which file holds which tensor. A file name must stay inside the index's own folder."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise broken(path, f"weight_map is {weight_map!r}, not an object")
    for name, file_name in weight_map.items():
        if not is_text(file_name):
            raise broken(path, f"{name}: {file_name!r} is not a file name")
        if file_name in ("", ".", "..") or any(mark in file_name for mark in "/\\:\0"):
            raise broken(path, f"{name}: {file_name!r} leads out of the folder")
    return weight_map


def check_shard(
    file_name: str, shard: Checkpoint, weight_map: Mapping[str, str], path: Path
) -> None:
    """A shard holds the tensors that the index puts there: each of them, and no other."""
    for name in shard.tensors:
        if weight_map.get(name) != file_name:
            wanted = weight_map.get(name, "no file")
            raise broken(path, f"{name} is in {file_name}, the index has it in {wanted}")
    for name, expected in weight_map.items():
        if expected == file_name and name not in shard.tensors:
            raise broken(path, f"{name} should be in {file_name}, which does not have it")
