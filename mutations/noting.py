"""A plugin of pytest that notes, in the file named by MUTATION_NOTES, which tests begin and which ones fail."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

_NOTES = "MUTATION_NOTES"


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test another copy of the library than the one in this folder."""
    found = find_spec("recollect")
    if found is None or found.origin is None or not Path(found.origin).is_relative_to(config.rootpath):
        raise pytest.UsageError(f"tests of {config.rootpath} would import {found and found.origin}")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note the test at hand, which is to be named if it never ends."""
    _note("begins", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that fails."""
    if report.failed:
        _note("fails", report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that cannot be imported."""
    if report.failed:
        _note("fails", report.nodeid)


def _note(what: str, nodeid: str) -> None:
    with Path(os.environ[_NOTES]).open("a", encoding="utf-8") as notes:
        notes.write(json.dumps([what, nodeid]) + "\n")
