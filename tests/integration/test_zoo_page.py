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
RESULTS = BENCHMARKS / "results"


def row(class_name: str, verdict: str, **fields: Any) -> dict[str, Any]:
    numbers = dict.fromkeys(("plain_bytes", "budget_bytes", "predicted_bytes", "measured_bytes", "seconds"), 0)
    common = {"task": "CTC", "reason": "", "date": "2026-01-01T00:00:00", **numbers}
    return {**common, "class_name": class_name, "verdict": verdict, **fields}


def test_page_is_made_from_the_committed_rows() -> None:
    rows = read_rows(RESULTS / "zoo.jsonl"), read_rows(RESULTS / "zoo_graph.jsonl")
    assert PAGE.read_text(encoding="utf-8") == page(*rows), "run: python benchmarks/model_zoo.py --page"


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


def test_page_says_which_layers_run_from_traces_and_why_not_all() -> None:
    traces = {"traces": 2, "trace_s": 2.0, "own_s": 0.5}
    rows = [
        row("A", "traced", kinds={"L": [3, 3]}, **traces),
        row("B", "on the tape", kinds={"L": [3, 0], "M": [2, 2]}, reason="a|b", **traces),
        row("C", "different", kinds={"L": [1, 1]}, reason="loss of step 2", **traces),
        row("D", "no plan", kinds={}, traces=0, trace_s=0.0, own_s=0.0),
    ]
    text = page({}, {entry["class_name"]: entry for entry in rows})
    assert "Of 3 classes, 1 run all their layers from traces (33.3%)" in text
    assert "1 run some layers on the tape, with the same bits; 1 differ, 0 crash" in text
    assert "Of 4 classes of layers, 3 are traced. A trace takes 1.00 s" in text
    assert "75% of it is Dynamo's" in text
    assert "| B | 2 of 5 | a/b |" in text
    assert "| C | 1 of 1 | different: loss of step 2 |" in text
