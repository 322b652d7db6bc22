"""Which quick tests run a line of the sources: a plugin of pytest that writes it down, and what reads it.

Programs that tests start in other processes are not seen.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
from coverage import Coverage, CoverageData

__all__ = ["FOLDER", "Covering"]

FOLDER = "COVERING"
"""The variable of the environment that names the folder to write to."""


_SOURCES = "src/recollect/"


class Covering:
    """What a run of tests with this plugin has written.

    Attributes:
        seconds: of each test.
    """

    def __init__(self, folder: Path) -> None:
        self.seconds: dict[str, float] = {}
        for path in folder.glob("seconds-*"):
            self.seconds |= dict(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        self._tests: defaultdict[str, dict[int, set[str]]] = defaultdict(dict)
        for path in folder.glob("lines-*"):
            data = CoverageData(str(path))
            data.read()
            for file in data.measured_files():
                # It ran in a copy that is gone.
                lines = self._tests[f"{_SOURCES}{file.rpartition(_SOURCES)[2]}"]
                for line, tests in data.contexts_by_lineno(file).items():
                    lines.setdefault(line, set()).update(filter(None, tests))

    def tests_of(self, file: str, line: int) -> list[str]:
        """Return the tests that run a line, the quickest first; if it runs at import, those that run others of its file."""
        lines = self._tests[file]
        # Of a statement of several lines, only some have code.
        near = next((lines[one] for one in range(line, line - 6, -1) if lines.get(one)), None)
        tests = set().union(*lines.values()) if near is None else near
        return sorted(tests, key=lambda test: (self.seconds[test], test))


class _Plugin:
    def __init__(self, folder: Path, config: pytest.Config) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "only")
        self._seconds = folder / f"seconds-{worker}"
        self._coverage = Coverage(
            data_file=folder / f"lines-{worker}", source=[str(config.rootpath / "src" / "recollect")], config_file=False
        )
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._coverage.switch_context(item.nodeid)
        begin = time.monotonic()
        try:
            return (yield)
        finally:
            with self._seconds.open("a", encoding="utf-8") as file:
                file.write(json.dumps([item.nodeid, time.monotonic() - begin]) + "\n")
            self._coverage.switch_context("")

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()


def pytest_configure(config: pytest.Config) -> None:
    """Watch the process that runs tests, which is not the one that hands them to workers."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(_Plugin(Path(os.environ[FOLDER]), config))
