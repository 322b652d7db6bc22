"""Find the units of a model: the modules that the planner treats as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from recollect.errors import UnknownNameError, UnsupportedModelError

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that is planned as a whole. `is_layer`: it is a repeated layer, not embedding, norm or head."""

    path: str
    module: nn.Module
    is_layer: bool


def find_units(model: nn.Module, paths: Iterable[str] | None = None) -> list[Unit]:
    """Split a model into units, in the order of its module tree.

    Layers are the outermost modules of a class that occurs at least twice among the children of one `ModuleList`,
    `Sequential` or `ModuleDict`; if there are none, among the children of any module. An only child of such a container is a
    layer too if it contains a module of a layer's class (multi-token prediction of depth 1). Modules without children, such
    as `nn.Linear`, are never layers. Everything else (embedding, final norm, head) is split into units as large as possible.

    Args:
        model: any module.
        paths: module paths of the layers, to choose them by hand.

    Raises:
        UnsupportedModelError: the model has no repeated layers and `paths` is not given.
        UnknownNameError: one of `paths` is not a module of the model, or lies inside another one.

    Example:
        >>> from torch import nn
        >>> layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)]
        >>> [
        ...     unit.path
        ...     for unit in find_units(
        ...         nn.ModuleDict({"stem": nn.Linear(4, 4), "layers": nn.ModuleList(layers)}),
        ...         paths=["layers.0", "layers.1"],
        ...     )
        ... ]
        ['stem', 'layers.0', 'layers.1']
    """
    layers = _named_layers(model, paths) if paths is not None else _repeated_layers(model)
    if not layers:
        raise UnsupportedModelError(
            f"found no repeated layers in {type(model).__name__}: expected a ModuleList, Sequential or module with at least "
            "two children of one class that have children themselves. Name the modules to plan, for example "
            'units=["encoder", "decoder"].'
        )
    units = _cover(model, "", layers)
    missing = sorted(layers - {unit.path for unit in units})
    if missing:
        raise UnsupportedModelError(
            f"cannot plan {missing[0]!r} of {type(model).__name__}: it is the same module as one that stands before it. "
            "Name that one; its plan holds for every run of the module."
        )
    return units


def _named_layers(model: nn.Module, paths: Iterable[str]) -> set[str]:
    known = dict(model.named_modules(remove_duplicate=False))
    chosen = set(paths)
    for path in chosen:
        if path not in known:
            raise UnknownNameError(kind="unit", name=path, known=known, where=type(model).__name__)
        outer = [other for other in chosen if path.startswith(f"{other}.") or (other == "" and path)]
        if outer:
            raise UnknownNameError(
                kind="separate unit", name=path, known=outer, where=f"unit {outer[0]!r} contains it:"
            )
    return chosen


def _repeated_layers(model: nn.Module) -> set[str]:
    found = _outermost_repeated(model, "", _CONTAINERS)
    if found:
        return found | _lone_layers(model, found)
    return _outermost_repeated(model, "", (nn.Module,))


def _lone_layers(model: nn.Module, found: set[str]) -> set[str]:
    """Return the paths of only children, outside the layers found, that contain a module of a layer's class."""
    classes = {type(model.get_submodule(path)) for path in found}
    lone: set[str] = set()
    for path, container in model.named_modules():
        children = list(container.named_children())
        if not isinstance(container, _CONTAINERS) or len(children) != 1:
            continue
        name, child = children[0]
        if isinstance(child, _CONTAINERS):
            continue
        only = f"{path}.{name}" if path else name
        is_apart = not any(f"{only}.".startswith(f"{other}.") or other.startswith(f"{only}.") for other in found | lone)
        if is_apart and any(type(module) in classes for module in child.modules()):
            lone.add(only)
    return lone


def _outermost_repeated(parent: nn.Module, prefix: str, parents: tuple[type[nn.Module], ...]) -> set[str]:
    children = [(f"{prefix}{name}", child) for name, child in parent.named_children()]
    repeated: set[str] = set()
    if isinstance(parent, parents):
        count = Counter(type(child) for _, child in children)
        repeated = {
            path
            for path, child in children
            if count[type(child)] > 1 and not isinstance(child, _CONTAINERS) and any(True for _ in child.children())
        }
    for path, child in children:
        if path not in repeated:
            repeated |= _outermost_repeated(child, f"{path}.", parents)
    return repeated


def _cover(module: nn.Module, path: str, layers: set[str]) -> list[Unit]:
    """Return the layers, and around them the largest modules that contain none."""
    if path in layers:
        return [Unit(path, module, is_layer=True)]
    prefix = f"{path}." if path else ""
    if not any(layer.startswith(prefix) for layer in layers):
        return [Unit(path, module, is_layer=False)] if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) else []
    units: list[Unit] = []
    for name, child in module.named_children():
        units += _cover(child, f"{prefix}{name}", layers)
    return units
