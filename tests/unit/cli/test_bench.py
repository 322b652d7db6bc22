"""`recollect bench`: its exit statuses, with times that are set, on a tiny model."""

from pathlib import Path
from typing import Any

import pytest

from recollect.cli import bench, main
from recollect.lab.bench.results import Row

QUICK = ["bench", "--size", "tiny", "--num-layers", "1", "--seq-length", "8", "--device", "cpu"]


def take(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each step take so many seconds."""
    row = Row(name="none", fields={}, peak_bytes=1000, step_s=step_s, model_flops=1e9, num_tokens=8)

    def measure(*_: Any, **__: Any) -> tuple[tuple[Row, ...], str, int]:
        return (row,), "none", 1

    monkeypatch.setattr(bench, "measure", measure)


@pytest.mark.parametrize(
    ("step_s", "status", "result"), [(1.0, 0, "ok"), (1.02, 0, "ok"), (1.2, 1, "perf regression"), (0.5, 0, "faster")]
)
def test_a_setting_that_got_slower_ends_with_1(
    step_s: float,
    status: int,
    result: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    golden = tmp_path / "golden.json"
    take(1.0, monkeypatch)
    assert main([*QUICK, "--save-golden", str(golden)]) == 0
    capsys.readouterr()
    take(step_s, monkeypatch)
    assert main([*QUICK, "--golden", str(golden), "--threshold", "0.05"]) == status
    assert result in capsys.readouterr().out
