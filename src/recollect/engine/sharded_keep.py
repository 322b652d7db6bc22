"""Holds a value that is the same on all ranks of a group as this rank's part of it, and gathers it when backward asks.

A value is cut by bytes, so that any size and type will do: the last ranks' parts may be padded, or nothing but padding.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from recollect._torch_parallel import gathered
from recollect._torch_private import disable_torch_dispatch
from recollect.arguments import check_kind
from recollect.engine.agreement import Agreement
from recollect.engine.content import checksums
from recollect.engine.values import Layout, TapeValue, bytes_of, laid_out, layout_of
from recollect.errors import PlanError
from recollect.plans.paths import unit_words

_groups: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def distribute_saved_activations(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Let plans of a model hold values that are the same on all ranks of a group as parts, one on each rank.

    Such a value has the action "shard" in a plan; it is gathered when backward asks for it. Call this before `record` and
    `apply`, on all ranks, which have to apply one plan. The first step under a plan compares each such value over the group.

    Args:
        model: the model, before or after it is parallelised.
        group: of ranks that compute the same values, as those of tensor parallelism compute each layer's input; all ranks by
            default.

    Returns:
        The model itself.

    Raises:
        ArgumentError: the model is no module.
        PlanError: there is no process group.

    Example:
        >>> import torch, recollect
        >>> torch.distributed.init_process_group("fake", rank=0, world_size=4)
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))
        >>> model = recollect.distribute_saved_activations(model)
        >>> profile = recollect.record(model, torch.randn(5, 6), loss_fn=torch.sum)
        >>> profile.shard_ranks
        4
        >>> torch.distributed.destroy_process_group()
    """
    check_kind("distribute_saved_activations(model)", "model", model, nn.Module, "a torch.nn.Module")
    if not dist.is_available() or not dist.is_initialized():
        raise PlanError(
            "distribute_saved_activations: got no process group, expected torch.distributed to be set up, whose ranks hold "
            "the parts. Call torch.distributed.init_process_group first."
        )
    _groups[model] = dist.group.WORLD if group is None else group
    return model


def shards_of(model: nn.Module) -> Shards | None:
    """Return how values of a model are held as parts; None if they are not."""
    group = _groups.get(model)
    return None if group is None else Shards(group)


class Shards:
    """Cuts values into the parts of a group's ranks.

    Attributes:
        size: number of ranks.
        ranks: their numbers among all processes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.name: str = group.group_name
        self.size = dist.get_world_size(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self._rank = dist.get_rank(group)
        self._num_seen: Counter[tuple[str, str]] = Counter()

    def part_bytes(self, nbytes: int) -> int:
        """Return the bytes of each rank's part of a value."""
        return -(-nbytes // self.size)

    def call(self, tensor: torch.Tensor, agreement: Agreement, unit: str, name: str) -> tuple[Gather, TapeValue]:
        """Return what gathers a tensor, and its argument: this rank's part of it.

        Raises:
            PlanError: the value `name` of a unit is not the same on all ranks, or they have other plans; on all of them.
        """
        agreement.meet(self.name)
        agreement.check(self.name, "hold values as parts")
        self._check(tensor, unit, name)
        content = bytes_of(tensor)
        size = self.part_bytes(len(content))
        part = content[self._rank * size : (self._rank + 1) * size].clone()
        if len(part) < size:
            part = nn.functional.pad(part, (0, size - len(part)))
        return Gather(self, layout_of(tensor)), TapeValue(part)

    def _check(self, tensor: torch.Tensor, unit: str, name: str) -> None:
        """Compare a value over the group, ever more seldom: all ranks hold the same values in the same order.

        In the first step, the second, the fourth and so on, as what starts as zeros on all ranks may part later.
        """
        self._num_seen[unit, name] += 1
        if self._num_seen[unit, name].bit_count() > 1:
            return
        found = torch.tensor([tensor.untyped_storage().nbytes(), *checksums([tensor])], device=tensor.device)
        everywhere = gathered(found, self.size, self.name).view(self.size, 2)
        if not bool((everywhere == found).all()):
            raise PlanError(
                f"cannot hold {name!r} of {unit_words(unit)} as parts: it is not the same on the {self.size} ranks of the "
                'group, as a value with the action "shard" has to be. Give it "keep" or "recompute" in the plan.'
            )


@dataclass(slots=True, eq=False)
class Gather:
    """Makes a tensor of the parts of all ranks."""

    shards: Shards
    layout: Layout

    def __call__(self, tensors: list[Any], may_overwrite_first: bool) -> tuple[torch.Tensor]:
        """Gather, as all ranks of the group do."""
        return (laid_out(gathered(tensors[0], self.shards.size, self.shards.name), self.layout),)


def content_of(tensor: torch.Tensor) -> int | None:
    """Return a number for the content of a tensor that may be held as a part; None for one that may not.

    What is one number throughout, such as zeros, tells nothing: it may be the same on all ranks in one step and not in another.
    """
    if tensor.layout is not torch.strided or tensor.storage_offset() or not tensor.numel():
        return None
    with disable_torch_dispatch(), torch.no_grad():
        content = bytes_of(tensor)
        if len(content) % tensor.element_size():
            return None
        elements = content.view(-1, tensor.element_size())
        if bool((elements == elements[0]).all()):
            return None
    return checksums([tensor])[0]
