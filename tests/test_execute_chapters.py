"""Chapters run when something they depend on has changed, and only then; outputs are checked.

nbmake is replaced by a function that puts an output into each notebook, so this takes no time; the
real one runs in every `make test`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import execute_chapters
import pytest


class Project:
    """A checkout with two chapters, one of which promises an error, and what was run."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.ran: list[str] = []
        self.raises = True
        for room in ("chapters", "mie", "kernels", "book/results"):
            (root / room).mkdir(parents=True)
        for name in ("_config.yml", "_toc.yml", "mie/model.py", "book/results/h200.json"):
            (root / name).write_text("1")
        (root / "requirements.lock").write_text("# versions\nhere==1\nelsewhere==1\n")
        self.installed = {"here": "1"}
        self.write("01-one.ipynb", tags=[])
        self.write("02-two.ipynb", tags=["raises-exception"])
        monkeypatch.setattr(execute_chapters, "ROOT", root)
        monkeypatch.setattr(execute_chapters, "COPY", root / "build" / "executed")
        monkeypatch.setattr(execute_chapters, "KEYS", root / "build" / "executed" / "keys.json")
        monkeypatch.setattr(execute_chapters, "run", self.run)
        monkeypatch.setattr(execute_chapters, "version", self.version)
        self.output: dict[str, Any] | None = None

    def version(self, package: str) -> str:
        if package not in self.installed:
            raise PackageNotFoundError(package)
        return self.installed[package]

    def write(self, name: str, tags: list[str], source: str = "1", **metadata: Any) -> None:
        cell = {
            "cell_type": "code",
            "id": "a",
            "source": source,
            "outputs": [],
            "execution_count": None,
        }
        notebook = {
            "cells": [cell | {"metadata": {"tags": tags}}],
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        path = self.root / "chapters" / name
        path.write_text(json.dumps(notebook | {"metadata": metadata}))

    def copy(self, name: str) -> dict[str, Any]:
        return json.loads(execute_chapters.copy_of(name).read_text())

    def run(self, names: list[str]) -> set[str]:
        self.ran += names
        for name in names:
            notebook = self.copy(name)
            tagged = notebook["cells"][0]["metadata"]["tags"]
            error = {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}
            pieces = [{"output_type": "stream", "name": "stdout", "text": text} for text in "ab"]
            pieces += [self.output] if self.output else []
            notebook["cells"][0]["outputs"] = [error] if tagged and self.raises else pieces
            execute_chapters.copy_of(name).write_text(json.dumps(notebook))
        return set(names)

    def make(self, *arguments: str) -> tuple[int, list[str]]:
        self.ran = []
        return execute_chapters.main(list(arguments)), self.ran


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    return Project(tmp_path, monkeypatch)


BOTH = ["01-one.ipynb", "02-two.ipynb"]


def test_the_second_call_finds_nothing_to_do(project: Project) -> None:
    assert project.make() == (0, BOTH)
    assert project.make() == (0, [])
    assert project.copy("01-one.ipynb")["cells"][0]["outputs"], "the executed copy was lost"


def test_a_chapter_that_changed_runs_alone(project: Project) -> None:
    project.make()
    project.write("01-one.ipynb", tags=[], new=True)
    assert project.make() == (0, ["01-one.ipynb"])


@pytest.mark.parametrize("name", ["mie/model.py", "book/results/h200.json", "kernels/new.cu"])
def test_a_change_in_code_or_data_runs_all(project: Project, name: str) -> None:
    project.make()
    (project.root / name).write_text("2")
    assert project.make() == (0, BOTH)


@pytest.mark.parametrize(
    "installed", [{"here": "2"}, {}, {"here": "1", "elsewhere": "1"}, {"here": "1+cpu"}]
)
def test_another_version_of_a_requirement_runs_all(
    project: Project, installed: dict[str, str]
) -> None:
    project.make()
    project.installed = installed
    assert project.make() == (0, BOTH)


def test_what_is_installed_besides_runs_nothing(project: Project) -> None:
    project.make()
    project.installed["stranger"] = "1"
    assert project.make() == (0, [])


def test_another_model_runs_all(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.make()
    other = replace(execute_chapters.SMOLLM2_135M, sha256="0" * 64)
    monkeypatch.setattr(execute_chapters, "SMOLLM2_135M", other)
    assert project.make() == (0, BOTH)


def test_a_change_in_a_page_runs_nothing_but_is_copied(project: Project) -> None:
    project.make()
    (project.root / "book" / "index.md").write_text("# New")
    assert project.make() == (0, [])
    assert (project.root / "build/executed/book/index.md").read_text() == "# New"


def test_a_cell_that_promises_an_error_must_raise(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.raises = False
    assert project.make() == (1, BOTH)
    assert "02-two.ipynb, cell 0: tagged raises-exception" in capsys.readouterr().out
    assert project.make() == (1, ["02-two.ipynb"]), "what failed must run again"


def test_a_run_that_was_interrupted_is_repeated(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(names: list[str]) -> set[str]:
        raise KeyboardInterrupt

    project.make()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(execute_chapters, "run", interrupted)
        execute_chapters.main(["--again", "chapters/01-one.ipynb"])
    assert project.make() == (0, ["01-one.ipynb"])


def test_a_removed_chapter_leaves_the_copy(project: Project) -> None:
    project.make()
    (project.root / "chapters" / "01-one.ipynb").unlink()
    assert project.make() == (0, [])
    assert not execute_chapters.copy_of("01-one.ipynb").exists()


def test_a_chapter_for_a_gpu_is_published_without_outputs_elsewhere(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute_chapters, "DEVICE", "cpu")
    project.write("01-one.ipynb", tags=[], mie={"requires": "gpu"})
    assert project.make() == (0, ["02-two.ipynb"])
    assert project.copy("01-one.ipynb")["cells"][0]["outputs"] == []


def test_what_was_printed_in_pieces_becomes_one_output(project: Project) -> None:
    project.make()
    (output,) = project.copy("01-one.ipynb")["cells"][0]["outputs"]
    assert "".join(output["text"]) == "ab"


# -- who runs beside whom -------------------------------------------------------------------------


def test_a_chapter_that_takes_times_has_the_machine_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_run = execute_chapters.run
    project = Project(tmp_path, monkeypatch)
    project.write("03-three.ipynb", tags=[], source="clock = measure(step)")
    project.write("04-four.ipynb", tags=[], source="measured = remeasured(step)")
    project.write("05-five.ipynb", tags=[], source="seconds = record.times.total")
    monkeypatch.setattr(execute_chapters, "DEVICE", "cpu")
    monkeypatch.setattr(execute_chapters, "usable_cores", lambda: 6)
    for name in ("MIE_BOOK", "OMP_NUM_THREADS", "TRITON_INTERPRET"):
        monkeypatch.setenv(name, "")  # so that they are put back
    calls = []

    def nbmake(arguments: list[str], plugins: list[execute_chapters.Passed]) -> None:
        notebooks = [Path(a).name for a in arguments if a.endswith(".ipynb")]
        (workers,) = (a for a in arguments if a.startswith("-n") and a != "--nbmake")
        calls.append((notebooks, workers, os.environ["OMP_NUM_THREADS"]))
        plugins[0].names |= {*notebooks}

    execute_chapters.copy_sources(keep=set())
    monkeypatch.setattr(execute_chapters.pytest, "main", nbmake)
    timed = ["03-three.ipynb", "05-five.ipynb"]
    names = [*BOTH, *timed, "04-four.ipynb"]
    assert real_run(names) == {*names}
    assert calls == [([*BOTH, "04-four.ipynb"], "-n2", "1"), (timed, "-n0", "6")]


# -- what may not be published --------------------------------------------------------------------


def display(**data: Any) -> dict[str, Any]:
    return {"output_type": "display_data", "metadata": {}, "data": data}


@pytest.mark.parametrize("place", ["checkout", "environment", "home"])
@pytest.mark.parametrize("form", ["text", "html", "coloured"])
def test_an_output_may_not_show_where_things_lie_here(
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    form: str,
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    path = {"checkout": str(project.root), "environment": sys.prefix, "home": "/home/somebody"}
    project.output = {
        "text": display(**{"text/plain": f"one\nread {path[place]}/mie/model.py\n"}),
        "html": display(**{"text/html": f'<a href="file://{path[place]}">here</a>'}),
        "coloured": display(
            **{"text/plain": f"{path[place].rpartition('/')[0]}/\x1b[31m{Path(path[place]).name}"}
        ),
    }[form]
    assert project.make() == (1, BOTH)
    said = capsys.readouterr().out
    assert f"01-one.ipynb, cell 0: its output shows a path of this machine: {path[place]}" in said
    assert project.make() == (1, ["01-one.ipynb"]), "what was refused must run again"


@pytest.mark.parametrize(
    "output",
    [
        display(**{"text/plain": "mie/model.py, /home/somebody-else, x/home/somebodyhood"}),
        display(**{"image/png": "/home/somebody"}),
    ],
)
def test_other_paths_and_pictures_pass(
    project: Project, monkeypatch: pytest.MonkeyPatch, output: dict[str, Any]
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    project.output = output
    assert project.make() == (0, BOTH)
