"""The GGUF format's table of contents: typed settings, then one line per tensor::

    "GGUF" | version | tensor count | settings count
    settings    key, type, value                      (strings and arrays carry their length)
    tensors     name, sizes, type, offset             (fastest size first: torch's shape, reversed)
    padding     up to a multiple of the alignment
    data        each tensor starts at a multiple of the alignment

Invariant: reading never passes the end of the file, and every tensor in the table lies inside it,
is a whole number of its type's blocks, and shares no byte with another. Numbers are little-endian.

Cost: one pass over the settings. A tokenizer's 50,000 strings among them take about 0.1 s; the data
is not touched.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the numbers of
its types come from the ``gguf`` package.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from mie.model.checkpoint import TensorInfo
from mie.model.safetensors import broken

VERSIONS = (2, 3)
MAX_DIMENSIONS = 4

NUMBERS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


@dataclass
class Cursor:
    """A place in the file that only moves forward, and never past the end."""

    buffer: mmap.mmap
    path: Path
    offset: int = 0

    def advance(self, count: int) -> int:
        """Claim the next ``count`` bytes: where they begin."""
        begin, self.offset = self.offset, self.offset + count
        if self.offset > len(self.buffer):
            raise broken(
                self.path,
                f"needs {count} bytes at byte {begin}, but ends at byte {len(self.buffer)}",
            )
        return begin

    def number(self, code: str) -> Any:
        """One number, ``code`` in the letters of the ``struct`` module."""
        begin = self.advance(struct.calcsize("<" + code))
        return struct.unpack_from("<" + code, self.buffer, begin)[0]

    def text(self) -> str:
        """One string: its length in bytes, then UTF-8."""
        length = self.number("Q")
        begin = self.advance(length)
        try:
            return self.buffer[begin : begin + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise broken(
                self.path, f"the string at byte {begin} is not UTF-8: {error.reason}"
            ) from None

    def value(self) -> Any:
        """One typed value: the type's number, then a number, a string, or an array of either."""
        kind = self._kind()
        if kind != GGUFValueType.ARRAY:
            return self._scalar(kind)
        kind, count = self._kind(), self.number("Q")
        if kind == GGUFValueType.STRING:
            return [self.text() for _ in range(count)]
        if kind in NUMBERS:
            items = np.dtype("<" + NUMBERS[kind])
            begin = self.advance(count * items.itemsize)
            return np.frombuffer(self.buffer, items, count, begin).tolist()
        raise broken(self.path, f"has an array of {kind.name} before byte {self.offset}")

    def _kind(self) -> GGUFValueType:
        number = self.number("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            where = f"before byte {self.offset}"
            raise broken(self.path, f"unknown value type {number} {where}") from None

    def _scalar(self, kind: GGUFValueType) -> Any:
        return self.text() if kind == GGUFValueType.STRING else self.number(NUMBERS[kind])


def read_table(buffer: mmap.mmap, path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """The settings, and the tensors under the names that the file gives them."""
    cursor = Cursor(buffer, path)
    magic = buffer[cursor.advance(4) : cursor.offset]
    if magic != b"GGUF":
        raise broken(path, f"begins with {magic!r}, not b'GGUF'")
    version = cursor.number("I")
    if version not in VERSIONS:
        hint = ", written for a big-endian machine" if version & 0xFFFF == 0 else ""
        raise broken(path, f"GGUF version {version}{hint}; {VERSIONS} are read")
    tensor_count, setting_count = cursor.number("Q"), cursor.number("Q")

    settings: dict[str, Any] = {}
    for _ in range(setting_count):
        key = cursor.text()
        if key in settings:
            raise broken(
                path, f"the setting {key} appears twice, again before byte {cursor.offset}"
            )
        settings[key] = cursor.value()

    lines = [read_line(cursor) for _ in range(tensor_count)]
    alignment = settings.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise broken(path, f"general.alignment is {alignment!r}, not a power of two from 8 on")
    data_begin = (cursor.offset + alignment - 1) // alignment * alignment

    tensors: dict[str, TensorInfo] = {}
    for name, kind, shape, offset in lines:
        if name in tensors:
            raise broken(path, f"the tensor {name} appears twice")
        if offset % alignment != 0:
            raise broken(path, f"{name}: offset {offset} is not a multiple of {alignment}")
        begin = data_begin + offset
        end = begin + byte_count(name, kind, shape, path)
        if end > len(buffer):
            raise broken(path, f"{name}: ends at byte {end}, the file at {len(buffer)}")
        tensors[name] = TensorInfo(kind.name, shape, begin, end)
    check_overlap(tensors, path)
    return settings, tensors


def read_line(cursor: Cursor) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    """One line of the tensors' table: name, type, shape in torch's order, offset into the data."""
    name, dimensions = cursor.text(), cursor.number("I")
    if dimensions > MAX_DIMENSIONS:
        raise broken(
            cursor.path, f"{name}: {dimensions} dimensions, at most {MAX_DIMENSIONS} are allowed"
        )
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    number, offset = cursor.number("I"), cursor.number("Q")
    try:
        return name, GGMLQuantizationType(number), shape, offset
    except ValueError:
        raise broken(cursor.path, f"{name}: unknown tensor type {number}") from None


def byte_count(name: str, kind: GGMLQuantizationType, shape: tuple[int, ...], path: Path) -> int:
    """Bytes of a tensor: a row is cut into blocks, each of a fixed number of weights and bytes."""
    weights_per_block, bytes_per_block = GGML_QUANT_SIZES[kind]
    if 0 in shape:
        raise broken(path, f"{name}: shape {shape} holds nothing")
    row = shape[-1] if shape else 1
    if row % weights_per_block != 0:
        raise broken(
            path, f"{name}: a row of {row} is no whole number of blocks of {weights_per_block}"
        )
    return math.prod(shape) // weights_per_block * bytes_per_block


def check_overlap(tensors: dict[str, TensorInfo], path: Path) -> None:
    """No byte belongs to two tensors. Gaps are allowed: they are the padding."""
    free_from = 0
    for name, info in sorted(tensors.items(), key=lambda item: item[1].begin):
        if info.begin < free_from:
            raise broken(
                path, f"{name}: begins at byte {info.begin}, inside one that ends at {free_from}"
            )
        free_from = info.end
