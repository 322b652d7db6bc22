"""Processes that are forked from one that has imported PyTorch and Transformers, which takes longer than most of what they do.

A program runs as `python PROGRAM` and `python -m MODULE` run it, in a process of its own; only what it imports is there sooner.
One test of each command line starts it the long way. Programs can read the meter of the benchmarks, which counts nothing
until they ask it to.
"""

import atexit
import gc
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import IO
from unittest import mock

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import known_host_times  # noqa: E402
from allocator_meter import can_be_built, metered_environment  # noqa: E402

# The first is what a process imports that pytest itself has started.
_IMPORTED = ["pytest", "recollect.lab.train.loop", "transformers.trainer", "transformers.models.llama.modeling_llama"]
_IMPORTED += [known_host_times.__name__]
# What takes longer hangs: ten times what the longest takes, an example for which DeepSpeed compiles its kernels.
LONGEST_S = 1800

HAS_METER = can_be_built()


class ForkedProcess:
    """A program under way, with what tests use of `subprocess.Popen`; standard output and error are text."""

    def __init__(
        self,
        program: str | Path,
        *arguments: object,
        cwd: Path | None = None,
        has_input: bool = False,
        **environment: str,
    ) -> None:
        """Start it in a folder: a path is a script, anything else a module's name."""
        self._written: tuple[str, str] | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._input: IO[str] | None = self._make_input() if has_input else None
        for stream in "12":
            Path(self._folder.name, stream).touch()
        words = [program, *map(str, arguments)]
        settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self._process = prepared_server().Process(
            target=_become, args=(words, cwd or Path.cwd(), settings, Path(self._folder.name)), daemon=True
        )
        self._process.start()
        self.args = words
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The status it ended with, negative for a signal; None before."""
        return self._process.exitcode

    def _make_input(self) -> IO[str]:
        path = Path(self._folder.name, "0")
        os.mkfifo(path)
        # For both ways: for one, opening it waits for who reads.
        return os.fdopen(os.open(path, os.O_RDWR), "w", encoding="utf-8")

    def write(self, text: str) -> None:
        assert self._input is not None
        self._input.write(text)
        self._input.flush()

    def end_input(self) -> None:
        if self._input is not None:
            self._input.close()

    def written(self) -> str:
        return Path(self._folder.name, "1").read_text(encoding="utf-8")

    def poll(self) -> int | None:
        """Return the status it ended with, None before."""
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float = LONGEST_S) -> tuple[str, str]:
        """Wait until it has ended; return what it wrote to standard output and to standard error."""
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired(self.args, timeout)
        if self._written is None:
            output, errors = (Path(self._folder.name, stream).read_text(encoding="utf-8") for stream in "12")
            self._written = output, errors
            self._folder.cleanup()
        return self._written


def run_forked(
    program: str | Path, *arguments: object, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    process = ForkedProcess(program, *arguments, cwd=cwd, **environment)
    try:
        output, errors = process.communicate()
    finally:
        process.kill()
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def prepared_server() -> multiprocessing.context.ForkServerContext:
    """Return what starts processes by the method "forkserver".

    It is one for all files whose tests this process runs, so that it imports but once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with mock.patch.dict(os.environ, _server_variables()):
        multiprocessing.forkserver.ensure_running()
    return context


@cache
def _server_variables() -> dict[str, str]:
    """Return what the server starts with: one thread, as a process with more cannot be forked, and the meter if it can be."""
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **known_host_times.variable()}
    if not HAS_METER:
        return variables
    # The library has to be there until the server has begun, which nobody waits for.
    kept = ExitStack()
    atexit.register(kept.close)
    environment = kept.enter_context(metered_environment())
    return {**variables, "LD_PRELOAD": environment["LD_PRELOAD"]}


def _become(words: list[str | Path], cwd: Path, environment: Mapping[str, str], folder: Path) -> None:
    """Run a program as if this process had been started for it."""
    for number in (1, 2):
        os.dup2(os.open(folder / str(number), os.O_WRONLY | os.O_APPEND), number)
    if (folder / "0").exists():
        sys.stdin = (folder / "0").open(encoding="utf-8")
    gc.freeze()  # what was imported is there for good: the meter need not look at it
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    program, *arguments = words
    sys.argv = [str(program), *map(str, arguments)]
    if isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
