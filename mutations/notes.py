"""The file in which runs of tests note what happens: lines of JSON."""

from __future__ import annotations

import json

__all__ = ["NOTES", "OVER", "line_of"]

NOTES = "MUTATION_NOTES"
"""The variable of the environment that says where it is."""


def line_of(what: str, nodeid: str = "") -> str:
    """Return the line of something that happens to a test, or to all of them."""
    return json.dumps([what, nodeid]) + "\n"


OVER = line_of("ends")
