"""Write and read the tensors of checkpoints; several processes go on training while they write.

By `torch.distributed.checkpoint`, each process writes its part of the tensors and its random number states. The folder has
a temporary name until all have written, and the last file in it is the manifest. Names, order and shapes match the whole
model, so any layout can read it.

Each process tells the places of its parts in the whole tensors. DTensors know that, except fused projections under
tensor parallelism, with rows reordered by rank: their parts are cut where neighbours in the whole matrix end.
"""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from recollect.errors import CheckpointError
from recollect.lab.models.gpt import GPTModel
from recollect.lab.parallel.tensor import fused_parameters
from recollect.lab.parallel.tensor_modules import whole_rows
from recollect.lab.train.checkpoint import Manifest, checksum_of, keep_newest, write_manifest
from recollect.lab.train.files import publish, unpublished, write_atomically
from recollect.lab.train.processes import Processes
from recollect.recording.restored_state import free_gathered

_MODEL, _OPTIMIZER = "model.", "optimizer."
_STATE = "state."
Fused: TypeAlias = tuple[Sequence[int], int]


class StoredState:
    """The tensors of a model and its optimizer that are in this process, by name.

    They are parameters, buffers, and the optimizer's state; its settings follow from the run's. Tensors are the run's own:
    writing to them changes it. An optimizer that has taken no step gets its state first. Of parameters and state with
    reordered rows, `fused` has the rows of each part in the whole model, and their dimension.
    """

    def __init__(self, model: GPTModel, optimizer: torch.optim.Optimizer, tensor_ranks: int) -> None:
        # Validation has no backward to free the gathered parameters; the optimizer has the parts.
        free_gathered(model)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
        found: dict[str, Any] = {f"{_MODEL}{name}": tensor for name, tensor in of_model.items()}
        found |= {f"{_OPTIMIZER}{name}": tensor for name, tensor in of_optimizer.items() if name.startswith(_STATE)}
        self.tensors: dict[str, Tensor] = found
        self.tensor_ranks = tensor_ranks
        self.fused: dict[str, Fused] = {}
        for name, reordered in fused_parameters(model).items() if tensor_ranks > 1 else ():
            self.fused[f"{_MODEL}{name}"] = reordered
            prefix, shape = f"{_OPTIMIZER}{_STATE}{name}.", found[f"{_MODEL}{name}"].shape
            # Not the number of its steps.
            self.fused |= {n: reordered for n, t in found.items() if n.startswith(prefix) and t.shape == shape}


def parts_of(tensor: Tensor, fused: Fused | None = None, ranks: int = 1) -> list[tuple[ChunkStorageMetadata, Tensor]]:
    """Return this process's parts of a tensor, spread or not, as views, with their places in the whole one.

    `fused`: for rows reordered by `ranks`, the rows of each part in the whole model, and their dimension.
    """
    if not isinstance(tensor, DTensor):
        return [(ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape), tensor)]
    chunk: ChunkStorageMetadata
    (chunk,) = tensor.__create_chunk_list__()
    local = tensor.to_local()
    if fused is None:
        return [(chunk, local)]
    sizes, dim = fused
    first, count = chunk.offsets[dim], chunk.sizes[dim]
    found, at = [], 0
    for rows in whole_rows(range(first, first + count), sizes, ranks):
        offsets, shape = list(chunk.offsets), list(chunk.sizes)
        offsets[dim], shape[dim] = rows.start, len(rows)
        place = ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))
        found.append((place, local.narrow(dim, at, len(rows))))
        at += len(rows)
    return found


class Checkpoints:
    """Writes the checkpoints of a run into a folder, at most one at a time; several processes go on training meanwhile.

    All of them make one, and call its methods together.
    """

    def __init__(self, folder: Path, *, keep: int, processes: Processes, timeout: timedelta) -> None:
        self._folder, self._keep, self._processes = folder, keep, processes
        # A separate group: its exchanges run concurrently with the steps', in no fixed order.
        self._group = None
        if not processes.ranks.is_alone:
            self._group = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoints")
        self._pending: Future[Any] | None = None
        self._path = folder

    def start(self, stored: StoredState, manifest: Manifest, random: dict[str, Any]) -> None:
        """Write the state once the previous checkpoint is complete; several processes copy it first, and write meanwhile."""
        self.finish()
        self._path = self._folder / f"step_{manifest.step:08d}"
        writer = _Writer(self._path, manifest, random, rank=self._processes.rank, keep=self._keep)
        if self._group is None:
            with self._named_errors(), warnings.catch_warnings():
                # That one process writes.
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                save(stored.tensors, storage_writer=writer, planner=_SaveByWholeRows(stored), no_dist=True)
            return
        began = async_save(
            stored.tensors, storage_writer=writer, planner=_SaveByWholeRows(stored), process_group=self._group
        )
        assert isinstance(began, Future)
        self._pending = began

    def finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._named_errors():
                pending.result()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except CheckpointException as problem:
            rank, (reason, _) = next(iter(sorted(problem.failures.items())))
            if not isinstance(reason, Exception):
                raise reason from None  # Ctrl-C
            words = getattr(reason, "strerror", None) or (str(reason).splitlines() or [type(reason).__name__])[0]
            who, which = ("", "") if self._group is None else (f" by rank {rank}", ", the same for all processes")
            raise CheckpointError(
                f"checkpoint {self._path}: cannot be written{who} ({words}), expected a writable folder with free space"
                f"{which}. Older checkpoints are kept; free space or choose a different --run-dir."
            ) from None


class _Writer(FileSystemWriter):
    """Writes a checkpoint under a temporary name, computes the checksums of its files, and finally renames it."""

    def __init__(self, path: Path, manifest: Manifest, random: dict[str, Any], *, rank: int, keep: int) -> None:
        self._unpublished = unpublished(path)
        # Of several processes all is on the CPU already. Else, on CUDA, the threads that write would wait for the first device.
        super().__init__(self._unpublished, per_thread_copy_ahead=0)
        self._published, self._manifest = path, manifest
        self._random, self._rank, self._keep = random, rank, keep

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        results: list[WriteResult] = super().write_data(plan, planner).wait()
        random = _random_name(self._rank)
        write_atomically(self._unpublished / random, lambda file: torch.save(self._random, file))
        names = {random, *(result.storage_data.relative_path for result in results)}
        # For `finish`, besides the place of each tensor.
        sums = {name: checksum_of(self._unpublished / name) for name in sorted(names)}
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([*results, WriteResult(MetadataIndex("checksums"), 0, sums)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See `StorageWriter`; one process calls it, when all have written."""
        for written in results:
            self._manifest.files.update(written.pop().storage_data)
        super().finish(metadata, results)
        self._manifest.files[".metadata"] = checksum_of(self._unpublished / ".metadata")
        write_manifest(self._unpublished, self._manifest)
        publish(self._unpublished, self._published)
        keep_newest(self._published.parent, self._keep)


def read_tensors(path: Path, stored: StoredState) -> None:
    """Read this process's parts of a checkpoint into a run, whatever layout wrote it. No process waits for the others."""
    reader, planner = FileSystemReader(path), _LoadByWholeRows(stored)
    try:
        with warnings.catch_warnings():
            # Each process reads this for itself.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(dict(stored.tensors), storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as problem:
        raise CheckpointError(f"checkpoint {path}: {next(iter(problem.failures.values()))[0]}") from None


def read_random_states(path: Path, manifest: Manifest, layout: dict[str, Any], rank: int) -> dict[str, Any] | None:
    """Return the random number states of a process; None if the checkpoint has a different layout."""
    if manifest.layout != layout:
        return None
    return torch.load(path / _random_name(rank), map_location="cpu", weights_only=True)


def _random_name(rank: int) -> str:
    return f"random_{rank}.pt"


class _WholeRows:
    """Planner method: look up this process's tensors, with reordered rows at their places in the whole matrix."""

    state_dict: dict[str, Any]

    def __init__(self, stored: StoredState) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)  # type: ignore[call-arg]
        self._fused, self._ranks = stored.fused, stored.tensor_ranks

    def _parts(self, name: str) -> list[tuple[ChunkStorageMetadata, Tensor]]:
        return parts_of(self.state_dict[name], self._fused[name], self._ranks)

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn not in self._fused:
            return find_state_dict_object(self.state_dict, index)
        return next(part for chunk, part in self._parts(index.fqn) if chunk.offsets == index.offset)

    lookup_tensor = lookup_object  # as `DefaultLoadPlanner` calls it


class _SaveByWholeRows(_WholeRows, DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            name = item.index.fqn
            if name not in self._fused:
                items.append(item)
                continue
            assert item.tensor_data is not None
            for chunk, _ in self._parts(name):
                data = dataclasses.replace(item.tensor_data, chunk=chunk)
                items.append(dataclasses.replace(item, index=MetadataIndex(name, chunk.offsets), tensor_data=data))
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan


class _LoadByWholeRows(_WholeRows, DefaultLoadPlanner):
    def create_local_plan(self) -> LoadPlan:
        try:
            plan = super().create_local_plan()
        except (RuntimeError, ValueError) as problem:
            raise CheckpointError(
                f"a checkpoint with other tensors than this model's: {problem} Resume the run with "
                "the version of recollect that wrote it, or start a new one."
            ) from None
        items = [item for item in plan.items if item.dest_index.fqn not in self._fused]
        assert self.metadata is not None
        for name in self._fused:
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, [chunk for chunk, _ in self._parts(name)])
        return dataclasses.replace(plan, items=items)
