"""The safetensors format, read by hand: a table of contents, then one long array::

    byte 0        8                 8 + n                          end of file
         +--------+-----------------+------------------------------------+
         | n, u64 | n bytes of JSON | the tensors' bytes, end to end     |
         +--------+-----------------+------------------------------------+

The JSON maps a tensor's name to its dtype, its shape, and where its bytes begin and end, counted
from the end of the JSON. Numbers are little-endian, the last index of a shape moves fastest.

Invariant: once a file is open, every tensor in its table lies inside the file, has exactly as many
bytes as its shape needs, and shares none with another; no byte of the file is left over. A file
that breaks any of this is refused before a single weight is read.

Cost: opening reads the table only (some 30 kB of SmolLM2's 269 MB). The rest of the file is mapped,
not read: the operating system fetches a page when something first looks at it.

The format is described at https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import torch

from mie.errors import CheckpointError
from mie.model.checkpoint import TensorInfo

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

MAX_HEADER_BYTES = 100_000_000  # the format's own limit: a header cannot make us allocate gigabytes
MAX_ELEMENTS = 2**63 - 1  # torch counts elements in a signed 64-bit integer


class SafetensorsFile:
    """One ``.safetensors`` file. Raises ``CheckpointError`` if any of it is unsound."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._bytes = map_file(self.path)
        header_text, data_begin = split_header(self._bytes, self.path)
        header = parse_json(header_text, self.path)
        self.metadata: Mapping[str, str] = read_metadata(header, self.path)
        self.tensors: Mapping[str, TensorInfo] = {
            name: read_entry(name, entry, data_begin, len(self._bytes), self.path)
            for name, entry in header.items()
            if name != "__metadata__"
        }
        check_coverage(self.tensors, data_begin, len(self._bytes), self.path)

    def load(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor ``name``: a view of the mapped file, or a copy as another ``dtype``.

        Writing into a view changes memory, never the file. Raises ``KeyError`` for an
        unknown name.
        """
        info = self.tensors[name]
        flat = view_bytes(self._bytes, info.begin, info.end, DTYPES[info.dtype])
        tensor = flat.reshape(info.shape)
        if dtype == torch.float32 and info.dtype == "BF16":
            return widen_bfloat16(tensor)
        return tensor if dtype is None else tensor.to(dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        # Unmapping the file here would pull it from under the tensors that view it.
        # Letting go is enough: the mapping ends with the last of them.
        del self._bytes


def broken(path: Path, why: str) -> CheckpointError:
    """The error to raise about a weight file. Made here, so that every one names the file, and none
    repeats the megabytes that a broken file may hold."""
    return CheckpointError(f"{path}: {why if len(why) <= 500 else why[:500] + ' ...'}")


# -- bytes --------------------------------------------------------------------------------------


def map_file(path: Path) -> mmap.mmap:
    """The file as an array of bytes that is fetched page by page, when first looked at.

    Pages are private to us and copied when written to (``ACCESS_COPY``): the file cannot change.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise broken(path, f"cannot be opened ({error.strerror})") from error
    except ValueError:  # mmap maps no empty file
        raise broken(path, "is empty, 0 bytes") from None


def view_bytes(buffer: mmap.mmap, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes ``begin:end`` as a flat tensor of ``dtype``, not copied where alignment allows it."""
    if begin == end:
        return torch.empty(0, dtype=dtype)  # frombuffer takes no empty range
    raw = torch.frombuffer(buffer, dtype=torch.uint8, offset=begin, count=end - begin)
    if raw.data_ptr() % dtype.itemsize != 0:
        raw = raw.clone()  # a processor may refuse a float that starts between two floats
    return raw.view(dtype)


def widen_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    """bfloat16 to float32, exactly: a bfloat16 is the upper half of a float32, so move it up."""
    return tensor.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).view(torch.float32)


# -- the table of contents ----------------------------------------------------------------------


def split_header(buffer: mmap.mmap, path: Path) -> tuple[bytes, int]:
    """The JSON's bytes, and the offset at which the tensors' bytes begin."""
    if len(buffer) < 8:
        raise broken(path, f"is {len(buffer)} bytes long, a header's length takes 8")
    (length,) = struct.unpack_from("<Q", buffer)
    end = 8 + length
    if length > MAX_HEADER_BYTES:
        raise broken(path, f"header of {length} bytes, {MAX_HEADER_BYTES} are allowed")
    if end > len(buffer):
        raise broken(path, f"header ends at byte {end}, the file at {len(buffer)}")
    return buffer[8:end], end


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """One JSON object, stricter than Python's parser: names once, numbers that are counts."""

    def each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) < len(pairs):
            [(name, times)] = Counter(name for name, _ in pairs).most_common(1)
            raise broken(path, f"the name {name!r} appears {times} times")
        return unique

    def count(digits: str) -> int:
        if digits.startswith("-"):
            raise broken(path, f"the number {digits} is negative")
        return int(digits)

    def no_number(word: str) -> NoReturn:
        raise broken(path, f"{word} is not a number in JSON")

    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=each_name_once,
            parse_int=count,
            parse_constant=no_number,
        )
    except UnicodeDecodeError as error:
        raise broken(
            path, f"not UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    except RecursionError:
        raise broken(path, "JSON nested too deeply") from None
    except ValueError as error:
        raise broken(path, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise broken(path, f"the JSON is a {type(value).__name__}, not an object")
    return value


def read_metadata(header: dict[str, Any], path: Path) -> dict[str, str]:
    """The free text that a writer may leave under ``__metadata__``."""
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict):
        raise broken(path, f"__metadata__ is {metadata!r}, not an object")
    for key, value in metadata.items():
        if not is_text(key) or not is_text(value):
            raise broken(path, f"__metadata__ maps {key!r} to {value!r}, not text to text")
    return metadata


def read_entry(
    name: str,
    entry: Any,
    data_begin: int,
    file_end: int,
    path: Path,
) -> TensorInfo:
    """One line of the table, checked against itself and the length of the file."""
    if not is_text(name):
        raise broken(path, f"the name {name!r} is not text")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise broken(path, f"{name}: {entry!r} is not {{dtype, shape, data_offsets}}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]

    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise broken(path, f"{name}: unknown dtype {dtype!r}, known: {' '.join(DTYPES)}")
    if not is_list_of_counts(shape):
        raise broken(path, f"{name}: shape {shape!r} is not a list of counts")
    if not is_list_of_counts(offsets) or len(offsets) != 2:
        raise broken(path, f"{name}: data_offsets {offsets!r} are not two counts")
    elements = 1
    for size in shape:
        elements *= max(size, 1)  # an empty tensor's other sizes must fit torch as well
        if elements > MAX_ELEMENTS:
            raise broken(path, f"{name}: shape {shape} is past {MAX_ELEMENTS} elements")

    begin, end = data_begin + offsets[0], data_begin + offsets[1]
    given, needed = end - begin, math.prod(shape) * DTYPES[dtype].itemsize
    if begin > end:
        raise broken(path, f"{name}: begins at byte {begin}, after its end at {end}")
    if end > file_end:
        raise broken(path, f"{name}: ends at byte {end}, the file at {file_end}")
    if given != needed:
        raise broken(path, f"{name}: {given} bytes, {dtype} {shape} takes {needed}")
    return TensorInfo(dtype, tuple(shape), begin, end)


def check_coverage(
    tensors: Mapping[str, TensorInfo], data_begin: int, file_end: int, path: Path
) -> None:
    """In the order of their bytes, the tensors follow each other: no overlap, no hole."""
    expected = data_begin
    places = sorted((info.begin, info.end, name) for name, info in tensors.items())
    for begin, end, name in places:
        if begin < expected:
            raise broken(path, f"{name}: begins at {begin}, before {expected}, in another")
        if begin > expected:
            raise broken(path, f"{name}: begins at {begin}, unused from {expected} on")
        expected = end
    if expected != file_end:
        raise broken(path, f"the tensors end at byte {expected}, the file at {file_end}")


def is_list_of_counts(value: Any) -> bool:
    # Not isinstance: Python's True is an int, JSON's true is not a number.
    return isinstance(value, list) and all(type(item) is int for item in value)


def is_text(value: Any) -> bool:
    # JSON can spell half of a surrogate pair, "\ud800". No UTF-8 file can hold it as text.
    return isinstance(value, str) and re.search("[\ud800-\udfff]", value) is None
