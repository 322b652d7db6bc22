"""The example notebook runs as it is, and what it ends its cells with shows itself."""

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "reading_a_plan.ipynb"
# What each cell that shows something has in its table, and whether there is a picture.
SHOWN = [
    ("without recompute", True),
    ("(Sequential)", True),
    ("keep all", True),
    ("alive at the peak", False),
    ("budget, 3 steps, 1 of them recorded", False),
    ("equal bit for bit", False),
]

pytestmark = pytest.mark.long


def test_the_notebook_runs_and_shows_what_it_makes() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear its outputs: they are of another machine"
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
    shown: list[dict[str, Any]] = [
        output["data"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "execute_result"
    ]
    assert len(shown) == len(SHOWN)
    for data, (text, has_picture) in zip(shown, SHOWN, strict=True):
        assert text in data["text/html"]
        assert ("data:image/png;base64," in data["text/html"]) == has_picture
