"""The private names of PyTorch that it takes to run code of its users: custom autograd Functions, and policies.

A part of `_torch_private.py`, to which the same applies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import _CachingTorchDispatchMode

__all__ = [
    "FunctionRunner",
    "above_autograd",
    "function_runner",
    "owner_of_hooks",
    "selective_policy",
    "tree_flatten",
    "tree_unflatten",
    "without_modes",
]


@contextmanager
def above_autograd() -> Iterator[None]:
    """Within `below_autograd`, run code as models run theirs: ops go through autograd again."""
    leave_out = torch._C._SetExcludeDispatchKeyGuard
    keys = torch._C.DispatchKey
    with leave_out(keys.AutogradFunctionality, False), leave_out(keys.AutogradOther, False):
        yield


# Run code without any of the dispatch modes that are active; tensor subclasses still work, as they would not under
# `disable_torch_dispatch`.
without_modes: Callable[[], AbstractContextManager[Any]] = _disable_current_modes


FunctionRunner = Callable[[Any, Callable[..., Any], tuple[Any, ...]], Any]
"""`runner(function, apply, args)`: runs a call of a custom autograd Function, which `apply(*args)` would do as always."""


class _Runner(threading.local):
    run: FunctionRunner | None = None


_runner = _Runner()


@contextmanager
def function_runner(runner: FunctionRunner | None) -> Iterator[None]:
    """Have all calls of custom autograd Functions on this thread run by `runner`; None: as always.

    Calls cannot be seen in any public way. Models often keep `Function.apply` itself, under another name, so it must stay as
    it is; but it looks for the C++ method through a class of PyTorch's own, where this puts another method in front. It stays
    there, and does nothing where no runner is set.
    """
    if "apply" not in vars(_SingleLevelFunction):
        _SingleLevelFunction.apply = classmethod(_apply)  # type: ignore[attr-defined]
    outer, _runner.run = _runner.run, runner
    try:
        yield
    finally:
        _runner.run = outer


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    apply = super(_SingleLevelFunction, cls).apply
    return apply(*args, **kwargs) if _runner.run is None or kwargs else _runner.run(cls, apply, args)


# Not traced by `torch.compile`, but what it calls is.
_frames = torch._C._dynamo.eval_frame
_frames.set_code_exec_strategy(
    _apply.__code__, _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
)


def runs_python_backward() -> bool:
    """Whether the backward formula that is running is written in Python, as compiled code's is."""
    return isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction)


def owner_of_hooks() -> object:
    """Return the object whose method packs what autograd saves; None if no hooks are active, or others than methods."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if top is None else getattr(top[0], "__self__", None)


def selective_policy(context: object) -> Callable[..., Any] | None:
    """Return the policy of the first context of PyTorch's `create_selective_checkpoint_contexts`; None for any other one.

    A subclass may do more than ask its policy.
    """
    return context.policy_fn if type(context) is _CachingTorchDispatchMode else None
