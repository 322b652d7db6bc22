"""Prints plans for people: the values that each group of units keeps, in 80 columns or the terminal's width.

A unit can have hundreds of values, so names are shortened without losing meaning: a module stands for its values if all
are treated alike, a module path is cut to the part that identifies the module within the unit, and several ops of one
module share its name: "self_attn.{mul,cat}". A module of an `nn.Sequential` has only a number for a name, and is shown with its
class: "0 (Conv2d)". `_scaled_dot_product_*` ops are written as `sdpa`; memory that a later op fills (`empty`) is not shown.
Of the kept and the recomputed values, the shorter list is shown; the other is "all else".
"""

import re
import textwrap
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from recollect.plans.action import Action, EngineChoice
from recollect.plans.paths import compress_paths
from recollect.plans.unit_plan import UnitPlan

_WIDEST_LABEL = 32
_MOST_LINES = 5
_MOST_OPS = 6
_MOST_PATHS = 8
_EMPTY = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
# Words that stay on the line of the previous word.
_TIED = re.compile(r" (?=[(%]|[KMGT]?i?B\b)")
_HARD_SPACE = "\xa0"
# Where a name that is longer than a line may be broken; the mark is removed again.
_JOINT = re.compile(r"(?<=[,.:])")
_MAY_BREAK = "\x1f "
_Mark = TypeVar("_Mark", bound=Hashable)
_Names = tuple[str, ...]


def unit_rows(units: Mapping[str, UnitPlan], classes: Mapping[str, str], loss: str) -> list[tuple[str, list[str]]]:
    """Return labels of groups of units, with the values that each keeps as items: words, or a verb, a tab, and value names."""
    paths_of: dict[tuple[str, ...], list[str]] = {}
    for path, unit in units.items():
        paths_of.setdefault(tuple(_unit_items(unit, classes_within(path, classes))), []).append(path or "the model")
    rows = [(label_paths(paths, classes), list(items)) for items, paths in paths_of.items()]
    rows.append(("all others" if rows else "all units", ["keep all"]))
    if loss:
        rows.append(("loss", [loss]))
    return rows


def changed_units(
    old: Mapping[str, UnitPlan], new: Mapping[str, UnitPlan], classes: Mapping[str, str], *, columns: int
) -> list[str]:
    """Return lines that say how units change from one plan to the next; those that change alike share a row."""
    paths_of: dict[tuple[str, ...], list[str]] = {}
    for path in dict.fromkeys([*old, *new]):
        if items := _unit_changes(old.get(path), new.get(path), classes_within(path, classes)):
            paths_of.setdefault(tuple(items), []).append(path or "the model")
    return layout([(label_paths(paths, classes), list(items)) for items, paths in paths_of.items()], columns)


def classes_within(unit: str, classes: Mapping[str, str]) -> dict[str, str]:
    """Return the classes of the modules in a unit, by their paths in it.

    Example:
        >>> classes_within("stem", {"stem.0": "Conv2d", "head.1": "Linear"})
        {'0': 'Conv2d'}
    """
    prefix = f"{unit}." if unit else ""
    return {path.removeprefix(prefix): name for path, name in classes.items() if path.startswith(prefix)}


def label_paths(paths: Sequence[str], classes: Mapping[str, str] = MappingProxyType({})) -> str:
    """Abbreviate paths; if only the last component differs they share the rest, and paths of one class share its name.

    Example:
        >>> label_paths(["layers.0", "layers.1", "layers.2", "layers.4"])
        'layers.{0-2,4}'
        >>> label_paths(["layers.0", "layers.2", "layers.1"])
        'layers.0-2'
        >>> label_paths(["0", "1", "3", "4"], {"1": "Block", "3": "Block"})
        '{0,4}, {1,3} (Block)'
    """
    alike: dict[str, list[str]] = {}
    for path in paths:
        alike.setdefault(classes.get(path, ""), []).append(path)
    labels = [(_short_paths(members, _MOST_PATHS), name) for name, members in alike.items()]
    return ", ".join(f"{label} ({name})" if name else label for shown, name in labels for label in shown)


def _short_paths(paths: Sequence[str], most: int) -> list[str]:
    """Abbreviate paths to one label for each set of siblings, with at most this many labels."""
    siblings: dict[str, list[str]] = {}
    for path in paths:
        siblings.setdefault(path.rpartition(".")[0], []).append(path)
    for own in siblings.values():
        if all(path.rpartition(".")[2].isdecimal() for path in own):
            own.sort(key=lambda path: int(path.rpartition(".")[2]))  # Files have them by their plans.
    members: dict[str, list[str]] = {}
    for path in compress_paths([path for own in siblings.values() for path in own]):
        stem, _, last = path.rpartition(".")
        members.setdefault(stem, []).append(last)
    labels = []
    for stem, ends in members.items():
        shown = ends if len(ends) <= most else [*ends[: most // 2], "...", ends[-1]]
        joined = shown[0] if len(shown) == 1 else "{" + ",".join(shown) + "}"
        is_joined = stem or all(end[:1].isdecimal() for end in ends)
        labels.append(f"{stem}.{joined}" if stem else joined if is_joined else ", ".join(shown))
    return labels


def layout(rows: Sequence[tuple[str, Sequence[str]]], columns: int) -> list[str]:
    """Lay out each row as a label and its items; a label that is too wide gets its own line."""
    width = max((len(label) for label, _ in rows if len(label) <= _WIDEST_LABEL), default=0)
    lines = []
    for label, items in rows:
        own_line = len(label) > width
        if own_line:
            lines += wrap(label, columns, hang="    ")
        for index, item in enumerate(items):
            start = "" if own_line or index else label
            lines += _wrapped(f"{start:<{width}}  ", item, columns)
    return lines


def _wrapped(start: str, item: str, columns: int) -> list[str]:
    verb, separator, names = item.partition("\t")
    if not separator:
        return wrap(item, columns, start=start, hang=" " * len(start))
    hang = " " * (len(start) + len(verb))
    lines = wrap(names, columns, start=start + verb, hang=hang)
    if len(lines) > _MOST_LINES:
        hidden = _TIED.sub(_HARD_SPACE, " ".join(lines[_MOST_LINES - 1 :])).split(" ")
        num_hidden = sum(map(bool, hidden))
        lines = [*lines[: _MOST_LINES - 1], f"{hang}and {num_hidden} more"]
    return lines


def wrap(text: str, columns: int, *, start: str = "", hang: str = "") -> list[str]:
    """Break a line between words, but no number from its unit and no name from its class; a long name between its parts.

    Example:
        >>> wrap("0 (Conv2d) attention.{clone,mul,softmax} 12 MiB", 20, hang="  ")
        ['0 (Conv2d)', '  attention.', '  {clone,mul,', '  softmax} 12 MiB']
    """
    room = columns - max(len(start), len(hang))
    tied = _TIED.sub(_HARD_SPACE, text).split(" ")
    words = (word if len(word) <= room else _JOINT.sub(_MAY_BREAK, word) for word in tied)
    lines = textwrap.wrap(
        " ".join(words), columns, initial_indent=start, subsequent_indent=hang, break_on_hyphens=False
    )
    return [line.replace(_MAY_BREAK, "").replace(_MAY_BREAK[0], "").replace(_HARD_SPACE, " ") for line in lines]


def _unit_items(unit: UnitPlan, classes: Mapping[str, str]) -> list[str]:
    if unit.engine is EngineChoice.COMPILE:
        items = _actions(unit, classes) if unit.actions else ["keep what PyTorch chooses"]
        return ["inside torch.compile", *items]
    if unit.engine is EngineChoice.GRAPH:
        return ["from a trace", *_actions(unit, classes)]
    return _actions(unit, classes)


def _actions(unit: UnitPlan, classes: Mapping[str, str]) -> list[str]:
    if not unit.recomputes_anything:
        return ["keep all"]
    and_output = " and the output" if unit.output is Action.RECOMPUTE else ""
    summary = summarise_names(unit.actions, classes)
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
    # The shorter list is enough.
    keep, recompute = (keep, "all else") if len(keep) <= len(recompute) else ("all else", recompute)
    return [f"keep       \t{keep}", f"recompute  \t{recompute}{and_output}", *others]


def _unit_changes(old: UnitPlan | None, new: UnitPlan | None, classes: Mapping[str, str]) -> list[str]:
    old_actions, new_actions = (({} if unit is None else unit.actions) for unit in (old, new))
    marks = {}
    for name in dict.fromkeys([*old_actions, *new_actions]):
        before, after = (actions.get(name, Action.KEEP) for actions in (old_actions, new_actions))
        marks[name] = f"{before} -> {after}" if before != after else ""
    summary = sorted(summarise_names(marks, classes).items())
    items = [f"{mark}  \t{' '.join(names)}" for mark, names in summary if mark]
    if old is not None and new is not None and not items and old.trips != new.trips:
        items.append("offload at other moments")
    for what, default in (("output", Action.KEEP), ("engine", EngineChoice.TAPE)):
        was, becomes = (getattr(unit, what, default) for unit in (old, new))
        if was != becomes:
            items.append(f"{what}: {was} -> {becomes}")
    return items


def summarise_names(
    marks: Mapping[str, _Mark], classes: Mapping[str, str] = MappingProxyType({})
) -> dict[_Mark, list[str]]:
    """Return, for each mark, short names of the values that have it, in forward order; "all" if all values do.

    Example:
        >>> summarise_names({"mlp.up.mm": "keep", "mlp.act.silu": "drop", "mlp.mul": "drop", "mlp.mul#1": "drop"})
        {'keep': ['up'], 'drop': ['act', 'mlp.mul']}
        >>> summarise_names({"0.addmm": 1, "1.relu": 2, "2.addmm": 1}, {"0": "Linear", "1": "ReLU", "2": "Linear"})
        {1: ['{0,2} (Linear)'], 2: ['1 (ReLU)']}
    """
    places = {name: _place(name) for name in marks}
    filled = {name: place for name, place in places.items() if not is_empty(name)}
    if {marks[name] for name in filled} == set(marks.values()):
        places = filled
    under: dict[_Names, set[_Mark]] = {}
    for name, place in places.items():
        for depth in range(len(place) + 1):
            under.setdefault(place[:depth], set()).add(marks[name])
    modules = {place[:depth] for place in places.values() for depth in range(len(place) - 1)}
    shown: dict[_Mark, dict[_Names, None]] = {}
    for name, place in places.items():
        node = next(place[:depth] for depth in range(len(place) + 1) if len(under[place[:depth]]) == 1)
        shown.setdefault(marks[name], {})[node] = None
    return {mark: _written(list(nodes), modules, classes) for mark, nodes in shown.items()}


def is_empty(name: str) -> bool:
    """Return whether a value is memory that nothing has written to yet, which is not shown.

    Example:
        >>> is_empty("dropout.empty_like"), is_empty("dropout.bernoulli_")
        (True, False)
    """
    return _place(name)[-2] in _EMPTY


def _place(name: str) -> _Names:
    """Split a value name into its module's components, the op, and the suffix for the op's call and output."""
    parts = name.split(".")
    output = parts.pop() if len(parts) > 1 and parts[-1].isdecimal() else ""
    *module, call = parts
    op, mark, count = call.partition("#")
    return (*module, op, f"{mark}{count}{'.' if output else ''}{output}")


def _written(nodes: list[_Names], modules: set[_Names], classes: Mapping[str, str]) -> list[str]:
    """Abbreviate nodes of the name tree, with ops of one module together, and modules of one class."""
    ops_of: dict[_Names, list[str]] = {}
    order: dict[_Names, None] = {}
    for node in nodes:
        module, op = _module_and_op(node, modules)
        order[module] = None
        if op:
            ops_of.setdefault(module, []).append(op)
    # Put all "experts.*.up_proj" and the like together: they become one range.
    alike: dict[tuple[str, str, str], list[str]] = {}
    for module in order:
        ops = list(dict.fromkeys(ops_of.get(module, [])))
        label, kind = _short_module(module, modules), classes.get(".".join(module), "")
        if not module and ops:
            label, ops = " ".join(ops), []
        elif len(ops) > _MOST_OPS:
            ops = [*ops[:_MOST_OPS], f"+{len(ops) - _MOST_OPS}"]
        inside = "" if not ops else f".{ops[0]}" if len(ops) == 1 else f".{{{','.join(ops)}}}"
        if not kind:
            label, inside = label + inside, ""
        alike.setdefault((re.sub(r"\d+", "*", label), inside, kind), []).append(label)
    result = []
    for (_, inside, kind), labels in alike.items():
        if kind:
            result += [f"{label}{inside} ({kind})" for label in _short_paths(labels, len(labels))]
        else:
            result += compress_paths(labels)
    return result


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
