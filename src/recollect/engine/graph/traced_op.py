"""One op of a trace, and the tensors that it passes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch

from recollect.engine.facts import OpFacts
from recollect.plans.value_names import value_stem

Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, bool, bool]

_aten = torch.ops.aten
# Views, in place of ops that give a tensor itself a different shape: nothing else that has its memory sees that.
AS_VIEWS: Final = {
    _aten.as_strided_.default: _aten.as_strided.default,
    _aten.squeeze_.default: _aten.squeeze.default,
    _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims,
    _aten.t_.default: _aten.t.default,
    _aten.transpose_.default: _aten.transpose.int,
    _aten.unsqueeze_.default: _aten.unsqueeze.default,
}


# Each refers to others, and a text of all would never end.
@dataclass(eq=False, repr=False, slots=True)
class TracedTensor:
    """Stands for one tensor, which an op made or wrote to, or that came from outside."""

    index: int
    storage: int
    """Number of the memory that it shares with others."""
    storage_bytes: int
    layout: Layout
    maker: TracedOp | None = None
    """None for inputs of the unit and gradients from outside."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout[0]

    @property
    def is_whole(self) -> bool:
        """Whether it covers its memory, without gaps."""
        shape, dtype = self.layout[0], self.layout[3]
        return torch.Size(shape).numel() * dtype.itemsize == self.storage_bytes

    @property
    def is_contiguous(self) -> bool:
        shape, strides = self.layout[:2]
        expected = 1
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(eq=False, repr=False, slots=True)
class TracedOp:
    """One call of an op. Its arguments have a `TracedTensor` in place of each tensor."""

    func: Any
    facts: OpFacts
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_backward: bool
    has_grad: bool
    """Whether gradients were switched on, which some kernels ask."""
    scope: str = ""
    is_random: bool = False
    count: int = -1
    """Of calls of this op in this module, from 0; -1 for a call whose results have no names."""
    reads: list[TracedTensor] = field(default_factory=list)
    outputs: list[TracedTensor | None] = field(default_factory=list)
    returns_one: bool = True
    written: frozenset[int] = frozenset()
    """Memory that it writes to."""
    keeps: bool = False
    """A copy between devices, or an index that is a mask: kept whatever a plan says."""

    @property
    def name(self) -> str:
        return value_stem(self.scope, self.facts.name, self.count) if self.count >= 0 else ""

    @property
    def updated(self) -> list[TracedTensor]:
        arguments = (self.args[position] for position in self.facts.updated_by(self.args))
        return [argument for argument in arguments if argument is not None]

    @property
    def layouts(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [output.layout[:2] for output in self.outputs if output is not None]


def grad_dtype_of(parameter: torch.Tensor) -> torch.dtype | None:
    """Return the type of a parameter's gradient; versions of PyTorch that cannot change it have no attribute for it."""
    return getattr(parameter, "grad_dtype", parameter.dtype)


def layout_of(tensor: torch.Tensor) -> Layout:
    place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    return *place, tensor.dtype, tensor.is_conj(), tensor.is_neg()
