"""A part of `scripts/gpu`: what it measures, what it needs, and where its results go."""

from __future__ import annotations

import datetime
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from contest import reason
from recollect.lab.bench.race import few_objects
from recollect.measuring.device_memory import empty_cache, is_out_of_memory
from results_csv import Number, RowsFile, machine_name
from subject import StepFlags

__all__ = ["Context", "Part", "deterministic_kernels", "device_slug"]

# A part begins nothing new after its seconds, by default these, so that it ends by itself. If it does not within some more, it
# is interrupted so long before that limit, to write what it has, and killed at the limit.
SECONDS = 390.0
ENDING_S = 90.0
STOPPING_S = 30


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part.

    Attributes:
        name: what it is called on the command line.
        what: what it measures, in a line.
        least_gib: memory that the smallest of its cases needs on the device.
        packages: optional packages that it cannot do without.
        run: measures, prints, writes rows as it goes, and returns its findings in a sentence.
    """

    name: str
    what: str
    least_gib: float
    packages: tuple[str, ...] = ()
    run: Callable[[Context], str]

    def problem(self, device_name: str, device_gib: float | None) -> str | None:
        """Say in a sentence why the part cannot run on a device with so much memory, None on a CPU; None if it can."""
        for package in self.packages:
            try:
                version(package)
            except PackageNotFoundError:
                return f"{self.name}: skipped, as it needs the package {package}, which is not installed."
        if device_gib is not None and device_gib < self.least_gib:
            needs = f"skipped, as it needs a device with {self.least_gib:g} GiB of memory"
            return f"{self.name}: {needs}; this one, {device_name}, has {device_gib:.1f} GiB."
        return None


@dataclass(frozen=True, kw_only=True)
class Context:
    """Where one part runs, and how much of it.

    Attributes:
        part: its name.
        device: where the tensors are.
        out: folder of the results.
        is_dry_run: sizes so small that everything runs in seconds on a CPU; times mean nothing then.
        only: run only the cases whose names contain this.
        seconds: after which nothing new is begun.
        began_s: when it began, by `time.perf_counter`.
    """

    part: str
    device: torch.device
    out: Path
    is_dry_run: bool
    only: str = ""
    seconds: float = SECONDS
    console: Console
    began_s: float = field(default_factory=time.perf_counter)

    @cached_property
    def path(self) -> Path:
        """The file of the part's rows; named by device, month and part."""
        month = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m")
        return self.out / f"{device_slug(machine_name(str(self.device)))}-{month}-{self.part}.csv"

    def rows(self, **config: Any) -> RowsFile:
        """Return the part's file, for rows that depend on this configuration, and on the device and versions."""
        command = " ".join(["scripts/gpu", self.part, *(["--dry-run"] if self.is_dry_run else [])])
        about = {"device": str(self.device), "command": command, "versions": versions()}
        return RowsFile(self.path, {**config, **about})

    def write(self, numbers: Iterable[Number], **config: Any) -> None:
        """Add rows to the part's file, with what they depend on."""
        self.rows(**config).append(numbers)

    def share(self, seconds: float) -> float:
        """Return what to spend on a task that takes this many seconds of a part's default time."""
        return seconds * self.seconds / SECONDS

    def large_step(self, **sizes: Any) -> StepFlags:
        """Return a step as wide as that of a model of 1B parameters, in bf16, with other sizes where they are given."""
        wide = {"hidden_size": 2048, "num_layers": 16, "vocab_size": 32_000, "batch_size": 1, "seq_length": 4096}
        return StepFlags(**{**wide, **sizes}, dtype="bf16", device=str(self.device))

    def say(self, text: str) -> None:
        """Tell how far it is."""
        elapsed_s = time.perf_counter() - self.began_s
        self.console.print(f"[{elapsed_s:4.0f} s] {text}", style="dim", markup=False, highlight=False, soft_wrap=True)

    def begins(self, case: str) -> bool:
        """Say whether a case is to be run: it was asked for, and there is time left. If not for time, that is a row."""
        if self.only not in case:
            return False
        if time.perf_counter() - self.began_s < self.seconds:
            self.say(case)
            return True
        self.say(f"{case}: left out, no time")
        self.write([Number("left_out", "text", case, "no time")], case=case)
        return False

    def attempt(self, case: str, run: Callable[[], None]) -> bool:
        """Run a case; what it raises is a row, and no reason not to run the others. Return whether it ran through."""
        try:
            with few_objects():
                run()
        except Exception as error:
            what = "out_of_memory" if is_out_of_memory(error) else "failed"
            self.say(f"{case}: {what}: {reason(error)}")
            self.write([Number(what, "text", case, reason(error))], case=case)
            # The traceback holds the frames of the step, and these its tensors.
            error.__traceback__ = None
            return False
        finally:
            empty_cache(self.device)
        return True


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Use kernels that repeat themselves to the bit: backward of fused attention adds with atomics by default.

    Raises:
        RuntimeError: in an op that has no such kernel. To warn instead would leave attention as it is.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def device_slug(name: str) -> str:
    """Return a device's name as a part of a file's: "NVIDIA H100 80GB HBM3" is h100-80gb-hbm3; all CPUs are "cpu"."""
    if "cores" in name:
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")


def versions() -> dict[str, str]:
    """Return the versions of what takes part; packages that are not there are left out."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    for package in ("transformers", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
