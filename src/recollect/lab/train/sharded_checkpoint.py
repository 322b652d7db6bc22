"""Checkpoints of several processes: written while training goes on, published whole, verified when read.

A checkpoint is a folder `step_XXXXXXXX`, by `torch.distributed.checkpoint`: each process writes its part of the tensors and its
random number states. The folder has another name until all have written, and the last file in it is the manifest. Names,
order and shapes are those of the whole model, so that any layout reads it, and one process.
"""

from __future__ import annotations

import json
import warnings
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult

from recollect.errors import CheckpointError
from recollect.lab.train.checkpoint import (
    Manifest,
    checksum_of,
    folder_path,
    keep_newest,
    rng_state,
    write_manifest,
)
from recollect.lab.train.files import publish, unpublished, write_atomically, write_text
from recollect.lab.train.stored_state import LoadByWholeRows, SaveByWholeRows, StoredState

__all__ = ["ShardedCheckpoints", "read_random_states", "read_tensors"]


class ShardedCheckpoints:
    """Writes the checkpoints of several processes into a folder, at most one at a time, while they train.

    All of them make one, and call its methods together.

    Args:
        folder: made if missing.
        keep: number of newest checkpoints to keep.
        layout: how the model is spread, in words and numbers.
        timeout: for an exchange of the processes.
    """

    def __init__(self, folder: Path, *, keep: int, layout: dict[str, Any], timeout: timedelta) -> None:
        self._folder, self._keep, self._layout = folder, keep, layout
        # A group of its own: its exchanges run beside those of the steps, in no order.
        self._group = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoints")
        self._pending: Future[Any] | None = None
        self._step = 0

    def start(self, stored: StoredState, *, step: int, identity: dict[str, Any], environment: dict[str, Any]) -> None:
        """Copy the state and begin to write it, once the checkpoint before is there.

        Args:
            stored: the state; the next step may change it as soon as this returns.
            step: optimizer steps completed.
            identity: settings of the run.
            environment: `checkpoint.environment()`.

        Raises:
            CheckpointError: the checkpoint before could not be written.
        """
        self.finish()
        manifest = Manifest(step, identity, environment, self._layout, {})
        path = folder_path(self._folder, step)
        writer = _Writer(path, manifest, rank=dist.get_rank(), ranks=dist.get_world_size(), keep=self._keep)
        self._step = step
        began = async_save(
            stored.tensors, storage_writer=writer, planner=SaveByWholeRows(stored), process_group=self._group
        )
        assert isinstance(began, Future)
        self._pending = began

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is there.

        Raises:
            CheckpointError: it could not be written; names a process and the reason, in all of them. Older ones are kept.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except CheckpointException as problem:
            rank, (reason, _) = next(iter(sorted(problem.failures.items())))
            words = getattr(reason, "strerror", None) or (str(reason).splitlines() or [type(reason).__name__])[0]
            raise CheckpointError(
                f"checkpoint {folder_path(self._folder, self._step)}: cannot be written by rank {rank} ({words}), expected a "
                "writable folder with free space, the same for all processes. Older checkpoints are kept; free space or choose "
                "another --run-dir."
            ) from None


class _Writer(FileSystemWriter):
    """Writes a checkpoint under another name, sums up what it wrote, and gives it its name at last."""

    def __init__(self, path: Path, manifest: Manifest, *, rank: int, ranks: int, keep: int) -> None:
        self._unpublished = unpublished(path)
        # All is on the CPU already. Else, on CUDA, the thread that writes would wait for the first device, in every process.
        super().__init__(self._unpublished, per_thread_copy_ahead=0)
        self._published, self._manifest = path, manifest
        self._own, self._ranks, self._keep = rank, ranks, keep
        # As they are now: the thread that writes comes later.
        self._random = rng_state(own_device=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """See `StorageWriter`."""
        writing = super().write_data(plan, planner)
        results: list[WriteResult] = writing.wait()
        random = _random_name(self._own)
        write_atomically(self._unpublished / random, lambda file: torch.save(self._random, file))
        names = {random, *(result.storage_data.relative_path for result in results)}
        sums = {name: checksum_of(self._unpublished / name) for name in sorted(names)}
        write_text(self._sums_path(self._own), json.dumps(sums))
        return writing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See `StorageWriter`; one process calls it, when all have written."""
        super().finish(metadata, results)
        for rank in range(self._ranks):
            path = self._sums_path(rank)
            self._manifest.files.update(json.loads(path.read_text()))
            path.unlink()
        self._manifest.files[".metadata"] = checksum_of(self._unpublished / ".metadata")
        write_manifest(self._unpublished, self._manifest)
        publish(self._unpublished, self._published)
        keep_newest(self._published.parent, self._keep)

    def _sums_path(self, rank: int) -> Path:
        return self._unpublished / f"sums_{rank}.json"


def read_tensors(path: Path, stored: StoredState) -> None:
    """Read this process's parts of a checkpoint into a run, whatever layout wrote it.

    No process waits for another.

    Args:
        path: the checkpoint, verified.
        stored: the state of the run.

    Raises:
        CheckpointError: it has other tensors.
    """
    reader, planner = FileSystemReader(path), LoadByWholeRows(stored)
    try:
        with warnings.catch_warnings():
            # That each process reads for itself.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(dict(stored.tensors), storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as problem:
        raise CheckpointError(f"checkpoint {path}: {next(iter(problem.failures.values()))[0]}") from None
    stored.put_back()


def read_random_states(path: Path, manifest: Manifest, layout: dict[str, Any], rank: int) -> dict[str, Any] | None:
    """Return the random number states of a process; None if the checkpoint is of another layout."""
    if manifest.layout != layout:
        return None
    found: dict[str, Any] = torch.load(path / _random_name(rank), map_location="cpu", weights_only=True)
    return found


def _random_name(rank: int) -> str:
    return f"random_{rank}.pt"
