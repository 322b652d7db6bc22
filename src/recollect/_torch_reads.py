"""What traced code reads and Dynamo does not follow; guards look at it in each call.

Numbers of the integers that it is given, by `tolist` and `item`: attention that goes by the lengths of sequences
(`cu_seqlens`) reads these. Context variables, which Dynamo follows since torch 2.14, and whether a stream is captured: layers
of `transformers` ask. The names of modules that classes of tensors are from, which torch 2.13 and 2.14 do not follow: DoRA in
PEFT asks. That attributes and keys are missing, where code catches the error, as in reads of the environment.

Importing this imports Dynamo, which takes a second: files import it inside functions.
"""

import operator
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, partialmethod
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo import symbolic_convert
from torch._dynamo.exc import ObservedAttributeError, raise_observed_exception
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
from torch._dynamo.variables import builtin
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import SkipFunctionVariable
from torch._dynamo.variables.misc import GetAttrVariable, PythonModuleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable
from torch.utils._python_dispatch import _disable_current_modes

# What may lie between integers that code is given and numbers that it reads: ops that write to none of them, and draw none.
_METHODS = ("__eq__", "_is_all_true", "cpu", "diff", "max", "sum")
_OPS = (operator.eq, operator.getitem, operator.mul, operator.sub, torch.diff, torch.max, *_METHODS)
_MOST_INTEGERS = 1024

_call_method = TensorVariable.call_method
_call_method_of_object = UserDefinedObjectVariable.call_method
_call_method_of_attribute = GetAttrVariable.call_method
_call_function = TorchInGraphFunctionVariable.call_function
_call_skipped = SkipFunctionVariable.call_function
_load_attribute = symbolic_convert.InstructionTranslatorBase._load_attr
_has_attribute = PythonModuleVariable.call_obj_hasattr
_look_up_key = ConstDictVariable.getitem_const_raise_exception_if_absent
_is_stdlib = symbolic_convert.is_stdlib

# The built-in `getattr`; in torch 2.11, any built-in function.
_Getattr: Any = getattr(builtin, "GetAttrBuiltinVariable", builtin.BuiltinVariable)
_call_getattr = _Getattr.call_function

_QUESTIONS = (torch.cuda.is_current_stream_capturing, torch.xpu.is_current_stream_capturing)


class _UnknownError(Exception):
    """What a tensor holds follows from more than the integers that the code was given."""


@contextmanager
def following_reads(numbers: list[Any]) -> Iterator[None]:
    """Have Dynamo follow what code reads; append each number that a trace takes for a constant to `numbers`."""
    with (
        mock.patch.object(TensorVariable, "call_method", partialmethod(_call_or_read, numbers)),
        mock.patch.object(UserDefinedObjectVariable, "call_method", _call_or_look_up),
        mock.patch.object(GetAttrVariable, "call_method", _call_of_name),
        mock.patch.object(
            TorchInGraphFunctionVariable, "call_function", partialmethod(_call_or_answer, _call_function)
        ),
        mock.patch.object(SkipFunctionVariable, "call_function", partialmethod(_call_or_answer, _call_skipped)),
    ):
        yield


@contextmanager
def guarding_what_is_missing() -> Iterator[None]:
    """Have Dynamo guard that attributes and keys are missing where code catches the error, and what functions of `os` read."""
    with (
        mock.patch.object(symbolic_convert.InstructionTranslatorBase, "_load_attr", _load_or_miss),
        mock.patch.object(symbolic_convert, "is_stdlib", _has_no_state),
        mock.patch.object(_Getattr, "call_function", _get_or_miss),
        mock.patch.object(PythonModuleVariable, "call_obj_hasattr", _has_or_miss),
        mock.patch.object(ConstDictVariable, "getitem_const_raise_exception_if_absent", _look_up_or_miss),
    ):
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
    """Whether anything traced so far may have written to memory that a tensor shares, with others of whatever type."""
    memory = _memory_of(placeholder)
    given = placeholder.graph.find_nodes(op="placeholder")
    return not all(_is_only_read(one) for one in given if _memory_of(one) == memory)


def _memory_of(placeholder: fx.Node) -> int | None:
    given = _given_as(placeholder)
    has_storage = isinstance(given, torch.Tensor) and given.layout is torch.strided
    return given.untyped_storage()._cdata if has_storage else None


def _is_only_read(node: fx.Node) -> bool:
    return all(user.target in _OPS and _is_only_read(user) for user in node.users)


def _call_or_look_up(self: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call a method of an object in traced code, as Dynamo would, or look a context variable up."""
    if type(self.value) is not ContextVar or name != "get" or args or kwargs:
        return _call_method_of_object(self, translator, name, args, kwargs)
    source = CallFunctionNoArgsSource(AttrSource(self.source, "get"))
    return VariableTracker.build(translator, self.value.get(), source)


def _call_of_name(self: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call a method of an attribute in traced code, as Dynamo would, or of the name of a class's module."""
    of_class = getattr(self.obj, "value", None)
    if self.name != "__module__" or not isinstance(of_class, type):
        return _call_method_of_attribute(self, translator, name, args, kwargs)
    return VariableTracker.build(translator, of_class.__module__).call_method(translator, name, args, kwargs)


def _call_or_answer(self: Any, call: Any, translator: Any, args: Any, kwargs: Any) -> Any:
    """Call a function in traced code, as Dynamo would; check numbers, or answer whether a stream is captured."""
    if self.value is torch._check_tensor_all_with:
        holds = args[1].call_method(translator, "_is_all_true", [], {}).call_method(translator, "item", [], {})
        if holds.as_python_constant():
            return VariableTracker.build(translator, None)
    if all(self.value is not question for question in _QUESTIONS):
        return call(self, translator, args, kwargs)
    answer = _answer_to(self.value)
    install_guard(self.source.make_guard(partial(_guard_answer, answer)))
    if answer is None:
        raise_observed_exception(RuntimeError, translator)
    return VariableTracker.build(translator, answer)


def _answer_to(question: Callable[[], bool]) -> bool | None:
    """Return the answer; None where the device's runtime is missing, and PyTorch raises an error."""
    try:
        return question()
    except RuntimeError:
        return None


def _guard_answer(answer: bool | None, builder: Any, guard: Any) -> None:
    condition = f"answer_to({guard.name}) is {answer}"
    builder.add_python_lambda_leaf_guard_to_root([condition], [condition], {"answer_to": _answer_to})


def _load_or_miss(self: Any, name: str) -> None:
    """Put an attribute on the stack of traced code, as Dynamo would; where it is missing, have a guard look for it."""
    owner = self.stack[-1]
    with _guarding_absence(owner, name):
        _load_attribute(self, name)
    found, source = self.stack[-1], owner.source
    # In torch 2.11, constants of classes have no guard.
    if source is not None and found.source is None and isinstance(owner.realize(), UserDefinedClassVariable):
        if isinstance(found, ConstantVariable):
            install_guard(AttrSource(source, name).make_guard(GuardBuilder.CONSTANT_MATCH))


def _get_or_miss(self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
    """Call `getattr` in traced code, as Dynamo would; where the attribute is missing, have a guard look for it."""
    is_plain = self.as_python_constant() is getattr and len(args) == 2 and args[1].is_python_constant()
    with _guarding_absence(args[0], args[1].as_python_constant()) if is_plain else nullcontext():
        return _call_getattr(self, translator, args, kwargs)


@contextmanager
def _guarding_absence(owner: Any, name: str) -> Iterator[None]:
    try:
        yield
    except ObservedAttributeError:
        _guard_presence(owner, name, has=False)
        raise


def _has_or_miss(self: Any, translator: Any, name: str) -> Any:
    """Ask whether a Python module has an attribute, as Dynamo would; have a guard ask again in each call."""
    _guard_presence(self, name, has=hasattr(self.value, name))
    return _has_attribute(self, translator, name)


def _guard_presence(owner: Any, name: str, *, has: bool) -> None:
    if owner.source is not None:
        install_guard(owner.source.make_guard(partial(_guard_attribute, name, has)))


def _guard_attribute(name: str, has: bool, builder: Any, guard: Any) -> None:
    condition = f"{'' if has else 'not '}hasattr({guard.name}, {name!r})"
    if condition not in builder.already_added_code_parts:
        builder.already_added_code_parts.add(condition)
        builder.add_python_lambda_leaf_guard_to_root([condition], [condition])


def _look_up_or_miss(self: Any, translator: Any, key: Any) -> Any:
    """Look a key up in traced code, as Dynamo would; where it is missing, have a guard look for it."""
    if key not in self:
        self.install_dict_contains_guard(translator, [key])
    return _look_up_key(self, translator, key)


def _has_no_state(module: Any) -> bool:
    """Whether Dynamo leaves out guards of what functions of a module read there: not of `os`, which has the environment."""
    return module is not os and _is_stdlib(module)


def _guard(content: Any, builder: Any, guard: Any) -> None:
    condition = f"{guard.name}.tolist() == {content}"
    builder.add_python_lambda_leaf_guard_to_root([condition], [condition])
