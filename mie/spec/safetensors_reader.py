"""What any reader of a .safetensors file must do.

    reader = Reader(path)            raises CheckpointError unless the whole file is sound
    reader.tensors                   name -> TensorInfo(dtype, shape, begin, end), at once
    reader.load(name)                the tensor as stored; load(name, dtype) converts it

The file is an 8-byte little-endian length n, then n bytes of JSON, then the tensors' bytes, end to
end::

    {"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {...}}

Offsets count from the end of the JSON, ``TensorInfo``'s from the start of the file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path

import torch

from mie.errors import CheckpointError
from mie.model.checkpoint import Checkpoint
from mie.spec.expect import CounterExample, equal
from mie.spec.handmade import a_file, entry, float32
from mie.spec.tensors import close, has_dtype, same_bits

Reader = Callable[[Path], Checkpoint]


def refuses(reader: Reader, path: Path, why: str) -> None:
    """Opening ``path`` raises CheckpointError, and the message names the file."""
    try:
        reader(path)
    except CheckpointError as error:
        if path.name not in str(error):
            raise CounterExample(
                f"{why}: expected an error that names {path.name}, got {str(error)!r}"
            ) from error
    except NotImplementedError:
        raise  # not written yet is not wrong
    except Exception as error:
        raise CounterExample(
            f"{why}: expected a CheckpointError, got {type(error).__name__}: {error}"
        ) from error
    else:
        raise CounterExample(f"{why}: expected a CheckpointError, but the file was opened")


# -- what is in a sound file --------------------------------------------------------------------


def case_table_of_contents(reader: Reader) -> None:
    """`tensors` gives the name, dtype and shape of every tensor as soon as the file is open.
    Otherwise: the loader can't compare them with what the model needs before it reads gigabytes."""
    header = {"a.weight": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [4], 24, 32)}
    with a_file(header, bytes(32)) as path:
        got = {name: (info.dtype, info.shape) for name, info in reader(path).tensors.items()}
    equal(got, {"a.weight": ("F32", (2, 3)), "b": ("BF16", (4,))}, "name: (dtype, shape)")


def case_byte_ranges(reader: Reader) -> None:
    """`begin` and `end` count from the start of the file, header included. Otherwise: the size of a
    tensor is right and everything read there is the header, or the tensor before."""
    header = {"a": entry("U8", [3], 0, 3), "b": entry("U8", [5], 3, 8)}
    start = 8 + len(json.dumps(header))
    with a_file(header, bytes(8)) as path:
        got = {name: (info.begin, info.end) for name, info in reader(path).tensors.items()}
    equal(got, {"a": (start, start + 3), "b": (start + 3, start + 8)}, "name: (begin, end)")


def case_knows_its_path(reader: Reader) -> None:
    """`path` is the file that was opened. Otherwise: an error found later, when weights meet the
    model, can't say which of many files it is about."""
    with a_file({"a": entry("U8", [1], 0, 1)}, bytes(1)) as path:
        equal(reader(path).path, path, "path")


def case_rows_first(reader: Reader) -> None:
    """The last axis of a shape runs fastest in the file. Otherwise: every matrix is transposed, and
    the square ones don't even complain."""
    with a_file({"w": entry("F32", [2, 2], 0, 16)}, float32(1, 2, 3, 4)) as path:
        close(reader(path).load("w"), [[1, 2], [3, 4]], 0.0, "load('w') of the floats 1, 2, 3, 4")


def case_any_order(reader: Reader) -> None:
    """Where a tensor lies is said by its offsets, not by its place in the header. Otherwise: a file
    whose writer sorts names and not bytes gives each tensor another one's weights."""
    header = {"first": entry("F32", [1], 4, 8), "second": entry("F32", [1], 0, 4)}
    with a_file(header, float32(2, 1)) as path:
        opened = reader(path)
        close(opened.load("first"), [1.0], 0.0, "load('first')")
        close(opened.load("second"), [2.0], 0.0, "load('second')")


def case_bfloat16_bits(reader: Reader) -> None:
    """All 65,536 bfloat16 patterns come back bit for bit, NaN and -0 too. Otherwise: weights are
    rounded on their way in, and no one notices until two engines are compared."""
    patterns = struct.pack("<65536H", *range(65536))
    with a_file({"w": entry("BF16", [65536], 0, 131072)}, patterns) as path:
        got = reader(path).load("w")
    signed = [bits - 65536 if bits >= 32768 else bits for bits in range(65536)]
    expected = torch.tensor(signed, dtype=torch.int16).view(torch.bfloat16)
    same_bits(got, expected, "load('w') of every bfloat16")


def case_every_dtype(reader: Reader) -> None:
    """Each of the format's dtypes becomes torch's dtype of that name. Otherwise: a quantised or
    half-precision checkpoint is refused, or read as numbers of another kind."""
    for word, dtype, data, values in (
        ("F64", torch.float64, struct.pack("<2d", 1.5, -2), [1.5, -2]),
        ("F32", torch.float32, struct.pack("<2f", 1.5, -2), [1.5, -2]),
        ("F16", torch.float16, struct.pack("<2e", 1.5, -2), [1.5, -2]),
        ("BF16", torch.bfloat16, bytes.fromhex("c03f 00c0"), [1.5, -2]),
        ("F8_E4M3", torch.float8_e4m3fn, bytes.fromhex("3c 7e"), [1.5, 448]),
        ("F8_E5M2", torch.float8_e5m2, bytes.fromhex("3e 7b"), [1.5, 57344]),
        ("I64", torch.int64, struct.pack("<2q", 2**40, -1), [2**40, -1]),
        ("I32", torch.int32, struct.pack("<2i", 2**30, -1), [2**30, -1]),
        ("I16", torch.int16, struct.pack("<2h", 2**14, -1), [2**14, -1]),
        ("I8", torch.int8, struct.pack("<2b", 2**6, -1), [2**6, -1]),
        ("U64", torch.uint64, struct.pack("<2Q", 2**40, 1), [2**40, 1]),
        ("U32", torch.uint32, struct.pack("<2I", 2**31, 1), [2**31, 1]),
        ("U16", torch.uint16, struct.pack("<2H", 2**15, 1), [2**15, 1]),
        ("U8", torch.uint8, struct.pack("<2B", 2**7, 1), [2**7, 1]),
        ("BOOL", torch.bool, struct.pack("<2?", True, False), [1, 0]),
    ):
        with a_file({"w": entry(word, [2], 0, len(data))}, data) as path:
            got = reader(path).load("w")
        has_dtype(got, dtype, f"load('w') of {word}")
        close(got, values, 0.0, f"load('w') of {word}")


def case_converts(reader: Reader) -> None:
    """`load(name, dtype)` converts, exactly where the new dtype is wider. Otherwise: a bfloat16
    checkpoint can't run on a CPU in float32."""
    data = bytes.fromhex("803f 4940 00bf")  # 1, 3.140625 and -0.5 in bfloat16
    with a_file({"w": entry("BF16", [3], 0, 6)}, data) as path:
        got = reader(path).load("w", torch.float32)
    same_bits(got, torch.tensor([1.0, 3.140625, -0.5]), "load('w', torch.float32)")


def case_empty_and_scalar(reader: Reader) -> None:
    """Shape [0, 4] holds no element and shape [] holds one. Otherwise: files with an empty bias or
    a stored scale fail to load."""
    header = {"empty": entry("F32", [0, 4], 0, 0), "scale": entry("F32", [], 0, 4)}
    with a_file(header, float32(0.25)) as path:
        opened = reader(path)
        same_bits(opened.load("empty"), torch.empty(0, 4), "load('empty')")
        same_bits(opened.load("scale"), torch.tensor(0.25), "load('scale')")


def case_any_alignment(reader: Reader) -> None:
    """A tensor may begin at any byte, and the header may have any length, padded or not. Otherwise:
    a correct file, one byte longer than the writer's habit, can't be read."""
    data = b"\x01" + float32(0.5, 2.0)
    header = json.dumps({"one": entry("U8", [1], 0, 1), "two": entry("F32", [2], 1, 9)})
    for padding in range(8):
        with a_file(header + " " * padding, data) as path:
            got = reader(path).load("two")
        close(got, [0.5, 2.0], 0.0, f"load('two'), header padded by {padding} spaces")


def case_metadata_is_no_tensor(reader: Reader) -> None:
    """`__metadata__` is not among the tensors. Otherwise: every file that Hugging Face writes is
    refused for a tensor that no model has."""
    header = {"__metadata__": {"format": "pt"}, "w": entry("U8", [1], 0, 1)}
    with a_file(header, bytes(1)) as path:
        equal(list(reader(path).tensors), ["w"], "names of the tensors")


# -- what is wrong with an unsound one ----------------------------------------------------------


def case_no_header(reader: Reader) -> None:
    """A file too short for its header's length is refused. Otherwise: an interrupted download ends
    in a stack trace about struct that says nothing of the file."""
    for size in (0, 7):
        with a_file({}, b"") as path:
            path.write_bytes(bytes(size))
            refuses(reader, path, f"a file of {size} bytes")


def case_header_past_end(reader: Reader) -> None:
    """A header longer than the file is refused before memory is asked for. Otherwise: eight wrong
    bytes make the loader allocate until the machine stops."""
    for length in (3, 2**40, 2**63):
        with a_file("{}", b"", header_bytes=length) as path:
            refuses(reader, path, f"a header of {length} bytes in a file of 10")


def case_header_is_an_object(reader: Reader) -> None:
    """A header that is not one JSON object in UTF-8 is refused. Otherwise: whatever error the
    parser has reaches the user, without the name of the file."""
    for header in ("", "{", "[]", "null", b'{"\xff": 1}'):
        with a_file(header, b"") as path:
            refuses(reader, path, f"the header {header!r}")


def case_whole_entries(reader: Reader) -> None:
    """A tensor without dtype, shape or offsets, or with others than counts, is refused. Otherwise:
    a half-written header gives a model with a tensor nobody can load."""
    sound = entry("U8", [1], 0, 1)
    incomplete = [{key: sound[key] for key in sound if key != lacking} for lacking in sound]
    for broken in (
        *incomplete,
        sound | {"dtype": 8},
        sound | {"shape": 1},
        sound | {"shape": [1.0]},
        sound | {"data_offsets": [0]},
        sound | {"data_offsets": ["0", "1"]},
        None,
    ):
        with a_file({"w": broken}, bytes(1)) as path:
            refuses(reader, path, f"the entry {broken}")


def case_data_truncated(reader: Reader) -> None:
    """A tensor that ends after the file does is refused. Otherwise: the tail of the model is zeros,
    or the process dies at the first touch of a mapped page."""
    with a_file({"w": entry("F32", [4], 0, 16)}, float32(1, 2, 3)) as path:
        refuses(reader, path, "a tensor of 16 bytes, of which 12 are there")


def case_offsets_backwards(reader: Reader) -> None:
    """Negative offsets and shapes, and an end before its begin, are refused. Otherwise: Python
    counts from the end of the file, and the weights are whatever lies there."""
    for broken in (
        entry("U8", [4], -4, 0),
        entry("U8", [4], 4, 0),
        entry("U8", [-4], 4, 0),
        entry("U8", [-2, -2], 0, 4),
    ):
        with a_file({"w": broken}, bytes(4)) as path:
            refuses(reader, path, f"the entry {broken}")


def case_size_fits_shape(reader: Reader) -> None:
    """A tensor has as many bytes as its shape and dtype need, no fewer and no more. Otherwise: a
    shape can be made to claim memory that belongs to other tensors, or to none."""
    for shape, given in (([3], 8), ([1], 8), ([2, 2], 8), ([0], 8), ([2**62, 4], 0)):
        with a_file({"w": entry("F32", shape, 0, given)}, bytes(given)) as path:
            refuses(
                reader, path, f"shape {shape} of F32, {4 * math.prod(shape)} bytes, in {given},"
            )


def case_unknown_dtype(reader: Reader) -> None:
    """A dtype that is not one of the format's is refused, by its name. Otherwise: a file from next
    year is read as numbers of the wrong kind."""
    with a_file({"w": entry("F7", [1], 0, 1)}, bytes(1)) as path:
        refuses(reader, path, "the dtype F7")


def case_no_overlap(reader: Reader) -> None:
    """No byte belongs to two tensors. Otherwise: a small file claims to be a large model, and a
    change to one weight changes another."""
    for size, *ranges in (
        (6, (0, 4), (2, 6)),
        (4, (0, 4), (0, 4)),
        (4, (0, 4), (1, 3)),
        (8, (0, 4), (2, 6)),  # the lengths add up to the file's: adding is not enough
    ):
        header = {f"w{i}": entry("U8", [e - b], b, e) for i, (b, e) in enumerate(ranges)}
        with a_file(header, bytes(size)) as path:
            refuses(reader, path, f"the byte ranges {ranges} of {size} bytes")


def case_no_hole(reader: Reader) -> None:
    """No byte belongs to no tensor, between two of them or after the last. Otherwise: a file can
    carry what nobody sees, and the end of a longer file passes for this one's."""
    for size, *ranges in ((6, (0, 2), (4, 6)), (6, (2, 6)), (6, (0, 4)), (1,)):
        header = {f"w{i}": entry("U8", [e - b], b, e) for i, (b, e) in enumerate(ranges)}
        with a_file(header, bytes(size)) as path:
            refuses(reader, path, f"the byte ranges {ranges} of {size} bytes")


def case_names_once(reader: Reader) -> None:
    """A name that stands twice in the header is refused. Otherwise: JSON keeps the last one, other
    readers the first, and two engines run two models from one file."""
    one = json.dumps(entry("U8", [1], 0, 1))
    with a_file(f'{{"w": {one}, "w": {one}}}', bytes(1)) as path:
        refuses(reader, path, "the name 'w' twice")
