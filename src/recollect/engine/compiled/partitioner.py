"""Has `torch.compile` save the values that a plan keeps and recompute the rest: tags the joint graph, and lets PyTorch cut it.

NOTE [ Rules of tagging ]
1. Equal nodes are merged first, as PyTorch does, or the one that stays might have the other's tag.
2. Nodes that forward needs and that compute tensors are tagged; not final writes to inputs, nor ops with effects. Values that
   backward computes without any gradient are computed there, not in forward in place of their inputs.
3. All results of one op share a decision: a kept and a dropped one would leave no cut.
4. Seeds are kept: eight bytes, from which all random numbers are drawn again, the same.
5. PyTorch may rerun ops under its own state of random numbers, which it then keeps.
6. Views are recreated. Collectives, choices such as `topk`, and ops unknown to PyTorch are kept.
7. Everything in a unit is tagged, and no heuristic decides there; the rest is left to PyTorch.
8. No tag can make a gradient wrong: both halves come from one graph.
Outputs of units are always kept, as are values that a plan does not name.
"""

from __future__ import annotations

import hashlib
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from recollect import _torch_compile
from recollect._torch_compile import (
    CustomPartitionerFn,
    captures_graphs,
    clear_policy,
    get_hash_for_files,
    has_policy,
    is_effect,
    is_made_by_inductor,
    is_seeds,
    merge_equal_nodes,
    partitioned,
    set_policy,
    traced_op,
)
from recollect.engine import facts as facts_of_ops
from recollect.engine.compiled import joint_names
from recollect.engine.compiled.joint_names import base_of, is_tensor, is_view, unit_of, value_names
from recollect.engine.facts import facts_of, results_of, varies_on_cuda
from recollect.errors import ConfigError, PlanMismatchWarning
from recollect.plans.action import Action
from recollect.warning import warn_user

# Part of the cache key: cached code was cut by these rules.
_RULES = get_hash_for_files((_torch_compile.__file__, facts_of_ops.__file__, joint_names.__file__, __file__))

# Warnings given, by the content of a partitioner: the objects are copied.
_told: set[str] = set()


@dataclass(frozen=True, slots=True)
class Partition:
    """The values that a cut saves between forward and backward.

    Attributes:
        kept: names of the saved values, in forward order, including outputs of the unit.
        missing: names in the plan that the graph lacks.
        unnamed: saved nodes without a name: seeds, states of random numbers, replacements of ops.
        inputs: positions of the saved inputs of the graph, including parameters.
        outputs: names of saved values that the unit returns.
    """

    kept: tuple[str, ...]
    missing: tuple[str, ...]
    unnamed: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[str, ...]


class PlanPartitioner(CustomPartitionerFn):
    """Cuts joint graphs as a plan says. Equal ones share compiled code, in this process and on disk.

    Args:
        actions: what happens to each value, by name, in forward order; None for PyTorch's own choice.
        on_partition: called with each cut; this bypasses caches.
        units: paths of the units in the compiled module, with which names begin; empty: that module is the unit.
    """

    def __init__(
        self,
        actions: Mapping[str, Action | str] | None,
        *,
        on_partition: Callable[[Partition], None] | None = None,
        units: Sequence[str] = ("",),
    ) -> None:
        self._words = None if actions is None else tuple((name, str(Action(word))) for name, word in actions.items())
        self._on_partition = on_partition
        self._units = tuple(units)

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> tuple[Any, Any]:
        """Cut a joint graph; as PyTorch does where this one cannot."""
        if captures_graphs():
            raise ConfigError(
                settings={"compile_options": "a plan", "triton.cudagraphs": True},
                reason="the pool of the CUDA graphs would hold what the plan keeps",
                advice="Leave triton.cudagraphs out of the options, or the plan.",
            )
        num_outputs: int = kwargs["num_fwd_outputs"]
        failure, names = None, {}
        try:
            names = self._tagged(gm, num_outputs)
            halves = partitioned(gm, joint_inputs, **kwargs)
        except Exception as error:  # noqa: BLE001, whatever it is, the step can run
            failure = error
            for node in gm.graph.nodes:
                clear_policy(node)
            halves = partitioned(gm, joint_inputs, **kwargs)
        found = {name for of_node in names.values() for name in of_node}
        words = dict(self._words or ())
        missing = [name for name in words if name not in found]
        if failure is not None:
            self._warn_of_failure(failure)
        elif found - words.keys() or any(words[name] == Action.KEEP for name in missing):
            # Values to be dropped that are not computed there take no memory, unless something else is in their place.
            self._warn_of_missing(missing)
        if self._on_partition is not None:
            self._on_partition(_partition(gm, halves[0], names, missing, num_outputs))
        return halves

    def _tagged(self, joint: fx.GraphModule, num_outputs: int) -> dict[str, tuple[str, ...]]:
        """Tag a joint graph; return the names of the values that its nodes compute, by the nodes' names."""
        words = dict(self._words or ())
        names = {node.name: found for node, found in value_names(joint, list(words), self._units).items()}
        if self._words is not None and any(map(has_policy, joint.graph.nodes)):
            raise ValueError("torch.utils.checkpoint is inside it, and would decide as well: remove it")
        merge_equal_nodes(joint)
        if self._words is not None:
            named = {node: names[node.name] for node in joint.graph.nodes if node.name in names}
            _Tags(joint, named, words, self._units, num_outputs).put()
        return names

    def _warn_of_missing(self, names: Sequence[str]) -> None:
        if names and self._is_first("missing"):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            warn_user(
                f"the plan does not fit the compiled code: it names {names[0]!r}{more}, which is not computed there. The step "
                "is exact, but may need more memory than predicted. Record the model again with this version of PyTorch, and "
                "make a new plan.",
                PlanMismatchWarning,
            )

    def _warn_of_failure(self, error: Exception) -> None:
        if self._is_first("failed"):
            warn_user(
                f"cannot carry out the plan inside torch.compile: {type(error).__name__}: {error}. What is kept is PyTorch's "
                "own choice, on every rank alike: the step is exact, but its peak is not as predicted.",
                PlanMismatchWarning,
            )

    def _is_first(self, word: str) -> bool:
        mark = f"{word} {self._digest()}"
        is_first = mark not in _told
        _told.add(mark)
        return is_first

    def _digest(self) -> str:
        return hashlib.sha256(repr((self._words, self._units, _RULES)).encode()).hexdigest()

    def uuid(self) -> str | None:
        """Return a text that is equal for equal plans, by which caches on disk tell them apart; None for no cache."""
        return None if self._on_partition is not None else self._digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanPartitioner) and self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())

    def _content(self) -> tuple[Any, ...]:
        return self._words, self._units, self._on_partition

    def __deepcopy__(self, _: dict[int, Any]) -> PlanPartitioner:
        return self  # Settings are copied, and a copy of the callback would have no effect.

    def __reduce__(self) -> tuple[Any, ...]:
        if self._on_partition is not None:
            # Pickled settings are part of the key under which compiled code is looked up, which would find it.
            raise pickle.PicklingError("a partitioner with a callback")
        return _unpickled, (self._words, self._units)


def _unpickled(words: tuple[tuple[str, str], ...] | None, units: tuple[str, ...]) -> PlanPartitioner:
    return PlanPartitioner(None if words is None else dict(words), units=units)


def _partition(
    joint: fx.GraphModule,
    forward: fx.GraphModule,
    names: Mapping[str, tuple[str, ...]],
    missing: Sequence[str],
    num_outputs: int,
) -> Partition:
    """Report a cut, given the joint graph, its forward half, and the names of the nodes' values, by the nodes' names."""
    # The halves are made of copies of nodes.
    nodes = {node.name: node for node in joint.graph.nodes}
    returned = [node for node in _results(forward) if node is not None]
    outputs = {base_of(nodes[node.name]).name for node in returned[:num_outputs] if node.name in nodes}
    places = {node.name: place for place, node in enumerate(joint.graph.find_nodes(op="placeholder"))}
    saved = {base_of(nodes.get(node.name, node)).name for node in returned[num_outputs:]}
    kept = {found[-1]: node in outputs for node, found in names.items() if node in saved}
    return Partition(
        kept=tuple(kept),
        missing=tuple(missing),
        unnamed=tuple(sorted(saved - names.keys() - places.keys())),
        inputs=tuple(place for node, place in places.items() if node in saved),
        outputs=tuple(name for name, is_output in kept.items() if is_output),
    )


def _results(graph: fx.GraphModule) -> list[fx.Node | None]:
    (output,) = graph.graph.find_nodes(op="output")
    found = results_of(output.args[0])
    return [node if isinstance(node, fx.Node) else None for node in found]


@dataclass(eq=False)
class _Tags:
    joint: fx.GraphModule
    names: Mapping[fx.Node, tuple[str, ...]]
    words: Mapping[str, str]
    units: Sequence[str]
    num_outputs: int

    def __post_init__(self) -> None:
        self.outputs = [node for node in _results(self.joint)[: self.num_outputs] if node is not None]
        self.needed = _needed_by(self.joint, self.outputs)

    def put(self) -> None:
        held = self._held()
        decisions = {node: node in held or self._is_kept(node) for node in self.needed if self._may_tag(node)}
        for node in list(decisions):
            if not is_tensor(node) and not is_view(node):
                # Forward may need only one of the results.
                together = [node, *(user for user in node.users if user.target is operator.getitem)]
                is_kept = decisions[node] or any(user in held or self._is_kept(user) for user in together[1:])
                decisions |= dict.fromkeys(together, is_kept)
        for node in self._between(decisions):
            decisions[node] = False
        for node, keep in decisions.items():
            set_policy(node, keep=keep)

    def _held(self) -> set[fx.Node]:
        """Return the outputs of units, without the views on top of them."""
        calls = {node: (unit_of(node, self.units) or (None, None))[:2] for node in self.needed}
        passed_on = {node for node, call in calls.items() if any(calls.get(user, call) != call for user in node.users)}
        return {base_of(node) for node in passed_on.union(self.outputs) if calls[node][0] is not None}

    def _between(self, tagged: Mapping[fx.Node, bool]) -> list[fx.Node]:
        """Return the nodes that backward computes only from tagged values, and that forward could compute and save instead."""
        found: dict[fx.Node, None] = {}
        for node in self.joint.graph.nodes:
            if node.op == "call_function" and node not in self.needed and node not in tagged and is_tensor(node):
                sources = node.all_input_nodes
                if sources and all(source in tagged or source in found for source in sources):
                    found[node] = None
        return list(found)

    def _may_tag(self, node: fx.Node) -> bool:
        target = node.target
        if node.op != "call_function" or is_effect(node):
            return False
        if target is operator.getitem and any(map(is_effect, node.all_input_nodes)):
            return False
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            return False
        value = node.meta.get("val")
        return isinstance(value, (torch.Tensor, tuple, list)) and unit_of(node, self.units) is not None

    def _is_kept(self, node: fx.Node) -> bool:
        if is_view(node):
            return False
        if is_seeds(node):
            return True
        if is_made_by_inductor(node):
            return False
        op = traced_op(node)
        value = node.meta["val"]
        if op is None or any(_must_keep(one, value) for one in (op, node.target) if one is not operator.getitem):
            return bool(node.all_input_nodes)  # A node without inputs, such as a mask, is quickly made.
        names = self.names.get(node)
        if names is None or not is_tensor(node):
            return False  # A step on an op's way to its result; or its results, which decide by themselves.
        return self.words.get(names[-1]) != Action.RECOMPUTE.value


def _must_keep(op: Any, value: Any) -> bool:
    facts = facts_of(op)
    is_drawn = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
    return facts.keeps or facts.draws_elsewhere or varies_on_cuda(facts, value) or (facts.is_random and not is_drawn)


def _needed_by(joint: fx.GraphModule, outputs: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """Return the nodes that these are computed from, in the order of the graph."""
    found = set(outputs)
    pending = list(outputs)
    while pending:
        new = [node for node in pending.pop().all_input_nodes if node not in found]
        found.update(new)
        pending += new
    return {node: None for node in joint.graph.nodes if node in found}
