"""The private names of PyTorch that are needed to run users' code: custom autograd Functions, and policies.

A part of `_torch_private.py`; the same rules apply.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol
from unittest import mock

import torch
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import FunctionMeta
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import _CachingTorchDispatchMode, noop_context_fn

from recollect._torch_private import owner_of_hook, revive_dispatch_modes, top_saved_tensors_hooks

__all__ = ["tree_flatten", "tree_unflatten"]  # Names that PyTorch defines, as in `_torch_private.py`.


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


_VMAP_MODE = torch._C._dispatch_key_parse("VmapMode")
_VMAP_MODES = torch._C.DispatchKeySet(_VMAP_MODE)


def outside_vmap() -> AbstractContextManager[None]:
    """Run ops of forward as they ran there, also in a backward for several gradients at once (`is_grads_batched`, `vmap`).

    `vmap` refuses those that draw random numbers.
    """
    is_mapped = peek_interpreter_stack() is not None or torch._C._dispatch_tls_is_dispatch_key_included(_VMAP_MODE)
    return _left_vmap() if is_mapped else nullcontext()


@contextmanager
def _left_vmap() -> Iterator[None]:
    with temporarily_clear_interpreter_stack(), torch._C._ExcludeDispatchKeyGuard(_VMAP_MODES):
        yield


class FunctionWatcher(Protocol):
    """Runs the code of one call of a custom autograd Function."""

    def run(self, code: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the Function's forward, or its `setup_context`, which comes after it if there is one."""

    def end(self, output: Any, saved: list[torch.Tensor], has_written: bool) -> None:
        """Note the outputs of forward, and the tensors that autograd is about to save, in order.

        `has_written`: the Function declares a write to an argument.
        """


WatchFunction = Callable[[Any, tuple[Any, ...], dict[str, Any]], FunctionWatcher | None]
"""`watch(function, args, kwargs)`: returns a runner for a call whose forward comes next; None to leave it alone."""


class _Calls(threading.local):
    """The calls of Functions on this thread.

    Attributes:
        watch: told of each call; None: nobody is.
        begun: the Function whose call has begun, and whether gradients are on; until its forward is looked up.
        unset: the call whose forward has run, and whose `setup_context` comes next.
    """

    watch: WatchFunction | None = None
    begun: tuple[Any, bool] | None = None
    unset: _Call | None = None


_calls = _Calls()


@contextmanager
def watched_functions(watch: WatchFunction | None) -> Iterator[None]:
    """Have the calls of custom autograd Functions on this thread watched, where gradients are on; None: leave them alone.

    Calls cannot be seen in any public way. Models often keep `Function.apply` itself, under a different name, and since torch
    2.15 it is all C++. But every call looks up the same attributes of the Function's class: `_backward_cls` when it
    begins, then `forward`, then `setup_context`. This puts a lookup in front that returns watched code. It
    stays there, and does nothing if nobody watches.
    """
    if FunctionMeta.__getattribute__ is not _look_up:
        FunctionMeta.__getattribute__ = _look_up  # type: ignore[method-assign]
    outer = _calls.watch, _calls.begun, _calls.unset
    _calls.watch, _calls.begun, _calls.unset = watch, None, None
    try:
        yield
    finally:
        _calls.watch, _calls.begun, _calls.unset = outer


def _look_up(cls: Any, name: str) -> Any:
    found = type.__getattribute__(cls, name)
    if _calls.watch is None:
        return found
    if name == "_backward_cls":
        _calls.begun = cls, torch.is_grad_enabled()
    elif name == "forward" and _calls.begun is not None:
        (function, is_recorded), _calls.begun = _calls.begun, None
        if function is cls and is_recorded:
            return _Call(cls, found)
    elif name == "setup_context" and _calls.unset is not None:
        call, _calls.unset = _calls.unset, None
        if call.function is cls:
            return functools.partial(call.set_up, found)
    return found


class _Call:
    """One call of a Function, in place of its forward."""

    def __init__(self, function: Any, forward: Callable[..., Any]) -> None:
        self.function = function
        self._forward = forward
        self._watcher: FunctionWatcher | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward; the context is its first argument unless it has a `setup_context`."""
        watch = _calls.watch
        sets_up = self.function.setup_context is not torch.autograd.Function.setup_context
        # If the call that began has failed, this may be a different one, through `Function.forward`.
        is_call = sets_up or (args and isinstance(args[0], torch.autograd.function.BackwardCFunction))
        if watch is None or not is_call:
            return self._forward(*args, **kwargs)
        self._watcher = watch(self.function, args if sets_up else args[1:], kwargs)
        output = self._run(self._forward, args, kwargs)
        if sets_up:
            _calls.unset = self
        else:
            self._end(args[0], output)
        return output

    def set_up(self, setup_context: Callable[..., Any], context: Any, inputs: Any, output: Any) -> Any:
        result = self._run(setup_context, (context, inputs, output), {})
        self._end(context, output)
        return result

    def _run(self, code: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return code(*args, **kwargs) if self._watcher is None else self._watcher.run(code, args, kwargs)

    def _end(self, context: Any, output: Any) -> None:
        _give_back_parameters(context)
        if self._watcher is None:
            return
        saved = (
            [tensor for tensor in context.to_save or () if tensor is not None] if any(context.needs_input_grad) else []
        )
        self._watcher.end(output, saved, bool(context.dirty_tensors))


_PARAMETERS = "_recollect_parameters"
_all_saved: Any = torch._C._FunctionBase.saved_tensors


def _give_back_parameters(context: Any) -> None:
    """Have a Function's backward get the parameters that it saved, with their attributes (`main_grad`).

    Of what hooks of saved tensors return, PyTorch makes new tensors, which have none.
    """
    saved = enumerate(context.to_save or ())
    # ZeRO-3 takes the content away from them.
    found = {index: one for index, one in saved if isinstance(one, Parameter) and not hasattr(one, "ds_tensor")}
    if found:
        vars(context)[_PARAMETERS] = found
        type(context).saved_tensors = _saved_tensors


@property  # type: ignore[misc]
def _saved_tensors(context: Any) -> tuple[Any, ...]:
    parameters = vars(context).get(_PARAMETERS, {})
    return tuple([parameters.get(index, one) for index, one in enumerate(_all_saved.__get__(context))])


# Not traced by `torch.compile`, but the code that they call is.
_frames = torch._C._dynamo.eval_frame
for _code in (_look_up.__code__, *(one.__code__ for one in (_Call.__call__, _Call.set_up, _Call._run))):
    _frames.set_code_exec_strategy(
        _code, _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
    )


@contextmanager
def modes_outlive_compiler() -> Iterator[None]:
    """Within the block, dispatch modes that were entered inside the wrapper of `torch.compile` see what runs after it, too.

    Leaving the wrapper switches them off; the last thing it does is to call this function of the compiler's.
    """
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    set_back = getattr(compiler, "_maybe_set_eval_frame", None)
    if set_back is None:
        yield
        return

    def set_and_revive(callback: Any) -> Any:
        before = set_back(callback)
        if callback is None:  # Else this would be compiled.
            revive_dispatch_modes()
        return before

    with mock.patch.object(compiler, "_maybe_set_eval_frame", set_and_revive):
        yield


def backward_of(function: Any) -> Callable[..., Any]:
    """Return the code of a Function's backward; of one that `torch.library` has made for an op, what it was given for it."""
    own: Callable[..., Any] = function.backward
    if not is_of_an_op(function):
        return own
    held = inspect.getclosurevars(own).nonlocals
    if "orig_backward" in held:  # An op on lists of tensors has one around it.
        held = inspect.getclosurevars(held["orig_backward"]).nonlocals
    return held["info"]._backward_fn or own


def is_of_an_op(function: Any) -> bool:
    return str(function.__module__) == "torch._library.autograd"


def python_backward() -> type | None:
    """Return the Function whose backward is running, as of compiled code; None if it is one of PyTorch's own in C++."""
    return getattr(torch._C._current_autograd_node(), "_forward_cls", None)


def is_compiled(function: type | None) -> bool:
    """Whether a Function is one of those as which `torch.compile` runs its code, whose ops no mode sees."""
    return hasattr(function, "compiled_bw")


def goes_everywhere(node: Any) -> bool:
    """Whether the running backward goes on to all that follows a node, and not only to what a part of the gradients needs."""
    following = [one for one, _ in node.next_functions if one is not None]
    try:
        return all(map(torch._C._will_engine_execute_node, following))
    except RuntimeError:  # It cannot tell within `torch.autograd.grad`, which asks for a part.
        return False


class CheckpointHooks(saved_tensors_hooks):
    """Has our methods pack and unpack the tensors that autograd saves, as the hooks of PyTorch's own checkpoints do.

    Since torch 2.15 a selective checkpoint looks for the user's hooks (`save_on_cpu`) around it, for its own
    saved tensors. A plan does not concern that, so our hooks point on to the ones around them, under the names by which
    PyTorch's do.
    """

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._pack = functools.partial(pack)
        self._pack._checkpoint_internal = True  # type: ignore[attr-defined]
        super().__init__(self._pack, unpack)

    def __enter__(self) -> None:
        self._pack._user_hooks = _users_hooks()  # type: ignore[attr-defined]
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        # The graph holds the hook, which must not hold other hooks.
        del self._pack._user_hooks  # type: ignore[attr-defined]
        super().__exit__(*error)


_disable_hooks = torch._C._autograd._saved_tensors_hooks_disable


def _disable_hooks_of_plans(message: str, fail_if_non_empty: bool = True) -> None:
    """Let `torch.func.grad` and the like run inside units, where all they save is kept; a user's hooks remain an error."""
    top = top_saved_tensors_hooks()
    is_ours = top is not None and isinstance(top[0], functools.partial) and getattr(top[0], "_user_hooks", top) is None
    _disable_hooks(message, fail_if_non_empty and not is_ours)


torch._C._autograd._saved_tensors_hooks_disable = _disable_hooks_of_plans


def _users_hooks() -> Any:
    hooks = top_saved_tensors_hooks()
    while hooks is not None and getattr(hooks[0], "_checkpoint_internal", False):
        hooks = getattr(hooks[0], "_user_hooks", None)
    return hooks


def are_users_hooks_active() -> bool:
    """Whether there are saved-tensor hooks that are neither a plan's nor of PyTorch's checkpoints."""
    hooks = _users_hooks()
    # Before torch 2.15 those of checkpoints are not marked.
    return hooks is not None and not getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook.")


def saves_on_cpu() -> bool:
    """Whether PyTorch's `save_on_cpu` packs values that are saved now."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top is not None and getattr(top[0], "__qualname__", "").startswith(f"{save_on_cpu.__name__}.")


def owner_of_hooks() -> object:
    """Return the object whose method packs saved tensors; None if no hooks are active, or hooks that are not methods."""
    top = top_saved_tensors_hooks()
    return None if top is None else owner_of_hook(top[0])


def selective_policy(context: object) -> Callable[..., Any] | None:
    """Return the policy of the first context of PyTorch's `create_selective_checkpoint_contexts`; None for any other one.

    A subclass may do more than consult its policy.
    """
    return context.policy_fn if type(context) is _CachingTorchDispatchMode else None


_CHECKPOINT_CODE = "_checkpoint_without_reentrant_generator"
Checkpoint = Generator[None, None, None]
"""The code of `torch.utils.checkpoint` around its function, which runs where this yields."""


def have_checkpoints_begin(begin: Callable[[Checkpoint, bool], Checkpoint]) -> None:
    """Have `begin` replace the code of each checkpoint with gradients on, unless it is reentrant; told if it has a context.

    Models keep `checkpoint` itself under their own names.
    """
    module: Any = torch.utils.checkpoint
    # Since torch 2.14 it takes its options by keyword, under its own name.
    name = f"{_CHECKPOINT_CODE}_impl" if hasattr(module, f"{_CHECKPOINT_CODE}_impl") else _CHECKPOINT_CODE
    before = getattr(module, name)

    def run(*args: Any, **options: Any) -> Checkpoint:
        own: Checkpoint = before(*args, **options)
        context_fn = options["context_fn"] if "context_fn" in options else args[2]
        return begin(own, context_fn is not noop_context_fn) if torch.is_grad_enabled() else own

    setattr(module, name, run)
