"""Flags shared by several benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class MachineFlags:
    """Device and threads."""

    device: str = "cpu"
    """A torch device."""
    threads: int = 2
    """PyTorch's threads on the CPU."""


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Least number of rounds, and the folder of the results."""

    least_rounds: int = 3
    """Rounds to run even if the time is over."""
    out: Path = RESULTS
    """Folder for rows and pictures."""


def parse(kind: type[T], description: str | None = None, arguments: Sequence[str] | None = None) -> T:
    """Parse the command line into a dataclass of flags; nested dataclasses add no prefix.

    tyro is imported here, so that measurements can be called without it.
    """
    import tyro

    return tyro.cli(kind, args=arguments, description=description, config=(tyro.conf.OmitArgPrefixes,))
