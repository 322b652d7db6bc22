"""Processes of tests that hang are started once more, and fail if they hang again."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rank_processes import run_program

PROGRAM = """
import sys, time
from pathlib import Path
rank, hung = sys.argv[1], Path(__file__).with_name("hung")
if rank == "1" and not hung.exists():
    hung.touch()
    time.sleep(60)
print("rank", rank)
"""


def test_processes_that_hang_are_started_once_more(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    _, outputs = run_program(program, 2, tmp_path_factory, longest_s=2)
    assert outputs == ["rank 0\n", "rank 1\n"]


def test_processes_that_hang_twice_or_fail_are_an_error(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    program = tmp_path / "program.py"
    program.write_text("import time; time.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired):
        run_program(program, 1, tmp_path_factory, longest_s=0.5)
    program.write_text("raise ValueError('why')")
    with pytest.raises(AssertionError, match="why"):
        run_program(program, 1, tmp_path_factory, longest_s=20)
