"""Chapters keep the rules of tools/chapter_rules.py, and each rule finds what it forbids."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chapter_rules as rules
import pytest
import yaml
from chapter_rules import RULES, Notebook

import mie

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted((ROOT / "chapters").glob("*.ipynb"))
Rule = Callable[[Notebook], Iterator[str]]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_chapter(path: Path, rule: Rule) -> None:
    broken = list(rule(Notebook(json.loads(path.read_text()), path.name)))
    assert not broken, "\n" + "\n".join(f"{path.relative_to(ROOT)}, {line}" for line in broken)


def test_the_table_of_contents_has_exactly_the_chapters() -> None:
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    files = [entry["file"] for part in toc["parts"] for entry in part["chapters"]]
    listed = [name for name in files if name.startswith("chapters/")]
    assert listed == [f"chapters/{path.stem}" for path in CHAPTERS]


def test_what_chapters_may_import_exists() -> None:
    names = rules.ALWAYS.union(*map(rules.built, rules.BUILT))
    names -= {f"mie.{name}" for name in mie.__all__}
    assert [name for name in sorted(names) if importlib.util.find_spec(name) is None] == []


def good() -> dict[str, Any]:
    prose = [
        {"cell_type": "markdown", "metadata": {}, "source": "A word or two. " * 30}
        for _ in range(20)
    ]
    code = {
        "cell_type": "code",
        "metadata": {},
        "source": "1 + 1",
        "outputs": [],
        "execution_count": None,
    }
    title = {
        "cell_type": "markdown",
        "metadata": {},
        "source": "# Title\n\nText with `just` in code.",
    }
    return {"metadata": {"kernelspec": {"name": "python3"}}, "cells": [title, code, *prose]}


def with_code(source: str, **metadata: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["cells"][1] |= {"source": source, "metadata": metadata}

    return change


def with_prose(source: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["cells"][2].update(source=content["cells"][2]["source"] + source)


BAD: list[tuple[Rule, Callable[[dict[str, Any]], Any]]] = [
    (rules.begins_with_its_title, lambda content: content["cells"].pop(0)),
    (rules.begins_with_its_title, with_prose("\n\n# A second title")),
    (rules.runs_on_the_python3_kernel, lambda content: content["metadata"].pop("kernelspec")),
    (
        rules.is_stored_without_outputs,
        lambda content: content["cells"][1].update(execution_count=3),
    ),
    (rules.is_stored_without_outputs, lambda content: content["cells"][1]["outputs"].append("...")),
    (
        rules.lets_no_error_pass,
        lambda content: content["metadata"].update(execution={"allow_errors": True}),
    ),
    (rules.runs_no_shell, with_code("!ls")),
    (rules.runs_no_shell, with_code("%%bash\nls")),
    (rules.runs_no_shell, with_code("%pip install torch")),
    (rules.runs_no_shell, with_code("files = !ls")),
    (rules.fetches_nothing, with_code("open_page('https://example.org')")),
    (rules.fetches_nothing, with_code("hf_hub_download('org/name', 'config.json')")),
    *(
        (rules.fetches_nothing, with_code(code))
        for code in (
            "import requests",
            "import os, socket",
            "import json, requests as web",
            "import http.client",
            "from urllib.request import urlopen",
            "from urllib import request",
            "from huggingface_hub import snapshot_download",
            "def later():\n    import httpx",
            "__import__('requests')",
            "import importlib\nimportlib.import_module('aiohttp.client')",
        )
    ),
    (rules.keeps_cells_short, with_code("1\n" * 31)),
    (rules.keeps_lines_narrow, with_code("x = " + "1" * 75)),
    (rules.skips_only_with_a_reason, with_code("1", tags=["skip-execution"])),
    (rules.explains_every_error, lambda content: content["cells"].insert(2, content["cells"][1])),
    (rules.uses_known_tags, with_code("1", tags=["hide_input"])),
    (rules.describes_its_plots, with_code("fig, ax = plt.subplots()")),
    (rules.describes_its_images, with_prose("\n![](picture.svg)")),
    (rules.describes_its_images, with_prose("\n```{figure} a.svg\n:name: a\nCaption\n```\n")),
    (rules.describes_its_images, with_prose('<img src="a.svg">')),
    (rules.presumes_nothing, with_prose("This is simply true.")),
    (rules.presumes_nothing, with_prose("\n```{note}\nIt just works.\n```\n")),
    (rules.imports_what_has_been_built, with_code("from mie import LLM")),
    (rules.imports_what_has_been_built, with_code("import mie.ops.reference")),
    (rules.imports_what_has_been_built, with_code("import kernels")),
    (rules.imports_what_has_been_built, with_code("__import__('mie.ops')")),
    (rules.names_no_absolute_path, with_code("open('/home/me/model')")),
    (rules.is_a_chapter_long, with_prose("word " * 4000)),
    (rules.is_a_chapter_long, lambda content: content["cells"].__delitem__(slice(10, None))),
]


@pytest.mark.parametrize(("rule", "spoil"), BAD, ids=lambda value: getattr(value, "__name__", None))
def test_rule_finds_what_it_forbids(rule: Rule, spoil: Callable[[dict[str, Any]], Any]) -> None:
    bad = good()
    if rule is rules.explains_every_error:
        bad["cells"][1]["metadata"] = {"tags": ["raises-exception"]}
    spoil(bad)
    found = list(rule(Notebook(bad, "01-bad.ipynb")))
    assert found, f"{rule.__name__} let it pass"
    assert all(re.match(r"cell \d+: ", line) for line in found)


@pytest.mark.parametrize(
    "code",
    [
        "requests = mixed_requests()\nfor request in requests:\n    print(request)",
        "from mie.bench.workloads import requests",
        "import requestsmith, sockets, httplike",
        "socket = http = 'requests'  # https://example.org",
    ],
)
def test_a_name_is_no_network(code: str) -> None:
    notebook = good()
    with_code(code)(notebook)
    assert list(rules.fetches_nothing(Notebook(notebook, "01-good.ipynb"))) == []


def test_a_good_notebook_breaks_no_rule_and_every_rule_is_tried() -> None:
    notebook = Notebook(good(), "01-good.ipynb")
    assert [line for rule in RULES for line in rule(notebook)] == []
    assert {rule for rule, _ in BAD} == set(RULES)
