"""Measures how sharp the tests are: scripts/mutate [NAME...] puts faults into a copy of the sources and runs tests.

A fault is caught in the first of these stages in which a test fails that passes without it: the test that is named for it in
`noticed_by.json`, the unit tests of its own package, all other unit tests, and all other tests. What was found is a line of a
file, so that a run that was broken off goes on.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mutations.catalogue import MUTATIONS
from mutations.copy import Copy, Outcome, copy_files, tracked, tree_of
from mutations.mutation import Mutation, place, problems, write
from mutations.results import Results, table

__all__: list[str] = []

ROOT = Path(__file__).parents[1]
_NAMED, _OWN, _UNIT, _REST = "named test", "own unit tests", "other unit tests", "other tests"
_STAGES = (_NAMED, _OWN, _UNIT, _REST)
_GIVEN = "given tests"
# It asserts that the text of every mutation is there.
_OF_THE_CATALOGUE = "tests/house/test_mutations.py"


def noticed_by(root: Path) -> dict[str, str]:
    """Return the test that notices a fault soonest, by the name of the fault."""
    found: dict[str, str] = json.loads((root / "mutations" / "noticed_by.json").read_text(encoding="utf-8"))
    return found


def own_tests(mutation: Mutation, root: Path) -> list[str]:
    """Return the unit tests of the package or file that a fault is in."""
    names = (f"tests/unit/{mutation.area}", f"tests/unit/test_{mutation.area.removeprefix('_')}.py")
    return [name for name in names if (root / name).exists()]


def tests_of(stage: str, mutation: Mutation, root: Path, given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the paths of a stage, and those in them that are left out."""
    if stage == _GIVEN:
        return list(given), [_OF_THE_CATALOGUE]
    if stage == _NAMED:
        named = noticed_by(root).get(mutation.name)
        return [named] if named else [], []
    own = own_tests(mutation, root)
    if stage == _OWN:
        return own, []
    if stage == _UNIT:
        return ["tests/unit"], own
    return ["tests/house", "tests/contracts", "tests/integration", "tests/gpu"], [_OF_THE_CATALOGUE]


class Trial:
    """Tries faults in a copy of its own."""

    def __init__(self, copy: Copy, results: Results, given: argparse.Namespace) -> None:
        self.copy = copy
        self._results = results
        self._tests: list[str] = given.tests
        self._most_failures: int = given.most_failures

    def line_of(self, mutation: Mutation, stages: Sequence[str]) -> dict[str, Any]:
        """Put a fault in, run the stages until one catches it, and take it out again."""
        self.copy.renew()
        begin = time.monotonic()
        ran: list[str] = []
        caught: str | None = None
        failed: tuple[str, ...] = ()
        ended = ""
        for stage in stages:
            ran.append(stage)
            failed, ended = self._failed(mutation, stage)
            if failed or ended:
                caught = stage
                break
        seconds = round(time.monotonic() - begin, 1)
        return {"caught": caught, "tests": list(failed), "ended": ended, "ran": ran, "seconds": seconds}

    def _failed(self, mutation: Mutation, stage: str) -> tuple[tuple[str, ...], str]:
        """Return the tests of a stage that fail, or never end, by the fault alone, and how it ended if not by itself."""
        paths, without = tests_of(stage, mutation, self.copy.root, self._tests)
        if not paths:
            return (), ""
        while True:
            known = self._results.without_fault()
            outcome = self._run_with(
                mutation, paths, [*without, *(test for test, passes in known.items() if not passes)]
            )
            new = [test for test in outcome.suspects if test not in known]
            if new:
                self._look_without_fault(new)
            known = self._results.without_fault()
            suspects = tuple(test for test in outcome.suspects if known[test])
            if suspects or not outcome.suspects:
                return suspects, outcome.ended
            # All that failed fails without the fault, too, and may hide what would have come after it.

    def _run_with(self, mutation: Mutation, paths: Sequence[str], without: Sequence[str]) -> Outcome:
        changed = place(mutation, self.copy.root)
        before = {path: path.read_text(encoding="utf-8") for path in changed}
        write(changed)
        try:
            return self.copy.run(paths, without=without, most_failures=self._most_failures)
        finally:
            write(before)

    def _look_without_fault(self, tests: Sequence[str]) -> None:
        """Run tests in the copy as it is; note which of them pass."""
        self.copy.renew()
        outcome = self.copy.run(tests)
        for test in tests:
            passes = not outcome.ended and test not in outcome.failed and test.partition("::")[0] not in outcome.failed
            self._results.add_without_fault(test, passes)


def text_of(line: dict[str, Any]) -> str:
    """Return a line of the report."""
    head = f"{line['mutation']}: {'not caught by ' + ', '.join(line['ran']) if not line['caught'] else line['caught']}"
    how = f", {line['ended']}" if line["ended"] else ""
    return "\n".join([f"{head}{how} ({line['seconds']:.0f} s)", *(f"    {test}" for test in line["tests"])])


def run(mutations: Sequence[Mutation], stages: Sequence[str], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Try faults, several at a time if so wanted; return a line of each."""
    names = tracked(ROOT)
    trials: list[Trial] = []
    lock = threading.Lock()

    def line_of(mutation: Mutation) -> dict[str, Any]:
        # The file does not say which tests were given.
        line = None if given.tests else results.found(mutation, stages)
        if line is None:
            with lock:
                trial = trials.pop()
            try:
                line = results.add(mutation, trial.line_of(mutation, stages))
            finally:
                with lock:
                    trials.append(trial)
        with lock:
            print(text_of(line), flush=True)
        return line

    with tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as folder:
        clean = Path(folder) / "clean"
        copy_files(ROOT, clean, names)
        results = Results(given.json, tree_of(clean, names))
        for number in range(given.jobs):
            trials.append(Trial(Copy(clean, names, Path(folder) / str(number)), results, given))
        copies = [trial.copy for trial in trials]
        pool = ThreadPoolExecutor(given.jobs)
        try:
            lines = list(pool.map(line_of, mutations))
        finally:
            for copy in copies:
                copy.stop()
            pool.shutdown(cancel_futures=True)
        left_out = [test for test, passes in results.without_fault().items() if not passes]
        if left_out:
            print("\nthese fail without any fault, too, and were left out:", *left_out, sep="\n    ")
        return lines


def _interrupt(*_: object) -> None:
    """Do as at Ctrl-C: the tests that run end, too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    """Check, list, or try the faults that are named, or all of them."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description="Measure how sharp the tests are.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="of a fault, or of the package that it is in; default: all"
    )
    parser.add_argument("--list", action="store_true", help="only print the faults")
    parser.add_argument(
        "--check", action="store_true", help="only say whether the text of every fault is there just once"
    )
    parser.add_argument("--tests", nargs="+", metavar="PATH", default=[], help="run these tests instead of the stages")
    parser.add_argument(
        "--stages", type=int, choices=(1, 2, 3, 4), default=4, help="how many of the stages (default: 4)"
    )
    parser.add_argument("--most-failures", type=int, default=5, metavar="N", help="end a stage after N (default: 5)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults to try at a time (default: 1)")
    parser.add_argument(
        "--json",
        type=Path,
        default=ROOT / "build" / "mutations.jsonl",
        metavar="FILE",
        help="default: build/mutations.jsonl",
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    unknown = [name for name in given.names if not any(name in (one.name, one.area) for one in MUTATIONS)]
    if unknown:
        parser.error(f"no fault and no package {unknown[0]!r}; --list prints them")
    chosen = [one for one in MUTATIONS if not given.names or one.name in given.names or one.area in given.names]
    if given.list:
        for one in chosen:
            print(f"{one.name} ({one.where}): {one.breaks}")
        return
    found = problems(MUTATIONS, ROOT)
    if found:
        sys.exit("\n".join([f"scripts/mutate: {len(found)} of {len(MUTATIONS)} faults have no place:", *found]))
    if given.check:
        print(f"the texts of all {len(MUTATIONS)} faults are there")
        return
    stages = (_GIVEN,) if given.tests else _STAGES[: given.stages]
    lines = run(chosen, stages, given)
    print(f"\n{table(chosen, lines, stages)}", end="")


if __name__ == "__main__":
    main()
