"""Finds the values of a recorded step that are the same on all ranks of a group, and the time to gather one from parts."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from recollect._torch_parallel import gathered, group_ranks
from recollect._torch_private import tree_leaves
from recollect.costs.modelled_costs import ModelledCosts
from recollect.costs.op_costs import timed_alone
from recollect.engine.facts import OpFacts
from recollect.engine.together import Shards, content_of, shards_of
from recollect.plans.value_names import collective_kind
from recollect.profile.graph import PartRecord
from recollect.recording.trackers import RecordedCall, storage_of
from recollect.tensors import tensors_in

_SMALL_BYTES, _LARGE_BYTES = 64, 1 << 22
_NUM_SAMPLES: Final = 5

_ALIKE: Final = "_recollect_alike"
_GATHERING: Final = ("all_reduce", "all_gather", "broadcast")


def _is_alike(tensor: torch.Tensor) -> bool:
    return getattr(storage_of(tensor), _ALIKE, False)


def _mark(tensor: torch.Tensor, *, is_alike: bool) -> None:
    storage = storage_of(tensor)
    if storage is not None:
        setattr(storage, _ALIKE, is_alike and tensor.dtype.is_floating_point)


class RanksWithParts:
    """The ranks that may hold parts of a model's values.

    Fake tensors have no content to compare, but their sources tell which tensors are the same on all
    ranks: equal inputs give equal results, also in collectives of all the ranks. Integers are left out,
    with everything computed from them: ranks offset them differently in shared tensors, such as a vocabulary, by
    numbers given to ops. Values that a plan holds as parts are compared when it is applied.
    """

    def __init__(self, shards: Shards, device: torch.device, modelled: ModelledCosts | None) -> None:
        self._shards = shards
        self._device = device
        self._modelled = modelled

    @classmethod
    def of(cls, model: nn.Module, device: torch.device, modelled: ModelledCosts | None) -> RanksWithParts | None:
        shards = shards_of(model)
        return None if shards is None else cls(shards, device, modelled)

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take parameters, buffers and the batch of the step to run, which ranks share unless they are parts."""
        for tensor in () if self._modelled is None else tensors:
            # Not by type: importing DTensor takes a second, and plain models have none.
            placements = getattr(tensor, "placements", ())
            if all(placement.is_replicate() for placement in placements):
                _mark(tensor.to_local() if placements else tensor, is_alike=True)  # type: ignore[attr-defined]

    def after_op(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, output: Any) -> None:
        if self._modelled is None:
            return
        inputs = tensors_in((args, kwargs))
        is_alike = bool(inputs) and all(map(_is_alike, inputs)) and not facts.is_random
        if func.namespace in ("c10d_functional", "_c10d_functional") and "wait" not in func.__name__:
            whole = set(self._shards.ranks) <= set(group_ranks(tree_leaves((args, kwargs))))
            is_alike = any(word in func.__name__ for word in _GATHERING) if whole else is_alike
        for tensor in tensors_in(output):
            _mark(tensor, is_alike=is_alike)

    def content_of(self, tensor: torch.Tensor) -> int | None:
        if self._modelled is None:
            return content_of(tensor)
        return 0 if _is_alike(tensor) else None

    def told(self, calls: Sequence[RecordedCall]) -> tuple[list[tuple[PartRecord, ...]], dict[str, Any]]:
        """Return the values that can be held as parts in each call, and the profile's fields about them.

        All ranks of the group have to ask together: they compare their values, and time gathers.
        """
        latency_s, s_per_byte = self._times()
        facts = {"shard_ranks": self._shards.size, "gather_latency_s": latency_s, "gather_s_per_byte": s_per_byte}
        same = self._same(calls)
        parts = []
        for number, call in enumerate(calls):
            found = []
            for index in sorted(call.contents):
                value = call.values[index]
                if (number, index) not in same or value.mutated_later or not value.nbytes:
                    continue
                # A collective's result can be held as a part, though the collective may not run again.
                if value.must_keep and not collective_kind(value.name):
                    continue
                nbytes = self._shards.part_bytes(value.nbytes)
                found.append(PartRecord(index, nbytes, latency_s + nbytes * self._shards.size * s_per_byte))
            parts.append(tuple(found))
        return parts, facts

    def _same(self, calls: Sequence[RecordedCall]) -> set[tuple[int, int]]:
        if self._modelled is not None:
            return {(number, index) for number, call in enumerate(calls) for index in call.contents}
        keys = [(number, index) for number, call in enumerate(calls) for index in range(len(call.values))]
        own = torch.tensor([calls[number].contents.get(index, 0) for number, index in keys], device=self._device)
        numbers = self._gathered(torch.tensor([len(keys)], device=self._device))
        if not bool((numbers == len(keys)).all()):
            return set()
        is_same = (self._gathered(own) == own).all(dim=0).tolist()
        return {key for key, same in zip(keys, is_same, strict=True) if same and key[1] in calls[key[0]].contents}

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        return gathered(own, self._shards.size, self._shards.name).view(self._shards.size, -1)

    def _times(self) -> tuple[float, float]:
        """Return the fixed seconds of a gather, and the seconds per byte of the whole tensor."""
        small_s, large_s = (self._gather_s(nbytes) for nbytes in (_SMALL_BYTES, _LARGE_BYTES))
        return small_s, max(0.0, large_s - small_s) / (_LARGE_BYTES - _SMALL_BYTES)

    def _gather_s(self, nbytes: int) -> float:
        shards = self._shards
        if self._modelled is not None:
            return self._modelled.gather_s(nbytes, shards.ranks)
        part = torch.zeros(nbytes // shards.size + 1, dtype=torch.uint8, device=self._device)
        gather = partial(gathered, part, shards.size, shards.name)
        return statistics.median(timed_alone(gather, self._device)[1] for _ in range(_NUM_SAMPLES))
