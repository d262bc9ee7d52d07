"""The GGUF reader against the gguf package: its writer makes the files, its reader judges."""

from __future__ import annotations

import copy
import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as fn
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mie.errors import CheckpointError, UnsupportedModelError
from mie.model.checkpoint import Checkpoint
from mie.model.gguf import GGUFFile, deinterleave_rows
from mie.model.gguf_format import read_table
from mie.model.kv_cache import NoCache
from mie.model.open import open_checkpoint
from mie.model.safetensors import map_file

per_file = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q8_0]
E, F, H, G, D, V = 64, 96, 2, 1, 32, 40  # a model of one block, its rows whole numbers of blocks


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def model(biases: bool = False, qk_norm: bool = False, untied: bool = False) -> dict:
    """The weights of one block, by the names of llama.cpp."""
    weights = {
        "token_embd.weight": noise(V, E),
        "output_norm.weight": noise(E),
        "blk.0.attn_norm.weight": noise(E),
        "blk.0.attn_q.weight": noise(H * D, E),
        "blk.0.attn_k.weight": noise(G * D, E),
        "blk.0.attn_v.weight": noise(G * D, E),
        "blk.0.attn_output.weight": noise(E, H * D),
        "blk.0.ffn_norm.weight": noise(E),
        "blk.0.ffn_gate.weight": noise(F, E),
        "blk.0.ffn_up.weight": noise(F, E),
        "blk.0.ffn_down.weight": noise(E, F),
    }
    if biases:
        weights |= {f"blk.0.attn_{x}.bias": noise(n * D) for x, n in [("q", H), ("k", G), ("v", G)]}
    if qk_norm:
        weights |= {f"blk.0.attn_{x}_norm.weight": noise(D) for x in "qk"}
    if untied:
        weights["output.weight"] = noise(V, E)
    return weights


def write(
    folder: Path,
    weights: dict[str, np.ndarray],
    arch: str = "llama",
    kind: Type = Type.F32,
    settings: dict[str, Any] | None = None,
) -> Path:
    """A GGUF file. Matrices are packed as ``kind``; ``settings`` override, None leaves one out."""
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, arch)
    known = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": E,
        "feed_forward_length": F,
        "attention.head_count": H,
        "attention.head_count_kv": G,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    for key, value in (known | (settings or {})).items():
        key = key if key.startswith(("general.", "split.", "tokenizer.")) else f"{arch}.{key}"
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        if value is not None:
            add[type(value)](key, value)
    for name, weight in weights.items():
        packed = kind if weight.ndim == 2 else Type.F32
        writer.add_tensor(name, gguf.quants.quantize(weight, packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# -- what the package wrote ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_unpacks_exactly_as_the_package_does(tmp_path, kind):
    path = write(tmp_path, model(), "qwen2", kind)  # qwen2: no rows to put back
    oracle = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with GGUFFile(path) as file:
        assert isinstance(file, Checkpoint)
        assert len(file.tensors) == len(oracle) == 11
        for theirs, ours in [
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("output_norm.weight", "model.norm.weight"),
            ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
            ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight"),
        ]:
            expected = gguf.quants.dequantize(oracle[theirs].data, oracle[theirs].tensor_type)
            info, loaded = file.tensors[ours], file.load(ours)
            assert loaded.dtype == torch.float32
            assert torch.equal(loaded, torch.from_numpy(np.array(expected)))
            assert info.dtype == oracle[theirs].tensor_type.name
            assert info.shape == loaded.shape == tuple(oracle[theirs].shape.tolist()[::-1])
            assert (info.begin, info.nbytes) == (
                oracle[theirs].data_offset,
                oracle[theirs].n_bytes,
            )


def test_q4_1_is_32_weights_in_20_bytes(tmp_path):
    path = write(tmp_path, {"token_embd.weight": noise(1, 32)}, "qwen2", Type.Q4_1)
    file = GGUFFile(path)
    info = file.tensors["model.embed_tokens.weight"]
    d, m, packed = struct.unpack("<ee16s", path.read_bytes()[info.begin : info.end])
    by_hand = [d * (byte & 15) + m for byte in packed] + [d * (byte >> 4) + m for byte in packed]
    assert info.nbytes == 20
    torch.testing.assert_close(
        file.load("model.embed_tokens.weight")[0], torch.tensor(by_hand), rtol=1e-6, atol=1e-6
    )


def test_metadata_is_what_the_package_reads(tmp_path):
    extra = {
        "tokenizer.ggml.tokens": ["a", "é", "", "🙂"],
        "tokenizer.ggml.scores": [0.5, -1.0, 2.0, 0.0],
        "tokenizer.ggml.token_type": [1, 3, -2, 1],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }
    path = write(tmp_path, model(), settings=extra)
    theirs = gguf.GGUFReader(path).fields
    ours = GGUFFile(path).metadata
    assert list(ours) == [key for key in theirs if not key.startswith("GGUF.")]
    assert ours == {key: theirs[key].contents() for key in ours}
    assert ours["tokenizer.ggml.tokens"] == ["a", "é", "", "🙂"]
    assert ours["tokenizer.ggml.add_bos_token"] is True


def test_every_kind_of_value(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    add = [
        (writer.add_uint8, 200), (writer.add_int8, -100), (writer.add_uint16, 60_000),
        (writer.add_int16, -30_000), (writer.add_uint32, 4_000_000_000), (writer.add_int32, -7),
        (writer.add_uint64, 2**63), (writer.add_int64, -(2**62)), (writer.add_float32, 0.5),
        (writer.add_float64, 0.1), (writer.add_bool, False), (writer.add_string, "ü"),
    ]  # fmt: skip
    for method, value in add:
        method(method.__name__, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GGUFFile(tmp_path / "model.gguf").metadata
    assert [metadata[method.__name__] for method, _ in add] == [value for _, value in add]


# -- names, rows and configuration --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        ("llama", {}),
        ("llama", {"biases": True}),
        ("qwen2", {"biases": True}),
        ("qwen3", {"qk_norm": True, "untied": True}),
    ],
)
def test_names_are_hugging_faces(tmp_path, arch, kind):
    """The names that transformers' own model of that family uses."""
    transformers = pytest.importorskip("transformers")
    file = GGUFFile(write(tmp_path, model(**kind), arch))
    config = file.hf_config()
    assert config["model_type"] == arch
    config_class = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config_class)
    wanted = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    if arch == "llama" and kind:
        wanted.pop("model.layers.0.self_attn.o_proj.bias")  # GGUF's llama has none
    assert {name: info.shape for name, info in file.tensors.items()} == wanted


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """By hand, row by row: what llama.cpp's converter does to the rows of Q and K."""
    out, size = np.empty_like(rows), len(rows) // heads
    for head in range(heads):
        for pair in range(size // 2):
            for half in range(2):
                out[head * size + 2 * pair + half] = rows[head * size + half * size // 2 + pair]
    return out


def test_llama_rows_are_put_back_and_qwen_rows_left_alone(tmp_path):
    weights = model(biases=True)
    packed = dict(weights)
    for name, heads in [("q", H), ("k", G)]:
        for kind in ("weight", "bias"):
            key = f"blk.0.attn_{name}.{kind}"
            packed[key] = interleave(weights[key], heads)
            assert not np.array_equal(packed[key], weights[key])
    llama = GGUFFile(write(tmp_path, packed, "llama"))
    for x in "qkv":
        for kind in ("weight", "bias"):
            loaded = llama.load(f"model.layers.0.self_attn.{x}_proj.{kind}")
            assert torch.equal(loaded, torch.from_numpy(weights[f"blk.0.attn_{x}.{kind}"]))
    qwen = GGUFFile(write(tmp_path, packed, "qwen2"))
    for x in "qkv":
        loaded = qwen.load(f"model.layers.0.self_attn.{x}_proj.weight")
        assert torch.equal(loaded, torch.from_numpy(packed[f"blk.0.attn_{x}.weight"]))


@given(st.integers(1, 4), st.integers(1, 6), st.lists(st.integers(1, 3), max_size=1))
def test_deinterleaving_undoes_interleaving(heads, pairs, columns):
    rows = torch.arange(heads * pairs * 2 * torch.Size(columns).numel(), dtype=torch.float32)
    rows = rows.reshape(heads * pairs * 2, *columns)
    packed = torch.from_numpy(interleave(rows.numpy(), heads))
    as_axes = rows.reshape(heads, 2, pairs, *columns).swapaxes(1, 2)  # the converter's own words
    assert torch.equal(as_axes.reshape(rows.shape), packed)
    assert torch.equal(deinterleave_rows(packed, heads), rows)


def test_rotating_neighbours_on_packed_rows_is_rotating_halves_on_ours(tmp_path):
    """Why the rows are permuted at all: each layout has its own rotation, the scores are equal."""
    angles = torch.rand(D // 2)
    cos, sin = angles.cos(), angles.sin()
    packed = torch.from_numpy(noise(D, E))
    hidden = torch.from_numpy(noise(E))
    even, odd = (packed @ hidden)[0::2], (packed @ hidden)[1::2]
    neighbours = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=1).flatten()
    first, second = (deinterleave_rows(packed, 1) @ hidden).split(D // 2)
    halves = torch.cat([first * cos - second * sin, first * sin + second * cos])
    torch.testing.assert_close(halves, deinterleave_rows(neighbours, 1))


class RowsAsStored(GGUFFile):
    """A reader that forgets to put the rows of Q and K back."""

    def _interleaved_heads(self, name: str) -> int:
        return 0


@torch.inference_mode()
def test_a_real_model_knows_the_order_of_its_words_only_with_its_rows_put_back(
    smollm2, smollm2_path
):
    """No check of names and shapes sees the order of rows, nor does a comparison of two readers
    that share a mistake. A sentence said twice does: whoever can look back hardly wonders the
    second time. Looking back needs the rotation, and that turns pairs of rows."""
    sentence = "The quick brown fox jumps over the lazy dog while seven green whales sing a song."
    tokens = torch.tensor(smollm2.tokenizer.encode(f"{sentence} {sentence}"))
    second_time = len(smollm2.tokenizer.encode(sentence))
    decoder = copy.deepcopy(smollm2.decoder)

    def bits_of_surprise(reader: type[GGUFFile]) -> float:
        file = reader(smollm2_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
        for number, layer in enumerate(decoder.layers):
            attention = f"model.layers.{number}.self_attn"
            rows = torch.cat([file.load(f"{attention}.{x}_proj.weight") for x in "qk"])
            layer.attention.qkv.weight[: len(rows)] = rows
        hidden = decoder(tokens, torch.arange(len(tokens)), NoCache())
        logits = decoder.logits(hidden)[second_time:-1]
        return float(fn.cross_entropy(logits, tokens[second_time + 1 :])) / math.log(2)

    assert bits_of_surprise(GGUFFile) < 2
    assert bits_of_surprise(RowsAsStored) > 5


def test_config_in_the_words_of_hugging_face(tmp_path):
    extra = {
        "attention.key_length": 32,
        "rope.freq_base": 100000.0,
        "rope.dimension_count": 32,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    assert GGUFFile(write(tmp_path, model(), settings=extra)).hf_config() == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": E,
        "intermediate_size": F,
        "num_hidden_layers": 1,
        "num_attention_heads": H,
        "num_key_value_heads": G,
        "head_dim": D,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "vocab_size": V,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_config_where_the_file_says_less(tmp_path):
    shorter = {"attention.head_count_kv": None, "attention.head_count": 4}
    weights = model(biases=True, untied=True)
    config = GGUFFile(write(tmp_path, weights, settings=shorter)).hf_config()
    assert (config["num_key_value_heads"], config["head_dim"]) == (4, E // 4)
    assert config["rope_theta"] == 10000.0
    assert config["attention_bias"] is True
    assert config["tie_word_embeddings"] is False
    assert config["bos_token_id"] is None


def test_rope_scaling(tmp_path):
    def scaling(**settings: Any) -> Any:
        named = {f"rope.scaling.{key}": value for key, value in settings.items()}
        return GGUFFile(write(tmp_path, model(), settings=named)).hf_config()["rope_scaling"]

    assert scaling(type="none") is None
    assert scaling(type="linear", factor=4.0) == {"rope_type": "linear", "factor": 4.0}
    yarn = scaling(type="yarn", factor=2.5, original_context_length=64, finetuned=True)
    assert yarn == {
        "rope_type": "yarn",
        "factor": 2.5,
        "original_max_position_embeddings": 64,
    }
    assert scaling(type="yarn", factor=2.0, yarn_beta_fast=16.0)["beta_fast"] == 16.0
    with pytest.raises(UnsupportedModelError, match="rope scaling 'longrope'"):
        scaling(type="longrope")
    with pytest.raises(UnsupportedModelError, match=r"attn_factor = 0\.5 in yarn rope scaling"):
        scaling(type="yarn", factor=2.0, attn_factor=0.5)


# -- sound files that hold something else -------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "weights", "settings", "message"),
    [
        ("gemma3", model(), {}, r"architecture 'gemma3', not of \['llama', 'qwen2', 'qwen3'\]"),
        (
            "llama",
            model() | {"rope_freqs.weight": noise(16)},
            {},
            r"rope_freqs\.weight: rotary freq",
        ),
        (
            "llama",
            model() | {"blk.0.ffn_gate_exps.weight": noise(8, 32)},
            {},
            r"blk\.0\.ffn_gate_exps\.weight has no place in a llama",
        ),
        ("llama", {"token_embd.scale": noise(2)}, {}, r"token_embd\.scale has no place"),
        ("llama", model(), {"split.count": 3}, "split over 3 files"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(
    tmp_path, arch, weights, settings, message
):
    path = write(tmp_path, weights, arch, settings=settings)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_partly_rotated_heads_are_refused(tmp_path):
    file = GGUFFile(write(tmp_path, model(), settings={"rope.dimension_count": 16}))
    with pytest.raises(UnsupportedModelError, match="rotates 16 of the 32 elements of a head"):
        file.hf_config()


def test_a_type_that_cannot_be_unpacked_names_the_tensor(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tensor("output_norm.weight", np.arange(32, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight is packed as I32"):
        file.load("model.norm.weight")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embedding_length": None}, r"llama\.embedding_length is None, expected .* int"),
        ({"attention.head_count": [2, 2]}, r"head_count is \[2, 2\], expected a value of type int"),
        ({"attention.head_count": 0}, "head_count is 0, expected at least 1"),
        ({"attention.layer_norm_rms_epsilon": 1}, "epsilon is 1, expected a value of type float"),
        ({"rope.scaling.type": 2}, r"rope\.scaling\.type is 2, expected a value of type str"),
    ],
)
def test_settings_must_be_there_and_of_their_type(tmp_path, settings, message):
    file = GGUFFile(write(tmp_path, model(), settings=settings))
    with pytest.raises(CheckpointError, match=message):
        file.hf_config()


def test_no_vocabulary_no_config(tmp_path):
    file = GGUFFile(write(tmp_path, {"output_norm.weight": noise(E)}))
    with pytest.raises(CheckpointError, match=r"has no token_embd\.weight"):
        file.hf_config()


def test_rows_that_are_no_heads(tmp_path):
    file = GGUFFile(write(tmp_path, {"blk.0.attn_q.weight": noise(66, E)}))
    with pytest.raises(CheckpointError, match="66 rows, 2 heads of pairs"):
        file.load("model.layers.0.self_attn.q_proj.weight")


# -- broken files -------------------------------------------------------------------------------

HEAD = b"GGUF" + struct.pack("<I", 3)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def setting(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def line(name: str = "t", sizes: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    head = text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return head + struct.pack("<IQ", kind, offset)


def table(*parts: bytes, tensors: int = 0, settings: int = 0, data: int = 64) -> bytes:
    front = HEAD + struct.pack("<QQ", tensors, settings) + b"".join(parts)
    return front + bytes(-len(front) % 32) + bytes(data)


BROKEN = {
    "short magic": (b"GG", r"needs 4 bytes at byte 0, but ends at byte 2"),
    "magic": (b"GGML" + bytes(20), r"begins with b'GGML', not b'GGUF'"),
    "version": (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), r"GGUF version 9; \(2, 3\) are read"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "written for a big-endian machine"),
    "counts": (HEAD + bytes(12), "needs 8 bytes at byte 16, but ends at byte 20"),
    "settings missing": (table(settings=2**60, data=0), r"needs 4 bytes at byte 32, but ends"),
    "tensors missing": (table(tensors=2**63, data=0), r"needs 4 bytes at byte 32, but ends"),
    "long key": (table(struct.pack("<Q", 2**62), settings=1), f"needs {2**62} bytes at byte 32"),
    "not utf-8": (table(setting("k", 8, text(b"\xff")), settings=1), "string at byte .* not UTF-8"),
    "value type": (table(setting("k", 77, b""), settings=1), "unknown value type 77 before byte"),
    "key twice": (
        table(setting("k", 0, b"\1"), setting("k", 0, b"\1"), settings=2),
        "the setting k appears twice",
    ),
    "long array": (
        table(setting("k", 9, struct.pack("<IQ", 6, 2**61)), settings=1),
        f"needs {2**63} bytes at byte",
    ),
    "long array of strings": (
        table(setting("k", 9, struct.pack("<IQ", 8, 2**61)), settings=1),
        "needs 8 bytes at byte",
    ),
    "array of arrays": (
        table(setting("k", 9, struct.pack("<IQIQ", 9, 1, 0, 0)), settings=1),
        "has an array of ARRAY",
    ),
    "alignment": (
        table(setting("general.alignment", 4, struct.pack("<I", 24)), settings=1),
        r"general\.alignment is 24, not a power of two from 8",
    ),
    "alignment 4": (
        table(setting("general.alignment", 4, struct.pack("<I", 4)), settings=1),
        r"general\.alignment is 4, not a power of two from 8",
    ),
    "alignment text": (
        table(setting("general.alignment", 8, text("32")), settings=1),
        r"general\.alignment is '32', not a power of two from 8",
    ),
    "five dimensions": (table(line(sizes=(1,) * 5), tensors=1), "t: 5 dimensions, at most 4"),
    "billions of dimensions": (
        table(text("t") + struct.pack("<I", 2**32 - 1), tensors=1),
        "t: 4294967295 dimensions, at most 4",
    ),
    "no elements": (table(line(sizes=(8, 0)), tensors=1), r"t: shape \(0, 8\) holds nothing"),
    "tensor type": (table(line(kind=999), tensors=1), "t: unknown tensor type 999"),
    "part of a block": (
        table(line(sizes=(33,), kind=3), tensors=1),
        "a row of 33 is no whole .* 32",
    ),
    "tensor twice": (table(line(), line(offset=32), tensors=2), "the tensor t appears twice"),
    "offset": (table(line(offset=33), tensors=1), "t: offset 33 is not a multiple of 32"),
    "past the end": (table(line(offset=64), tensors=1), r"t: ends at byte 160, the file at 128"),
    "huge": (table(line(sizes=(2**62, 2**62)), tensors=1), r"t: ends at byte \d+, the file at 160"),
    "overlap": (
        table(line(sizes=(9,)), line("u", offset=32), tensors=2),
        "u: begins at byte 128, inside one that ends at 132",
    ),
    "no architecture": (table(), r"general\.architecture is None, expected"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_with_its_numbers(tmp_path, case):
    content, message = BROKEN[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        GGUFFile(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_arrays_of_every_length_and_sign(tmp_path):
    unsigned = setting("unsigned", 9, struct.pack("<IQ2I", 4, 2, 4_000_000_000, 7))
    signed = setting("signed", 9, struct.pack("<IQ2i", 5, 2, -4, 7))
    empty = setting("empty", 9, struct.pack("<IQ", 4, 0))
    path = tmp_path / "arrays.gguf"
    path.write_bytes(table(unsigned, signed, empty, settings=3))
    settings, _ = read_table(map_file(path), path)
    assert settings == {"unsigned": [4_000_000_000, 7], "signed": [-4, 7], "empty": []}


def test_the_table_helper_makes_sound_files(tmp_path):
    """So that the cases above fail for their own reason."""
    path = tmp_path / "good.gguf"
    key = setting("general.architecture", 8, text("llama"))
    lines = line("output_norm.weight"), line("token_embd.weight", (32, 2), 3, offset=32)
    path.write_bytes(table(key, *lines, tensors=2, settings=1, data=72))
    assert GGUFFile(path).load("model.norm.weight").tolist() == [0] * 8
    assert GGUFFile(path).load("model.embed_tokens.weight").shape == (2, 32)


@per_file
@given(st.data())
def test_no_damage_raises_anything_else(tmp_path, data):
    good = tmp_path / "model.gguf"
    if not good.exists():
        tokens = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.scores": [0.5, 1.0]}
        write(tmp_path, model(), "qwen2", Type.Q8_0, tokens)
    content = bytearray(good.read_bytes())
    table_ends = min(info.begin for info in read_table(map_file(good), good)[1].values())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, table_ends))
        if data.draw(st.booleans()):
            content[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
        else:
            del content[at : at + data.draw(st.integers(1, 12))]
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path = tmp_path / "damaged.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    try:
        file = GGUFFile(path)
        for name in file.tensors:
            file.load(name)
        file.hf_config()
    except (CheckpointError, UnsupportedModelError) as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("keep", [0, 3, 4, 8, 23, 24, 40, 200, 600])
def test_a_file_cut_short(tmp_path, keep):
    path = write(tmp_path, model())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.gguf: "):
        GGUFFile(path)
