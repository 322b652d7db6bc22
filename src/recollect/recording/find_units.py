"""Find the units of a model: the modules that the planner treats as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from recollect.errors import UnknownNameError, UnsupportedModelError
from recollect.plans.paths import unit_words
from recollect.recording.repeated_layers import NOT_CALLED, find_layers


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that is planned as a whole. `is_layer`: it is a repeated layer, not embedding, norm or head."""

    path: str
    module: nn.Module
    is_layer: bool


def find_units(model: nn.Module, paths: Iterable[str] | None = None) -> list[Unit]:
    """Split a model into units, in the order of its module tree.

    Layers are the outermost modules of a class that occurs at least twice among the children of one `ModuleList`,
    `Sequential` or `ModuleDict`; if there are none, `find_layers` says what is taken instead, at last the model as one layer.
    An only child of such a container is a layer too if it contains a module of a layer's class (multi-token prediction of
    depth 1). Everything else (embedding, final norm, head) is split into units as large as possible.

    Args:
        model: any module.
        paths: module paths of the layers, to choose them by hand.

    Raises:
        UnsupportedModelError: there is nothing to plan in the model, or `paths` is empty.
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
    layers = _named_layers(model, paths) if paths is not None else find_layers(model)
    if not layers:
        raise UnsupportedModelError(
            f"found nothing to plan in {type(model).__name__}: expected a module that computes something with parameters of "
            'its own or of its children. Name the modules to plan, for example units=["encoder", "decoder"]; units=[""] is '
            "the model as a whole."
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
                kind="separate unit", name=path, known=outer, where=f"{unit_words(outer[0])} contains it:"
            )
    return chosen


def _cover(module: nn.Module, path: str, layers: set[str]) -> list[Unit]:
    """Return the layers, and around them the largest modules that contain none."""
    if path in layers:
        return [Unit(path, module, is_layer=True)]
    prefix = f"{path}." if path else ""
    if not any(layer.startswith(prefix) for layer in layers):
        return [Unit(path, module, is_layer=False)] if not isinstance(module, NOT_CALLED) else []
    units: list[Unit] = []
    for name, child in module.named_children():
        units += _cover(child, f"{prefix}{name}", layers)
    return units
