"""Who may import whom: the sentences of `book/architecture.md` about rooms and arrows, as tests.

Nothing is imported: the sources are parsed, so imports inside functions count too, and so do those
for type checkers alone. What a line imports is written in full: `mie.ops.reference`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
ONLOOKERS = {"book", "viz", "spec", "terminal", "cli", "bench"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            # `from mie.book import machine` may name a module: both readings count
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources() -> dict[str, set[str]]:
    """Each module of the package, by the name it is imported by, with what it imports."""
    found = {}
    for folder in ("mie", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(part for part in parts if part != "__init__")
            name = f"mie.{name}" if folder == "kernels" else name
            found[name] = set(imports(path.read_text("utf-8")))
    return found


SOURCES = sources()


def room(module: str) -> str:
    """`mie.ops.reference` -> `ops`; a file that stands beside the rooms is its own."""
    return module.split(".")[1] if "." in module else ""


def ours(module: str) -> set[str]:
    """What `module` imports of the package, each with its room's name in front."""
    return {name for name in SOURCES[module] if name.split(".")[0] == "mie"}


def of(*rooms: str) -> list[str]:
    chosen = [module for module in SOURCES if room(module) in rooms]
    assert chosen or rooms == ("kernels",), f"no module in {rooms}"
    return chosen


def rooms_used(*rooms: str) -> set[tuple[str, str]]:
    """(module, room it imports from), its own room left out."""
    return {
        (module, room(name))
        for module in of(*rooms)
        for name in ours(module)
        if room(name) != room(module)
    }


def test_the_parser_sees_imports_wherever_they_stand() -> None:
    source = "import a.b\ndef f():\n    from c import d\nif TYPE_CHECKING:\n    import e\n"
    assert set(imports(source)) == {"a.b", "c.d", "e"}
    assert "mie.model.hub" in SOURCES["mie.engine.llm"]


# -- rooms --------------------------------------------------------------------------------------


def test_nothing_in_the_engine_looks_at_an_onlooker() -> None:
    engine = {room(module) for module in SOURCES} - ONLOOKERS
    assert {"engine", "model", "ops", "text", "parts"} <= engine
    assert {(m, used) for m, used in rooms_used(*engine) if used in ONLOOKERS} == set()


def test_chapter_tools_and_specs_do_not_need_the_terminal() -> None:
    assert {
        (m, u) for m, u in rooms_used("book", "viz", "spec", "bench") if u in {"terminal", "cli"}
    } == set()


def test_kernels_use_nothing_of_the_package() -> None:
    assert rooms_used("kernels") == set()


def test_ops_use_kernels_at_most() -> None:
    assert {used for _, used in rooms_used("ops")} <= {"kernels"}


def test_the_model_uses_ops_errors_and_text_in_one_named_file() -> None:
    beyond = {(m, used) for m, used in rooms_used("model") if used not in {"ops", "errors"}}
    assert beyond == {("mie.model.convert", "text")}


def test_text_uses_errors_and_the_reader_of_gguf_files() -> None:
    strangers = {
        (module, name)
        for module in of("text")
        for name in ours(module)
        if room(name) not in {"text", "errors"} and not name.startswith("mie.model.gguf")
    }
    assert strangers == set()


PASSED_DOWN = {  # what a plan is made of: all that execution may know of those who decide
    "mie.scheduling.plan",
    "mie.scheduling.limits",  # what memory is made for, once
    "mie.memory.block_copies",
    "mie.memory.swap",
    "mie.sampling_params",
}


def test_execution_does_not_look_up_at_the_engine() -> None:
    rooms = {"errors", "model", "ops", "kernels", "sampling"}
    strangers = {
        (module, name)
        for module in of("execution")
        for name in ours(module)
        if room(name) not in rooms | {"execution"} and name.rpartition(".")[0] not in PASSED_DOWN
    }
    assert strangers == set()


def test_sampling_knows_what_may_be_asked_for_and_nothing_else() -> None:
    assert {used for _, used in rooms_used("sampling")} <= {"sampling_params", "kernels"}
    from_kernels = {name for m in of("sampling") for name in ours(m) if room(name) == "kernels"}
    assert all(name.startswith("mie.kernels.philox") for name in from_kernels), "it needs Triton"


def strangers_to_the_standard_library(*rooms: str) -> set[tuple[str, str]]:
    return {
        (module, name)
        for module in of(*rooms)
        for name in SOURCES[module]
        if name.split(".")[0] not in sys.stdlib_module_names | {"mie"}
    }


def test_memory_uses_errors_and_the_standard_library() -> None:
    assert {used for _, used in rooms_used("memory")} <= {"errors"}
    assert strangers_to_the_standard_library("memory") == set()


def test_scheduling_decides_in_integers() -> None:
    beside = {"memory", "errors", "request", "sampling_params"}
    assert {used for _, used in rooms_used("scheduling")} <= beside
    assert {used for _, used in rooms_used("request")} <= {"memory", "sampling_params"}
    assert {used for _, used in rooms_used("sampling_params")} <= {"errors"}
    assert {used for _, used in rooms_used("config")} <= {"errors", "sampling_params", "scheduling"}
    alone = strangers_to_the_standard_library("scheduling", "request", "sampling_params", "config")
    assert alone == set()


def test_the_core_of_the_engine_knows_a_plan_and_no_runner() -> None:
    used = {room(name) for name in ours("mie.engine.core")}
    assert used == {"errors", "request", "scheduling"}


def test_benchmarks_draw_in_two_named_files() -> None:
    looks = {m for m, used in rooms_used("bench") if used in {"book", "viz"}}
    assert looks == {"mie.bench.memory_plots", "mie.bench.memory_report"}


RUN_THE_MODEL = {"mie.bench.decode", "mie.bench.plain_loop"}  # benchmarks that need torch
NO_TORCH = ["mie", "mie.errors", "mie.parts", "mie.machine", "mie.cli", "mie.terminal.bench"]
NO_TORCH += ["mie.config", "mie.request", "mie.sampling_params", "mie.engine.core"]
NO_TORCH += sorted({*of("memory", "scheduling", "bench")} - RUN_THE_MODEL)


def test_the_benchmarks_that_are_excepted_need_torch() -> None:
    imported = {name.split(".")[0] for module in RUN_THE_MODEL for name in SOURCES[module]}
    assert {*of("bench")} >= RUN_THE_MODEL and "torch" in imported


@pytest.mark.parametrize("module", NO_TORCH)
def test_what_everybody_imports_brings_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert module in run.stdout.split()
    assert not {"torch", "numpy", "tokenizers", "triton"} & {*run.stdout.split()}


# -- other people's packages --------------------------------------------------------------------


def declared(*lines: str) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines}


# Imported by whoever calls it; without it, an error says what to install.
WHERE_IT_IS_ASKED_FOR = {("mie.kernels.cuda.paged_decode", "cuda")}


def test_every_package_that_we_import_is_declared() -> None:
    """A package that another one happens to bring may be gone with its next version."""
    engine = declared(*PROJECT["dependencies"])
    book = engine | declared(*EXTRAS["book"])
    owners = packages_distributions()
    missing = set()
    for module, names in SOURCES.items():
        draws = room(module) in {"book", "viz"} or module == "mie.bench.memory_plots"
        allowed = book if draws else engine
        for name in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"mie"}:
            if not allowed & {*map(canonicalize_name, owners.get(name, [name]))}:
                missing.add((module, name))
    assert missing == WHERE_IT_IS_ASKED_FOR


def test_every_extra_that_a_page_names_exists() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "book").glob("*.md")]
    pages += [path for room in (".github", ".binder") for path in (ROOT / room).rglob("*.*")]
    pages += [*(ROOT / "mie").rglob("*.py"), ROOT / "Makefile", *(ROOT / "tools").glob("*")]
    named = {
        (path.relative_to(ROOT).as_posix(), extra)
        for path in pages
        if path.is_file()
        for extras in re.findall(r"(?:\bmie|['\" ]\.|/mie)\[([a-z, ]+)\]", path.read_text("utf-8"))
        for extra in re.split(r",\s*", extras)
    }
    assert ("book/how-to-read.md", "book") in named
    assert {(page, extra) for page, extra in named if extra not in EXTRAS} == set()
