"""Values that can be computed again, and the loop that does it.

A training step is a graph of op calls (`Node`) and what they produced (`Value`). A value that is *available* holds its
tensor and no node; a value that was *dropped* holds the node that makes it, and nothing else. Asking for a dropped value
runs its node, after the nodes of the arguments that are dropped themselves, each of them once.

Python's reference counts are the only lifetime manager:

1. a node refers to its arguments strongly and to its results weakly, a value to its node strongly;
2. a node that ran lets go of its arguments, a value that is available lets go of its node;
3. so an argument that nobody else needs disappears with its tensor as soon as the node has run, and one that is needed
   later stays, already computed, until its last user is gone.

This module knows nothing of PyTorch: what a node calls and what it passes around is opaque here. The engine runs it on
tensors, the planner's simulator on byte counts, so that what the simulator predicts is what the engine does.
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
        # True once another value shares this one's storage: it must not be overwritten in place any more.
        self.is_viewed = False

    def fetch(self) -> Any:
        """Return the tensor of an available value; subclasses check here that it is still what it was."""
        return self.tensor

    def take(self, tensor: Any) -> None:
        """Become available: this value's node has just made the tensor."""
        self.tensor = tensor
        self.node = None

    def get(self) -> Any:
        """Return the tensor, computing it first if it was dropped."""
        if self.tensor is None:
            _materialise(self)
        return self.fetch()


class Node:
    """One op call, with what is needed to run it again.

    `mutates`: the call writes into its first argument and returns it; it then gets a private copy, unless nobody else
    will ever need the old content.
    """

    __slots__ = ("call", "inputs", "mutates", "outputs")

    def __init__(self, call: Call, inputs: Sequence[Value], *, mutates: bool = False) -> None:
        self.call: Call | None = call
        self.inputs: Sequence[Value] = inputs
        self.outputs: list[weakref.ref[Value] | None] = []
        self.mutates = mutates

    def add_output(self, value: Value | None) -> None:
        """Name the value of the next result; None for a result that this node need not deliver."""
        self.outputs.append(None if value is None else weakref.ref(value))

    def run(self) -> None:
        """Run the call; hand its results to the values that are still alive, and let go of the arguments."""
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


# What the count is when nobody but the node refers to the value. It differs between versions of Python.
_OWN_REFERENCES = Node(lambda tensors, may_overwrite_first: (), [Value()])._count_references_to_first()


def _materialise(value: Value) -> None:
    """Run what `value` needs, arguments first; a loop, because chains (a scan over time steps) can be thousands long."""
    if value.node is None:
        raise RuntimeError("a dropped value has neither tensor nor node: this is a bug in recollect, please report it")
    pending = [value.node]
    while pending:
        node = pending[-1]
        num_pending = len(pending)
        # A comprehension, because a loop variable would stay behind as one more reference to an argument, and an op that
        # writes in place would think that somebody else needs it.
        pending += [v.node for v in reversed(node.inputs) if v.tensor is None and v.node is not None]
        if len(pending) > num_pending:
            continue
        pending.pop()
        # Two consumers can have asked for the same node: it is then pending twice and has run when it comes up again.
        if node.call is not None:
            node.run()
