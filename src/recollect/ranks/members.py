"""Find the processes that train a model together, and check that they are about to do the same.

A process without a memory budget never asks the others for a plan: it goes on to its first collective, where it waits for ever.
So each process that has one leaves a note at the store where all of them met, before it does anything that needs the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch.distributed as dist
from torch import nn

from recollect._torch_parallel import RankNotes, meeting_place, processes_of
from recollect.errors import ArgumentError, ConfigError, RecordError
from recollect.ranks.group import ALONE, Place, Ranks, group_of

# A DeviceMesh is imported only where there is one.
GroupChoice: TypeAlias = "dist.ProcessGroup | Any | Literal['alone'] | None"
"""Which processes run one plan: a process group, a device mesh, "alone", or None for those that the model is spread over."""


def ranks_of(model: nn.Module, group: GroupChoice, call: str) -> Ranks:
    """Return the processes that run one plan, once all of them are here.

    Args:
        model: wrapped by DistributedDataParallel, or with parameters that FSDP2 or a device mesh spreads, if there are several.
        group: see `GroupChoice`.
        call: that is under way, for errors.

    Raises:
        ArgumentError: the group is none, or this process is not in it.
        RecordError: the model is spread over two groups of which none contains the other; or another process does not call.
    """
    if isinstance(group, str) and group == "alone":
        return ALONE
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise _no_group(group, call, "there are no process groups yet")
        return ALONE
    if group is not None:
        return group_of(_chosen(group, call), call)
    found = sorted({tuple(sorted(ranks)) for ranks in processes_of(model)}, key=len)
    if not found:
        return ALONE
    *others, largest = found
    for other in others:
        if not set(other) <= set(largest):
            raise RecordError(
                f"recollect.{call}: {type(model).__name__} is spread over the processes {list(other)} and {list(largest)}, of "
                "which neither contains the other, so that it is not clear which run one plan. Pass group=, a process group "
                'or device mesh of all that train the model; or group="alone" to have each plan for itself.'
            )
    return group_of(largest, call)


def _chosen(group: GroupChoice, call: str) -> list[int]:
    if isinstance(group, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group)
    elif not isinstance(group, str) and type(group).__name__ == "DeviceMesh":
        ranks = group.mesh.flatten().tolist()  # type: ignore[union-attr]
    else:
        raise _no_group(group, call, "expected a process group, a device mesh, or 'alone'")
    if dist.get_rank() not in ranks:
        raise _no_group(group, call, f"this process, rank {dist.get_rank()}, is not in it")
    return ranks


def _no_group(group: object, call: str, reason: str) -> ArgumentError:
    return ArgumentError(
        f"recollect.{call}: got {group!r} as group: {reason}. Leave it out to take the processes that the model is spread over."
    )


def check_alike(ranks: Ranks, model: nn.Module, settings: Mapping[str, object]) -> None:
    """Check that all processes are about to do the same.

    Args:
        ranks: the processes.
        model: with the same modules and parameters in all of them; sizes may differ, as experts' do.
        settings: arguments, by name.

    Raises:
        ConfigError: a setting is another one in some process.
        RecordError: a model is.
    """
    if ranks.is_alone:
        return
    own = _Described(
        type(model).__name__,
        [f"{name} ({p.dtype}, {'trained' if p.requires_grad else 'frozen'})" for name, p in model.named_parameters()],
        {name: str(value) for name, value in settings.items()},
    )
    found: list[_Described] = ranks.gather(own, Place.START)
    at, first = ranks.ranks[0], found[0]
    for rank, other in zip(ranks.ranks, found, strict=True):
        if (other.model, other.parameters) != (first.model, first.parameters):
            raise RecordError(
                f"the processes of one group have different models: {first} in rank {at}, {other} in rank {rank}"
                f"{_difference(at, first, rank, other)}; expected the same, since they run one plan. Build the same model in "
                'all; or pass group=, those that have the same one; or group="alone" to have each plan for itself.'
            )
        for name, value in first.settings.items():
            if other.settings.get(name) != value:
                raise ConfigError(
                    settings={f"{name} in rank {at}": value, f"{name} in rank {rank}": other.settings.get(name)},
                    reason=f"two values of {name} in one group, whose processes run one plan",
                    advice=f'Pass the same {name} in all of them; or group="alone" to have each plan for itself.',
                )


@dataclass(frozen=True)
class _Described:
    """What a process is about to do."""

    model: str
    parameters: list[str]
    settings: dict[str, str]

    def __str__(self) -> str:
        return f"{self.model} with {len(self.parameters)} parameters"


def _difference(first_rank: int, first: _Described, other_rank: int, other: _Described) -> str:
    for rank, its, others in ((first_rank, first, other), (other_rank, other, first)):
        only = [parameter for parameter in its.parameters if parameter not in set(others.parameters)]
        if only:
            return f"; only rank {rank} has {only[0]}"
    return ""


# Where nothing made the processes wait for each other just before, loading data may take one of them longer.
_PATIENCE_S: Final = 60.0
_PATIENCE_AFTER_BARRIER_S: Final = 10.0

# How often something was told in this process: the same number in all of a training.
_num_told: Counter[str] = Counter()


class Presence:
    """What the processes of a training tell each other of one thing that all of them need, before they wait for those without.

    Args:
        what: they need, for errors: "MemoryBudget".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._notes: RankNotes | None = None

    def tell(self) -> None:
        """Tell the others, the first time; do nothing where there are none."""
        is_alone = not (dist.is_available() and dist.is_initialized()) or dist.get_backend() == "fake"
        if self._notes is not None or is_alone or dist.get_world_size() == 1:
            return
        _num_told[self._what] += 1
        key = f"recollect/{self._what}/{_num_told[self._what]}"
        self._notes = RankNotes(key, list(range(dist.get_world_size())), meeting_place())
        self._notes.leave("here")

    def check(self, *, is_after_barrier: bool) -> None:
        """Check that all processes have told.

        Args:
            is_after_barrier: those that tell have done so before something for which all of them waited.

        Raises:
            RecordError: some have not.
        """
        self.tell()
        if self._notes is None:
            return
        found = self._notes.read(_PATIENCE_AFTER_BARRIER_S if is_after_barrier else _PATIENCE_S)
        missing = next((rank for rank, text in found.items() if text is None), None)
        if missing is not None:
            _num_told[self._what] -= 1
            self._notes = None
            raise RecordError(
                f"{self._what}: rank {missing} of {dist.get_world_size()} trains without it, expected it in every process of "
                "the training, since they run one plan. Pass it in all of them, or in none."
            )
