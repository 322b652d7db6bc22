"""Processes that train together over gloo, in which a mistake of ours shows as a hang: ended, and said."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

__all__ = ["outputs_of", "run_program"]


def outputs_of(started: Sequence[subprocess.Popen[str]], *, longest_s: float) -> list[str]:
    """Return the standard output of processes that were started with pipes for both streams.

    Args:
        started: the processes.
        longest_s: in seconds; what takes longer hangs, which is an error.
    """
    try:
        done = [process.communicate(timeout=longest_s) for process in started]
    finally:
        for process in started:
            # So that torchrun can end its own.
            process.terminate()
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
    assert all(process.returncode == 0 for process in started), "".join(errors[-4000:] for _, errors in done)
    return [output for output, _ in done]


def run_program(
    program: Path, num_ranks: int, folders: pytest.TempPathFactory, *, longest_s: float
) -> tuple[Path, list[str]]:
    """Run a program in processes that get their rank and a folder; return the folder, and the standard output of each."""
    folder = folders.mktemp("ranks")
    command = [sys.executable, "-W", "ignore", str(program)]
    started = [
        subprocess.Popen([*command, str(rank), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]
    return folder, outputs_of(started, longest_s=longest_s)
