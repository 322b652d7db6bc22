"""Every private name of PyTorch's Dynamo that the graph engine uses, each with the reason why a public one is not enough.

Importing this imports Dynamo, which takes a second: files import it inside functions.
"""

import ast
import functools
import gc
import inspect
import itertools
import logging
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo as dynamo
from torch import fx
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame, eval_frame, external_utils, mark_static_address, variables
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException, Unsupported
from torch._dynamo.guards import get_guard_fail_reason
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch._dynamo.variables.torch import tracing_state_functions
from torch._guards import CompileId
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode

from recollect._torch_private import tree_leaves
from recollect._torch_reads import following_reads, guarding_what_is_missing
from recollect.garbage import without_collections

# The errors of a function that could not be traced, or not into one graph, or too often.
ERRORS = (TorchDynamoException, FailOnRecompileLimitHit)

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

# What model code calls to learn whether it is compiled. Layers of `transformers` then choose other kernels.
_ASKED = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch.compiler.is_exporting,
    torch._utils.is_compiling,
    external_utils.is_compiling,
)

# They write pages about things users cannot change: the first one's error says the same, and the second one in torch 2.11
# cannot say which functions are ignored.
_FAKES, _METRICS = map(logging.getLogger, ("torch._subclasses.fake_tensor", "torch._dynamo.metrics_context"))

# The Function as which torch 2.11 traces hooks on gradients inside, in the wrong order and without what they write.
_HOOK: Any = getattr(external_utils, "_ApplyBackwardHook", SimpleNamespace(vjp=None))

_call_wrapped = WrapperUserFunctionVariable.call_function

# By default it looks neither at hooks that come later nor, in torch 2.11, at whether weights were frozen since.
_GUARDS = {
    "skip_nnmodule_hook_guards": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "use_recursive_dict_tags_for_guards": False,
    "skip_guards_on_constant_func_defaults": False,
}


class TracedWhole:
    """A function that Dynamo traces into one graph for a backend, or whose call raises an error.

    Its code and its globals are copies: Dynamo keeps there what was traced for it, which is released with it.
    `dynamic`: whether sizes that differ between calls become variables in later traces.
    """

    most_traces = 64
    """For each way in which guards can differ."""

    def __init__(self, function: Any, backend: Backend, *, dynamic: bool = False) -> None:
        own_globals = {**function.__globals__}
        own = FunctionType(function.__code__.replace(), own_globals, function.__name__, function.__defaults__)
        # Not `torch.compile`: it wraps the backend, and Dynamo would keep the wrapper.
        optimize = dynamo.optimize(backend, nopython=True, dynamic=None if dynamic else False)
        self._trace: Callable[..., Any] = optimize(own)
        self._is_off = isinstance(optimize, eval_frame._NullDecorator)
        self._own = own
        self._given, self._backend = function.__code__, backend
        # By the numbers of the code that Dynamo made for each trace.
        self._runs: dict[int, FunctionType] = {}

    def trace(self, *args: Any) -> Any:
        """Call the function; first trace it if no trace fits the call; raise one of `ERRORS` if it cannot be traced."""
        if self._is_off or dynamo_config.disable:
            raise TorchDynamoException("Dynamo is switched off (TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE)")
        if (stance := eval_frame._stance.stance) != "default":
            raise TorchDynamoException(f"torch.compiler.set_stance({stance!r}) keeps Dynamo from tracing it")
        limits = {"recompile_limit": self.most_traces, "accumulated_recompile_limit": 2**20}
        try:
            with _TURN, dynamo_config.patch({**limits, **_GUARDS}), guarding_what_is_missing():
                return self._trace(*args)
        finally:
            # Else, in Dynamo's maps, what it made for a trace keeps our code, which has it, and backends stay for good.
            for entry in self._entries():
                dynamo_utils.orig_code_map[entry.code] = self._given
            eval_frame.cached_backends.pop(id(self._backend), None)

    def release(self) -> None:
        """Release all traces now. Dynamo holds on to the first function that it traces in a process."""
        reset_code(self._own.__code__)

    def run_of(self, *args: Any) -> Callable[..., Any] | None:
        """Return the function that runs the trace that fits a call; None if none does.

        `trace` would do the same within wrappers that take 0.2 ms in each call. `torch.compiler.set_stance` could ask whether a
        trace fits, but holds for the calls of all threads.
        """
        given = self._named(args)
        entries = self._entries()
        for entry in entries:
            if entry.guard_manager.check(given):
                if id(entry.code) not in self._runs:
                    present = {id(one.code) for one in entries}
                    self._runs = {number: run for number, run in self._runs.items() if number in present}
                    self._runs[id(entry.code)] = self._without_wrappers(entry.code)
                return self._runs[id(entry.code)]
        return None

    def what_differs(self, *args: Any) -> str:
        """Return the first condition of the last trace that a call does not meet, which fits none."""
        code = self._own.__code__
        last = (self._entries() or _debug_get_cache_entry_list(code))[-1]
        number = CompileId(frame_id=0, frame_compile_id=0)
        given = self._named(args)
        reason = get_guard_fail_reason(last.guard_manager, code, given, number, self._backend, skip_logging=True)
        # As in "0/0: forward.__self__.count == 1   # self.count += 1 ...".
        return re.sub(r"^0/0: |\bforward\.__self__\.|\s+#.*", "", reason.partition("\n")[0])

    def _named(self, args: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self._own.__code__.co_varnames, args, strict=False))

    def _entries(self) -> list[Any]:
        """Return Dynamo's entries for traces. Of one that looks at a class which is gone, an entry without code stays."""
        return [entry for entry in _debug_get_cache_entry_list(self._own.__code__) if entry.code is not None]

    def _without_wrappers(self, code: CodeType) -> FunctionType:
        """Return a function of what Dynamo made, which calls the backend's result directly."""
        names = {name: self._own.__globals__.get(name) for name in code.co_names if name.startswith("__compiled_fn")}
        around = {**self._own.__globals__, "__import_torch_dot__dynamo_dot_utils": _UTILS}
        around |= {name: getattr(function, "_torchdynamo_orig_callable", function) for name, function in names.items()}
        return FunctionType(code, around, self._own.__name__, self._own.__defaults__)


# What traced code calls, without the regions for the profiler, which take 50 us.
_UTILS = SimpleNamespace(**vars(dynamo_utils))
_UTILS.record_pregraph_bytecode_enter = lambda: None
_UTILS.record_pregraph_bytecode_exit = lambda _region: None


def raised_by_tracing(error: BaseException) -> bool:
    """Whether an error was raised before anything of the traced function had run.

    Dynamo raises errors of other types, too, for code that it did not expect.
    """
    if isinstance(error, ERRORS):
        return True
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_outside = itertools.dropwhile(lambda file: file != eval_frame.__file__, files)
    inside = itertools.dropwhile(lambda file: file == eval_frame.__file__, is_outside)
    return next(inside, "") == convert_frame.__file__


def first_line(error: BaseException) -> str:
    """Return why a function could not be traced, and the line of code, if Dynamo says which."""
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()] or [type(inner).__name__]
    where = list(getattr(error, "real_stack", None) or ())
    code = f" in `{where[-1].line}` ({Path(where[-1].filename).name}:{where[-1].lineno})" if where else ""
    return lines[0].rstrip(".") + code


@contextmanager
def tracing_as_eager() -> Iterator[list[Any]]:
    """Have Dynamo guard hooks of modules and tied weights, and tell code that asks whether it is compiled that it is not.

    By default it takes these for constant: a hook added later would be ignored, and tied weights' gradients would be added up
    in a different order. There is no public way to change the answers.
    Dynamo's warnings are left out; the unit's own warnings were shown when it ran on the tape.

    Numbers that code reads of integers it is given become constants, which guards look at; this yields a list of them.
    """
    read: list[Any] = []
    with _TURN, without_collections(), _tracing_as_eager(), following_reads(read):
        yield read
    # What Dynamo leaves in reference cycles holds tensors that modules have as attributes. It is young, and quickly found.
    gc.collect(1)


# What is changed holds for all threads.
_TURN = threading.RLock()


@contextmanager
def _tracing_as_eager() -> Iterator[None]:
    answers = tracing_state_functions()
    before = {function: answers[function] for function in _ASKED if function in answers}
    answers.update(dict.fromkeys(before, False))
    # Code asks first whether it is compiled.
    mark_static_address._dynamo_forbidden = False
    try:
        with (
            warnings.catch_warnings(),
            mock.patch.object(_FAKES, "disabled", True),
            mock.patch.object(_METRICS, "disabled", True),
            # Dynamo refuses Functions that have their own.
            mock.patch.object(_HOOK, "vjp", None),
            mock.patch.object(WrapperUserFunctionVariable, "call_function", _call_unscripted),
            dynamo_config.patch(
                skip_no_tensor_aliasing_guards_on_parameters=False,
                run_gc_after_compile=False,
                ignore_logging_functions=dynamo_config.ignore_logging_functions | {mark_static_address, *_said_once()},
            ),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        mark_static_address._dynamo_forbidden = True
        answers.update(before)
        # By the functions that it traced, Dynamo keeps the defaults of their arguments, which may hold the functions.
        getattr(variables.functions, "_spec_cache", {}).clear()


def _call_unscripted(self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
    """Call a function inside a wrapper in traced code; refuse a scripted one with gradients, which TorchScript differentiates.

    Dynamo traces the function that was scripted, whose gradients have other bits.
    """
    result = _call_wrapped(self, translator, args, kwargs)
    if isinstance(self.wrapper_obj, torch.jit.ScriptFunction):
        made = [one.node.meta["example_value"] for one in tree_leaves(result.as_proxy()) if isinstance(one, fx.Proxy)]
        if any(isinstance(one, torch.Tensor) and one.requires_grad for one in made):
            raise Unsupported("torch.jit.script has a backward of its own")
    return result


def _said_once() -> Iterator[Any]:
    """Yield functions that say the same only once: the tape's call has said it.

    Libraries add such methods to loggers. PyTorch warns of masks of different types in each call of an attention.
    """
    yield from (own for own in vars(logging.Logger).values() if hasattr(own, "cache_info"))
    actions = {action for action, _, category, *_ in warnings.filters if issubclass(UserWarning, category)}
    if actions.isdisjoint(("always", "all", "error")):
        yield warnings.warn


def _fake_grouped_mm(
    mode: FakeTensorMode,
    func: Any,
    one: torch.Tensor,
    other: torch.Tensor,
    offs: Any = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> Any:
    """Return what `_grouped_mm` makes of other types than bfloat16, which PyTorch refuses for fake tensors."""
    if one.dtype is other.dtype is torch.bfloat16:
        return NotImplemented
    shape = [one.shape[-2], other.shape[-1]]
    if one.dim() == other.dim():
        shape.insert(0, one.shape[0] if one.dim() == 3 else offs.shape[0])
    dtype = out_dtype or one.dtype
    aligned = 16 // dtype.itemsize
    row = -(-shape[-1] // aligned) * aligned
    strides = [shape[1] * row, row, 1] if len(shape) == 3 else [row, 1]
    return one.new_empty_strided(shape, strides, dtype=dtype)


register_op_impl(torch.ops.aten._grouped_mm.default)(_fake_grouped_mm)


# How Dynamo leads from a forward to the module that it is of, through the wrappers around it.
_WRAPPERS = r"(?:\.(?:__wrapped__|__func__|func|args\[\d+\]|__closure__\[\d+\]\.cell_contents))"
_TO_MODULE = rf"{_WRAPPERS}*(?:\.__self__)?(?:\._orig_mod)*"
_ROOT = re.compile(rf"^L\['[^']*'\](?:\[\d+\])*{_TO_MODULE}\.?")
_GIVEN = re.compile(rf"\.forward(?={_WRAPPERS}|\.__self__){_TO_MODULE}")
# And a part whose name is a number, as `torch.fx` gives them to attributes: `getattr(layers, '0')`.
_BY_NAME = re.compile(r"getattr\(([^()]*), '([^']*)'\)")
# And a part of a module whose class has a `__getattr__`, as those of diffusers have.
_PART = re.compile(r"\.__dict__\['_modules'\]\['([^']*)'\]")


def module_stack(node: fx.Node) -> list[tuple[str, str]]:
    """Return (number of the call, path below the traced module) of the modules around a node, outermost first."""
    paths = {key: _by_dots(str(entry[0])) for key, entry in (node.meta.get("nn_module_stack") or {}).items()}
    # Code that `torch.fx` made has notes of modules that it does not call, by their paths before.
    known = {key: path for key, path in paths.items() if path.startswith("L[")}
    return [(key, _ROOT.sub("", _GIVEN.sub("", _PART.sub(r".\1", path)))) for key, path in known.items()]


def _by_dots(path: str) -> str:
    """Write names that are numbers as others are."""
    while (found := _BY_NAME.sub(r"\1.\2", path)) != path:
        path = found
    return path


def paths_around(
    graph: fx.Graph, root: torch.nn.Module, names: Mapping[int, str | None] | None = None
) -> dict[str, str | None]:
    """Return, for each node by its name, the path of the innermost module inside `root` whose forward it was traced in.

    Dynamo counts hooks as parts of the module that they are on; they run in the forward of the module around it. `names` has,
    by `id`, what modules are called in place of their first path.
    """
    modules = reversed(list(root.named_modules(remove_duplicate=False)))
    known = {**{id(module): path for path, module in modules}, **(names or {})}
    return {node.name: _path_around(node, root, known) for node in graph.nodes}


def _path_around(node: fx.Node, root: torch.nn.Module, names: Mapping[int, str | None]) -> str | None:
    for _, path in reversed(module_stack(node)):
        module = _part(root, path)
        hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
        if id(module) in names and not any(_is_in(hook, node) for hook in hooks):
            return names[id(module)]
    return names[id(root)]


def _part(module: Any, path: str) -> torch.nn.Module:
    """Return the module at a path, which may lead through a list or a dict that a module keeps (`layers[0]`)."""
    for step in _STEP.findall(path):
        module = module[ast.literal_eval(step[1:])] if step[0] == "[" else getattr(module, step)
    return module


_STEP = re.compile(r"\[?[^.[\]]+")


# A frame, as Dynamo writes where a node was traced.
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')


def _is_in(function: Callable[..., Any], node: fx.Node) -> bool:
    """Whether a function was running when a node was traced."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    # Hooks may be objects, as those of `torch.nn.utils.weight_norm`.
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None or not node.stack_trace:
        return False
    lines = {str(line) for *_, line in code.co_lines()}
    return any(file == code.co_filename and line in lines for file, line in _FRAME.findall(node.stack_trace))


def faked(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor that stands for a real one, whose sizes are constants."""
    return mode.from_tensor(tensor, static_shapes=True)
