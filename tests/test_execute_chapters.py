"""Chapters run when something that they depend on has changed, and only then.

nbmake is replaced by a function that puts an output into each notebook, so this takes no time; the
real one runs in every `make test`.
"""

from __future__ import annotations

import json
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
        self.write("01-one.ipynb", tags=[])
        self.write("02-two.ipynb", tags=["raises-exception"])
        monkeypatch.setattr(execute_chapters, "ROOT", root)
        monkeypatch.setattr(execute_chapters, "COPY", root / "build" / "executed")
        monkeypatch.setattr(execute_chapters, "KEYS", root / "build" / "executed" / "keys.json")
        monkeypatch.setattr(execute_chapters, "run", self.run)

    def write(self, name: str, tags: list[str], **metadata: Any) -> None:
        cell = {
            "cell_type": "code",
            "id": "a",
            "source": "1",
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
