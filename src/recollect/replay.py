"""Lazy values: what holds a dropped tensor's recipe, and the loop that recomputes it.

A training step is a graph of op calls (`Node`) and their results (`Value`). An *available* value holds its tensor and no
node; a *dropped* value holds the node that computes it, and no tensor. Asking for a dropped value runs its node, after the
nodes of dropped arguments, each node once.

Python's reference counts are the only lifetime manager:

1. a node refers to its arguments strongly and to its results weakly, a value to its node strongly;
2. a node releases its arguments once it has run, and a value releases its node once it is available;
3. so an argument that nobody else needs is freed as soon as the node has run, and one that is needed later stays, already
   computed, until its last user is gone.

This module knows nothing of PyTorch: calls and tensors are opaque here. The engine runs it on tensors and the simulator on
byte counts, so the engine does exactly what the simulator predicts.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

Call = Callable[[list[Any], bool], Sequence[Any]]
"""`call(tensors, may_overwrite_first) -> results`: runs one op again on its tensor arguments."""


class Value:
    """One tensor of the step: available (`tensor`), or dropped (`node` makes it again)."""

    __slots__ = ("__weakref__", "is_viewed", "node", "tensor")

    def __init__(self, *, tensor: Any = None, node: Node | None = None) -> None:
        self.tensor = tensor
        self.node = node
        # True once another value shares this one's storage, which must not be overwritten from then on.
        self.is_viewed = False

    def fetch(self) -> Any:
        """Return the tensor of an available value; subclasses check here that it is unchanged."""
        return self.tensor

    def take(self, tensor: Any) -> None:
        """Become available: the node has just computed the tensor."""
        self.tensor = tensor
        self.node = None

    def get(self) -> Any:
        """Return the tensor, computing it first if it was dropped."""
        if self.tensor is None:
            _materialise(self)
        return self.fetch()


class Node:
    """One op call, with all that is needed to run it again.

    `mutates`: the call writes into its first argument and returns it; it gets a private copy of it unless nobody else needs
    the old content.
    """

    __slots__ = ("call", "inputs", "mutates", "outputs")

    def __init__(self, call: Call, inputs: Sequence[Value], *, mutates: bool = False) -> None:
        self.call: Call | None = call
        self.inputs: Sequence[Value] = inputs
        self.outputs: list[weakref.ref[Value] | None] = []
        self.mutates = mutates

    def add_output(self, value: Value | None) -> None:
        """Add the value of the next result; None for a result that nobody needs."""
        self.outputs.append(None if value is None else weakref.ref(value))

    def run(self) -> None:
        """Run the call, hand its results to the values still alive, and release the arguments."""
        call = self.call
        if call is None:
            raise RuntimeError("an op was asked to run twice: this is a bug in recollect, please report it")
        may_overwrite_first = self.mutates and self._owns_first()
        results = call([value.fetch() for value in self.inputs], may_overwrite_first)
        for reference, result in zip(self.outputs, results, strict=False):
            value = None if reference is None else reference()
            if value is not None and value.tensor is None:
                value.take(result)
        self.call = None
        self.inputs = ()

    def _owns_first(self) -> bool:
        return not self.inputs[0].is_viewed and self._count_references_to_first() == _OWN_REFERENCES

    def _count_references_to_first(self) -> int:
        return sys.getrefcount(self.inputs[0])


# The count if only the node refers to the value. It differs between versions of Python.
_OWN_REFERENCES = Node(lambda tensors, may_overwrite_first: (), [Value()])._count_references_to_first()


def _materialise(value: Value) -> None:
    """Run the nodes that `value` needs, arguments first; a loop, since chains (a scan over time) can be thousands long."""
    if value.node is None:
        raise RuntimeError("a dropped value has neither tensor nor node: this is a bug in recollect, please report it")
    pending = [value.node]
    while pending:
        node = pending[-1]
        num_pending = len(pending)
        # A comprehension, because a loop variable would remain as one more reference to an argument, and to an op that
        # writes in place it would look as if somebody else needed it.
        pending += [v.node for v in reversed(node.inputs) if v.tensor is None and v.node is not None]
        if len(pending) > num_pending:
            continue
        pending.pop()
        # If two consumers asked for the same node, it is pending twice and has run when it comes up again.
        if node.call is not None:
            node.run()
