"""A safetensors reader with nothing but open().read(), and the ways to get one wrong.

Every mutant exchanges one piece of ``PlainReader``, which is right as it stands.
"""

import json
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from mie.errors import CheckpointError
from mie.model.checkpoint import TensorInfo

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
} | {f"{kind[0].upper()}{bits}": getattr(torch, f"{kind}{bits}")
     for kind in ("int", "uint") for bits in (8, 16, 32, 64)}  # fmt: skip


class PlainReader:
    dtypes = DTYPES

    def __init__(self, path):
        self.path = Path(path)
        self.file = self.path.read_bytes()
        text, self.start = self.split()
        try:
            header = self.parse(text)
        except ValueError as error:  # of JSON and of UTF-8
            self.refuse(f"the header is not JSON: {error}")
        self.demand(isinstance(header, dict), "the header is not an object")
        self.tensors = {name: self.entry(said) for name, said in self.entries(header)}
        self.cover(sorted((info.begin, info.end) for info in self.tensors.values()))

    def refuse(self, why):
        raise CheckpointError(f"{self.path}: {why}")

    def demand(self, holds, why):
        if not holds:
            self.refuse(why)

    def split(self):
        self.demand(len(self.file) >= 8, f"{len(self.file)} bytes, 8 are the least")
        (length,) = struct.unpack("<Q", self.file[:8])
        self.demand(8 + length <= len(self.file), f"a header of {length} bytes does not fit")
        return self.file[8 : 8 + length], 8 + length

    def parse(self, text):
        def once(pairs):
            self.demand(len(dict(pairs)) == len(pairs), "a name stands twice")
            return dict(pairs)

        return json.loads(text.decode(), object_pairs_hook=once)

    def entries(self, header):
        return [(name, said) for name, said in header.items() if name != "__metadata__"]

    def entry(self, said):
        match said:
            case {"dtype": str(word), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
                pass
            case _:
                self.refuse(f"{said} is no tensor")
        self.demand(word in self.dtypes, f"unknown dtype {word}")
        self.demand(all(isinstance(size, int) and size >= 0 for size in shape), f"shape {shape}")
        self.demand(0 <= begin <= end <= len(self.file) - self.start, f"range {begin} to {end}")
        needed = self.size(shape) * self.dtypes[word].itemsize
        self.demand(end - begin == needed, f"{end - begin} bytes for {needed}")
        return TensorInfo(word, tuple(shape), self.start + begin, self.start + end)

    def size(self, shape):
        count = 1
        for size in shape:
            count *= size
        return count

    def cover(self, ranges):
        at = self.start
        for begin, end in ranges:
            self.demand(begin == at, f"a tensor begins at {begin}, not at {at}")
            at = end
        self.demand(at == len(self.file), f"the tensors end at {at}, the file elsewhere")

    def load(self, name, dtype=None):
        info = self.tensors[name]
        stored = self.numbers(self.file[info.begin : info.end], info.dtype).reshape(info.shape)
        return stored if dtype is None else stored.to(dtype)

    def numbers(self, data, word):
        dtype = self.dtypes[word]
        return (
            torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        )


class FilledLater(PlainReader):
    def __init__(self, path):
        super().__init__(path)
        self.found, self.tensors = self.tensors, {}

    def load(self, name, dtype=None):
        self.tensors = self.found
        return super().load(name, dtype)


class OffsetsFromData(PlainReader):
    def __init__(self, path):
        super().__init__(path)
        self.shift, self.tensors = self.start, {
            name: TensorInfo(info.dtype, info.shape, info.begin - self.start, info.end - self.start)
            for name, info in self.tensors.items()
        }  # fmt: skip
        self.file = self.file[self.start :]


class ForgetsTheFolder(PlainReader):
    def __init__(self, path):
        super().__init__(path)
        self.path = Path(self.path.name)


class ColumnsFirst(PlainReader):
    def load(self, name, dtype=None):
        stored = super().load(name, dtype)
        axes = range(stored.dim())
        return stored.reshape(stored.shape[::-1]).permute(*reversed(axes)) if axes else stored


class HeaderOrder(PlainReader):
    def load(self, name, dtype=None):
        names = list(self.tensors)
        earlier = (self.tensors[other] for other in names[: names.index(name)])
        begin = self.start + sum(info.nbytes for info in earlier)
        info = self.tensors[name]
        data = self.file[begin : begin + info.nbytes]
        stored = self.numbers(data, info.dtype).reshape(info.shape)
        return stored if dtype is None else stored.to(dtype)


class ThroughFloat16(PlainReader):
    def numbers(self, data, word):
        stored = super().numbers(data, word)
        return stored.half().bfloat16() if word == "BF16" else stored


EXCHANGED = DTYPES | {"F8_E4M3": torch.float8_e5m2, "F8_E5M2": torch.float8_e4m3fn}
FLOATS = {word: dtype for word, dtype in DTYPES.items() if dtype.is_floating_point}


class EightBitsExchanged(PlainReader):
    dtypes = EXCHANGED


class FloatsOnly(PlainReader):
    dtypes = FLOATS


class NeverConverts(PlainReader):
    def load(self, name, dtype=None):
        return super().load(name)


class ReinterpretsInsteadOfConverting(PlainReader):
    def load(self, name, dtype=None):
        stored = super().load(name)
        return stored if dtype is None else stored.view(torch.int16).to(dtype)


class NoEmptyBuffer(PlainReader):
    def numbers(self, data, word):
        return torch.frombuffer(bytearray(data), dtype=self.dtypes[word])


class ScalarsAreRows(PlainReader):
    def load(self, name, dtype=None):
        stored = super().load(name, dtype)
        return stored if stored.dim() else stored.reshape(1)


class WholeElementsFromTheStart(PlainReader):
    def load(self, name, dtype=None):
        info = self.tensors[name]
        size = self.dtypes[info.dtype].itemsize
        begin = info.begin // size * size
        data = self.file[begin : begin + info.nbytes]
        stored = self.numbers(data, info.dtype).reshape(info.shape)
        return stored if dtype is None else stored.to(dtype)


class HeaderAssumedPadded(PlainReader):
    def split(self):
        text, start = super().split()
        return text, (start + 7) // 8 * 8


class MetadataIsATensor(PlainReader):
    def entries(self, header):
        return list(header.items())


class LengthUnchecked(PlainReader):
    def split(self):
        (length,) = struct.unpack("<Q", self.file[:8])
        self.demand(8 + length <= len(self.file), f"a header of {length} bytes does not fit")
        return self.file[8 : 8 + length], 8 + length


class HeaderLengthBelieved(PlainReader):
    def split(self):
        with self.path.open("rb") as file:
            head = file.read(8)
            self.demand(len(head) == 8, f"{len(head)} bytes, 8 are the least")
            (length,) = struct.unpack("<Q", head)
            return file.read(length), 8 + length


class ParserErrorsEscape(PlainReader):
    def parse(self, text):
        try:
            return super().parse(text)
        except ValueError as error:
            raise SyntaxError(str(error)) from error


class ListsAllowed(PlainReader):
    def parse(self, text):
        return super().parse(text) or {}


class EntriesBelieved(PlainReader):
    def entry(self, said):
        word, shape, (begin, end) = said["dtype"], said["shape"], said["data_offsets"]
        self.demand(word in self.dtypes, f"unknown dtype {word}")
        return super().entry({"dtype": word, "shape": shape, "data_offsets": [begin, end]})


class Believing(PlainReader):
    """Only what each subclass below puts back is checked."""

    def entry(self, said):
        word, shape, (begin, end) = said["dtype"], said["shape"], said["data_offsets"]
        self.demand(word in self.dtypes, f"unknown dtype {word}")
        return TensorInfo(word, tuple(shape), self.start + begin, self.start + end)

    def cover(self, ranges):
        pass


class EndBelieved(Believing):
    pass


class LengthsAddedUp(Believing):
    def cover(self, ranges):
        total = sum(end - begin for begin, end in ranges)
        self.demand(total == len(self.file) - self.start, f"{total} bytes in all")


class ShapesBelieved(PlainReader):
    def size(self, shape):
        return self.wanted // self.item

    def entry(self, said):
        match said:
            case {"dtype": str(word), "data_offsets": [int(begin), int(end)]}:
                self.wanted = end - begin
                self.item = self.dtypes[word].itemsize if word in self.dtypes else 1
        return super().entry(said)


class SizesWrapAround(PlainReader):
    def size(self, shape):
        return int(np.prod(np.array(shape, dtype=np.int64)))


class UnknownIsBytes(PlainReader):
    class Bytes(dict):
        def __contains__(self, word):
            return True

        def __missing__(self, word):
            return torch.uint8

    dtypes = Bytes(DTYPES)


class OverlapUnseen(PlainReader):
    def cover(self, ranges):
        total = sum(end - begin for begin, end in ranges)
        self.demand(total == len(self.file) - self.start, f"{total} bytes in all")


class HolesUnseen(PlainReader):
    def cover(self, ranges):
        for (_, end), (begin, _) in pairwise(ranges):
            self.demand(begin >= end, f"a tensor begins at {begin}, before {end}")


class TailUnseen(PlainReader):
    def cover(self, ranges):
        at = self.start
        for begin, end in ranges:
            self.demand(begin == at, f"a tensor begins at {begin}, not at {at}")
            at = end


class LastNameWins(PlainReader):
    def parse(self, text):
        return json.loads(text.decode())


class FileUnnamed(PlainReader):
    def refuse(self, why):
        raise CheckpointError(why)


ALTERNATIVES = [PlainReader]
KILLED_BY = {
    FilledLater: "table_of_contents",
    OffsetsFromData: "byte_ranges",
    ForgetsTheFolder: "knows_its_path",
    ColumnsFirst: "rows_first",
    HeaderOrder: "any_order",
    ThroughFloat16: "bfloat16_bits",
    EightBitsExchanged: "every_dtype",
    FloatsOnly: "every_dtype",
    NeverConverts: "converts",
    ReinterpretsInsteadOfConverting: "converts",
    NoEmptyBuffer: "empty_and_scalar",
    ScalarsAreRows: "empty_and_scalar",
    WholeElementsFromTheStart: "any_alignment",
    HeaderAssumedPadded: "any_alignment",
    MetadataIsATensor: "metadata_is_no_tensor",
    LengthUnchecked: "no_header",
    HeaderLengthBelieved: "header_past_end",
    ParserErrorsEscape: "header_is_an_object",
    ListsAllowed: "header_is_an_object",
    EntriesBelieved: "whole_entries",
    EndBelieved: "data_truncated",
    LengthsAddedUp: "offsets_backwards",
    ShapesBelieved: "size_fits_shape",
    SizesWrapAround: "size_fits_shape",
    UnknownIsBytes: "unknown_dtype",
    OverlapUnseen: "no_overlap",
    HolesUnseen: "no_hole",
    TailUnseen: "no_hole",
    LastNameWins: "names_once",
    FileUnnamed: "no_header",
}
