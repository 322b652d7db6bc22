"""Find the units of a model: the modules that the planner treats as one."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from recollect._torch_private import without_wrapper
from recollect._torch_replicate import own_class
from recollect.arguments import listed
from recollect.engine.placed_forward import unit_modules
from recollect.errors import UnknownNameError, UnsupportedModelError
from recollect.plans.paths import compress_classes, unit_words

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# A child with a smaller share of its parent's parameters is not the main part.
_LEAST_SHARE = 0.1
# A child with this share of them is the main part.
_WHOLE_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that is planned as a whole. `is_layer`: it is a repeated layer, not embedding, norm or head."""

    path: str
    module: nn.Module
    is_layer: bool


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward: lists of modules, and a plain `nn.Module` as a namespace, only hold others."""
    only_holds = type(module) is nn.Module or isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return not only_holds or "forward" in vars(module) or type(module).forward is not nn.Module.forward


def find_units(model: nn.Module, paths: Iterable[str] | None = None) -> list[Unit]:
    """Split a model into units, in the order of its module tree.

    Layers are the outermost modules of a class that occurs at least twice among the children of one `ModuleList`,
    `Sequential` or `ModuleDict`; if there are none, `_find_layers` says what is taken instead, at last the model as one layer.
    An only child of such a container is a layer too if it contains a module of a layer's class (multi-token prediction of
    depth 1). Everything else (embedding, final norm, head) is split into units as large as possible.
    """
    layers = _named_layers(model, paths) if paths is not None else _outermost(model, _find_layers(model))
    if not layers:
        raise UnsupportedModelError(
            f"found nothing to plan in {type(model).__name__}: expected a module that computes something with parameters of "
            'its own or of its children. Name the modules to plan, for example units=["encoder", "decoder"]; units=[""] is '
            "the model as a whole."
        )
    units = _cover(model, "", layers, {id(model.get_submodule(path)) for path in layers})
    # A model may hold modules twice, the second time in a helper.
    firsts = {id(unit.module): unit for unit in reversed(units)}
    units = [unit for unit in units if firsts[id(unit.module)] is unit]
    missing = [] if paths is None else sorted(layers - {unit.path for unit in units})
    if missing:
        raise UnsupportedModelError(
            f"cannot plan {missing[0]!r} of {type(model).__name__}: it is the same module as one that stands before it. "
            "Name that one; its plan holds for every run of the module."
        )
    # An activation that all layers share, say: what it computes in a layer is the layer's.
    inside = _inside(unit.module for unit in units)
    return [unit for unit in units if unit.is_layer or id(unit.module) not in inside]


def class_names(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the classes of the modules in each `nn.Sequential` that have a number for a name; see `Plan.class_names`.

    Example:
        >>> class_names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
        (('0', 'Linear'), ('2', 'Linear'), ('1', 'ReLU'))
    """
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Sequential):
            children = ((name, child) for name, child in module.named_children() if name.isdecimal())
            found.update({f"{path}.{name}".lstrip("."): type(child).__name__ for name, child in children})
    return compress_classes(found)


def _named_layers(model: nn.Module, paths: Iterable[str]) -> set[str]:
    known = unit_modules(model, set(listed(paths) or []))
    inside = {path: _inside([module]) for path, module in known.items()}
    for path in known:
        outer = [other for other, parts in inside.items() if id(known[path]) in parts]
        if outer:
            raise UnknownNameError(
                kind="separate unit", name=path, known=outer, where=f"{unit_words(outer[0])} contains it:"
            )
    return set(known)


def _outermost(model: nn.Module, layers: set[str]) -> set[str]:
    """Return the paths without those of modules that others contain: a model may list parts of its layers, too."""
    modules = unit_modules(model, layers)
    inside = _inside(modules.values())
    return {path for path, module in modules.items() if id(module) not in inside}


def _inside(modules: Iterable[nn.Module]) -> set[int]:
    return {id(part) for module in modules for part in module.modules() if part is not module}


def _cover(module: nn.Module, path: str, layers: set[str], layer_ids: set[int]) -> list[Unit]:
    """Return the layers, and around them the largest modules that contain none, under whatever name."""
    if path in layers:
        return [Unit(path, module, is_layer=True)]
    if id(module) in layer_ids:
        return []
    if layer_ids.isdisjoint(map(id, module.modules())):
        if is_called(module):
            return [Unit(path, module, is_layer=False)]
        if isinstance(module, _CONTAINERS):
            return []
    units: list[Unit] = []
    for name, child in _children(module):
        units += _cover(child, f"{path}.{name}".lstrip("."), layers, layer_ids)
    return units


def _find_layers(model: nn.Module) -> set[str]:
    """Return the paths of a model's layers, not nested; "" for the model itself.

    The first of these that finds any:

    1. modules with children, of a class that occurs twice among the children of one container;
    2. the same, where the containers' children are containers: each `Sequential` is a layer, and the modules of all
       inner lists count as children of the outer one (`[[attention, mlp], ...]`);
    3. modules with children, of a class that occurs twice among the children of any module;
    4. the same with each `Sequential` as a layer;
    5. modules without children but no single ops (`nn.LSTM`, blocks of parameters), of a class that occurs twice in one
       container, if most parameters are theirs;
    6. the main module of the model: the innermost one with almost all its parameters, inside modules that hold little
       else. It may run several times (ALBERT, recurrent depth). If several children of the model share them, all of
       these; if most are in single ops, the model.
    """
    found = _outermost_repeated(model, "", _CONTAINERS)
    if found:
        return found | _lone_layers(model, found)
    return (
        _outermost_repeated(model, "", _CONTAINERS, containers_too=True)
        or _outermost_repeated(model, "", (nn.Module,))
        or _outermost_repeated(model, "", (nn.Module,), containers_too=True)
        or _repeated_leaves(model)
        or _heaviest(model)
    )


def _lone_layers(model: nn.Module, found: set[str]) -> set[str]:
    """Return the paths of only children, outside the layers found, that contain a module of a layer's class."""
    classes = {own_class(model.get_submodule(path)) for path in found}
    lone: set[str] = set()
    for path, container in model.named_modules():
        children = _children(container)
        if not isinstance(container, _CONTAINERS) or len(children) != 1:
            continue
        name, child = children[0]
        if isinstance(child, _CONTAINERS):
            continue
        only = f"{path}.{name}" if path else name
        is_apart = not any(f"{only}.".startswith(f"{other}.") or other.startswith(f"{only}.") for other in found | lone)
        if is_apart and any(own_class(module) in classes for module in child.modules()):
            lone.add(only)
    return lone


def _outermost_repeated(
    parent: nn.Module, prefix: str, parents: tuple[type[nn.Module], ...], *, containers_too: bool = False
) -> set[str]:
    """Return the outermost modules with children, of a class that occurs twice among the children of one of `parents`.

    A plain `nn.Module` that only holds others, as autoencoders of latent diffusion have them, counts as one of `parents`.

    `containers_too`: also containers among them; members of lists then count as children of the lists' owner.
    """
    children = [(f"{prefix}{name}", child) for name, child in _children(parent)]
    repeated: set[str] = set()
    if isinstance(parent, parents) or (prefix and not is_called(parent)):
        plain = [(path, child) for path, child in children if is_called(child) and not isinstance(child, _CONTAINERS)]
        counted = _called(parent, prefix) if containers_too else plain
        count = Counter(own_class(without_wrapper(child)) for _, child in counted)
        repeated = {p for p, child in counted if count[own_class(without_wrapper(child))] > 1 and _has_children(child)}
    for path, child in children:
        if not any(other == path or other.startswith(f"{path}.") for other in repeated):
            repeated |= _outermost_repeated(child, f"{path}.", parents, containers_too=containers_too)
    return repeated


def _repeated_leaves(model: nn.Module) -> set[str]:
    found: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, _CONTAINERS):
            leaves = [
                (f"{path}.{name}" if path else name, child)
                for name, child in _children(module)
                if not _has_children(child)
                and (isinstance(child, nn.RNNBase) or not type(child).__module__.startswith("torch."))
            ]
            count = Counter(own_class(child) for _, child in leaves)
            found |= {name for name, child in leaves if count[own_class(child)] > 1}
    weight_of = _weigher(model)
    is_most = sum(weight_of(model.get_submodule(path)) for path in found) >= 0.5 * weight_of(model)
    return found if is_most else set()


def _heaviest(model: nn.Module) -> set[str]:
    weight_of = _weigher(model)
    path, module = "", model
    heavy = _heavy_children(module, path, weight_of)
    if len(heavy) > 1 and sum(heavy.values()) >= 0.5:
        return set(heavy)
    while len(heavy) == 1 and sum(heavy.values()) >= _WHOLE_SHARE:
        (path,) = heavy
        module = model.get_submodule(path)
        heavy = _heavy_children(module, path, weight_of)
    is_empty = not _has_children(module) and not weight_of(module)
    return {path} if is_called(module) and not is_empty else set()


def _heavy_children(parent: nn.Module, path: str, weight_of: Callable[[nn.Module], int]) -> dict[str, float]:
    """Return the non-leaf children that hold much of their parent's parameters, with their shares."""
    whole = max(1, weight_of(parent))
    shares = {
        name: weight_of(child) / whole
        for name, child in _called(parent, f"{path}." if path else "")
        if _has_children(child)
    }
    return {name: share for name, share in shares.items() if share >= _LEAST_SHARE}


def _weigher(model: nn.Module) -> Callable[[nn.Module], int]:
    """Return a counter of a module's parameters, excluding embeddings and equally large output layers."""
    left_out = {module.weight.shape for module in model.modules() if isinstance(module, nn.Embedding)}
    return lambda module: sum(p.numel() for p in module.parameters() if p.shape not in left_out)


def _called(parent: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """Return the children, with lists of modules replaced by their own children."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in _children(parent):
        path = f"{prefix}{name}"
        found += [(path, child)] if is_called(child) else _called(child, f"{path}.")
    return found


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children by name; none of a scripted module, which runs them without Python."""
    return [] if isinstance(module, torch.jit.ScriptModule) else list(module.named_children())
