"""Flags that more than one benchmark has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

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


def parse(kind: type[T], description: str | None = None, arguments: Sequence[str] | None = None) -> T:
    """Read flags, a dataclass, from the command line; those of a nested dataclass have no prefix.

    tyro is imported here, so that what a benchmark measures can be called where it is not installed.
    """
    import tyro

    return tyro.cli(kind, args=arguments, description=description, config=(tyro.conf.OmitArgPrefixes,))
