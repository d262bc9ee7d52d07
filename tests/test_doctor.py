"""The doctor tells what is so, calls a problem only what stops the engine, and says what to do."""

from __future__ import annotations

import io
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
from rich.console import Console

from mie.model import hub, packaged
from mie.terminal import doctor
from mie.terminal.doctor import Finding, State


def found(check):
    """The findings of one check, without their words where those depend on the machine."""
    return list(check())


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MIE_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path


def versions(monkeypatch, **changes):
    """Let the installed packages have other versions; None for one that is not there."""
    real = metadata.version

    def version(package):
        if package not in changes:
            return real(package)
        if changes[package] is None:
            raise metadata.PackageNotFoundError(package)
        return changes[package]

    monkeypatch.setattr(metadata, "version", version)


def requirements(monkeypatch, **of_package):
    monkeypatch.setattr(metadata, "requires", lambda package: of_package.get(package))


def test_whoever_can_run_these_tests_has_no_problem(home):
    findings = doctor.examine()
    assert {"Python", "processor", "packages", "torch", "GPU", "triton", "model", "book"} <= {
        finding.topic for finding in findings
    }
    assert [finding for finding in findings if finding.state is State.PROBLEM] == []
    assert all(
        finding.advice
        for finding in findings
        if finding.topic != "model" and finding.state is State.NOTE
    )


# -- packages -----------------------------------------------------------------------------------


def test_a_missing_and_an_old_package_are_problems_with_the_command_that_helps(monkeypatch):
    requirements(
        monkeypatch, mie=["jinja2>=3.1", "typer>=0.15", "rich>=13", 'nope; extra == "dev"']
    )
    versions(monkeypatch, jinja2=None, typer="0.9", rich="15.0")
    (finding,) = found(doctor._needed_packages)
    assert finding.state is State.PROBLEM
    assert finding.says == "jinja2>=3.1 (here: none), typer>=0.15 (here: 0.9)"
    assert finding.advice == "pip install 'jinja2>=3.1' 'typer>=0.15'"


def test_a_package_for_another_platform_is_not_missed(monkeypatch):
    requirements(monkeypatch, mie=["nope; sys_platform == 'plan9'"])
    (finding,) = found(doctor._needed_packages)
    assert finding.state is State.OK


def test_book_tools_are_only_noted(monkeypatch):
    requirements(monkeypatch, mie=["rich", 'nbmake>=1; extra == "book"', 'x; extra == "dev"'])
    versions(monkeypatch, nbmake=None)
    (finding,) = found(doctor._book_tools)
    assert (finding.state, finding.says) == (State.NOTE, "wanting nbmake>=1")
    assert "mie[book]" in finding.advice
    versions(monkeypatch, nbmake="1.5")
    (finding,) = found(doctor._book_tools)
    assert (finding.state, finding.says) == (State.OK, "nbmake 1.5")


# -- computing ----------------------------------------------------------------------------------


def test_a_torch_that_cannot_be_imported_is_a_problem(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (finding,) = found(doctor._torch)
    assert finding.state is State.PROBLEM and "torch" in finding.says
    assert found(doctor._gpus) == []


def test_a_gpu_that_does_not_compute_is_a_problem(monkeypatch):
    import torch

    properties = SimpleNamespace(name="Card", total_memory=24e9, major=8, minor=6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    def no_kernel(*_, **__):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(torch, "ones", no_kernel)
    (finding,) = found(doctor._gpus)
    assert finding.state is State.PROBLEM
    assert "cuda:0 Card, 24 GB, sm_86" in finding.says and "no kernel image" in finding.says
    assert "--device cpu" in finding.advice


@pytest.mark.parametrize(("driver", "says"), [(None, "no CUDA device"), ("/bin/x", "CPU build")])
def test_no_gpu_is_only_noted(monkeypatch, driver, says):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(doctor.shutil, "which", lambda program: driver)
    (finding,) = found(doctor._gpus)
    assert finding.state is State.NOTE and says in finding.says and finding.advice


def test_triton_is_compared_with_what_torch_asks_for(monkeypatch):
    requirements(monkeypatch, torch=['triton==3.7.1; sys_platform != "plan9"', "sympy"])
    versions(monkeypatch, triton="3.9.0")
    (finding,) = found(doctor._triton)
    assert (finding.state, finding.says) == (State.NOTE, "3.9.0, but torch asks for ==3.7.1")
    assert finding.advice == "pip install 'triton==3.7.1'"
    versions(monkeypatch, triton="3.7.1")
    assert found(doctor._triton) == [Finding("triton", State.OK, "3.7.1")]
    versions(monkeypatch, triton=None)
    assert found(doctor._triton)[0].state is State.NOTE


@pytest.mark.parametrize(
    ("flags", "state"),
    [({"avx2", "avx512_bf16"}, State.OK), ({"avx2"}, State.NOTE), (None, State.OK)],
)
def test_a_processor_without_bfloat16_is_told_which_dtype_to_take(monkeypatch, flags, state):
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: flags)
    (finding,) = found(doctor._processor)
    assert finding.state is state
    assert ("float32" in finding.advice) == (state is State.NOTE)


def test_little_memory_is_noted(monkeypatch):
    monkeypatch.setattr(doctor, "memory_bytes", lambda: 1_500_000_000)
    (finding,) = found(doctor._memory)
    assert finding.state is State.NOTE and finding.says == "1.5 GB" and "bfloat16" in finding.advice


# -- the model ----------------------------------------------------------------------------------


def model_folder(home):
    folder = home / "models" / hub.DEFAULT_MODEL
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / packaged.MARK).write_bytes(packaged._mark(packaged.SMOLLM2_135M))
    return folder


def test_a_model_that_is_not_here_yet_is_a_note_that_says_how_to_get_it(home):
    (finding,) = found(doctor._models)
    assert finding.state is State.NOTE
    assert str(home) in finding.says and "mie doctor --fetch" in finding.advice


def test_no_room_for_the_model_is_a_problem(home, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1e6))
    monkeypatch.setenv("MIE_HOME", str(home / "not" / "there" / "yet"))
    (finding,) = found(doctor._models)
    assert finding.state is State.PROBLEM and "MIE_HOME" in finding.advice


def test_a_whole_model_is_found_and_a_damaged_one_is_a_problem(home):
    folder = model_folder(home)
    (finding,) = found(doctor._models)
    assert finding.state is State.PROBLEM
    assert "model.safetensors missing" in finding.says and "remove" in finding.advice
    (folder / "model.safetensors").write_bytes(bytes(10))
    (finding,) = found(doctor._models)
    assert finding.state is State.OK and str(folder) in finding.says


# -- on the screen ------------------------------------------------------------------------------


def shown(*findings):
    output = io.StringIO()
    doctor.show(list(findings), Console(file=output, width=60, highlight=False))
    return output.getvalue()


def test_states_are_words_and_marks_and_not_only_colours():
    text = shown(
        Finding("one", State.OK, "fine"),
        Finding("two", State.NOTE, "so [so]", "do x"),
        Finding("three", State.PROBLEM, "broken", "mend it"),
    )
    assert "✓ one       fine" in text
    assert "– two       note: so [so]\n            → do x" in text
    assert "✗ three     problem: broken\n            → mend it" in text
    assert text.endswith("\n1 to solve first\n")
    assert shown(Finding("one", State.OK, "fine")).endswith("\nready\n")
