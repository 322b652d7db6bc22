"""Every private name of PyTorch that this library uses, each with the reason why a public one is not enough.

When a release moves one of them, change this file; `engine/self_check.py` detects names that no longer work.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch._C._autograd import _get_current_graph_task_keep_graph, _profiler_enabled
from torch._C._functorch import peek_interpreter_stack
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

_Function = TypeVar("_Function", bound=Callable[..., Any])

# The versions that `scripts/test --torch` has run with, and all between.
OLDEST_TESTED = "2.11.0"
NEWEST_TESTED = "2.15.0"

# Names that PyTorch defines. All others here without an underscore are also for other files.
__all__ = [
    "FakeTensorMode",
    "HigherOrderOperator",
    "TorchDispatchMode",
    "is_traceable_wrapper_subclass",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "unset_fake_temporarily",
]

# The errors that fake tensors raise when a step asks for their content, or for a shape that depends on it.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)

# These are classes, not functions around them: they are entered several times per op.
# Run tensor methods without the active dispatch modes; no public guard leaves out all of them at this price.
disable_torch_dispatch: Callable[[], AbstractContextManager[Any]] = torch._C._DisableTorchDispatch

# An entered mode steps aside for a while, which `with` cannot express; a tenth of the time of leaving and entering it.
push_dispatch_mode: Callable[[TorchDispatchMode], None] = torch._C._push_on_torch_dispatch_stack


def pop_dispatch_mode(mode: TorchDispatchMode) -> bool:
    """Pop a mode off the stack if it is on top; return whether it was."""
    top = torch._C._pop_torch_dispatch_stack(None) if num_dispatch_modes() else None
    if top is not mode and top is not None:
        torch._C._push_on_torch_dispatch_stack(top)
    return top is mode


# How many dispatch modes are active on this thread.
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def dispatch_mode_stack() -> list[TorchDispatchMode]:
    """Return the active dispatch modes, outermost first."""
    return [torch._C._get_dispatch_stack_at(index) for index in range(num_dispatch_modes())]


@contextmanager
def replaced_dispatch_modes(modes: list[TorchDispatchMode]) -> Iterator[None]:
    """Replace the active dispatch modes, outermost first; never those for fake tensors and tracing."""
    before, wanted = of_no_key(dispatch_mode_stack()), of_no_key(modes)
    _exchange_dispatch_modes(len(before), wanted)
    try:
        yield
    finally:
        _exchange_dispatch_modes(len(wanted), before)


def of_no_key(modes: list[TorchDispatchMode]) -> list[TorchDispatchMode]:
    return [mode for mode in modes if getattr(mode, "_mode_key", None) is None]


def _exchange_dispatch_modes(num_popped: int, pushed: list[TorchDispatchMode]) -> None:
    for _ in range(num_popped):
        torch._C._pop_torch_dispatch_stack(None)
    for mode in pushed:
        push_dispatch_mode(mode)


def revive_dispatch_modes() -> None:
    """Make the active modes see ops again: leaving the wrapper of `torch.compile` switches off those entered inside."""
    if num_dispatch_modes() and not torch._C._dispatch_tls_is_dispatch_key_included("Python"):
        modes = of_no_key(dispatch_mode_stack())
        _exchange_dispatch_modes(len(modes), modes)


# The same for saved-tensor hooks.
push_saved_tensors_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks


# The innermost pair of active saved-tensor hooks; None if there are none.
top_saved_tensors_hooks: Callable[[], Any] = functools.partial(
    torch._C._autograd._top_saved_tensors_default_hooks, False
)


def has_saved_tensors_hooks() -> bool:
    """Whether any saved-tensor hooks are active, or none may be, as inside `torch.func.grad`."""
    hooks: Any = torch._C._autograd
    return top_saved_tensors_hooks() is not None or not hooks._saved_tensors_hooks_is_enabled()


def owner_of_hook(pack: Any) -> object:
    """Return the object whose method packs; None for any other function."""
    return getattr(getattr(pack, "func", pack), "__self__", None)


def pop_saved_tensors_hooks(owner: object) -> tuple[Any, Any] | None:
    """Take a pair of hooks off the stack and return it, if its pack hook, a method of `owner`, is on top."""
    top = top_saved_tensors_hooks()
    if top is None or owner_of_hook(top[0]) is not owner:
        return None
    torch._C._autograd._pop_saved_tensors_default_hooks()
    return top


# Let views and aliases made inside a dispatch mode share the version counter of their base, as they do outside.
share_version_counters: Callable[[], AbstractContextManager[Any]] = functools.partial(
    torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey.ADInplaceOrView, False
)


# Run ops as dispatch modes see them, past autograd; `torch.no_grad` would change what some kernels return.
below_autograd: Callable[[], AbstractContextManager[Any]] = torch._C._AutoDispatchBelowAutograd

_ABOVE_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def as_no_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same memory, but not a view to autograd: it counts its own writes. Call it below autograd."""
    with torch._C._ExcludeDispatchKeyGuard(_ABOVE_VIEWS):
        return tensor.detach()  # `view_as` would change the strides of dimensions of size 1.


# Run recorded ops as they were recorded, below autocast, for every device type.
disable_autocast: Callable[[], AbstractContextManager[Any]] = torch._C._DisableAutocast

# Whether autocast is on for any type of device; the public way asks for one.
any_autocast_is_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

# Whether there are hooks on all modules, of which Dynamo's guards know nothing.
has_global_hooks: Callable[[], object] = torch.nn.modules.module._has_any_global_hook

# The mode that makes new tensors fake; None if there is none. No public name tells it.
fake_mode: Callable[[], object] = functools.partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE)

# The mode that traces ops for `make_fx`, as in `torch.func.linearize`; None if nothing is traced.
tracing_mode: Callable[[], object] = functools.partial(
    torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY
)


def is_fake_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape but no memory."""
    return type(tensor) is FakeTensor


@functools.cache
def desugars(kind: type) -> bool:
    """Whether a tensor type declined by a dispatch mode reaches it again as ops on the inner tensors (DTensor).

    `FakeTensor` is handled like a plain tensor: it stands for one.
    """
    handler: object = getattr(kind, "__torch_dispatch__", None)
    return handler is not torch._C._disabled_torch_dispatch_impl and not issubclass(kind, FakeTensor)


def is_opaque_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass with its own `__torch_dispatch__` that does not tell its inner tensors.

    It may have no storage, and asking for it then ends the process.
    """
    return desugars(type(tensor)) and not is_traceable_wrapper_subclass(tensor)


def keeps_graph() -> bool:
    """Whether the backward that is running may be followed by one more over the same graph (`retain_graph`).

    Private, because there is no public way to ask; without it a saved tensor may never be used up by a backward.
    """
    return bool(_get_current_graph_task_keep_graph())


# A number for the running backward (several may run at once); -1 for none.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call this when the running backward has ended; if backward fails, release it."""
    torch.autograd.Variable._execution_engine.queue_callback(untraced(callback))


def current_autograd_node() -> int:
    """Return a number for the backward formula that is running, or whose results are being added up; -1 for none."""
    node: Any = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


# The number that the next node of the graph will have, on this thread.
next_autograd_node: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


def accumulates_gradient() -> bool:
    """Whether backward is adding up a parameter's gradient, or running the hooks for when it has."""
    node: Any = torch._C._current_autograd_node()
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` compiled a module, its call or its `forward`; without importing the compiler."""
    is_wrapped = without_compiler(module) is not module
    return is_wrapped or getattr(module, "_compiled_call_impl", None) is not None or has_compiled_forward(module)


def has_compiled_forward(module: torch.nn.Module) -> bool:
    own = vars(module).get("forward")
    return without_compiler(module) is module and compiled_function(own) is not None


def compiled_function(function: Any) -> Callable[..., Any] | None:
    """Return the function that `torch.compile` wrapped in this one; None if it is not compiled."""
    return (
        None
        if getattr(function, "_torchdynamo_disable", False)
        else getattr(function, "_torchdynamo_orig_callable", None)
    )


def without_compiler(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile(module)` wrapped in this one; the module itself if it is not compiled."""
    # FSDP2 makes a class of its own of the wrapper's.
    is_wrapped = any(kind.__name__ == "OptimizedModule" for kind in type(module).__mro__)
    return module._orig_mod if is_wrapped else module  # type: ignore[return-value]


def without_wrapper(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that PyTorch's checkpoint wrapper, or its compiler, has wrapped; else the module itself."""
    inner = getattr(module, "_checkpoint_wrapped_module", without_compiler(module))
    return module if inner is module else without_wrapper(inner)


def compiler_around() -> bool | None:
    """Whether compiled code that calls this may have no graph breaks (`fullgraph`); None if no compiled code calls it.

    Neither of them tells: where the graph is broken, PyTorch says that nothing is compiling.
    """
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None or compiler._stance.stance == "force_eager":
        return None
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_globals is vars(compiler) and frame.f_code.co_name in ("compile_wrapper", "_fn"):
            context = frame.f_locals.get("self")
            return bool(getattr(context, "fullgraph", False)) if isinstance(context, compiler.OptimizeContext) else None
    return None


# With `fullgraph=True` an error is raised if a call made no graph: modules under a plan run eagerly, or compile by themselves.
# This ends the count of the running call's graphs; -1 if there is none. PyTorch before 2.13 counts nothing.
leave_graph: Callable[[], int] = functools.partial(
    getattr(torch._C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", int), -1
)

# Read attributes of any tensor subclass without running the subclass's code.
disable_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass

# Whether this thread runs under a profiler; PyTorch's own check is not exported.
profiler_is_active: Callable[[], bool] = _profiler_enabled

# A tenth of the time of `torch.cuda.current_stream`, which makes an object; builds without CUDA lack it, and its tensors.
current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


_rehearses_capture = ContextVar("rehearses_capture", default=False)
# PyTorch's own: `told_of_capture` answers for it.
_stream_is_captured = torch.cuda.is_current_stream_capturing


def is_capturing() -> bool:
    """Whether a CUDA graph is captured on this thread's current stream, or a capture is rehearsed."""
    return _rehearses_capture.get() or (torch.cuda.is_initialized() and _stream_is_captured())


@contextmanager
def rehearsing_capture() -> Iterator[None]:
    """Within the block, units run on this thread as they do while a CUDA graph is captured, on any device."""
    before = _rehearses_capture.set(True)
    try:
        yield
    finally:
        _rehearses_capture.reset(before)


# About 100 us at the clock rate of an H100: longer than it takes to launch an op from Python.
_BUSY_CYCLES = 200_000


def keep_busy(device: torch.device) -> None:
    """Keep a CUDA device busy for a moment, as no public kernel does without memory or bandwidth."""
    with torch.cuda.device(device):
        torch.cuda._sleep(_BUSY_CYCLES)


def raises_version_first(func: Any) -> bool:
    """Whether an op that writes in place raises the version counters before dispatch modes see it, not after it ran.

    Ops made by `torch.library.custom_op` do.
    """
    return isinstance(func, torch._ops.OpOverload) and func._schema.name in OPDEFS


def untraced(function: _Function) -> _Function:
    """Keep `torch.compile` from tracing a function and its callees, at no cost when it runs.

    The public decorator `torch.compiler.disable` costs 1 us a call, too much around the handling of a single op.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


# Dynamo's message where `fullgraph=True` forbids breaking the graph.
_WHY_EAGER = "modules under a recollect plan run eagerly: compile them without fullgraph=True, or remove the plan"


def uncompiled(function: _Function) -> _Function:
    """Have `torch.compile` break its graph at calls of a function, instead of tracing its callees.

    Like `torch._dynamo.disable`, but without importing the compiler and without its 1 us per call.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _WHY_EAGER  # type: ignore[attr-defined]
    return untraced(function)


def transforms_are_active() -> bool:
    """Whether this runs inside `torch.func`, forward-mode differentiation, `torch.export` or `torch.jit.trace`."""
    is_traced = torch.compiler.is_exporting() or torch._C._is_tracing()
    return is_traced or forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


@contextmanager
def without_global_hooks() -> Iterator[None]:
    """Within the block, no global hook of modules or optimizers runs."""
    named = {**vars(torch.nn.modules.module), **vars(sys.modules["torch.optim.optimizer"])}
    tables = [table for name, table in named.items() if name.startswith("_global_")]
    kept = [(table, dict(table)) for table in tables if isinstance(table, dict)]
    try:
        for table, _ in kept:
            table.clear()
        yield
    finally:
        for table, its in kept:
            table.update(its)
