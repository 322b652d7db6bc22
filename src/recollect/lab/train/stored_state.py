"""A run's tensors as checkpoints store them: by name, in the order of the whole model, whatever the layout.

Each process has parts of them, and says where these are in the whole tensor. DTensors know that, but for fused projections
under tensor parallelism, whose rows are reordered by rank: their parts are cut where neighbours in the whole matrix end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from recollect.errors import CheckpointError
from recollect.lab.models.gpt import GPTModel
from recollect.lab.parallel.fused_rows import whole_rows
from recollect.lab.parallel.tensor import fused_parameters
from recollect.lab.train.optimizer_step import parameter_names
from recollect.recording.gathered_stage import free_gathered

__all__ = ["LoadByWholeRows", "SaveByWholeRows", "StoredState"]

_MODEL, _OPTIMIZER = "model.", "optimizer."
_STATE = "state."
Fused: TypeAlias = tuple[Sequence[int], int]


class StoredState:
    """The tensors of a model and its optimizer that are in this process, by name.

    Tensors are those of the run itself: what writes to them changes it, and `put_back` makes it so for copies, too.

    Args:
        model: spread or not.
        optimizer: over its parameters; if it has taken no step yet, its state is made.
        tensor_ranks: those of tensor parallelism.

    Attributes:
        tensors: parameters, buffers, and the optimizer's state. Its settings follow from those of the run.
        fused: of parameters and of state whose rows are reordered, the rows of each part in the whole model, and their
            dimension.
        tensor_ranks: those of tensor parallelism.
    """

    def __init__(self, model: GPTModel, optimizer: torch.optim.Optimizer, tensor_ranks: int) -> None:
        self._model, self._optimizer = model, optimizer
        # Validation has no backward, which frees what forward gathered; the optimizer has the parts.
        free_gathered(model)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        self._of_model, self._of_optimizer = get_state_dict(model, optimizer, options=options)
        found: dict[str, Any] = {f"{_MODEL}{name}": tensor for name, tensor in self._of_model.items()}
        found |= {f"{_OPTIMIZER}{n}": tensor for n, tensor in self._of_optimizer.items() if n.startswith(_STATE)}
        self.tensors: dict[str, Tensor] = found
        self.tensor_ranks = tensor_ranks
        self.fused = self._fused(model) if tensor_ranks > 1 else {}

    def put_back(self) -> None:
        """Give model and optimizer what the tensors hold now."""
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=self._of_model,
            optim_state_dict=self._of_optimizer,
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )

    def take(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Copy this process's parts from the state dicts of a run in one process."""
        whole: dict[str, Tensor] = {f"{_MODEL}{name}": tensor for name, tensor in model.items()}
        with torch.device("meta"):
            # In the order of the whole model's optimizer; here there may be some of the parameters.
            names = parameter_names(GPTModel(self._model.config))
        for number, name in enumerate(names):
            for kind, tensor in optimizer["state"].get(number, {}).items():
                whole[f"{_OPTIMIZER}{_STATE}{name}.{kind}"] = tensor
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                for chunk, part in parts_of(tensor, self.fused.get(name), self.tensor_ranks):
                    ends = zip(chunk.offsets, chunk.sizes, strict=True)
                    part.copy_(whole[name][tuple(slice(begin, begin + size) for begin, size in ends)])
        self.put_back()

    def _fused(self, model: GPTModel) -> dict[str, Fused]:
        found: dict[str, Fused] = {}
        for name, reordered in fused_parameters(model).items():
            shape = self.tensors[f"{_MODEL}{name}"].shape
            found[f"{_MODEL}{name}"] = reordered
            prefix = f"{_OPTIMIZER}{_STATE}{name}."
            # Not the number of its steps.
            found |= {n: reordered for n, t in self.tensors.items() if n.startswith(prefix) and t.shape == shape}
        return found


def parts_of(tensor: Tensor, fused: Fused | None = None, ranks: int = 1) -> list[tuple[ChunkStorageMetadata, Tensor]]:
    """Return this process's parts of a tensor, as views, with their places in the whole one.

    Args:
        tensor: spread or not.
        fused: of reordered rows, those of each part in the whole model, and their dimension; None: rows are in order.
        ranks: by which they are reordered.
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


class SaveByWholeRows(DefaultSavePlanner):
    """Says what this process writes, with reordered rows at their places in the whole matrix."""

    def __init__(self, stored: StoredState) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._fused, self._ranks = stored.fused, stored.tensor_ranks

    def create_local_plan(self) -> SavePlan:
        """See `SavePlanner`."""
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            name = item.index.fqn
            if name not in self._fused:
                items.append(item)
                continue
            assert item.tensor_data is not None
            for chunk, _ in parts_of(self.state_dict[name], self._fused[name], self._ranks):
                data = dataclasses.replace(item.tensor_data, chunk=chunk)
                items.append(dataclasses.replace(item, index=MetadataIndex(name, chunk.offsets), tensor_data=data))
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """See `DefaultSavePlanner`."""
        if index.fqn not in self._fused:
            return super().lookup_object(index)
        return _part_at(index, self.state_dict[index.fqn], self._fused[index.fqn], self._ranks)


class LoadByWholeRows(DefaultLoadPlanner):
    """Says what this process reads, likewise."""

    def __init__(self, stored: StoredState) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._fused, self._ranks = stored.fused, stored.tensor_ranks

    def create_local_plan(self) -> LoadPlan:
        """See `LoadPlanner`.

        Raises:
            CheckpointError: tensors are missing in the checkpoint, or have other sizes there.
        """
        try:
            plan = super().create_local_plan()
        except (RuntimeError, ValueError) as problem:
            raise CheckpointError(
                f"a checkpoint with other tensors than this model's: {problem} Resume the run with "
                "the version of recollect that wrote it, or start a new one."
            ) from None
        items = [item for item in plan.items if item.dest_index.fqn not in self._fused]
        assert self.metadata is not None
        for name, reordered in self._fused.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [chunk for chunk, _ in parts_of(self.state_dict[name], reordered, self._ranks)]
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return dataclasses.replace(plan, items=items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """See `DefaultLoadPlanner`."""
        if index.fqn not in self._fused:
            return super().lookup_tensor(index)
        return _part_at(index, self.state_dict[index.fqn], self._fused[index.fqn], self._ranks)


def _part_at(index: MetadataIndex, tensor: Tensor, fused: Fused, ranks: int) -> Tensor:
    """Return the part at a place in the whole tensor."""
    return next(part for chunk, part in parts_of(tensor, fused, ranks) if chunk.offsets == index.offset)
