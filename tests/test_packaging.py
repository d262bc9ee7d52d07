"""What the package, the lock, the book's settings and the workflows say about one another."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text())
LOCK = {
    canonicalize_name(requirement.name): requirement
    for line in (ROOT / "requirements.lock").read_text().splitlines()
    if not line.startswith("#") and (requirement := Requirement(line))
}
STATIC = ROOT / "book" / "_static"


def requirements() -> list[Requirement]:
    project = PROJECT["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    return [requirement for requirement in map(Requirement, lines) if requirement.name != "mie"]


# ---- the package ---------------------------------------------------------------------------------


def test_every_folder_with_code_is_a_listed_package() -> None:
    folders = {path.parent for room in ("mie", "kernels") for path in (ROOT / room).rglob("*.py")}
    names = {".".join(path.relative_to(ROOT).parts) for path in folders}
    names = {f"mie.{name}" if name.startswith("kernels") else name for name in names}
    assert names == set(PROJECT["tool"]["setuptools"]["packages"])


def test_kernels_is_importable_only_inside_mie(tmp_path: Path) -> None:
    """transformers asks for a package called `kernels` and breaks when ours answers."""
    code = """
import importlib.util
assert importlib.util.find_spec("kernels") is None, importlib.util.find_spec("kernels")
assert importlib.util.find_spec("mie.kernels") is not None
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


# ---- the lock ------------------------------------------------------------------------------------


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_the_lock_fits_the_project(requirement: Requirement) -> None:
    locked = LOCK[canonicalize_name(requirement.name)]
    (pin,) = locked.specifier
    assert pin.operator == "=="
    assert pin.version in requirement.specifier
    assert locked.marker == requirement.marker


def test_the_lock_holds_plain_versions() -> None:
    """A local label such as +cpu, a path or an address would tie the lock to one machine."""
    assert [str(r) for r in LOCK.values() if r.url or "+" in str(r.specifier)] == []


# ---- the book ------------------------------------------------------------------------------------


def test_the_repository_has_one_address() -> None:
    address = PROJECT["project"]["urls"]["Repository"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert CONFIG["repository"]["url"] == citation["repository-code"] == address


def test_the_books_style_and_settings_ask_for_local_files_only() -> None:
    style = (STATIC / "custom.css").read_text()
    addresses = re.findall(r"url\(\"?([^)\"]+)", style)
    assert addresses and [name for name in addresses if not (STATIC / name).is_file()] == []
    assert not re.search(r"@import|https?:", style)
    assert (STATIC / CONFIG["sphinx"]["config"]["mathjax_path"]).is_file()


def test_vendored_files_are_small_and_carry_their_licences() -> None:
    vendor = STATIC / "vendor"
    assert sum(path.stat().st_size for path in vendor.rglob("*")) < 3.5e6
    fonts = {path.name.split("-")[0].lower() for path in vendor.glob("fonts/*.woff2")}
    licences = {
        path.stem.removeprefix("OFL-").replace("-", "") for path in vendor.glob("fonts/OFL-*")
    }
    assert {name.removesuffix("nl").replace("source", "sourceserif4") for name in fonts} == licences
    assert "Apache License" in (vendor / "mathjax" / "LICENSE.txt").read_text()


# ---- the commands --------------------------------------------------------------------------------


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_help_lists_every_target_that_the_readme_promises() -> None:
    said = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True)
    for target in ("setup", "book", "lab", "serve", "test", "test-gpu", "bench", "lint", "clean"):
        assert re.search(rf"^  make {target} +\S", said.stdout, re.MULTILINE), target


def test_workflows_and_the_ci_script_call_targets_that_exist() -> None:
    scripts = [ROOT / ".ci" / "run", *(ROOT / ".github" / "workflows").glob("*.yml")]
    commands = re.compile(r"^\W*(?:run: )?make ([a-z -]+)$", re.MULTILINE)
    called = {
        target
        for path in scripts
        for line in commands.findall(path.read_text())
        for target in line.split()
    }
    assert {"test", "book"} <= called <= targets()


def test_the_installed_package_is_this_version() -> None:
    assert version("mie") == PROJECT["project"]["version"], (
        "pyproject.toml changed: run `make setup`"
    )


def test_a_cached_model_does_not_outlive_a_change_of_what_makes_it() -> None:
    """The key of the cache hashes every file of ours that the conversion runs through."""
    workflow = (ROOT / ".github" / "workflows" / "cpu.yml").read_text()
    patterns = re.findall(r"'([^']+\.py)'", workflow[workflow.index("hashFiles(") :])
    hashed = {path for pattern in patterns for path in ROOT.glob(pattern)}
    convert = ROOT / "mie" / "model" / "convert.py"
    modules = re.findall(r"^from mie\.([\w.]+) import", convert.read_text(), re.MULTILINE)
    makers = {ROOT / "mie" / f"{module.replace('.', '/')}.py" for module in modules}
    assert len(makers) >= 2
    assert {convert, ROOT / "mie" / "model" / "packaged.py", *makers} <= hashed


def test_no_workflow_names_an_index_of_its_own() -> None:
    """Which builds of torch exist where is uv's business: `UV_TORCH_BACKEND`."""
    for path in [*(ROOT / ".github").rglob("*.yml"), *(ROOT / ".binder").iterdir()]:
        assert not re.search(r"download\.pytorch|--(extra-)?index-url|find-links", path.read_text())
