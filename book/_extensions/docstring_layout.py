"""An indented block in a docstring is a formula, a picture or code: its lines stay as they stand.

reStructuredText would read it as a quotation and run its lines together. In the source, indentation
alone is what one wants to read, so the `::` that keeps the layout is put in here and not there.
"""

from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", keep_indented_blocks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def keep_indented_blocks(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Put `::` before each indented block that follows a paragraph, in place."""
    before = ""  # the last line with anything on it
    kept: list[str] = []
    for line in lines:
        after_paragraph = bool(kept) and not kept[-1].strip() and before[:1].strip() != ""
        marked = before.endswith("::") or before.startswith((":", "..", "- ", "* "))
        if line.startswith("  ") and after_paragraph and not marked:
            kept += ["::", ""]
        kept.append(line)
        before = line if line.strip() else before
    lines[:] = kept
