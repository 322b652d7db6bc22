"""Have processes that train one model together record the same steps, and run them under the same plan.

Under ZeRO-3 what runs again gathers its parameters from all processes, so that they have to run the same again; and where they
need not, one that recomputes more than the others makes them wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["ALONE", "Group", "Ranks"]


class Ranks:
    """One process on its own; `Group` is several."""

    is_alone = True

    def least(self, values: Sequence[int]) -> list[int]:
        """Return the least that any process gave, for each of a few small numbers; true if it is so in all of them."""
        return list(values)

    def gather(self, value: Any) -> list[Any]:
        """Return what each process gave, which may be anything that pickles."""
        return [value]


ALONE = Ranks()


class Group(Ranks):
    """The processes of PyTorch's default group, which all have to make one.

    They talk by gloo, on the CPU: numbers that a GPU had to bring would wait for all that it has to do.
    """

    is_alone = False

    def __init__(self) -> None:
        self._group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def least(self, values: Sequence[int]) -> list[int]:
        """See `Ranks`."""
        numbers = torch.tensor([int(value) for value in values], dtype=torch.int32)
        dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=self._group)
        return [int(number) for number in numbers]

    def gather(self, value: Any) -> list[Any]:
        """See `Ranks`."""
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, value, group=self._group)
        return found
