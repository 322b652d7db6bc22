"""Flags that more than one benchmark has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class MachineFlags:
    """Where steps run."""

    device: str = "cpu"
    """A torch device."""
    threads: int = 2
    """Threads of PyTorch on the CPU."""


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """How long to measure at least, and where the results go."""

    least_rounds: int = 3
    """Rounds that are run even if the time is over."""
    out: Path = RESULTS
    """Folder of the rows and pictures."""
