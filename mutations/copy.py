"""A copy of the working tree in which tests run, with a fault or without."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutations.notes import NOTES, OVER

__all__ = ["Copy", "Outcome", "copy_files", "environment_of", "tracked", "tree_of"]

# Seconds without a test that begins or fails, after which the one at hand counts as hanging; and for a whole stage.
_LONGEST_TEST_S = 600
_LONGEST_STAGE_S = 7200
# And for the process to end after its tests.
_LONGEST_END_S = 20
_SECONDS_BETWEEN_LOOKS = 0.5
# Of pytest (`pytest.ExitCode`, which takes a second to import): all passed, some failed, there are none.
_ENDED_BY_ITSELF = (0, 1, 5)
_USAGE_ERROR = 4
_INTERRUPTED = 130


@dataclass(frozen=True)
class Outcome:
    """What a run of tests said.

    Attributes:
        failed: tests, in the order in which they failed.
        ended: how the run ended if not by itself; empty otherwise.
        last: the test at hand then, if any.
    """

    failed: tuple[str, ...]
    ended: str = ""
    last: str = ""

    @property
    def suspects(self) -> tuple[str, ...]:
        """The tests that noticed something."""
        return tuple(dict.fromkeys((*self.failed, *([self.last] if self.last else []))))


def tracked(root: Path) -> list[str]:
    """Return the files of a working tree that git knows and that are there."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (root / name).is_file()]


def tree_of(root: Path, names: Sequence[str]) -> str:
    """Return a digest of what tests and tested code are, so that nobody takes results of other ones for theirs."""
    digest = hashlib.sha256()
    for name in sorted(names):
        if name.startswith(("src/", "tests/")) or name == "pyproject.toml":
            digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def copy_files(source: Path, target: Path, names: Sequence[str]) -> None:
    """Copy files that are not there, or not with the same size and time."""
    for name in names:
        before, after = (source / name).stat(), target / name
        there = after.stat() if after.exists() else None
        if there is None or (there.st_size, there.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            after.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, after)


def environment_of(root: Path) -> dict[str, str]:
    """Return what tests of a copy run with: what scripts/test sets, and the copy's own sources."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions")),
    }


class Copy:
    """Files of a working tree, in a folder of their own.

    Args:
        source: a folder that does not change meanwhile.
        names: of the files.
        folder: where to put them, and what runs of tests leave.
    """

    def __init__(self, source: Path, names: Sequence[str], folder: Path) -> None:
        self.root = folder / "copy"
        self._source = source
        self._names = names
        self._folder = folder
        self._num_runs = 0
        self._is_stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.renew()
        self._environment = environment_of(self.root)

    def stop(self) -> None:
        """End the tests that run, and run no more."""
        self._is_stopped.set()
        # At once: whoever interrupts may do so twice.
        if self._process is not None:
            _kill(self._process)

    def renew(self) -> None:
        """Undo what tests have done to the files."""
        copy_files(self._source, self.root, self._names)

    def run(self, paths: Sequence[str], *, without: Sequence[str] = (), most_failures: int = 0) -> Outcome:
        """Run tests.

        Args:
            paths: of tests, or ids.
            without: paths and ids not to run.
            most_failures: after which to stop; 0 for all.
        """
        self._num_runs += 1
        notes = self._folder / f"notes-{self._num_runs}.jsonl"
        printed = self._folder / f"printed-{self._num_runs}.txt"
        notes.touch()
        left_out = [f"--{'deselect' if '::' in one else 'ignore'}={one}" for one in without]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "mutations.noting", "-p", "no:cacheprovider"]
        command += [f"--maxfail={most_failures}", f"--basetemp={self._folder / 'tests'}", *left_out, *paths]
        environment = {**self._environment, NOTES: str(notes)}
        with printed.open("wb") as out:
            self._process = process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=out, stderr=out, start_new_session=True
            )
            try:
                why = _wait(process, notes, self._is_stopped)
            finally:
                # With what the tests have started.
                _kill(process)
                self._process = None
        if self._is_stopped.is_set():
            raise SystemExit(_INTERRUPTED)
        found = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
        failed = tuple(dict.fromkeys(nodeid for what, nodeid in found if what == "fails"))
        if process.returncode in _ENDED_BY_ITSELF:
            return Outcome(failed)
        at = next((nodeid for what, nodeid in reversed(found) if what == "begins"), "")
        if process.returncode == _USAGE_ERROR:
            raise SystemExit(f"scripts/mutate: {' '.join(command)}\n{printed.read_text(encoding='utf-8')[-3000:]}")
        ended = why or ("" if failed else f"it ended by {process.returncode}")
        return Outcome(failed, ended, at if ended else "")


def _wait(process: subprocess.Popen[bytes], notes: Path, is_stopped: threading.Event) -> str:
    """Wait until the tests end; return why they were not waited for any more, if so."""
    begin = heard = time.monotonic()
    size = 0
    while not is_stopped.is_set():
        try:
            process.wait(_SECONDS_BETWEEN_LOOKS)
            return ""
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if notes.stat().st_size != size:
            size, heard = notes.stat().st_size, now
        is_over = notes.read_text(encoding="utf-8").endswith(OVER)
        if is_over and now - heard > _LONGEST_END_S:
            return "the process did not end after its tests"
        if now - heard > _LONGEST_TEST_S:
            return f"nothing for {_LONGEST_TEST_S} s, a hang"
        if now - begin > _LONGEST_STAGE_S:
            return f"no end after {_LONGEST_STAGE_S} s"
    return "stopped"


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
