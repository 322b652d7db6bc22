"""Finds the tensors in nested containers and objects, and those that a tensor consists of."""

import types
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from recollect._torch_private import is_traceable_wrapper_subclass, tree_leaves

_PLAIN = frozenset({type(None), bool, int, float, str})
_NO_HOLDERS = (torch.nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dicts, in order."""
    found: list[torch.Tensor] = []
    _add_tensors(tree, found)
    return found


def _add_tensors(tree: Any, found: list[torch.Tensor]) -> None:
    # PyTorch's own search takes three times as long, in each call of a layer.
    kind = type(tree)
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif kind is tuple or kind is list:
        for one in tree:
            _add_tensors(one, found)
    elif kind is dict:
        for one in tree.values():
            _add_tensors(one, found)
    elif kind not in _PLAIN:
        found += [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def tensors_held(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers, and in the attributes of objects in them, except modules.

    Less deeply nested ones come first.

    Example:
        >>> import torch, types
        >>> cache = types.SimpleNamespace(layers=[types.SimpleNamespace(keys=torch.tensor(2))])
        >>> [tensor.item() for tensor in tensors_held({"cache": cache, "logits": torch.tensor(1)})]
        [1, 2]
    """
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}
    pending = deque(tree_leaves(tree))
    while pending:
        thing = pending.popleft()
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        elif id(thing) not in seen and not isinstance(thing, _NO_HOLDERS):
            seen[id(thing)] = thing
            pending += _parts(thing)
    return found


def _parts(thing: Any) -> Iterable[Any]:
    leaves = tree_leaves(thing)
    if len(leaves) != 1 or leaves[0] is not thing:
        return leaves
    inside = thing.values() if isinstance(thing, Mapping) else thing if isinstance(thing, (list, tuple, set)) else ()
    return [*inside, *getattr(thing, "__dict__", {}).values()]


def has_strides(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a size and strides: not a sparse one, nor a nested one, though that may say that it is strided."""
    return tensor.layout is torch.strided and not tensor.is_nested


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to; -1 for one made in inference mode, which does not count."""
    return -1 if tensor.is_inference() else tensor._version


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; of a nested one, whose rows differ in length, the number of rows and that of elements.

    Example:
        >>> import torch
        >>> shape_of(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged))
        (2, 18)
    """
    return (tensor.size(0), tensor.numel()) if tensor.is_nested else tuple(tensor.shape)


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that one of a wrapper subclass (DTensor and its kin) holds; none for any other tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    names, _ = tensor.__tensor_flatten__()
    # A DTensor names its device mesh, too.
    return [inner for inner in (getattr(tensor, name) for name in names) if isinstance(inner, torch.Tensor)]


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the indices and values of a sparse tensor; none for any other.

    Example:
        >>> import torch
        >>> [list(part.shape) for part in sparse_parts(torch.eye(3).to_sparse())]
        [[2, 3], [3]]
    """
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []
