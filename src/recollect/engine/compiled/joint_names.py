"""Names nodes of a joint graph, which `torch.compile` traces of a unit's forward and backward, as the tape names values.

An op may have become several nodes: the last of them is its result. Names are counted before equal nodes are merged.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from recollect._torch_compile import (
    autograd_number,
    is_made_by_inductor,
    is_of_backward,
    is_seeds,
    traced_op,
)
from recollect._torch_dynamo import module_stack
from recollect.engine.facts import OpFacts, facts_of
from recollect.plans.value_names import module_of, result_names, value_stem

# What the tape sees of a batch norm; the compiler traces it before a kernel is chosen.
_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")


@dataclass(slots=True)
class _Group:
    """The nodes that one op became."""

    op: Any
    facts: OpFacts
    # The unit that it is in, a number of the unit's call, and the path of its module, which begins with the unit's.
    unit: str
    call: str
    module: str
    nodes: list[fx.Node] = field(default_factory=list)


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_view(node: fx.Node) -> bool:
    """Whether a node has no memory itself: a view, or one of several results of an op."""
    target = node.target
    if target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    return isinstance(target, torch._ops.OpOverload) and facts_of(target).is_view


def base_of(node: fx.Node) -> fx.Node:
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def unit_of(node: fx.Node, units: Iterable[str]) -> tuple[str, str, str] | None:
    """Return the unit that a node was traced in, a number of the unit's call, and the path of its module; None if in none.

    `units`: paths, as seen from the module that was compiled; empty for that module itself.
    """
    stack = [("", ""), *module_stack(node)]
    known = set(units)
    found = next(((call, path) for call, path in reversed(stack) if path in known), None)
    return None if found is None else (found[1], found[0], stack[-1][1])


def value_names(
    joint: fx.GraphModule, known: Sequence[str] = (), units: Iterable[str] = ("",)
) -> dict[fx.Node, tuple[str, ...]]:
    """Return the names of the value that each node computes, which begin with the unit's path; the last one counts.

    A node has several if it may be any of an op's results, or if values are overwritten before anything reads them; none if
    it is outside units, or no result of an op.

    Args:
        joint: the joint graph, before equal nodes were merged.
        known: names of the unit's values in forward order: they tell which ops wrote in place; in the graph none does.
        units: paths of the units, as seen from the compiled module.
    """
    stems = _Stems(known)
    names: dict[fx.Node, tuple[str, ...]] = {}
    for group in _groups(joint, list(units)):
        facts = group.facts
        if facts.is_view or facts.is_lazy or facts.changes_layout_only:
            continue
        if facts.name.startswith("_native_batch_norm_legit"):
            names |= _names_of_batch_norm(group, stems)
        elif facts.name == "native_dropout" and stems.has_in_place(group, "bernoulli"):
            # Outside the compiler, on a CPU: noise is drawn in place, scaled in place, and multiplied.
            drawn = stems.next(group, "empty_like"), stems.next(group, "bernoulli")
            mask, output = stems.next(group, "div"), stems.next(group, "mul")
            names |= _names_in(group, (output, mask))
            noise = next(filter(is_made_by_inductor, group.nodes), group.nodes[0])
            names[noise] = (*drawn, *names.get(noise, ()))
        else:
            names |= _names_in(
                group, result_names(stems.next(group, facts.name), 1 if facts.writes else facts.num_returns)
            )
    return names


def _names_of_batch_norm(group: _Group, stems: _Stems) -> dict[fx.Node, tuple[str, ...]]:
    """Outside the compiler, one of several kernels runs, on a CPU after an empty tensor is made."""
    kernel = next((op for op in _BATCH_NORMS if stems.has(group, op)), _BATCH_NORMS[0])
    empty = [stems.next(group, "empty")] if stems.has(group, "empty") else []
    stem = stems.next(group, kernel)
    names = result_names(stem, group.facts.num_returns)
    found = _names_in(group, names)
    if group.facts.name.endswith("no_training"):
        empty += names[1:]
    if kernel == "cudnn_batch_norm":
        empty.append(f"{stem}.3")  # What its own backward needs besides.
    # The others are the new running statistics.
    return {node: (*empty, *of_node) for node, of_node in found.items() if of_node[0] in names[:3]}


class _Stems:
    """Counts the calls of ops as the tape does; `known`: see `value_names`."""

    def __init__(self, known: Sequence[str]) -> None:
        self._known = _stems_of(known)
        self._in_place = {
            key: stems
            for key, stems in self._known.items()
            if any(stem.partition("#")[0].endswith("_") for stem in stems)
        }
        self._counts: dict[tuple[str, str, str], int] = defaultdict(int)

    def has(self, group: _Group, op: str) -> bool:
        return (group.module, op) in self._known

    def has_in_place(self, group: _Group, op: str) -> bool:
        return (group.module, op) in self._in_place

    def next(self, group: _Group, op: str) -> str:
        key = (group.call, group.module, op)
        count = self._counts[key]
        self._counts[key] += 1
        stems = self._in_place.get((group.module, op), [])
        return stems[count] if count < len(stems) else value_stem(group.module, op, count)


def _stems_of(known: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Return, in order, the stems of each op of a module, be it in place or not."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in known:
        module = module_of(name)
        call = name.removeprefix(f"{module}.") if module else name
        op, mark, count = call.partition("#")
        op = op if mark else op.partition(".")[0]
        stem = value_stem(module, op, int(count.partition(".")[0]) if mark else 0)
        stems = found[module, op.rstrip("_")]
        if stem not in stems:
            stems.append(stem)
    return dict(found)


def _groups(joint: fx.GraphModule, units: list[str]) -> list[_Group]:
    """Return the nodes of the forward's ops, in the order in which the ops ran."""
    found: list[_Group] = []
    latest: dict[tuple[Any, ...], _Group] = {}
    for node in joint.graph.nodes:
        op = traced_op(node)
        if node.op != "call_function" or op is None or is_of_backward(node) or is_seeds(node):
            continue
        place = unit_of(node, units)
        if place is None:
            continue
        number = autograd_number(node)
        unnumbered, key = (op, *place, None), (op, *place, number)
        group = latest.get(key)
        if group is None and number is not None:
            # Nodes that Inductor made for random numbers come first, and have no number.
            group = latest.pop(unnumbered, None)
        if group is None or _begins(node, group, is_latest=group is found[-1]):
            group = _Group(op, facts_of(op), *place)
            found.append(group)
        latest[key] = group
        group.nodes.append(node)
    return found


def _begins(node: fx.Node, group: _Group, *, is_latest: bool) -> bool:
    """Whether a node, traced from a group's op, belongs to a later call of it; without gradients, calls share a number.

    `is_latest`: no other op has run since the group's call.
    """
    if node.target is operator.getitem:
        return False
    if node.target is group.op:
        return True
    is_repeated = node.target is group.nodes[0].target
    return is_repeated and (not is_latest or is_made_by_inductor(node) or not _reads_tensors(group.op))


def _reads_tensors(op: Any) -> bool:
    is_known = isinstance(op, torch._ops.OpOverload)
    return not is_known or any("Tensor" in str(argument.type) for argument in op._schema.arguments)


def _names_in(group: _Group, names: tuple[str, ...]) -> dict[fx.Node, tuple[str, ...]]:
    if group.nodes[0].target is group.op:
        return {node: _whole(node, names) for node in group.nodes}
    results = [node for node in group.nodes if is_tensor(node) and not is_view(node) and not is_made_by_inductor(node)]
    if not results:
        return {}
    last = results.pop()
    found = {last: names[:1]}
    if len(names) == 1:
        return found
    members = set(group.nodes)
    others = [node for node in results if _is_read_outside(node, members)]
    if len(others) == len(names) - 1:
        return found | {node: (name,) for node, name in zip(others, names[1:], strict=True)}
    return found | dict.fromkeys(others, names[1:])


def _is_read_outside(node: fx.Node, members: set[fx.Node]) -> bool:
    return any(user not in members or (is_view(user) and _is_read_outside(user, members)) for user in node.users)


def _whole(node: fx.Node, names: tuple[str, ...]) -> tuple[str, ...]:
    if node.target is not operator.getitem:
        results = node.meta.get("val")
        if not isinstance(results, (tuple, list)):
            return names
        # Of the nine results of cuDNN's attention, four are tensors.
        return tuple(name for name, one in zip(names, results, strict=False) if isinstance(one, torch.Tensor))
    if len(names) == 1:
        return names
    index = node.args[1]
    return names[index : index + 1] if isinstance(index, int) else names
