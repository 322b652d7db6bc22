"""A tape that notes the ops of a unit's call, with which a trace of the unit is compared."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

from recollect._torch_functions import FunctionWatcher, backward_of, is_of_an_op
from recollect._torch_private import tree_leaves
from recollect.engine.facts import OpFacts, facts_of
from recollect.engine.function_mode import FunctionMode
from recollect.engine.function_run import is_plain_value
from recollect.engine.graph.code_names import names_in, state_in
from recollect.engine.policy import Policy
from recollect.engine.tape import Tape
from recollect.engine.together import Agreement
from recollect.tensors import has_strides, tensors_in

# Dynamo traces a Function's backward for gradients that are all there, and contiguous, under forward's autocast. One that asks
# runs on the tape.
_ASKED_OF_CONTEXTS: Final = frozenset({"set_materialize_grads"})
_ASKED_OF_GRADIENTS: Final = frozenset({"is_contiguous", "stride", "is_autocast_enabled", "is_grad_enabled"})


class NotedOp(NamedTuple):
    """An op that has run: the module that it ran in, its name, and the shapes and strides of its results."""

    module: str
    name: str
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, module: str, name: str, layouts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> NotedOp:
        """Note an op. The stride of a dimension of size 1 is meaningless, and taken as 0."""
        layouts = list(layouts)
        strides = [tuple(step if size > 1 else 0 for size, step in zip(*layout, strict=True)) for layout in layouts]
        return cls(module, name, tuple(tuple(shape) for shape, _ in layouts), tuple(strides))

    def __str__(self) -> str:
        layouts = [
            f" {list(shape)} of strides {list(steps)}" for shape, steps in zip(self.shapes, self.strides, strict=True)
        ]
        return f"{self.module}.{self.name}".lstrip(".") + "".join(layouts)


def is_noted(facts: OpFacts) -> bool:
    """Whether an op must be in a unit's trace, too. The numbers that code reads of a tensor are constants of a trace."""
    return not facts.changes_nothing and facts.name != "_local_scalar_dense"


class NotingTape(Tape):
    """A tape that notes ops while it is asked to.

    Attributes:
        noted: the ops so far; None if nothing is noted.
        traced: units that have been traced, by the facts that units sharing a trace must agree on.
        reads_numbers: facts of units whose code reads numbers of the integers that it is given.
    """

    def __init__(self, policy: Policy, *, agreement: Agreement | None = None) -> None:
        super().__init__(policy, agreement=agreement)
        self.noted: list[NotedOp] | None = None
        self.traced: dict[Hashable, list[weakref.ref[Any]]] = {}
        self.reads_numbers: set[Hashable] = set()

    def numbers_read(self, unit: Hashable, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Return the integers that a unit's code may read of what it is given."""
        if unit not in self.reads_numbers:
            return ()
        from recollect._torch_reads import integers_in

        return integers_in(tensors)

    @contextmanager
    def noting(self, *, is_on: bool) -> Iterator[list[NotedOp]]:
        """Note the ops of the block's calls in the list that this yields."""
        found: list[NotedOp] = []
        self.noted = found if is_on else None
        try:
            yield found
        finally:
            self.noted = None

    def new_mode(self, unit_path: str) -> FunctionMode:
        return FunctionMode(self, unit_path) if self.noted is None else _NotingMode(self, unit_path, self.noted)


class _NotingMode(FunctionMode):
    def __init__(self, tape: Tape, unit_path: str, noted: list[NotedOp]) -> None:
        super().__init__(tape, unit_path)
        self._noted = noted
        # All ops are noted, also those of modules that the tape need not watch any more.
        self._may_step_aside = False

    def watch_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FunctionWatcher | None:
        asked = _ASKED_OF_CONTEXTS & (names_in(function.forward) | names_in(function.setup_context))
        asked |= _ASKED_OF_GRADIENTS & names_in(function.backward)
        # Dynamo traces backward with forward, and takes for constant what may change before backward.
        asked |= state_in(backward_of(function))
        given = [] if is_of_an_op(function) else tree_leaves((args, kwargs))
        asked |= {type(one).__name__ for one in given if not (isinstance(one, torch.Tensor) or is_plain_value(one))}
        # DTensors change their layout by Functions that Dynamo leaves as they are.
        if asked and not function.__module__.startswith("torch.distributed.tensor."):
            self._noted.append(NotedOp.of(self.scope, f"{function.__name__}, which uses {min(asked)},", []))
        return super().watch_function(function, args, kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        facts = facts_of(func)
        if output is not NotImplemented and is_noted(facts) and not self.is_foreign():
            layouts = [(result.shape, result.stride()) for result in tensors_in(output) if has_strides(result)]
            self._noted.append(NotedOp.of(self.scope, facts.name, layouts))
        return output
