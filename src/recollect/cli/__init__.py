"""The command line: parses, calls, prints. `main` is the entry point of the `recollect` script."""

from __future__ import annotations

from recollect.cli.entry import main

__all__ = ["main"]
