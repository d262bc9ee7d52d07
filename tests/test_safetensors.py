"""The safetensors reader against the safetensors library, and against broken files.

The library is the oracle: on what it wrote we read the same bits, and what it refuses we refuse.
"""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from mie.errors import CheckpointError
from mie.model.checkpoint import Checkpoint
from mie.model.open import open_checkpoint
from mie.model.safetensors import (
    DTYPES,
    MAX_HEADER_BYTES,
    SafetensorsFile,
    parse_json,
    widen_bfloat16,
)
from mie.model.sharded import ShardedSafetensors

per_file = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
FLOATS = [dtype for dtype in DTYPES.values() if dtype.is_floating_point]


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes: what must be equal, for NaN as well."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


names = st.text(max_size=12).filter(lambda name: name != "__metadata__")
metadata_of_files = st.none() | st.dictionaries(st.text(max_size=8), st.text(max_size=8))


# -- what the library wrote ---------------------------------------------------------------------


@per_file
# Not without a tensor: then, with empty metadata, the library (0.8.0) writes what it cannot read.
@given(st.dictionaries(names, tensors(), min_size=1, max_size=5), metadata_of_files)
def test_reads_what_the_library_wrote(tmp_path, state, metadata):
    path = tmp_path / "model.safetensors"
    save_file(state, path, metadata)
    with SafetensorsFile(path) as ours:
        assert ours.metadata == (metadata or {})
        assert ours.tensors.keys() == state.keys()
        for name, expected in state.items():
            info, tensor = ours.tensors[name], ours.load(name)
            assert DTYPES[info.dtype] == tensor.dtype == expected.dtype
            assert info.shape == tensor.shape == expected.shape
            assert bits(tensor) == bits(expected)
            assert path.read_bytes()[info.begin : info.end] == bits(expected)


@per_file
@given(tensors(), st.sampled_from(FLOATS))
def test_converts_as_torch_does(tmp_path, tensor, dtype):
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    loaded = SafetensorsFile(tmp_path / "x.safetensors").load("x", dtype)
    expected = tensor.to(dtype)
    assert loaded.dtype == dtype
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0, equal_nan=True)


def test_every_bfloat16_is_the_upper_half_of_a_float32():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    wide = widen_bfloat16(every)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.view(torch.int32) & 0xFFFF, torch.zeros(2**16, dtype=torch.int32))
    torch.testing.assert_close(wide, every.float(), rtol=0, atol=0, equal_nan=True)


def test_widening_is_what_load_does(tmp_path):
    save_file({"w": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}, tmp_path / "w.safetensors")
    file = SafetensorsFile(tmp_path / "w.safetensors")
    assert file.load("w", torch.float32).tolist() == [1.5, -2.0]
    assert file.load("w").dtype == torch.bfloat16


def test_a_tensor_is_a_view_until_it_is_converted(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.arange(4.0)}, path)
    file = SafetensorsFile(path)
    assert file.load("w").data_ptr() == file.load("w").data_ptr()
    before = path.read_bytes()
    file.load("w").zero_()
    assert file.load("w").tolist() == [0, 0, 0, 0]
    assert path.read_bytes() == before


def test_tensors_outlive_the_file(tmp_path):
    save_file({"w": torch.arange(100_000)}, tmp_path / "m.safetensors")
    with SafetensorsFile(tmp_path / "m.safetensors") as file:
        tensor = file.load("w")
    del file
    assert torch.equal(tensor, torch.arange(100_000))


def test_both_readers_are_checkpoints(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    assert isinstance(SafetensorsFile(tmp_path / "model.safetensors"), Checkpoint)
    with pytest.raises(KeyError, match="v"):
        SafetensorsFile(tmp_path / "model.safetensors").load("v")


# -- files by hand ------------------------------------------------------------------------------


def entry(dtype: object = "F32", shape: object = (2,), begin: object = 0, end: object = 8) -> dict:
    shape = list(shape) if isinstance(shape, tuple) else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(folder: Path, header: object, data: bytes = bytes(8), name: str = "bad") -> Path:
    """A file whose header is ``header``: an object to put as JSON, or the bytes themselves."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / f"{name}.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_unaligned_tensors_are_read_by_copying(tmp_path):
    values = struct.pack("<d", 0.1) + b"\x01" + struct.pack("<f", 2.5)
    header = {
        "d": entry("F64", (1,), 0, 8),
        "b": entry("BOOL", (), 8, 9),
        "f": entry("F32", (1,), 9, 13),
    }
    for padding in range(8):  # JSON may end in spaces, and so begin the data anywhere
        text = json.dumps(header).encode() + b" " * padding
        file = SafetensorsFile(write(tmp_path, text, values))
        assert file.load("d").item() == 0.1
        assert file.load("b").item() is True
        assert file.load("f").item() == 2.5
        assert file.load("f").data_ptr() % 4 == 0


def test_tensors_may_lie_in_any_order(tmp_path):
    header = {"second": entry("U8", (1,), 1, 2), "first": entry("U8", (1,), 0, 1)}
    file = SafetensorsFile(write(tmp_path, header, b"\x07\x08"))
    assert (file.load("first").item(), file.load("second").item()) == (7, 8)


BROKEN_HEADERS = {
    "list": (b"[]", "is a list, not an object"),
    "number": (b"17", "is a int, not an object"),
    "syntax": (b'{"a":', "not JSON: "),
    "after": (b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}}', "not JSON: Extra data"),
    "utf8": (b'{"\xff":{}}', "not UTF-8: byte 2 is 0xff"),
    "bom": (b"\xef\xbb\xbf{}", "not JSON"),
    "utf16": ("{}".encode("utf-16-le"), "not JSON"),
    "nesting": (b"[" * 100_000, "JSON nested too deeply"),
    "digits": (b'{"a":' + b"1" * 5000 + b"}", "not JSON: "),
    "nan": (b'{"a":NaN}', "NaN is not a number in JSON"),
    "twice": (
        b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},'
        b'"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
        "the name 'a' appears 2 times",
    ),
    "field twice": (
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
        "the name 'dtype' appears 2 times",
    ),
    "minus zero": (
        b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[-0,8]}}',
        "the number -0 is negative",
    ),
    "surrogate": (
        b'{"\\ud800":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
        r"the name '\\ud800' is not text",
    ),
    "megabytes": ({"a": "x" * 1_000_000}, r"a: 'xxxx[x]* \.\.\.$"),
    "not an entry": ({"a": 5}, "a: 5 is not {dtype, shape"),
    "entry lacks": ({"a": {"dtype": "U8", "shape": [8]}}, "is not {dtype, shape, data_offsets}"),
    "entry has more": ({"a": entry() | {"crc": 1}}, "is not {dtype, shape, data_offsets}"),
    "dtype": ({"a": entry("F12")}, "a: unknown dtype 'F12', known: F64 F32"),
    "dtype list": ({"a": entry(["F32"])}, r"a: unknown dtype \['F32'\]"),
    "shape float": ({"a": entry(shape=(2.0,))}, r"a: shape \[2.0\] is not a list of counts"),
    "shape bool": ({"a": entry(shape=(True, 2))}, r"a: shape \[True, 2\] is not a list of counts"),
    "shape negative": ({"a": entry(shape=(-2, -1))}, "the number -2 is negative"),
    "shape text": ({"a": entry(shape="2")}, "a: shape '2' is not a list of counts"),
    "offset negative": ({"a": entry(begin=-8, end=0)}, "the number -8 is negative"),
    "offset float": ({"a": entry(begin=0.0)}, r"a: data_offsets \[0.0, 8\] are not two counts"),
    "offset bool": ({"a": entry(begin=False)}, r"data_offsets \[False, 8\] are not two counts"),
    "three offsets": (
        {"a": entry() | {"data_offsets": [0, 4, 8]}},
        r"a: data_offsets \[0, 4, 8\] are not two counts",
    ),
    "huge": (
        {"a": entry(shape=(2**40, 2**40))},
        r"a: shape \[1099511627776, 1099511627776\] is past 9223372036854775807 elements",
    ),
    "huge and empty": ({"a": entry(shape=(0, 2**70), end=0)}, "is past 9223372036854775807"),
    "backwards": ({"a": entry(begin=8, end=0)}, r"a: begins at byte \d+8, after its end at \d+0"),
    "past the end": ({"a": entry(end=9)}, r"a: ends at byte \d+, the file at \d+"),
    "too few bytes": ({"a": entry(end=4)}, r"a: 4 bytes, F32 \[2\] takes 8"),
    "too many bytes": ({"a": entry("U8")}, r"a: 8 bytes, U8 \[2\] takes 2"),
    "overlap": (
        {"a": entry(), "b": entry("U8", (1,), 7, 8)},
        r"b: begins at \d+, before \d+, in another",
    ),
    "empty inside another": (
        {"a": entry(), "b": entry("U8", (0,), 3, 3)},
        r"b: begins at \d+, before \d+, in another",
    ),
    "hole": (
        {"a": entry("U8", (1,), 0, 1), "b": entry("U8", (6,), 2, 8)},
        r"b: begins at \d+, unused from \d+ on",
    ),
    "hole in front": ({"a": entry("F32", (1,), 4, 8)}, r"a: begins at \d+, unused from"),
    "rest": ({"a": entry("U8", (7,), 0, 7)}, r"the tensors end at byte \d+, the file at \d+"),
    "no tensors": ({}, r"the tensors end at byte 10, the file at 18"),
    "metadata list": ({"__metadata__": []}, r"__metadata__ is \[\], not an object"),
    "metadata number": (
        {"__metadata__": {"step": 3}},
        "__metadata__ maps 'step' to 3, not text to text",
    ),
    "metadata surrogate": (
        b'{"__metadata__":{"a":"\\udfff"}}',
        "__metadata__ maps 'a' to '.*', not text to text",
    ),
}


@pytest.mark.parametrize("case", BROKEN_HEADERS)
def test_a_broken_header_is_refused_with_its_numbers(tmp_path, case):
    header, message = BROKEN_HEADERS[case]
    if case == "backwards":
        header = json.dumps(header).encode().ljust(92)  # so that the data begins at byte 100
    path = write(tmp_path, header)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < len(str(path)) + 600


@pytest.mark.parametrize("size", range(8))
def test_a_file_without_room_for_the_length(tmp_path, size):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match=f"bad.safetensors: is (empty, )?{size} bytes"):
        SafetensorsFile(path)


def test_a_header_of_gigabytes_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "bad.safetensors"
    for length in (MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(CheckpointError, match=f"header of {length} bytes, 100000000 are"):
            SafetensorsFile(path)


def test_a_header_past_the_end(tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", 3) + b"{}")
    with pytest.raises(CheckpointError, match="header ends at byte 11, the file at 10"):
        SafetensorsFile(path)


def test_no_such_file_and_no_file_at_all(tmp_path):
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: cannot be opened"):
        SafetensorsFile(tmp_path / "gone.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"folder\.safetensors: cannot be opened"):
        SafetensorsFile(tmp_path / "folder.safetensors")


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A file that the library wrote, with bytes of its front changed, cut, doubled or added."""
    state = draw(st.dictionaries(st.text("abé", min_size=1, max_size=2), tensors(), max_size=3))
    file = bytearray(save(state, draw(metadata_of_files)))
    front = 8 + struct.unpack_from("<Q", file)[0]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, min(front, len(file))))
        match draw(st.sampled_from(["set", "cut", "digit", "insert", "delete", "word"])):
            case "set":
                file[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "digit":
                file[at : at + 1] = draw(st.sampled_from([b"0", b"1", b"9", b"-", b"e", b"."]))
            case "insert":
                file[at:at] = draw(st.binary(min_size=1, max_size=4))
            case "delete":
                del file[at : at + draw(st.integers(1, 4))]
            case "word":
                old = draw(st.sampled_from([b'"F32"', b'"I8"', b"[0,", b"]", b"dtype", b"shape"]))
                new = draw(st.sampled_from([b'"BF16"', b"true", b"null", b"[", b"1e2,", b'"x"']))
                file = bytearray(bytes(file).replace(old, new, 1))
            case "cut":
                del file[draw(st.integers(0, len(file))) :]
    if draw(st.booleans()) and len(file) >= 8:  # keep the length honest, so that the JSON is met
        file[:8] = struct.pack("<Q", max(0, front - 8))
    return bytes(file)


@settings(per_file, max_examples=400)
@given(damaged())
def test_what_the_library_refuses_we_refuse(tmp_path, file):
    path = tmp_path / "damaged.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(file)
    try:
        ours = SafetensorsFile(path)
    except CheckpointError as error:
        assert str(path) in str(error)
        return
    try:
        theirs = safe_open(path, "pt")
    except SafetensorError as error:
        pytest.fail(f"we read what the library refuses: {error}")
    with theirs:
        assert sorted(ours.tensors) == sorted(theirs.keys())
        assert ours.metadata == (theirs.metadata() or {})
        for name in ours.tensors:
            assert bits(ours.load(name)) == bits(theirs.get_tensor(name))


@per_file
@given(st.binary(max_size=40))
def test_json_alone_never_raises_anything_else(text):
    with suppress(CheckpointError):
        assert isinstance(parse_json(text, Path("x")), dict)


# -- several files that act as one --------------------------------------------------------------

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(2), "c": torch.tensor(3)}, tmp_path / A)
    save_file({"b": torch.full((2,), 2.0, dtype=torch.bfloat16)}, tmp_path / B)
    put_index(tmp_path, {"a": A, "b": B, "c": A})
    return tmp_path


def put_index(folder: Path, weight_map: object, **more: object) -> None:
    index = {"metadata": {"total_size": 20}, "weight_map": weight_map} | more
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_act_as_one(sharded):
    with ShardedSafetensors(sharded / "model.safetensors.index.json") as both:
        assert isinstance(both, Checkpoint)
        assert sorted(both.tensors) == ["a", "b", "c"]
        assert both.tensors["b"].dtype == "BF16"
        assert both.load("a").tolist() == [1, 1]
        assert both.load("b", torch.float32).tolist() == [2, 2]
        assert both.load("c").item() == 3
        assert both.metadata == {"total_size": "20"}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": A, "b": B, "c": B}, f"c is in {A}, the index has it in {B}"),
        ({"a": A, "b": B}, f"c is in {A}, the index has it in no file"),
        ({"a": A, "b": B, "c": A, "d": B}, f"d should be in {B}, which does not have it"),
        ({"a": A, "b": "model-3.safetensors", "c": A}, "names the shard 'model-3.safetensors', wh"),
        ({"a": A, "b": "../" + B, "c": A}, f"b: '../{B}' leads out of the folder"),
        ({"a": A, "b": "..\\" + B, "c": A}, "leads out of the folder"),
        ({"a": A, "b": "/etc/passwd", "c": A}, "b: '/etc/passwd' leads out of the folder"),
        ({"a": A, "b": "c:x", "c": A}, "leads out of the folder"),
        ({"a": A, "b": "x\0", "c": A}, "leads out of the folder"),
        ({"a": A, "b": "..", "c": A}, "b: '..' leads out of the folder"),
        ({"a": A, "b": ".", "c": A}, "b: '.' leads out of the folder"),
        ({"a": A, "b": "", "c": A}, "b: '' leads out of the folder"),
        ({"a": A, "b": 7, "c": A}, "b: 7 is not a file name"),
        ([A, B], "weight_map is .*, not an object"),
        (None, "weight_map is None, not an object"),
    ],
)
def test_index_and_shards_must_agree(sharded, weight_map, message):
    put_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json: ") as caught:
        open_checkpoint(sharded)
    assert caught.match(message)


def test_a_tensor_in_two_shards(sharded):
    save_file({"b": torch.ones(1), "a": torch.ones(2)}, sharded / B)
    with pytest.raises(CheckpointError, match=f"a is in {B}, the index has it in {A}"):
        open_checkpoint(sharded)


def test_an_index_that_is_no_index(sharded, monkeypatch):
    put_index(sharded, {}, metadata=[])
    with pytest.raises(CheckpointError, match=r"metadata is \[\], not an object"):
        open_checkpoint(sharded)
    monkeypatch.setattr("mie.model.sharded.MAX_HEADER_BYTES", 10)
    with pytest.raises(CheckpointError, match=r"\d+ bytes, 10 are allowed"):
        open_checkpoint(sharded)


def test_a_broken_shard_names_itself(sharded):
    (sharded / B).write_bytes(b"12")
    with pytest.raises(CheckpointError, match=f"{B}: is 2 bytes"):
        open_checkpoint(sharded)


# -- the door -----------------------------------------------------------------------------------


def test_a_folder_leads_to_its_weights(sharded):
    assert isinstance(open_checkpoint(sharded), ShardedSafetensors)
    assert isinstance(open_checkpoint(str(sharded / A)), SafetensorsFile)
    index = sharded / "model.safetensors.index.json"
    assert open_checkpoint(index).path == index
    save_file({"whole": torch.ones(1)}, sharded / "model.safetensors")
    assert list(open_checkpoint(sharded).tensors) == ["whole"]


def test_a_lone_file_of_any_name_will_do(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    assert open_checkpoint(tmp_path).path == tmp_path / "other.safetensors"
    save_file({"x": torch.ones(1)}, tmp_path / "third.safetensors")
    with pytest.raises(CheckpointError, match=r"has 2 \.safetensors files and no index"):
        open_checkpoint(tmp_path)


def test_no_weights_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors and no \.gguf"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.bin: is neither a folder nor"):
        open_checkpoint(tmp_path / "model.bin")


def test_the_readers_class_is_used_for_every_file(sharded):
    opened = []

    class Counting(SafetensorsFile):
        def __init__(self, path: Path) -> None:
            opened.append(path.name)
            super().__init__(path)

    open_checkpoint(sharded, safetensors_reader=Counting)
    open_checkpoint(sharded / A, Counting)
    assert opened == [A, B, A]
