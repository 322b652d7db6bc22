"""Check every architecture of the installed transformers, small and random, and write docs/zoo.md.

    python benchmarks/model_zoo.py          # goes on where the last run ended; about an hour on one core
    python benchmarks/model_zoo.py --engine graph   # instead, which layers run from traces, and the bits of three steps
    python benchmarks/model_zoo.py --page   # the page, from the rows that there are

One process checks one class after the other and is replaced when a class takes too long or ends it. Each class is a row of
`results/zoo.jsonl`, or `results/zoo_graph.jsonl`; a later row of the same class counts in place of an earlier one.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import select
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeAlias

from allocator_meter import metered_environment
from architectures.page import PAGE, page, read_rows
from flags import RESULTS, parse
from results_csv import commit

Engine: TypeAlias = Literal["tape", "graph"]

_PROCESSOR_S = 60
_WALL_S = 1800  # only against a process that sleeps for ever: other programs may leave this one little
_MEMORY_BYTES = 6 << 30


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What to check."""

    classes: tuple[str, ...] = ()
    """Names of classes or tasks; all if empty. Those that are named are checked again."""
    again: bool = False
    """Check again what has a row."""
    not_exact: bool = False
    """Check again what has a row with another verdict than "exact", or "traced"."""
    engine: Engine = "tape"
    """The engine to check."""
    page: bool = False
    """Only write the page."""
    minutes: float = 0.0
    """Begin with no class after so many minutes; 0 for no limit."""
    out: Path = RESULTS
    """Folder of `zoo.jsonl` and `zoo_graph.jsonl`."""


def main() -> None:
    """Check what has no row yet."""
    if sys.argv[1:2] == ["worker"]:
        _work("graph" if sys.argv[2] == "graph" else "tape")
        return
    flags = parse(Flags, __doc__)
    rows, traced_rows = flags.out / "zoo.jsonl", flags.out / "zoo_graph.jsonl"
    if not flags.page:
        _check_all(flags, rows if flags.engine == "tape" else traced_rows)
    PAGE.write_text(page(read_rows(rows), read_rows(traced_rows)), encoding="utf-8")


def _check_all(flags: Flags, path: Path) -> None:
    from architectures.subjects import subjects

    start = datetime.datetime.now(datetime.timezone.utc)
    rows = read_rows(path)
    wanted = set(flags.classes)
    todo = [
        subject.class_name
        for subject in subjects()
        if ({subject.class_name, subject.task, subject.model_type} & wanted)
        or (not wanted and _is_due(rows.get(subject.class_name), flags))
    ]
    with _Worker(flags.engine) as worker:
        for number, class_name in enumerate(todo, 1):
            now = datetime.datetime.now(datetime.timezone.utc)
            if flags.minutes and (now - start).total_seconds() > 60 * flags.minutes:
                break
            row = {**worker.check(class_name), "date": now.isoformat(timespec="seconds"), "commit": commit()}
            # Opened for each row: the file may be replaced meanwhile, by git for one.
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{number}/{len(todo)} {class_name}: {row['verdict']} {row['reason']}", flush=True)


def _is_due(row: Mapping[str, Any] | None, flags: Flags) -> bool:
    return row is None or flags.again or (flags.not_exact and row["verdict"] not in ("exact", "traced", "not built"))


class _Worker:
    """A process that checks classes; started when one is asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> _Worker:
        self._metered = metered_environment()
        self._environment = self._metered.__enter__()
        self._process: subprocess.Popen[str] | None = None
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._metered.__exit__(None, None, None)

    def check(self, class_name: str) -> dict[str, Any]:
        """Return the row of a class."""
        if self._process is None:
            command = [sys.executable, __file__, "worker", self._engine]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process = subprocess.Popen(command, env=self._environment, text=True, **pipes)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(class_name + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], _WALL_S)
        line = self._process.stdout.readline() if ready else ""
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        code = self._end()
        is_slow = not ready or code == -signal.SIGXCPU
        verdict, reason = ("too slow", "stopped") if is_slow else ("crashed", f"the process ended with {code}")
        return {**_empty_row(self._engine, class_name), "verdict": verdict, "reason": reason}

    def _end(self) -> int | None:
        if self._process is None:
            return None
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._process = None
        return code


def _empty_row(engine: Engine, class_name: str) -> dict[str, Any]:
    from architectures.check import Checked
    from architectures.subjects import subjects
    from architectures.traced import CheckedTraces

    subject = next(subject for subject in subjects() if subject.class_name == class_name)
    checked: type[Checked | CheckedTraces] = Checked if engine == "tape" else CheckedTraces
    return checked(subject.task, class_name).row()


def _work(engine: Engine) -> None:
    """Check the classes named on the standard input, one a line, and write a row for each."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what models print
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    import gc

    import torch
    import transformers

    from allocator_meter import AllocatorMeter
    from architectures.check import check
    from architectures.subjects import subjects
    from architectures.traced import check_traces

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    known = {subject.class_name: subject for subject in subjects()}
    meter = AllocatorMeter()
    for line in sys.stdin:
        class_name = line.strip()
        gc.collect()
        gc.freeze()
        try:
            with _processor_limit():
                found = check(known[class_name], meter) if engine == "tape" else check_traces(known[class_name])
                row = found.row()
        except _OverLimit:
            row = {**_empty_row(engine, class_name), "verdict": "too slow", "reason": f"over {_PROCESSOR_S} s"}
        answers.write(json.dumps(row) + "\n")
        answers.flush()


class _OverLimit(BaseException):
    """Too much processor time; no `Exception`, so that nothing on the way handles it."""


@contextmanager
def _processor_limit() -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise _OverLimit

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _PROCESSOR_S)
    # One long call in C hears no signal: twice the time ends the process.
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 2 * _PROCESSOR_S, most))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
