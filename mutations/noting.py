"""A plugin of pytest that notes, in the file named by MUTATION_NOTES, which tests begin and which ones fail."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from mutations.notes import NOTES, OVER, line_of


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test another copy of the library than the one in this folder."""
    found = find_spec("recollect")
    if found is None or found.origin is None or not Path(found.origin).is_relative_to(config.rootpath):
        raise pytest.UsageError(f"tests of {config.rootpath} would import {found and found.origin}")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note the test at hand, which is to be named if it never ends."""
    _note(line_of("begins", nodeid))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that fails."""
    if report.failed:
        _note(line_of("fails", report.nodeid))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that cannot be imported."""
    if report.failed:
        _note(line_of("fails", report.nodeid))


def pytest_unconfigure() -> None:
    """Note that all is over, after which a thread that a test has left may keep the process from ending."""
    _note(OVER)


def _note(line: str) -> None:
    with Path(os.environ[NOTES]).open("a", encoding="utf-8") as notes:
        notes.write(line)
