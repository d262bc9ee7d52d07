"""A GGUF file becomes a Hugging Face folder, which every other program can load too.

    model.Q4_1.gguf   ->   model.safetensors        weights in bf16, 2 bytes each
                           config.json              the model's shape
                           tokenizer.json           vocabulary and merges
                           tokenizer_config.json    special tokens and chat template
                           generation_config.json   which tokens end an answer

Invariant: the two describe one model. Weights differ by the rounding to bf16 and by nothing else;
the tokenizer is the same to the last token. Whoever changes what is written here raises
``CONVERSION`` in ``packaged.py``, so that folders made before are made anew.

Cost: one pass. The table at the head of a safetensors file is known before any weight is unpacked,
so the tensors follow one by one and only one of them is in memory.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mie.model.gguf import GGUFFile
from mie.text.gguf_tokenizer import tokenizer_from_metadata


def gguf_to_folder(gguf: Path, folder: Path) -> None:
    """Write the model in ``gguf`` into the existing ``folder``.

    Raises ``CheckpointError`` or ``UnsupportedModelError``; the folder is then incomplete.
    """
    with GGUFFile(gguf) as checkpoint:
        backend, settings, generation = tokenizer_from_metadata(checkpoint.metadata)
        backend.save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", settings)
        _write_json(folder / "generation_config.json", generation)
        _write_json(folder / "config.json", {**checkpoint.hf_config(), "dtype": "bfloat16"})
        write_bf16_safetensors(
            folder / "model.safetensors",
            {name: info.shape for name, info in checkpoint.tensors.items()},
            (checkpoint.load(name, torch.bfloat16) for name in checkpoint.tensors),
        )


def write_bf16_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[torch.Tensor]
) -> None:
    """One safetensors file with a tensor of two bytes an element for each entry of ``shapes``, in
    that order: eight bytes with the length of the table, the table, the tensors end to end."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)  # tensors begin at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for shape, tensor in zip(shapes.values(), tensors, strict=True):
            assert tensor.dtype == torch.bfloat16 and tensor.shape == shape
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
