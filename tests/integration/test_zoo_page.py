"""The page of architectures is what the committed rows say, and the harness tells right from wrong."""

import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from architectures.page import PAGE, page, read_rows  # noqa: E402

RESULTS = BENCHMARKS / "results"


def row(class_name: str, verdict: str, **fields: Any) -> dict[str, Any]:
    numbers = dict.fromkeys(("plain_bytes", "budget_bytes", "predicted_bytes", "measured_bytes", "seconds"), 0)
    common = {"task": "CTC", "reason": "", "date": "2026-01-01T00:00:00", **numbers}
    return {**common, "class_name": class_name, "verdict": verdict, **fields}


def test_page_is_made_from_the_committed_rows() -> None:
    rows = read_rows(RESULTS / "zoo.jsonl"), read_rows(RESULTS / "zoo_graph.jsonl")
    assert PAGE.read_text(encoding="utf-8") == page(*rows), "run: python benchmarks/model_zoo.py --page"


def test_page_counts_verdicts_and_shows_reasons() -> None:
    rows = [
        row("A", "exact", measured_bytes=2048, predicted_bytes=2048),
        row("B", "crashed", reason="X: a|b <c>"),
        row("C", "not built", reason="too large"),
    ]
    text = page({entry["class_name"]: entry for entry in rows})
    assert "1 of 2 classes are exact and within the budget (50.0%); 1 could not be built" in text
    assert "| CTC | 1 | 0 | 0 | 1 | 0 | 1 | 0 |" in text
    assert "| B | crashed: X: a/b (c) |" in text
    assert "Not checked: C." in text
    assert "Nothing has been run yet" in page({})
