"""Prints plans for people: what each group of units keeps, in 80 columns or as many as there are.

A unit can have hundreds of values, so names are shortened without losing meaning: a module stands for its values if all
are treated alike, a module path is cut to the part that identifies the module within the unit, and several ops of one
module share its name: "self_attn.{mul,cat}". `_scaled_dot_product_*` ops are written as `sdpa`. Of the kept and the
recomputed values, the shorter list is shown; the other is "all else".
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from recollect.plans.action import Action, EngineChoice
from recollect.plans.paths import compress_paths
from recollect.plans.unit_plan import UnitPlan

_WIDEST_LABEL = 32
_MOST_LINES = 4
_MOST_OPS = 6
_Mark = TypeVar("_Mark", bound=Hashable)
_Names = tuple[str, ...]


def unit_table(units: Mapping[str, UnitPlan], *, loss: str = "", columns: int) -> list[str]:
    """Return lines that say what each group of units keeps, and what happens to the loss if `loss` is not empty."""
    paths_of: dict[tuple[str, ...], list[str]] = {}
    for path, unit in units.items():
        paths_of.setdefault(tuple(_unit_items(unit)), []).append(path or "the model")
    rows = [(label_paths(paths), list(items)) for items, paths in paths_of.items()]
    rows.append(("all others" if rows else "all units", ["keep all"]))
    if loss:
        rows.append(("loss", [loss]))
    return _table(rows, columns)


def changed_units(old: Mapping[str, UnitPlan], new: Mapping[str, UnitPlan], *, columns: int) -> list[str]:
    """Return lines that say how units change from one plan to another; those that change alike share a row."""
    paths_of: dict[tuple[str, ...], list[str]] = {}
    for path in dict.fromkeys([*old, *new]):
        if items := _unit_changes(old.get(path), new.get(path)):
            paths_of.setdefault(tuple(items), []).append(path or "the model")
    return _table([(label_paths(paths), list(items)) for items, paths in paths_of.items()], columns)


def label_paths(paths: Sequence[str]) -> str:
    """Abbreviate paths; those that differ only in their last component share the rest.

    Example:
        >>> label_paths(["layers.0", "layers.1", "layers.2", "layers.4"])
        'layers.{0-2,4}'
    """
    members: dict[str, list[str]] = {}
    for path in compress_paths(paths):
        stem, _, last = path.rpartition(".")
        members.setdefault(stem, []).append(last)
    labels = []
    for stem, ends in members.items():
        shown = ends if len(ends) <= 8 else [*ends[:4], "...", ends[-1]]
        joined = shown[0] if len(shown) == 1 else "{" + ",".join(shown) + "}"
        labels.append(f"{stem}.{joined}" if stem else ", ".join(shown))
    return ", ".join(labels)


def _table(rows: list[tuple[str, list[str]]], columns: int) -> list[str]:
    """Lay out each row as a label and its items; a label that is too wide gets its own line."""
    width = max((len(label) for label, _ in rows if len(label) <= _WIDEST_LABEL), default=0)
    lines = []
    for label, items in rows:
        own_line = len(label) > width
        if own_line:
            lines += textwrap.wrap(label, columns, subsequent_indent="    ", break_long_words=False)
        for index, item in enumerate(items):
            start = "" if own_line or index else label
            lines += _wrapped(f"{start:<{width}}  ", item, columns)
    return lines


def _wrapped(start: str, item: str, columns: int) -> list[str]:
    verb, separator, names = item.partition("\t")
    if not separator:
        return [start + item]
    hanging = " " * (len(start) + len(verb))
    lines = textwrap.wrap(
        names, columns, initial_indent=start + verb, subsequent_indent=hanging, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    if len(lines) > _MOST_LINES:
        num_hidden = len(" ".join(lines[_MOST_LINES - 1 :]).split())
        lines = [*lines[: _MOST_LINES - 1], f"{hanging}and {num_hidden} more"]
    return lines


def _unit_items(unit: UnitPlan) -> list[str]:
    if unit.engine is EngineChoice.COMPILE:
        items = _actions(unit) if unit.actions else ["keep what PyTorch chooses"]
        return [f"compiled: {items[0]}", *items[1:]]
    return _actions(unit)


def _actions(unit: UnitPlan) -> list[str]:
    if not unit.recomputes_anything:
        return ["keep all"]
    and_output = " and the output" if unit.output is Action.RECOMPUTE else ""
    if unit.engine is EngineChoice.REGION:
        return [f"run the whole module, its Python too, twice{', recompute the output' if and_output else ''}"]
    summary = summarise_names(unit.actions)
    if set(summary) <= {Action.RECOMPUTE}:
        return ["recompute all" + and_output if summary else "recompute the output"]
    if set(summary) == {Action.KEEP}:
        return ["keep all but the output"]
    others = [
        f"{action:<11}\t{' '.join(summary.pop(action))}"
        for action in (Action.SHARD, Action.OFFLOAD)
        if action in summary
    ]
    keep, recompute = (" ".join(summary.get(action, ())) for action in (Action.KEEP, Action.RECOMPUTE))
    if not (keep and recompute):
        verb, names = ("keep       ", keep) if keep else ("recompute  ", recompute)
        return [*([f"{verb}\tall else"] if names else []), *others]
    # The shorter list says it all.
    keep, recompute = (keep, "all else") if len(keep) <= len(recompute) else ("all else", recompute)
    return [f"keep       \t{keep}", f"recompute  \t{recompute}{and_output}", *others]


def _unit_changes(old: UnitPlan | None, new: UnitPlan | None) -> list[str]:
    old_actions, new_actions = (({} if unit is None else unit.actions) for unit in (old, new))
    marks = {}
    for name in dict.fromkeys([*old_actions, *new_actions]):
        before, after = (actions.get(name, Action.KEEP) for actions in (old_actions, new_actions))
        marks[name] = f"{before} -> {after}" if before != after else ""
    items = [f"{mark}  \t{' '.join(names)}" for mark, names in sorted(summarise_names(marks).items()) if mark]
    if old is not None and new is not None and not items and old.trips != new.trips:
        items.append("offload at other moments")
    for what, default in (("output", Action.KEEP), ("engine", EngineChoice.TAPE)):
        was, becomes = (getattr(unit, what, default) for unit in (old, new))
        if was != becomes:
            items.append(f"{what}: {was} -> {becomes}")
    return items


def summarise_names(marks: Mapping[str, _Mark]) -> dict[_Mark, list[str]]:
    """Return, for each mark, short names of the values that have it, in forward order; "all" if all values do.

    Example:
        >>> summarise_names({"mlp.up.mm": "keep", "mlp.act.silu": "drop", "mlp.mul": "drop", "mlp.mul#1": "drop"})
        {'keep': ['up'], 'drop': ['act', 'mlp.mul']}
    """
    under: dict[_Names, set[_Mark]] = {}
    places = {name: _place(name) for name in marks}
    for name, place in places.items():
        for depth in range(len(place) + 1):
            under.setdefault(place[:depth], set()).add(marks[name])
    modules = {place[:depth] for place in places.values() for depth in range(len(place) - 1)}
    shown: dict[_Mark, dict[_Names, None]] = {}
    for name, place in places.items():
        node = next(place[:depth] for depth in range(len(place) + 1) if len(under[place[:depth]]) == 1)
        shown.setdefault(marks[name], {})[node] = None
    return {mark: _written(list(nodes), modules) for mark, nodes in shown.items()}


def _place(name: str) -> _Names:
    """Split a value name into its module's components, the op, and the suffix for the op's call and output."""
    parts = name.split(".")
    output = parts.pop() if len(parts) > 1 and parts[-1].isdecimal() else ""
    *module, call = parts
    op, mark, count = call.partition("#")
    return (*module, op, f"{mark}{count}{'.' if output else ''}{output}")


def _written(nodes: list[_Names], modules: set[_Names]) -> list[str]:
    """Abbreviate nodes of the name tree, with ops of one module together."""
    ops_of: dict[_Names, list[str]] = {}
    order: dict[_Names, None] = {}
    for node in nodes:
        module, op = _module_and_op(node, modules)
        order[module] = None
        if op:
            ops_of.setdefault(module, []).append(op)
    result = []
    for module in order:
        label = _short_module(module, modules)
        ops = list(dict.fromkeys(ops_of.get(module, [])))
        if module and len(ops) > _MOST_OPS:
            ops = [*ops[:_MOST_OPS], f"+{len(ops) - _MOST_OPS}"]
        if module and ops:
            label = f"{label}.{ops[0]}" if len(ops) == 1 else f"{label}.{{{','.join(ops)}}}"
        result.append(label if module or not ops else " ".join(ops))
    # Put all "experts.*.up_proj" and the like together, so that they become one range.
    alike: dict[str, list[str]] = {}
    for label in result:
        alike.setdefault(re.sub(r"\d+", "*", label), []).append(label)
    return [short for labels in alike.values() for short in compress_paths(labels)]


def _module_and_op(node: _Names, modules: set[_Names]) -> tuple[_Names, str]:
    if node in modules:
        return node, ""
    # A node below the modules is an op, or one call or output of it.
    depth = max(depth for depth in range(len(node)) if node[:depth] in modules)
    op = node[depth].lstrip("_")
    return node[:depth], ("sdpa" if "scaled_dot_product" in op else op) + "".join(node[depth + 1 :])


def _short_module(module: _Names, modules: set[_Names]) -> str:
    """Return the shortest end of the path that identifies this module and does not begin with a number."""
    if not module:
        return "all"
    for length in range(1, len(module)):
        end = module[-length:]
        if not end[0].isdecimal() and sum(other[-length:] == end for other in modules) == 1:
            return ".".join(end)
    return ".".join(module)
