"""Print the executed chapters' tables of predictions and measurements, as plain text."""

import json
from collections.abc import Iterator
from pathlib import Path

CHAPTERS = Path(__file__).resolve().parents[1] / "build" / "executed" / "chapters"


def comparisons(notebook: Path) -> Iterator[str]:
    """Each output of class `mie-compare` carries a text form that says the same."""
    for cell in json.loads(notebook.read_text())["cells"]:
        for output in cell.get("outputs", ()):
            forms = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
            if "mie-compare" in forms.get("text/html", ""):
                yield forms["text/plain"]


for path in sorted(CHAPTERS.glob("*.ipynb")):
    for table in comparisons(path):
        print(f"\n{path.stem}\n{table}")
print(f"\nThe notebooks with these outputs are in {CHAPTERS}")
