"""Rules that convert tensors between two checkpoint formats: renamed, split, stacked or transposed, never changed.

Each rule makes one of our tensors and reads only what it needs, so a checkpoint may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recollect.errors import CheckpointError

__all__ = ["Layout", "WeightRule", "rename"]


@dataclass(frozen=True, slots=True)
class Layout:
    """One way a checkpoint may hold one of our tensors.

    Attributes:
        parts: names of the tensors whose rows, concatenated, give ours; with `num_experts`, "{}" stands for the expert.
        num_experts: how many such tensors ours stacks; 0: it is no stack.
        is_transposed: their columns are our rows.
    """

    parts: tuple[str, ...]
    num_experts: int = 0
    is_transposed: bool = False

    def names(self) -> list[list[str]]:
        """Return the names of the parts, expert by expert."""
        if not self.num_experts:
            return [list(self.parts)]
        return [[part.format(expert) for part in self.parts] for expert in range(self.num_experts)]


@dataclass(frozen=True, slots=True)
class WeightRule:
    """How a checkpoint holds one of our tensors.

    Attributes:
        ours: its name here.
        layouts: all can be read, the first is written.
        rows: rows of each part; () if there is only one.
        is_extra: a second copy in the checkpoint: written, but not read.

    Example:
        >>> rule = WeightRule("fc1.weight", (Layout(("gate", "up")),), rows=(2, 1))
        >>> rule.read({"gate": torch.zeros(2, 4), "up": torch.ones(1, 4)}).shape
        torch.Size([3, 4])
        >>> [(name, tuple(tensor.shape)) for name, tensor in rule.write(torch.zeros(3, 4))]
        [('gate', (2, 4)), ('up', (1, 4))]
    """

    ours: str
    layouts: tuple[Layout, ...]
    rows: tuple[int, ...] = ()
    is_extra: bool = False

    def read(self, theirs: Mapping[str, Tensor]) -> Tensor:
        """Return our tensor, or theirs itself if nothing has to change.

        Args:
            theirs: the checkpoint; lookups may read files.

        Raises:
            CheckpointError: the checkpoint has the tensor in none of the known layouts.
        """
        for layout in self.layouts:
            if layout.names()[0][0] in theirs:
                experts = [_joined([_found(theirs, name) for name in names]) for names in layout.names()]
                found = torch.stack(experts) if layout.num_experts else experts[0]
                return found.mT if layout.is_transposed else found
        known = " or ".join(repr(layout.names()[0][0]) for layout in self.layouts)
        raise CheckpointError(
            f"checkpoint: has no {known}, expected it for {self.ours!r}. Is it from another architecture?"
        )

    def write(self, ours: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield their tensors with their names, as views of ours."""
        layout = self.layouts[0]
        if layout.is_transposed:
            ours = ours.mT
        experts = ours.unbind() if layout.num_experts else (ours,)
        for tensor, names in zip(experts, layout.names(), strict=True):
            parts = tensor.split(self.rows) if len(names) > 1 else (tensor,)
            yield from zip(names, parts, strict=True)

    def their_names(self) -> Iterator[str]:
        """Yield the names of their tensors, in every layout."""
        for layout in self.layouts:
            for names in layout.names():
                yield from names


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _found(theirs: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in theirs:
        raise CheckpointError(f"checkpoint: has no {name!r}, expected it beside the related tensors. Is it complete?")
    return theirs[name]


def rename(ours: str, *theirs: str, is_extra: bool = False) -> WeightRule:
    """Return the rule of a tensor that is only renamed; of several names all can be read, the first is written.

    Example:
        >>> rename("output_layer.weight", "lm_head.weight").ours
        'output_layer.weight'
    """
    return WeightRule(ours, tuple(Layout((name,)) for name in theirs), is_extra=is_extra)
