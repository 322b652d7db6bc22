"""Processes that train together over gloo, started once more if they hang.

Very rarely gloo (of PyTorch 2.13) loses a message: one process waits in `UnboundBuffer::waitRecv`, the other, already in the
next collective, in `waitSend`, and all bytes are read from the socket. Seen about once in ten runs of all tests.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

__all__ = ["outputs_of", "run_program"]


def outputs_of(start: Callable[[], Sequence[subprocess.Popen[str]]], *, longest_s: float) -> list[str]:
    """Return the standard output of each process.

    Args:
        start: starts them, with pipes for both streams; called again if they hang, when it must not use what the first ones
            left.
        longest_s: in seconds; what takes longer hangs.
    """
    try:
        return _outputs_of(start(), longest_s)
    except subprocess.TimeoutExpired:
        return _outputs_of(start(), longest_s)


def _outputs_of(started: Sequence[subprocess.Popen[str]], longest_s: float) -> list[str]:
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
    used: list[Path] = []

    def start() -> list[subprocess.Popen[str]]:
        used.append(folders.mktemp("ranks"))
        command = [sys.executable, "-W", "ignore", str(program)]
        return [
            subprocess.Popen(
                [*command, str(rank), str(used[-1])], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(num_ranks)
        ]

    outputs = outputs_of(start, longest_s=longest_s)
    return used[-1], outputs
