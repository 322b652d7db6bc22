"""`scripts/gpu`: run parts, one after the other, each in a process of its own that is stopped when its time is over."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["main"]

_RESULTS = Path(__file__).parents[1] / "results" / "gpu"
# All that a quarter of an hour on a lent machine is for, in one call of four minutes: what matters most comes first.
_QUICK = ("engines-random", "capture", "engines-2048", "engines-4096", "compiled", "offload", "fp8")
_QUICK_SECONDS = 25.0
_LEAST_TORCH = (2, 11)
_FINDING = "finding: "
_EXIT_FAILED, _EXIT_NOTHING = 1, 2


@dataclass(frozen=True)
class Outcome:
    """How a part ended: "ok", "failed", "stopped" or "skipped", with a sentence."""

    name: str
    result: str
    seconds: float
    finding: str


def parse(arguments: Sequence[str] | None, names: dict[str, str]) -> argparse.Namespace:
    """Read the command line. `names`: parts, with what they measure."""
    from gpu.part import SECONDS

    listed = "\n".join(f"  {name:16}{what}" for name, what in names.items())
    parser = argparse.ArgumentParser(
        prog="scripts/gpu",
        description="Measure on a GPU what has to be measured there. Each part takes less than eight minutes, writes its rows\n"
        "and its log as it goes, and can be run alone.",
        epilog=f"parts:\n{listed}\n\nA name that several parts begin with, such as `frontier`, stands for all of them.\n"
        f"`quick` stands for {', '.join(_QUICK)}, of {_QUICK_SECONDS:g} s each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="parts to run; default: all")
    parser.add_argument("--out", type=Path, help=f"folder of rows and logs; default: {_RESULTS}")
    parser.add_argument("--device", default="cuda", help="a CUDA device; default: cuda")
    parser.add_argument("--only", default="", help="only the cases of a part whose names contain this")
    parser.add_argument("--seconds", type=float, help=f"after which a part begins nothing new; default: {SECONDS:g}")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, to see that everything runs")
    parser.add_argument(
        "--page", action="store_true", help="write docs/gpu.md from the rows in --out, and measure nothing"
    )
    found = parser.parse_args(arguments)
    if found.parts == ["quick"]:
        found.parts, found.seconds = [*_QUICK], found.seconds or _QUICK_SECONDS
    found.seconds = found.seconds or SECONDS
    found.parts = _chosen(parser, found.parts, list(names))
    return found


def _chosen(parser: argparse.ArgumentParser, asked: Sequence[str], names: list[str]) -> list[str]:
    chosen: list[str] = []
    for one in asked:
        meant = [name for name in names if name == one or name.startswith(f"{one}-")]
        if not meant:
            parser.error(f"no part {one!r}; expected one of {', '.join(names)}")
        chosen += [name for name in meant if name not in chosen]
    return chosen or names


def torch_problem() -> str | None:
    """Say in a sentence why PyTorch will not do; None if it will."""
    try:
        import torch
    except ImportError as error:
        return f"scripts/gpu: {sys.executable} cannot import torch ({error}). Install torch 2.11 or later."
    found = torch.__version__.split("+")[0].split(".")
    if tuple(int(part) for part in found[:2]) < _LEAST_TORCH:
        return f"scripts/gpu: got torch {torch.__version__}, expected 2.11 or later. Install a newer one."
    return None


def device_problem(device: str) -> str | None:
    """Say in a sentence why a device will not do; None if it will."""
    import torch

    try:
        kind = torch.device(device)
    except RuntimeError as error:
        return f"scripts/gpu: --device {device}: {str(error).splitlines()[0]} Expected cuda, or cuda:N."
    if kind.type != "cuda":
        return f"scripts/gpu: --device {device}: expected cuda, or cuda:N. On a CPU use --dry-run."
    if not torch.cuda.is_available():
        return (
            f"scripts/gpu: torch {torch.__version__} finds no CUDA device here. Run it where there is one, or use --dry-run, "
            "which runs every part at tiny sizes on the CPU."
        )
    if (kind.index or 0) >= torch.cuda.device_count():
        return f"scripts/gpu: --device {device}: there are {torch.cuda.device_count()} CUDA devices, counted from 0."
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for.

    Returns:
        0 if each part ran or was skipped with a reason, 1 if one failed or was stopped, 2 if nothing could run.
    """
    problem = torch_problem()
    if problem is not None:
        print(problem, file=sys.stderr)
        return _EXIT_NOTHING
    from gpu.part import ENDING_S
    from gpu.parts import PARTS

    flags = parse(arguments, {part.name: part.what for part in PARTS})
    if flags.page:
        from gpu.page import write_page

        return write_page(flags.out or _RESULTS)
    device = "cpu" if flags.dry_run else flags.device
    problem = None if flags.dry_run else device_problem(device)
    if problem is not None:
        print(problem, file=sys.stderr)
        return _EXIT_NOTHING
    out: Path = flags.out or (Path(tempfile.mkdtemp(prefix="gpu-dry-run-")) if flags.dry_run else _RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    options = ["--out", str(out), "--device", device, "--only", flags.only, "--seconds", str(flags.seconds)]
    options += ["--dry-run"] if flags.dry_run else []
    # Importing takes longer than a part of a dry run: there one process runs them all.
    groups = [flags.parts] if flags.dry_run else [[name] for name in flags.parts]
    outcomes: list[Outcome] = []
    for group in groups:
        command = [sys.executable, "-u", "-m", "gpu.run_parts", *group, *options]
        outcomes += run_group(command, group, out, limit_s=(flags.seconds + ENDING_S) * len(group))
    _show(outcomes, out)
    if all(outcome.result == "skipped" for outcome in outcomes):
        return _EXIT_NOTHING
    return 0 if all(outcome.result in ("ok", "skipped") for outcome in outcomes) else _EXIT_FAILED


def run_group(command: Sequence[str], names: Sequence[str], out: Path, *, limit_s: float) -> list[Outcome]:
    """Run parts in a process of their own; what it prints goes to this one's output and to the log of the part.

    Args:
        command: starts the process, which says where parts begin and end as `run_parts.py` does.
        names: of the parts.
        out: folder of the logs.
        limit_s: a process that is not done by then is stopped; it has written what it had.
    """
    from gpu.part import STOPPING_S

    # A session of its own, so that what it starts (pytest, compilers) is stopped with it.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    was_stopped = threading.Event()

    def stop(how: signal.Signals) -> None:
        was_stopped.set()
        _stop(process, how)

    # First as Ctrl+C does, after which a race goes on with what it has; then in earnest.
    watches = [
        threading.Timer(limit_s - min(STOPPING_S, limit_s / 2), stop, (signal.SIGINT,)),
        threading.Timer(limit_s, stop, (signal.SIGKILL,)),
    ]
    for watch in watches:
        watch.start()
    began_s = time.perf_counter()
    try:
        outcomes = _follow(process, out)
        process.wait()
    except KeyboardInterrupt:
        _stop(process, signal.SIGKILL)
        raise
    finally:
        for watch in watches:
            watch.cancel()
    elapsed_s = time.perf_counter() - began_s
    why = "failed", 0.0, f"its process ended with status {process.returncode} before the part did"
    if was_stopped.is_set():
        why = "stopped", elapsed_s, f"stopped after {elapsed_s:.0f} s; what it had measured by then is in its file"
    done = {outcome.name for outcome in outcomes}
    return [*outcomes, *(Outcome(name, *why) for name in names if name not in done)]


def _follow(process: subprocess.Popen[str], out: Path) -> list[Outcome]:
    """Print and log what a process prints, to its end; return the parts that ended."""
    outcomes: list[Outcome] = []
    current, began_s, finding = "", time.perf_counter(), ""
    assert process.stdout is not None
    with process.stdout as printed, LogFile(out) as log:
        for line in printed:
            if line.startswith("== part "):
                current, began_s, finding = line.split()[2].rstrip(":"), time.perf_counter(), ""
                log.begin(current)
            print(line, end="", flush=True)
            log.write(line)
            if line.startswith(_FINDING):
                finding = line.removeprefix(_FINDING).strip()
            elif line.startswith("== end "):
                outcomes.append(Outcome(current, line.split()[2], time.perf_counter() - began_s, finding))
    return outcomes


def _stop(process: subprocess.Popen[str], how: signal.Signals) -> None:
    try:
        os.killpg(process.pid, how)
    except ProcessLookupError:
        pass


class LogFile:
    """The log of the part that is running."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._file = None

    def __enter__(self) -> LogFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def begin(self, part: str) -> None:
        """Go on in the log of another part."""
        self._close()
        self._file = (self._out / f"{part}.log").open("a", encoding="utf-8")

    def write(self, line: str) -> None:
        """Add a line; what is printed before the first part begins is in no log."""
        if self._file is not None:
            self._file.write(line)
            self._file.flush()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _show(outcomes: Sequence[Outcome], out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="scripts/gpu", title_justify="left")
    for heading in ("part", "result"):
        table.add_column(heading, no_wrap=True)
    table.add_column("s", justify="right")
    table.add_column("finding")
    for one in outcomes:
        table.add_row(one.name, one.result, f"{one.seconds:.0f}", one.finding)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    console.print(f"rows and logs: {out}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
