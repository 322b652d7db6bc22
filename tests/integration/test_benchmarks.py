"""The benchmarks run: on sizes so small that their times mean nothing, but all else has to be right."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.integration

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    columns = ["metric", "unit", "contestant", "value", "config", "machine", "torch", "date", "commit"]
    assert list(found[0]) == columns
    assert all(row[column] for row in found for column in columns)
    return found


def values(found: list[dict[str, str]], metric: str) -> dict[str, float]:
    return {row["contestant"]: float(row["value"]) for row in found if row["metric"] == metric}


def test_overhead(tmp_path: Path) -> None:
    sizes = ["--num-layers", "2", "--real-hidden-size", "32", "--real-num-layers", "2", "--real-seq-length", "16"]
    no_time = ["--tiny-minutes", "0", "--real-minutes", "0", "--least-rounds", "2", "--threads", "1"]
    output = run("overhead.py", *sizes, *no_time, "--out", str(tmp_path))
    found = rows(tmp_path / "overhead.csv")
    added = values(found, "tiny_added_time")
    assert len(added) == 8
    assert added["checkpoint"] > 0
    per_layer = values(found, "tiny_added_time_per_layer")
    assert per_layer["checkpoint"] == pytest.approx(added["checkpoint"] / 2)
    assert set(values(found, "tiny_added_time_ratio_to_sac")) == {"tape, keeps matmuls", "tape, keeps nothing"}
    assert set(values(found, "real_slowdown_fp32")) == set(values(found, "real_slowdown_bf16")) == {"tape, keeps all"}
    assert json.loads(found[0]["config"])["real_hidden_size"] == 32
    assert "of the added time" in output


def test_frontier(tmp_path: Path) -> None:
    sizes = ["--hidden-size", "32", "--num-layers", "5", "--vocab-size", "64", "--seq-length", "64", "--threads", "1"]
    output = run("frontier.py", *sizes, "--minutes", "0", "--least-rounds", "1", "--out", str(tmp_path))
    found = rows(tmp_path / "frontier.csv")
    peaks, equal = values(found, "peak"), values(found, "gradients_equal")
    ours = {name for name in equal if name.startswith("recollect")}
    peers = {"full", "every 2nd layer", "every 4th layer", "sqrt segments"}
    peers |= {"SAC attention", "SAC 2nd matmul", "torchtitan SAC", "SAC matmuls"}
    assert set(equal) == ours | peers
    assert all(equal.values())
    assert len(ours) > 3
    assert all(peaks[name] < peaks["no recompute"] for name in peers)
    # More is kept with fewer layers checkpointed, and with more ops saved.
    assert peaks["full"] < peaks["every 2nd layer"] < peaks["every 4th layer"]
    assert peaks["SAC attention"] < peaks["SAC 2nd matmul"] < peaks["SAC matmuls"]
    # The same is saved; early stop lets go of its last tensors a little later.
    assert peaks["SAC 2nd matmul"] == pytest.approx(peaks["torchtitan SAC"], rel=0.03)
    assert set(values(found, "recollect_time_ratio_at_equal_peak")) <= peers
    assert "Each peer against recollect" in output
    (picture,) = tmp_path.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_results_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import results_csv

    path = tmp_path / "results" / "some.csv"
    numbers = [results_csv.Number("peak", "bytes", "full", 12)]
    for seed in (1, 2):
        results_csv.append(path, numbers, {"device": "cpu", "seed": seed})
    found = rows(path)
    assert values(found, "peak") == {"full": 12.0}
    assert [json.loads(row["config"])["seed"] for row in found] == [1, 2]
    path.write_text("metric,value\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"some.csv: got the columns \('metric', 'value'\), expected"):
        results_csv.append(path, numbers, {"device": "cpu"})


def test_slowdowns_are_smoothed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import frontier

    assert frontier.falling([5.0, 3.0, 4.0, 1.0]) == [5.0, 3.5, 3.5, 1.0]
    assert frontier.falling([1.0, 2.0, 6.0]) == [3.0, 3.0, 3.0]


def test_allocator_is_settled_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import environment

    monkeypatch.delitem(os.environ, "MALLOC_MMAP_MAX_", raising=False)
    with pytest.raises(RuntimeError, match="torch is imported already"):
        environment.settle_allocator()
