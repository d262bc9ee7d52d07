"""What every chapter keeps to, one rule a function.

A rule takes a notebook and yields a line for every place where it is broken. The rules cover
what execution alone lets through: nbmake is silent about a failing `!command`, about
`allow_errors`, about skipped cells. `tools/execute_chapters.py` adds the one that needs
outputs: a cell tagged `raises-exception` must raise. tests/test_notebooks.py applies the rules,
and shows that each one bites.
"""

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

MAX_CODE_LINES = 30
MAX_CODE_WIDTH = 78  # more would scroll in the published page
CELLS = range(18, 51)  # the aim is 20 to 35
WORDS = range(900, 3301)  # the aim is 1,200 to 2,500
TAGS = {"hide-input", "hide-output", "hide-cell", "remove-input", "remove-output", "remove-cell"}
TAGS |= {"raises-exception", "skip-execution"}
NETWORK = {"aiohttp", "ftplib", "http", "httpx", "huggingface_hub", "requests", "smtplib"}
NETWORK |= {"socket", "socketserver", "urllib", "urllib3", "websockets", "xmlrpc"}
PRESUMING = re.compile(r"\b(simply|just|obviously|of course|easily)\b", re.IGNORECASE)

# What a chapter may import: the reader's tools, and what the chapters up to it have built.
ALWAYS = {"mie.book", "mie.viz", "mie.spec", "mie.parts", "mie.errors"}
BUILT = {
    "01": """
        mie.model.checkpoint mie.model.safetensors mie.model.sharded mie.model.gguf
        mie.model.hub mie.model.open mie.model.weights""",
    "02": """
        mie.ops mie.text mie.model.config mie.model.layers mie.model.rope mie.model.decoder
        mie.model.registry mie.model.kv_cache""",
    "03": """
        mie.LLM mie.engine.llm mie.engine.plain mie.execution.contiguous_cache""",
    "04": "mie.memory.block_pool",
    "05": """
        mie.memory.block_copies mie.memory.block_table mie.execution.kv_cache""",
    "06": """
        mie.memory.prefix_cache mie.memory.radix_tree mie.memory.manager mie.engine.paged""",
    "07": "mie.memory.usage mie.bench",
    "08": """
        mie.SamplingParams mie.EngineConfig mie.request mie.sampling_params mie.config
        mie.scheduling.plan mie.scheduling.planned mie.scheduling.limits mie.scheduling.queue
        mie.scheduling.static mie.scheduling.trace mie.engine.core mie.engine.outputs
        mie.execution.batch mie.execution.model_runner""",
    "09": "mie.scheduling.scheduler mie.sampling.sampler",
    "10": "",
    "11": "mie.scheduling.policy mie.memory.swap mie.execution.swap_space",
    "12": """
        mie.kernels.launch mie.kernels.rms_norm mie.kernels.swiglu mie.kernels.rope
        mie.kernels.qk_rope_write mie.execution.fused_forward mie.execution.skinny_forward
        mie.kernels.skinny_linear mie.engine.assemble""",
    "13": "mie.kernels.decode_plan mie.kernels.paged_decode",
    "14": """
        mie.kernels.paged_prefill mie.kernels.kv_write mie.kernels.inputs
        mie.execution.device_runner""",
    "15": "mie.kernels.cuda",
    "16": "mie.execution.cuda_graphs mie.execution.step_memory mie.kernels.block_copy",
    "17": """
        mie.engine.overlapped_core mie.execution.device_state mie.execution.overlap""",
}


class Notebook:
    """A notebook as it is stored, with its cells by kind and their numbers."""

    def __init__(self, content: dict[str, Any], name: str) -> None:
        self.name = name
        self.metadata = content["metadata"]
        self.cells = content["cells"]

    def code(self) -> Iterator[tuple[int, dict[str, Any], str]]:
        for number, cell in enumerate(self.cells):
            if cell["cell_type"] == "code":
                yield number, cell["metadata"], "".join(cell["source"])

    def markdown(self) -> Iterator[tuple[int, str]]:
        for number, cell in enumerate(self.cells):
            if cell["cell_type"] == "markdown":
                yield number, "".join(cell["source"])

    def prose(self) -> Iterator[tuple[int, str]]:
        """Markdown without code: no fences with a language, no inline code, no formulas."""
        for number, text in self.markdown():
            text = re.sub(r"^(`{3,})[a-z]+\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
            yield number, re.sub(r"`[^`\n]+`|\$\$.*?\$\$|\$[^$\n]+\$", "", text, flags=re.DOTALL)

    def tags(self, metadata: dict[str, Any]) -> list[str]:
        return metadata.get("tags", [])


def parsed(source: str) -> ast.Module:
    """A cell as Python; lines for IPython alone are left out."""
    return ast.parse("\n".join(re.sub(r"^\s*[%!].*", "", line) for line in source.splitlines()))


def begins_with_its_title(notebook: Notebook) -> Iterator[str]:
    headings = [(n, text) for n, text in notebook.markdown() if re.search(r"^# \S", text, re.M)]
    if [number for number, _ in headings] != [0] or not headings[0][1].startswith("# "):
        yield "cell 0: a chapter has one title, '# ...', and it is the first line of the first cell"


def runs_on_the_python3_kernel(notebook: Notebook) -> Iterator[str]:
    if (name := notebook.metadata.get("kernelspec", {}).get("name")) != "python3":
        yield f"cell 0: the notebook's kernel is {name!r}, not 'python3'"


def is_stored_without_outputs(notebook: Notebook) -> Iterator[str]:
    for number, cell in enumerate(notebook.cells):
        traces = (
            cell.get("outputs") or cell.get("execution_count") or cell["metadata"].get("execution")
        )
        if traces:
            yield f"cell {number}: traces of a run are stored; nbstripout takes them out"


def lets_no_error_pass(notebook: Notebook) -> Iterator[str]:
    if notebook.metadata.get("execution", {}).get("allow_errors"):
        yield "cell 0: the notebook's metadata sets allow_errors"


def runs_no_shell(notebook: Notebook) -> Iterator[str]:
    for number, _, source in notebook.code():
        for line in source.splitlines():
            if re.match(r"\s*(!|%%(bash|sh|script|!)|%(pip|conda|sx|system|run)\b|\w+ = !)", line):
                yield f"cell {number}: {line.strip()!r} runs a command, whose failure would pass"


def fetches_nothing(notebook: Notebook) -> Iterator[str]:
    for number, _, source in notebook.code():
        tree = parsed(source)
        found = [name for name in imported(tree) if name.split(".")[0] in NETWORK]
        found += re.findall(r"https?://|hf_hub_download", ast.unparse(tree))
        if found:
            yield f"cell {number}: {found[0]!r}: a chapter needs no network"


def keeps_cells_short(notebook: Notebook) -> Iterator[str]:
    for number, _, source in notebook.code():
        if (lines := len(source.splitlines())) > MAX_CODE_LINES:
            yield f"cell {number}: {lines} lines of code, at most {MAX_CODE_LINES} are one idea"


def keeps_lines_narrow(notebook: Notebook) -> Iterator[str]:
    for number, _, source in notebook.code():
        for line in source.splitlines():
            if len(line) > MAX_CODE_WIDTH:
                yield f"cell {number}: {len(line)} wide, at most {MAX_CODE_WIDTH}: {line.strip()}"


def skips_only_with_a_reason(notebook: Notebook) -> Iterator[str]:
    for number, metadata, _ in notebook.code():
        skipped = "skip-execution" in notebook.tags(metadata)
        if skipped and not metadata.get("mie", {}).get("reason"):
            yield f"cell {number}: skip-execution without a reason in its metadata (mie.reason)"


def explains_every_error(notebook: Notebook) -> Iterator[str]:
    kinds = [cell["cell_type"] for cell in notebook.cells]
    for number, metadata, _ in notebook.code():
        raises = "raises-exception" in notebook.tags(metadata)
        if raises and kinds[number + 1 : number + 2] != ["markdown"]:
            yield f"cell {number}: raises, and no prose after it says what was seen"


def uses_known_tags(notebook: Notebook) -> Iterator[str]:
    for number, metadata, _ in notebook.code():
        for tag in set(notebook.tags(metadata)) - TAGS:
            yield f"cell {number}: the tag {tag!r} does nothing; known: {', '.join(sorted(TAGS))}"


def describes_its_plots(notebook: Notebook) -> Iterator[str]:
    """Steppers carry their own text. A function that draws is judged where it is called."""
    for number, metadata, source in notebook.code():
        tree = parsed(source)
        tree.body = [n for n in tree.body if not isinstance(n, ast.FunctionDef | ast.ClassDef)]
        draws = re.search(
            r"\bsubplots\(|\bplt\.(show|plot|figure)\(|\b(Image|SVG)\(", ast.unparse(tree)
        )
        if draws and not metadata.get("mystnb", {}).get("image", {}).get("alt"):
            yield f"cell {number}: draws, and its metadata has no mystnb.image.alt"


def describes_its_images(notebook: Notebook) -> Iterator[str]:
    for number, text in notebook.markdown():
        if re.search(r"!\[\s*\]\(|<img(?![^>]*\balt=\"[^\"])", text):
            yield f"cell {number}: an image without alt text"
        for fence, body in re.findall(
            r"^([`:]{3,})\{(?:figure|image)\}(.*?)^\1\s*$", text, re.M | re.S
        ):
            if ":alt:" not in body:
                yield f"cell {number}: a figure without :alt: ({fence}{{figure}}...)"


def presumes_nothing(notebook: Notebook) -> Iterator[str]:
    for number, text in notebook.prose():
        for match in PRESUMING.finditer(text):
            yield f"cell {number}: {match[0]!r} tells a reader who is stuck that it's their fault"


def imports_what_has_been_built(notebook: Notebook) -> Iterator[str]:
    chapter = notebook.name[:2]
    if chapter not in BUILT:
        yield f"cell 0: tools/chapter_rules.py does not say what chapter {chapter} builds"
    allowed = ALWAYS.union(*(built(number) for number in BUILT if number <= chapter))
    for number, _, source in notebook.code():
        for name in imported(parsed(source)):
            ours = name.split(".")[0] in {"mie", "kernels"}
            if ours and not any(f"{name}.".startswith(f"{entry}.") for entry in allowed):
                yield f"cell {number}: imports {name}, not built by chapters up to {chapter}"


def built(chapter: str) -> list[str]:
    return BUILT[chapter].split()


def imported(tree: ast.Module) -> Iterator[str]:
    """Every module that is imported, by a statement or by a call with its name written out."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module, names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Call(
                func=ast.Name("__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(str(name)), *_],
            ):
                yield name


def names_no_absolute_path(notebook: Notebook) -> Iterator[str]:
    for number, cell in enumerate(notebook.cells):
        text = "".join(cell["source"])
        if match := re.search(
            r"(?<![\w.:/])/(home|root|tmp|work|Users|mnt|opt|var)/|\b[A-Z]:\\", text
        ):
            yield f"cell {number}: {match[0]!r} is a path of one machine"


def is_a_chapter_long(notebook: Notebook) -> Iterator[str]:
    words = sum(len(re.findall(r"[A-Za-z’']{2,}", text)) for _, text in notebook.prose())
    for count, bounds, unit in ((len(notebook.cells), CELLS, "cells"), (words, WORDS, "words")):
        if count not in bounds:
            yield f"cell 0: {count:,} {unit}, outside {bounds.start:,} to {bounds.stop - 1:,}"


RULES: list[Callable[[Notebook], Iterator[str]]] = [
    begins_with_its_title,
    runs_on_the_python3_kernel,
    is_stored_without_outputs,
    lets_no_error_pass,
    runs_no_shell,
    fetches_nothing,
    keeps_cells_short,
    keeps_lines_narrow,
    skips_only_with_a_reason,
    explains_every_error,
    uses_known_tags,
    describes_its_plots,
    describes_its_images,
    presumes_nothing,
    imports_what_has_been_built,
    names_no_absolute_path,
    is_a_chapter_long,
]
