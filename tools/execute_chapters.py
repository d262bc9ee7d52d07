"""Execute the chapters once, on a copy: what was tested is what is published.

    chapters/*.ipynb --copy--> build/executed/chapters/*.ipynb --nbmake--> the same, with outputs

Invariant: a notebook whose key stands in build/executed/keys.json ran without a failure from
exactly the present content of the chapter, of the package and of the data in `book/results`.
`make test` and `make book` both call this; whoever comes second finds nothing left to do. Keys
are hashes of contents, not times of files, so a fresh clone, a checkout and a touched file all
do the right thing.

nbmake stays silent where a cell tagged `raises-exception` raises nothing; that is an error here.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import torch
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "executed"
KEYS = COPY / "keys.json"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SECONDS_A_CELL = 300


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", nargs="*", default=[], help="chapters to run in any case")
    again = {Path(name).name for name in parser.parse_args(arguments).again}

    wanted = {path.name: key(path) for path in runnable_chapters()}
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
        for cell in silent_cells(copy_of(name)):
            print(f"{name}, cell {cell}: tagged raises-exception, and it raised nothing")
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


def key(chapter: Path) -> str:
    """Changes with anything that the outputs of the chapter can depend on, other than the clock."""
    digest = hashlib.sha256(f"{DEVICE} {torch.__version__} {sys.version}".encode())
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
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    workers = (
        2 if DEVICE == "cpu" and len(names) > 1 else 0
    )  # two chapters on one GPU would time each other
    passed = Passed()
    notebooks = [str(copy_of(name)) for name in names]
    options = [
        "--nbmake",
        "--overwrite",
        f"--nbmake-timeout={SECONDS_A_CELL}",
        "--durations=0",
        f"-n{workers}",
    ]
    pytest.main([*options, f"--rootdir={ROOT}", *notebooks], plugins=[passed])
    return passed.names


def join_streams(notebook: Path) -> None:
    """What a cell has printed piece by piece is one output; on a page each would be a block."""
    content, _ = CoalesceStreamsPreprocessor().preprocess(nbformat.read(notebook, 4), {})
    nbformat.write(content, notebook)


def silent_cells(notebook: Path) -> list[int]:
    """The cells that promise an error and have none among their outputs."""
    return [
        number
        for number, cell in enumerate(json.loads(notebook.read_text())["cells"])
        if "raises-exception" in cell["metadata"].get("tags", [])
        and not any(output["output_type"] == "error" for output in cell["outputs"])
    ]


if __name__ == "__main__":
    sys.exit(main())
