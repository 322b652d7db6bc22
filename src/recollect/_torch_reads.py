"""Numbers that traced code reads of the integers it is given: constants of the trace, which its guards look at.

Dynamo does not know what `tolist` and `item` give back. Attention that goes by the lengths of sequences (`cu_seqlens`) reads
these. Importing this imports Dynamo, which takes a second: files import it inside functions.
"""

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo.guards import install_guard
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch.utils._python_dispatch import _disable_current_modes

# What may lie between integers that code is given and numbers that it reads: ops that write to none of them, and draw none.
_OPS = (operator.getitem, operator.sub, torch.diff, torch.max, "cpu", "diff", "max")
_MOST_INTEGERS = 1024

_call_method = TensorVariable.call_method


class _UnknownError(Exception):
    """What a tensor holds follows from more than the integers that the code was given."""


@contextmanager
def numbers_as_constants(read: list[Any]) -> Iterator[None]:
    """Have Dynamo take numbers that code reads for constants; append each to `read`."""
    with mock.patch.object(TensorVariable, "call_method", partialmethod(_call_or_read, read)):
        yield


def integers_in(tensors: Any) -> tuple[Any, ...]:
    """Return the contents of those tensors whose numbers a trace may take for constants."""
    return tuple(tuple(one.flatten().tolist()) for one in tensors if _holds_integers(one))


def _holds_integers(tensor: Any) -> bool:
    kinds = torch.int32, torch.int64
    return type(tensor) is torch.Tensor and tensor.dtype in kinds and tensor.numel() <= _MOST_INTEGERS


def _call_or_read(self: Any, read: list[Any], translator: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call a method of a tensor in traced code, as Dynamo would, or read its numbers."""
    if name not in ("item", "tolist") or args or kwargs:
        return _call_method(self, translator, name, args, kwargs)
    contents: dict[Any, Any] = {}
    try:
        with _disable_current_modes():
            numbers = getattr(_computed(self.as_proxy().node, contents), name)()
    except _UnknownError:
        return _call_method(self, translator, name, args, kwargs)
    for source, content in contents.items():
        install_guard(source.make_guard(partial(_guard, content)))
    read.append(numbers)
    return VariableTracker.build(translator, numbers)


def _computed(node: fx.Node, contents: dict[Any, Any]) -> Any:
    """Return the tensor that a node of Dynamo's graph stands for; note what it follows from, by Dynamo's sources."""
    if not isinstance(node.meta.get("example_value"), torch.Tensor):
        raise _UnknownError
    if node.op == "placeholder":
        given = _given_as(node)
        if not _holds_integers(given) or _may_be_written(node):
            raise _UnknownError
        contents[node.meta["grapharg"].source] = given.tolist()
        return given
    if node.target not in _OPS:
        raise _UnknownError
    args: Any = fx.map_arg(node.args, lambda one: _computed(one, contents))
    kwargs: Any = fx.map_arg(node.kwargs, lambda one: _computed(one, contents))
    if isinstance(node.target, str):
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    function: Any = node.target
    return function(*args, **kwargs)


def _given_as(placeholder: fx.Node) -> Any:
    argument = placeholder.meta.get("grapharg")  # Parts of a graph, as of a checkpoint, have none.
    return None if argument is None else argument.example


def _may_be_written(placeholder: fx.Node) -> bool:
    """Whether anything traced so far may have written to memory that a tensor shares."""
    memory = _given_as(placeholder).untyped_storage()._cdata
    integers = (one for one in placeholder.graph.find_nodes(op="placeholder") if _holds_integers(_given_as(one)))
    return not all(_is_only_read(one) for one in integers if _given_as(one).untyped_storage()._cdata == memory)


def _is_only_read(node: fx.Node) -> bool:
    return all(user.target in _OPS and _is_only_read(user) for user in node.users)


def _guard(content: Any, builder: Any, guard: Any) -> None:
    """Compare at the root of the guards: those of a module's attributes are skipped while its dicts have not changed."""
    condition = f"{guard.name}.tolist() == {content}"
    builder.add_python_lambda_leaf_guard_to_root([condition], [condition])
