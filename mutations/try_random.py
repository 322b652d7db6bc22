"""Measures the tests by random faults: scripts/mutate-at-random [--number N] [--seed S] says how many of them the tests notice.

First all quick tests run once, and what lines they run is written down (half an hour on two cores). Then, for each fault, the
tests that run its line, the quickest first, until one fails. A process that has imported PyTorch is forked for each fault.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mutations.copy import copy_files, environment_of, tracked
from mutations.covering import FOLDER, Covering
from mutations.mutation import write
from mutations.random_faults import RandomFault, random_faults

__all__: list[str] = []

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "planning", "simulation", "recording", "attaching")
# Tests for one fault, in seconds and number, and of one function: cases of one function are much alike.
_MOST_S = 60.0
_MOST_TESTS = 150
_MOST_OF_FUNCTION = 2
# Tests that run before it is known whether more are needed; then twice as many.
_FIRST_TESTS = 25
_LEAST_LIMIT_S = 60.0
_LIMIT_PER_S = 6
# The endings of a run of tests in which none failed.
_NOTHING_FAILED = (0, 5)
_SECONDS_BETWEEN_LOOKS = 0.05


def cover(root: Path, folder: Path) -> None:
    """Run all quick tests of a copy, and write down which lines they run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    paths = [f"tests/{name}" for name in ("contracts", "integration", "unit")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mutations.covering", "-n", "2", "--dist", "loadfile"]
    environment = {**environment_of(root), FOLDER: str(folder)}
    subprocess.run([*command, "-m", "not long", *paths], cwd=root, env=environment, check=True)


def chosen(covering: Covering, fault: RandomFault) -> list[str]:
    """Return the tests to run for a fault."""
    found: list[str] = []
    of_function: Counter[str] = Counter()
    total_s = 0.0
    for test in covering.tests_of(fault.file, fault.line):
        function, seconds = test.partition("[")[0], covering.seconds[test]
        if of_function[function] < _MOST_OF_FUNCTION and total_s + seconds <= _MOST_S and len(found) < _MOST_TESTS:
            of_function[function] += 1
            total_s += seconds
            found.append(test)
    return found


def try_all(root: Path, faults: Sequence[RandomFault], covering: Covering, path: Path) -> None:
    """Try faults in a copy, which nobody else uses; append a line of JSON for each to a file."""
    os.environ.update(environment_of(root))
    sys.path[:0] = [str(root / "src"), str(root), str(root / "tests" / "support")]
    # What tests import, but nothing of the copy.
    import pytest  # noqa: F401
    import torch
    import transformers.trainer  # noqa: F401

    torch.set_num_threads(1)
    os.chdir(root)
    for fault in faults:
        tests = chosen(covering, fault)
        before = (root / fault.file).read_text(encoding="utf-8")
        write({root / fault.file: fault.text})
        try:
            noticed_by = _noticed_by(tests, covering, root)
        finally:
            write({root / fault.file: before})
        line = {"file": fault.file, "line": fault.line, "before": fault.before, "after": fault.after}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "num_tests": len(tests), "noticed_by": noticed_by}) + "\n")


def _noticed_by(tests: Sequence[str], covering: Covering, root: Path) -> str:
    begin, number = 0, _FIRST_TESTS
    while begin < len(tests):
        some = tests[begin : begin + number]
        limit_s = _LEAST_LIMIT_S + _LIMIT_PER_S * sum(covering.seconds[test] for test in some)
        if found := _first_failure(some, limit_s, root):
            return found
        begin, number = begin + number, 2 * number
    return ""


def _first_failure(tests: Sequence[str], limit_s: float, root: Path) -> str:
    """Run tests in a forked process; return the one that fails, or how the process ended if not by itself."""
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        told = Path(folder, "told")
        child = os.fork()
        if child == 0:
            _run_tests(tests, told, Path(folder))
        begin = time.monotonic()
        ended, status = 0, 0
        while not ended and time.monotonic() - begin < limit_s:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            ended, status = os.waitpid(child, os.WNOHANG)
        try:
            os.killpg(child, signal.SIGKILL)  # With what the tests have started.
        except ProcessLookupError:
            pass
        if not ended:
            os.waitpid(child, 0)
            return f"no end within {limit_s:.0f} s"
        if not told.exists():
            return f"the process ended by {status}"
        return told.read_text(encoding="utf-8")


def _run_tests(tests: Sequence[str], told: Path, folder: Path) -> None:
    """Run tests in this process, which is a copy of the parent's, until one fails; write which one."""
    import pytest

    os.setsid()
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    failed: list[str] = []

    class Plugin:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            failed.extend([report.nodeid] if report.failed else [])

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            failed.extend([report.nodeid] if report.failed else [])

    words = [*tests, "-x", "-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'tests'}"]
    # Plugins that the parent has imported are not rewritten.
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    status = pytest.main(words, plugins=[Plugin()])
    told.write_text(failed[0] if failed else "" if status in _NOTHING_FAILED else f"pytest ended by {status}")
    os._exit(0)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return how many faults of each package were noticed, and those that were not."""
    packages = [line["file"].split("/")[2] for line in lines]
    text = "| package | faults | noticed |\n|---|--:|--:|\n"
    for package in (*sorted(set(packages)), "all"):
        some = [line for line, its in zip(lines, packages, strict=True) if package in (its, "all")]
        text += f"| {package} | {len(some)} | {sum(bool(line['noticed_by']) for line in some)} |\n"
    for line in lines:
        if not line["noticed_by"]:
            text += f"\n{line['file']}:{line['line']} ({line['num_tests']} tests)\n  - {line['before']}\n  + {line['after']}\n"
    return text


def main() -> None:
    """Cover the tests if need be, and try faults."""
    parser = argparse.ArgumentParser(prog="scripts/mutate-at-random", description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="*", default=PACKAGES, help=f"default: {' '.join(PACKAGES)}")
    parser.add_argument("--number", type=int, default=300, help="faults to try (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="faults to try at a time (default: 2)")
    parser.add_argument("--covering", type=Path, default=ROOT / "build" / "covering", help="default: build/covering")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "random_faults.jsonl")
    given = parser.parse_args()
    names = tracked(ROOT)
    with tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as folder:
        roots = [Path(folder) / f"{number}" / "copy" for number in range(given.jobs)]
        for root in roots:
            copy_files(ROOT, root, names)
        if not given.covering.exists():
            cover(roots[0], given.covering)
        faults = random_faults(roots[0], given.packages, given.number, given.seed)
        covering = Covering(given.covering)
        given.out.parent.mkdir(exist_ok=True)
        given.out.write_text("")
        processes = [
            get_context("spawn").Process(target=try_all, args=(root, faults[job :: given.jobs], covering, given.out))
            for job, root in enumerate(roots)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    print(table([json.loads(line) for line in given.out.read_text(encoding="utf-8").splitlines()]), end="")


if __name__ == "__main__":
    main()
