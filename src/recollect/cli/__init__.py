"""The command line: parse flags, call the library, print results. `main` is the entry point of the `recollect` script."""

from recollect.cli.entry import main

__all__ = ["main"]
