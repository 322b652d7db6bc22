"""Lazy values, which hold a dropped tensor's recipe, and the loop that recomputes them.

A training step is a graph of op calls (`Node`) and their results (`Value`). An *available* value holds its tensor and no
node; a *dropped* value holds the node that computes it, and no tensor. Asking for a dropped value runs its node, after the
nodes of dropped arguments, each node once.

Python's reference counts are the only lifetime manager:

1. a node refers to its arguments strongly and to its results weakly, a value to its node strongly;
2. a node releases its arguments once it has run, and a value releases its node once it is available;
3. so an argument that nothing else needs is freed as soon as the node has run, and one that is needed later stays, already
   computed, until its last user is gone.

This module knows nothing of PyTorch: calls and tensors are opaque here. The engine runs it on tensors and the simulator on
byte counts, so the engine does exactly what the simulator predicts.

A backward that keeps its graph (`retain_graph`, or the half of a backward that finds the gradients of a pipeline stage's
input) is followed by one that asks again. It computes on copies of the recipes (`KeptPass`), so none of its results live on
into the next one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

Call = Callable[[list[Any], bool], Sequence[Any]]
"""`call(tensors, may_overwrite_first) -> results`: runs one op again on its tensor arguments."""


class Value:
    """One tensor of the step: available (`tensor`), or dropped (`node` recomputes it)."""

    __slots__ = ("__weakref__", "is_viewed", "node", "tensor")

    def __init__(self, *, tensor: Any = None, node: Node | None = None) -> None:
        self.tensor = tensor
        self.node = node
        # True once a second value shares this one's storage, which must not be overwritten from then on.
        self.is_viewed = False

    def fetch(self) -> Any:
        """Return the tensor of an available value; subclasses check here that it is unchanged."""
        return self.tensor

    def take(self, tensor: Any) -> None:
        """Become available: the node has just computed the tensor."""
        self.tensor = tensor
        self.node = None

    def copy(self, node: Node) -> Value:
        """Return a new value for the same tensor, which `node`, a copy of this one's, makes."""
        value = type(self)(node=node)
        value.is_viewed = self.is_viewed
        return value

    def is_saved(self) -> None:
        if self.node is not None and self.node.recipes is not None:
            self.node.recipes.saved.append(weakref.ref(self))

    def get(self) -> Any:
        """Return the tensor, computing it first if it was dropped."""
        if self.tensor is None:
            _materialise(self)
        return self.fetch()


class Node:
    """One op call, with everything needed to run it again.

    `mutates`: the call writes into its first argument and returns it; it gets a private copy of it unless nobody else needs
    the old content.
    `recipes`: those of the unit's call that the op belongs to.
    """

    __slots__ = ("call", "inputs", "mutates", "outputs", "recipes")

    def __init__(
        self, call: Call, inputs: Sequence[Value], *, mutates: bool = False, recipes: Recipes | None = None
    ) -> None:
        self.call: Call | None = call
        self.inputs: Sequence[Value] = inputs
        self.outputs: list[weakref.ref[Value] | None] = []
        self.mutates = mutates
        self.recipes = recipes

    def add_output(self, value: Value | None) -> None:
        """Add the value of the next result; None for an unused result."""
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


# The count if only the node refers to the value. This differs between versions of Python.
_OWN_REFERENCES = Node(lambda tensors, may_overwrite_first: (), [Value()])._count_references_to_first()


class Recipes:
    """Stands for one call of a unit.

    `saved`: the values made in it that backward will ask for, once for each time that it does.
    """

    __slots__ = ("saved",)

    def __init__(self) -> None:
        self.saved: list[weakref.ref[Value]] = []


class KeptPass:
    """Computes the values for one backward that keeps its graph, on copies of the recipes.

    When it first asks for a value of a call, all recipes of that call are copied, and those of the calls whose dropped values
    they read. A copy is held until backward has asked for it as often as it was saved, at the latest until the pass ends, and
    for as long as the copies need it; so shared values are computed once, as in a backward that uses its graph up.
    """

    def __init__(self) -> None:
        # Of each value: its copy, and how often backward has still to ask for it.
        self._copies: dict[Value, tuple[Value, int]] = {}
        self._copies_of: dict[Recipes, list[Value]] = {}

    def get(self, value: Value) -> Any:
        if value not in self._copies:
            self._copy_calls(value)
        copy, asks_left = self._copies.pop(value)
        if asks_left > 1:
            self._copies[value] = copy, asks_left - 1
        return copy.get()

    def end(self, recipes: Recipes) -> None:
        for value in self._copies_of.pop(recipes, ()):
            self._copies.pop(value, None)

    def end_all(self) -> None:
        self._copies.clear()
        self._copies_of.clear()

    def _copy_calls(self, value: Value) -> None:
        copies = _Copies()
        node = value.node
        pending = [] if node is None or node.recipes is None else [node.recipes]
        while pending:
            recipes = pending.pop()
            if recipes in self._copies_of:
                continue
            held = self._copies_of[recipes] = []
            for saved in filter(None, (reference() for reference in recipes.saved)):
                if saved.tensor is None:
                    copy, asks_left = self._copies.get(saved, (None, 0))
                    self._copies[saved] = copy or copies.of(saved), asks_left + 1
                    held.append(saved)
            pending += copies.reached()
        if value not in self._copies:
            # It has been requested more often than it was saved.
            self._copies[value] = copies.of(value), 1
            copies.reached()


class _Copies:
    """Copies of values and nodes, made together so that they refer to each other as the originals do."""

    def __init__(self) -> None:
        self._values: dict[Value, Value] = {}
        self._nodes: dict[Node, Node] = {}
        # Nodes whose copies have no arguments yet.
        self._pending: list[Node] = []

    def of(self, value: Value) -> Value:
        """Return the copy of a value; an available one is its own copy."""
        if value.node is None or value.tensor is not None:
            return value
        copy = self._values.get(value)
        if copy is None:
            node = self._node(value.node)
            copy = self._values[value] = value.copy(node)
            for position, reference in enumerate(value.node.outputs):
                if reference is not None and reference() is value:
                    node.outputs[position] = weakref.ref(copy)
        return copy

    def _node(self, node: Node) -> Node:
        copy = self._nodes.get(node)
        if copy is None:
            assert node.call is not None
            copy = self._nodes[node] = Node(node.call, (), mutates=node.mutates)
            copy.outputs = [None] * len(node.outputs)
            self._pending.append(node)
        return copy

    def reached(self) -> list[Recipes]:
        """Copy all that the copies need; return the calls that this belongs to."""
        found: dict[Recipes, None] = {}
        while self._pending:
            node = self._pending.pop()
            self._nodes[node].inputs = [self.of(value) for value in node.inputs]
            if node.recipes is not None:
                found[node.recipes] = None
        return list(found)


def _materialise(value: Value) -> None:
    """Run the nodes that `value` needs, arguments first; a loop, since chains (a scan over time) can be thousands long."""
    if value.node is None:
        raise RuntimeError("a dropped value has neither tensor nor node: this is a bug in recollect, please report it")
    pending = [value.node]
    while pending:
        node = pending[-1]
        num_pending = len(pending)
        # A comprehension, because a loop variable would remain as one more reference to an argument, and to an op that
        # writes in place it would look as if something else needed it.
        pending += [v.node for v in reversed(node.inputs) if v.tensor is None and v.node is not None]
        if len(pending) > num_pending:
            continue
        pending.pop()
        # If two consumers asked for the same node, it is pending twice and has run when it comes up again.
        if node.call is not None:
            node.run()
