"""The benchmark of loss chunks runs: on sizes so small that its times mean nothing."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from forked_processes import run_forked

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "loss_chunks.py"


@pytest.mark.long
def test_loss_chunks(tmp_path: Path) -> None:
    flags = ["--vocab-sizes", "2048", "--hidden-size", "32", "--seq-length", "64", "--threads", "1", "--minutes", "0"]
    done = run_forked(SCRIPT, *flags, "--least-rounds", 1, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gradients off by" in done.stdout
    found: dict[str, dict[str, float]] = {}
    with (tmp_path / "loss_chunks.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["metric"], {})[row["contestant"]] = float(row["value"])
    peaks, off = found["peak"], found["gradients_off_by"]
    assert list(peaks) == ["1 of 2048", "2 of 2048", "4 of 2048", "8 of 2048", "32 of 2048"]
    assert peaks["1 of 2048"] > 1.3 * peaks["2 of 2048"] > 1.3 * peaks["32 of 2048"]
    assert off["1 of 2048"] == 0 < off["8 of 2048"] < 1e-5
    assert set(found["time_over_one_piece"]) == set(peaks) - {"1 of 2048"}
    for part in ("logits", "hidden", "weight", "rest"):
        assert set(found[f"loss_{part}_time"]) == set(peaks)
        assert all(seconds > 0 for seconds in found[f"loss_{part}_time"].values())
