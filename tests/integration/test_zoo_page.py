"""The page of architectures is what the committed rows say, and the harness tells right from wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from architectures.page import PAGE, page, read_rows  # noqa: E402

pytestmark = pytest.mark.integration
ROWS = BENCHMARKS / "results" / "zoo.jsonl"


def row(class_name: str, verdict: str, **fields: Any) -> dict[str, Any]:
    numbers = dict.fromkeys(("plain_bytes", "budget_bytes", "predicted_bytes", "measured_bytes", "seconds"), 0)
    common = {"task": "CTC", "reason": "", "date": "2026-01-01T00:00:00", **numbers}
    return {**common, "class_name": class_name, "verdict": verdict, **fields}


def test_page_is_made_from_the_committed_rows() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read_rows(ROWS)), "run: python benchmarks/model_zoo.py --page"


def test_the_last_row_of_a_class_counts(tmp_path: Path) -> None:
    path = tmp_path / "zoo.jsonl"
    path.write_text("".join(json.dumps(row("A", verdict)) + "\n" for verdict in ("crashed", "exact")))
    assert read_rows(path)["A"]["verdict"] == "exact"
    assert read_rows(tmp_path / "none.jsonl") == {}


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
