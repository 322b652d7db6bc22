"""The flags of `recollect doctor`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

__all__ = ["Doctor"]


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Name what went wrong in a training run, why, and what to do, from its log, its settings, or a memory snapshot."""

    files: Positional[tuple[Path, ...]] = ()
    """Logs or tracebacks, configurations (YAML, JSON, TOML, scripts with flags), snapshots of torch.cuda.memory._dump_snapshot;
    files of one run are judged together. - or nothing: standard input."""
    json: bool = False
    """Print JSON instead of text."""
    debug: bool = False
    """Show the traceback of an error."""
