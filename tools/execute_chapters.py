"""Execute the chapters once, on a copy: what was tested is what is published.

    chapters/*.ipynb --copy--> build/executed/chapters/*.ipynb --nbmake--> the same, with outputs

Invariant: a notebook whose key stands in build/executed/keys.json ran without a failure from
exactly the present content of the chapter, of the package, of the data in `book/results`, with
the installed versions of what requirements.lock names, and with the book's model. `make test` and
`make book` both call this; whoever comes second finds nothing left to do. Keys are hashes of
contents, not times of files, so a fresh clone, a checkout and a touched file all do the right
thing.

A chapter that takes times has the machine to itself: all its cores, and nothing beside it. The
others run side by side, with one thread each.

Two things pass nbmake in silence and are errors here: a cell tagged `raises-exception` that raises
nothing, and an output that shows where this checkout, its environment or somebody's home lies.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbconvert.preprocessors import CoalesceStreamsPreprocessor
from packaging.requirements import Requirement

from mie.machine import usable_cores
from mie.model.packaged import SMOLLM2_135M

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "executed"
KEYS = COPY / "keys.json"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SECONDS_A_CELL = 300
SIDE_BY_SIDE = 2  # chapters at once; each may hold the model, 1.2 GB in float32


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", nargs="*", default=[], help="chapters to run in any case")
    again = {Path(name).name for name in parser.parse_args(arguments).again}

    surroundings = environment()
    wanted = {path.name: key(path, surroundings) for path in runnable_chapters()}
    done = json.loads(KEYS.read_text()) if KEYS.exists() else {}
    fresh = {name for name in wanted if done.get(name) == wanted[name] and copy_of(name).exists()}
    fresh -= again
    copy_sources(keep=fresh)
    record(fresh, wanted)
    stale = sorted(wanted.keys() - fresh)
    if not stale:
        print(f"{len(fresh)} chapters, all executed as they are now, in {COPY.relative_to(ROOT)}/")
        return 0

    passed = run(stale)
    for name in sorted(passed):
        join_streams(copy_of(name))
        for complaint in complaints(json.loads(copy_of(name).read_text())["cells"]):
            print(f"{name}, {complaint}")
            passed.discard(name)
    record(fresh | passed, wanted)
    return 0 if passed == set(stale) else 1


def copy_of(name: str) -> Path:
    return COPY / "chapters" / name


def record(names: set[str], keys: dict[str, str]) -> None:
    KEYS.write_text(json.dumps({name: keys[name] for name in sorted(names)}, indent=1))


def runnable_chapters() -> Iterator[Path]:
    """Every chapter, less those for a device that is not here: published without outputs."""
    for path in sorted((ROOT / "chapters").glob("*.ipynb")):
        requires = json.loads(path.read_text())["metadata"].get("mie", {}).get("requires")
        if requires == "gpu" and DEVICE == "cpu":
            print(
                f"skipped {path.name}: it needs a CUDA device (metadata mie.requires), none is here"
            )
        else:
            yield path


def environment() -> str:
    """What the outputs of every chapter depend on outside this checkout."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    names = [Requirement(line).name for line in lines if not line.startswith("#")]
    versions = [f"{name}=={installed_version(name)}" for name in names]
    return "\n".join([DEVICE, torch.__version__, sys.version, SMOLLM2_135M.sha256, *versions])


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # one for another platform
        return None


def key(chapter: Path, surroundings: str) -> str:
    """Changes with anything that the outputs of the chapter can depend on, other than the clock."""
    digest = hashlib.sha256(surroundings.encode())
    for path in [chapter, *code_and_data()]:
        digest.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def code_and_data() -> list[Path]:
    roots = [ROOT / "mie", ROOT / "kernels", ROOT / "book" / "results"]
    files = (path for root in roots for path in root.rglob("*") if path.is_file())
    return sorted(path for path in files if "__pycache__" not in path.parts)


def copy_sources(keep: set[str]) -> None:
    """Book and chapters side by side, as in the checkout; the executed notebooks in `keep` stay."""
    (COPY / "chapters").mkdir(parents=True, exist_ok=True)
    for old in (COPY / "chapters").glob("*.ipynb"):
        if old.name not in keep:
            old.unlink()
    for new in (ROOT / "chapters").glob("*.ipynb"):
        if new.name not in keep:
            shutil.copy(new, COPY / "chapters")
    shutil.rmtree(COPY / "book", ignore_errors=True)
    shutil.copytree(ROOT / "book", COPY / "book", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy(ROOT / name, COPY)


class Passed:
    """A pytest plugin that remembers which notebooks passed."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.names.add(Path(report.nodeid.partition("::")[0]).name)


def run(names: list[str]) -> set[str]:
    """Run the copies of these chapters through nbmake, in place. Returns those that passed."""
    os.environ["MIE_BOOK"] = "1"  # live widgets show their static twin
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    timed = [name for name in names if takes_times(copy_of(name))]
    others = [name for name in names if name not in timed]
    workers = SIDE_BY_SIDE if DEVICE == "cpu" else 0  # one GPU is not shared
    return execute(others, workers, threads=1) | execute(timed, 0, threads=usable_cores())


def takes_times(notebook: Path) -> bool:
    """Whether a chapter calls the book's clock, `measure(...)`, or reads the times of a trace."""
    return any(
        cell["cell_type"] == "code" and re.search(r"\bmeasure\(|\.times\.", "".join(cell["source"]))
        for cell in json.loads(notebook.read_text())["cells"]
    )


def execute(names: list[str], workers: int, threads: int) -> set[str]:
    """Run these copies on `workers` processes, or here one after another if that is 0."""
    if not names:
        return set()
    os.environ["OMP_NUM_THREADS"] = str(threads)  # kernels inherit it
    passed = Passed()
    notebooks = [str(copy_of(name)) for name in names]
    options = ["--nbmake", "--overwrite", f"--nbmake-timeout={SECONDS_A_CELL}", "--durations=0"]
    options += [f"-n{min(workers, len(names))}", f"--rootdir={ROOT}"]
    pytest.main([*options, *notebooks], plugins=[passed])
    return passed.names


def join_streams(notebook: Path) -> None:
    """What a cell has printed piece by piece is one output; on a page each would be a block."""
    content, _ = CoalesceStreamsPreprocessor().preprocess(nbformat.read(notebook, 4), {})
    nbformat.write(content, notebook)


def complaints(cells: list[dict[str, Any]]) -> Iterator[str]:
    for number, cell in enumerate(cells):
        outputs = cell.get("outputs", [])
        promises_error = "raises-exception" in cell["metadata"].get("tags", [])
        if promises_error and not any(output["output_type"] == "error" for output in outputs):
            yield f"cell {number}: tagged raises-exception, and it raised nothing"
        if found := {path for text in texts(outputs) for path in private_paths(text)}:
            yield f"cell {number}: its output shows a path of this machine: {', '.join(found)}"


def texts(output: Any) -> Iterator[str]:
    """All text of an output, pictures in binary left out."""
    if isinstance(output, str):
        yield output
    elif isinstance(output, dict):
        yield from texts([output[name] for name in output.keys() - {"image/png", "image/jpeg"}])
    elif isinstance(output, list):
        for each in output:
            yield from texts(each)


def private_paths(text: str) -> Iterator[str]:
    """Where the checkout, the environment and the home folder lie, where `text` says so."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)  # tracebacks have colours, also within a path
    for place in {ROOT, Path(sys.prefix), Path.home()}:
        path = str(place)
        if len(place.parts) > 1 and re.search(rf"(?<!\w){re.escape(path)}(?![\w-])", plain):
            yield path


if __name__ == "__main__":
    sys.exit(main())
