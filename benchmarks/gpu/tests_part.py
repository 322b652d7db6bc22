"""The tests of tests/gpu, by pytest, each outcome a row."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from gpu.part import STOPPING_S, Context
from results_csv import Number

_ROOT = Path(__file__).parents[2]


def run(context: Context) -> str:
    """Run the tests on the device.

    Raises:
        RuntimeError: a test failed, or pytest did not run.
    """
    report = context.out / f"{context.part}.xml"
    report.unlink(missing_ok=True)
    # No plugins and no settings of the project that this machine may lack; warnings of other versions are no failures.
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "--durations=10", f"--junitxml={report}"]
    command += ["-p", "no:cacheprovider", "-W", "default", *(["-k", context.only] if context.only else [])]
    environment = {**os.environ, "RECOLLECT_TEST_DEVICE": context.device.type}
    if context.device.type == "cpu":
        environment["OMP_NUM_THREADS"] = "1"  # the tensors are small: more threads make them slower
    status = _status(command, environment, context.seconds)
    if not report.exists():
        raise RuntimeError(f"pytest ended with status {status} and left no report")
    outcomes = Counter(_rows(context, report))
    report.unlink()
    text = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    if status != 0:
        raise RuntimeError(f"{text}; pytest ended with status {status}")
    return text


def _status(command: list[str], environment: dict[str, str], seconds: float) -> int:
    """Run pytest and return its exit status; when its time is over, as Ctrl+C does, after which it still writes its report."""
    process = subprocess.Popen(command, cwd=_ROOT, env=environment)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(STOPPING_S)
    except subprocess.TimeoutExpired:
        return -1
    finally:
        process.kill()


def _rows(context: Context, report: Path) -> list[str]:
    """Write a row for each test, and return the outcomes."""
    numbers, outcomes = [], []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if problem is None else {"skipped": "skipped"}.get(problem.tag, "failed")
        why = "" if problem is None else ": " + (problem.get("message") or "").split("\n")[0][:200]
        numbers.append(Number("outcome", "text", name, outcome + why))
        numbers.append(Number("test_time", "s", name, float(case.get("time") or 0)))
        outcomes.append(outcome)
    context.write(numbers)
    return outcomes
