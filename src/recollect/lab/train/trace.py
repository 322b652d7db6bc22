"""Trace some steps with torch.profiler: which ops ran when, including recomputed ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from recollect.lab.train.config import ProfileFlags

__all__ = ["StepTrace"]


class StepTrace:
    """Trace each of the steps chosen by `flags` into a separate file.

    Args:
        flags: which steps, if any.
        folder: folder of `step_00000010.json` and so on; created with the first one. None: in another process, which traces.
    """

    def __init__(self, flags: ProfileFlags, folder: Path | None) -> None:
        self._flags = flags
        self._folder = folder

    def covers(self, step: int) -> bool:
        """Return whether `step` (from 1) is traced, here or in another process."""
        return self._flags.profile and self._flags.profile_step_start <= step < self._flags.profile_step_end

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Trace a with-block, if `step` is to be traced."""
        if not self.covers(step) or self._folder is None:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
            yield
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._folder / f"step_{step:08d}.json"))
