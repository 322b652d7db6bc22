"""Replaces the `forward` of module instances while a plan is applied, and restores it afterwards."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, TypeVar

import torch
from torch import nn

from recollect._torch_private import compiled_function, transforms_are_active, uncompiled, without_compiler
from recollect.arguments import check_kind
from recollect.engine.offload.flight import HostUse
from recollect.errors import ArgumentError, UnknownNameError, UnsupportedModelError
from recollect.measuring.stopwatch import Stopwatch
from recollect.plans.paths import paths_above
from recollect.plans.plan import Plan
from recollect.weak_map import WeakMap

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

_OF_MODULES: Final = vars(nn.modules.module)
_Handle = TypeVar("_Handle", bound="Handle")


def forward_of_user(module: Any) -> Any:
    """Return the forward that the user has put on a module itself; None if there is none, or one of ours."""
    forward = vars(module).get("forward")
    return None if isinstance(forward, PlacedForward) else forward


def forward_name(forward: Any) -> str:
    return str(getattr(forward, "__qualname__", type(forward).__name__))


def placed_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function the `__call__` of a placed forward, which copies of its module leave: they would run on its weights."""

    @uncompiled
    @functools.wraps(function)
    def call(self: PlacedForward, *args: Any, **kwargs: Any) -> Any:
        called = _called_module()
        if called is not self.module and isinstance(called, nn.Module) and _is_copied(called):
            _leave_copy(called)
            return called.forward(*args, **kwargs)
        try:
            return function(self, *args, **kwargs)
        finally:
            del self, called, args, kwargs  # A kept error would hold them.

    return call


def _called_module() -> Any:
    """Return the module whose forward PyTorch calls, two frames up; None if it is not PyTorch that calls."""
    frame = sys._getframe(2)
    if frame.f_globals is not _OF_MODULES:
        return None
    found = frame.f_locals
    called = found.get("self")
    if type(found) is dict:
        found.clear()  # Up to Python 3.12 the frame keeps this copy, and an error that is kept the frame.
    return called


def _is_copied(module: nn.Module) -> bool:
    """Whether attributes were copied, our forward among them; code may also put it on a wrapper, or on a planned module."""
    forward, made_once = vars(module).get("forward"), "_non_persistent_buffers_set"
    if not isinstance(forward, PlacedForward) or (copied := forward.module) is module:
        return False
    is_planned = any(one.module is module for one, _ in PlacedForward.placed.items())
    return vars(module).get(made_once) is vars(copied)[made_once] or (type(module) is type(copied) and not is_planned)


def _leave_copy(copied: nn.Module) -> None:
    """Restore the forwards of a copy, and of all modules in it."""
    for module in filter(_is_copied, copied.modules()):
        forward, had_own_forward = vars(module)["forward"], True
        while isinstance(forward, PlacedForward):
            had_own_forward, forward = forward.had_own_forward, forward.forward
        if had_own_forward:
            vars(module)["forward"] = forward
        else:
            del vars(module)["forward"]


class PlacedForward:
    """Stands in for a module's `forward`; copied and pickled as what it stands for, without the plan."""

    applied: Applied
    placed: ClassVar[WeakMap[bool]] = WeakMap()  # All that are in place, on any model.

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.is_on = False
        self.is_placed = False
        self.has_looked = False
        self._read_forward()
        # Do not copy attributes: a different placed forward's would become this one's own.
        functools.update_wrapper(self, self.forward, updated=())  # type: ignore[arg-type]

    def _read_forward(self) -> None:
        self.had_own_forward = "forward" in vars(self.module)
        self._forward: Callable[..., Any] = self.module.forward
        # What a scripted module's class has as its forward cannot be read, nor replaced.
        self._follows_class = not self.had_own_forward and not isinstance(self.module, torch.jit.ScriptModule)
        self._of_class = type(self.module).forward if self._follows_class else None

    @property
    def forward(self) -> Callable[..., Any]:
        """What this stands in for: the module's own forward, or that of its class, which may be replaced at any time."""
        if self._follows_class and (of_class := type(self.module).forward) is not self._of_class:
            static = inspect.getattr_static(type(self.module), "forward")
            is_bound = hasattr(type(static), "__get__")  # Built-in functions are not.
            self._of_class, self._forward = of_class, static.__get__(self.module) if is_bound else static
        return self._forward

    def host_use(self) -> HostUse | None:
        """The cost of offloaded values so far; None if there are none here."""
        return None

    def time_reruns(self, watch: Stopwatch | None) -> None:
        """Make a watch count what the tape reruns in backward, or stop it; nothing to do without a tape."""

    def tell_departures(self, departs: Callable[[str, str], object]) -> None:
        """Tell a function of unit and value if the plan does not name it; nothing to do without a tape."""

    def recomputes(self) -> bool:
        """Whether the plan is to be obeyed now.

        Without gradients there is nothing to recompute. Under `torch.func` and forward-mode differentiation a tensor may have
        no storage, and saved-tensor hooks are refused.
        """
        return self.is_on and torch.is_grad_enabled() and not transforms_are_active()

    def begin(self, micro_batch: int) -> None:
        """Learn which micro-batch is next; nothing to do for one plan."""

    @property
    def __code__(self) -> CodeType:
        """That of the module's forward: `torch.export` reads it."""
        return self.forward.__code__

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.had_own_forward:
            return getattr, (self.module, "forward")  # A bound method is pickled by its function's name.
        return operator.getitem, ((self.forward,), 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of what it stands for; if that is of the class, the module's copy loses it again with the memo.

        Else that copy would hold itself, and live until a garbage collection.
        """
        copied = copy.deepcopy(self.forward, memo)
        owner = None if self.had_own_forward else getattr(copied, "__self__", None)
        if isinstance(owner, nn.Module):
            end = set[None]()
            memo[id(end)] = end
            # All of it C: code in a callback would lose an interrupt of the program.
            callback = weakref.ref(end, functools.partial(vars(owner).pop, "forward"))
            memo[id(callback)] = callback
        return copied

    def put(self) -> None:
        self.is_on = True
        self.placed[self] = True
        if not self.is_placed:
            # Read it now: a new forward may have been placed since this object was made.
            self._read_forward()
            vars(self.module)["forward"] = self
            self.is_placed = True

    def take_off(self) -> None:
        self.is_on = False
        self.placed.discard(self)
        if vars(self.module).get("forward") is not self:
            return  # A later forward wraps this one: stay in place, switched off, and pass calls through.
        self.is_placed = False
        if self.had_own_forward:
            vars(self.module)["forward"] = self.forward
        else:
            del vars(self.module)["forward"]
        if isinstance(self.forward, PlacedForward) and self.forward not in self.placed:
            self.forward.take_off()  # It was to be taken off while this one wrapped it.


class Handle:
    """Something in place on a model of this process, until `remove()` or the end of a with-block."""

    remove: Callable[[], None]
    is_removed = False

    def __enter__(self: _Handle) -> _Handle:
        if self.is_removed:
            raise ArgumentError(
                f"with {self!r}: it was removed, and the block would run without a plan. Apply the plan, or attach, once more."
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __reduce__(self) -> NoReturn:
        raise ArgumentError(
            f"cannot copy or pickle {self!r}: it belongs to a model in this process. Save its plan, plan.save(path), and pass "
            "that on: recollect.apply(model, recollect.Plan.load(path))."
        )


class Applied(Handle):
    """A plan applied to a model. `remove()`, or the end of a with-block, removes it.

    Example:
        >>> import recollect
        >>> from torch import nn
        >>> plan = recollect.Plan(units={})
        >>> with recollect.apply(nn.Linear(2, 2), plan) as applied:
        ...     applied.plan is plan
        True
    """

    removal = "for applied in recollect.applied_to(model): applied.remove()"
    """How users remove it, in errors."""

    def __init__(self, model: nn.Module, forwards: Iterable[PlacedForward], plan: Plan | None) -> None:
        self.model = model
        self.plan = plan
        self._forwards = list(forwards)
        for forward in self._forwards:
            forward.applied = self
        self._put()

    def _put(self) -> None:
        for forward in self._forwards:
            forward.put()

    def _take_off(self) -> None:
        for forward in reversed(self._forwards):
            forward.take_off()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the plan for the duration of a with-block."""
        self._take_off()
        try:
            yield
        finally:
            self._put()

    @property
    def host_use(self) -> HostUse | None:
        """The cost of offloaded values so far: host memory, and waiting for copies; None if the plan offloads nothing.

        Example:
            >>> import recollect
            >>> from torch import nn
            >>> print(recollect.apply(nn.Linear(2, 2), recollect.Plan({})).host_use)
            None
        """
        return next((use for use in (forward.host_use() for forward in self._forwards) if use is not None), None)

    def begin(self, micro_batch: int = 0) -> None:
        """Take the plan of this micro-batch for the next forward, if each has its own plan.

        For your own loops, after a step that failed halfway; otherwise the first plan follows the last automatically.

        Args:
            micro_batch: its number in the step, from 0.

        Raises:
            ConfigError: it has no plan.

        Example:
            >>> import recollect
            >>> from torch import nn
            >>> applied = recollect.apply(nn.Linear(2, 2), [recollect.Plan({}), recollect.Plan({})])
            >>> applied.begin(1)
        """
        for forward in self._forwards:
            forward.begin(micro_batch)

    def follow(self, stage: PipelineStage) -> None:
        """Take the number of each micro-batch from a stage of `torch.distributed.pipelining`.

        Before its first step such a stage runs an extra forward to learn shapes, which must not take the first plan.

        Args:
            stage: made of the model. With one plan for all micro-batches there is nothing to follow.

        Raises:
            ArgumentError: it is not such a stage.

        Example:
            >>> import recollect, torch
            >>> from torch import nn
            >>> import torch.distributed as dist
            >>> from torch.distributed.pipelining import PipelineStage
            >>> from recollect.errors import ArgumentError
            >>> applied = recollect.apply(nn.Linear(2, 2), [recollect.Plan({}), recollect.Plan({})])
            >>> try:
            ...     applied.follow(nn.Linear(2, 2))
            ... except ArgumentError as error:
            ...     print(str(error)[:62])
            recollect.Applied.follow(stage): got an object of class Linear
        """
        from torch.distributed.pipelining import PipelineStage  # Here: it takes a second to import, and few need it.

        check_kind("Applied.follow(stage)", "stage", stage, PipelineStage, "torch.distributed.pipelining.PipelineStage")
        run = stage.forward_one_chunk

        def run_in_turn(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            self.begin(micro_batch)
            return run(micro_batch, *args, **kwargs)

        vars(stage)["forward_one_chunk"] = run_in_turn

    def remove(self) -> None:
        """Restore every module's own forward; do nothing the second time."""
        self.is_removed = True
        self._take_off()
        self._forwards = []

    def __repr__(self) -> str:
        state = "removed from" if self.is_removed else "applied to"
        return f"<plan {state} {type(self.model).__name__}>"


def time_reruns(applied: Applied, watch: Stopwatch | None) -> None:
    for forward in applied._forwards:
        forward.time_reruns(watch)


def unit_module(model: nn.Module, path: str) -> nn.Module:
    return unit_modules(model, [path])[path]


def unit_modules(model: nn.Module, paths: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules at paths; raise an error if a plan cannot have one of them as a unit."""
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    return {path: _checked(model, path, modules) for path in paths}


def _checked(model: nn.Module, path: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    if path not in modules:
        named = next((name for name in modules if _without_wrappers(name) == _without_wrappers(path)), "")
        reason = named and f"It has {named!r}: torch.compile(module) wraps it, while module.compile() keeps names."
        raise UnknownNameError(kind="unit", name=path, where=type(model).__name__, known=list(modules), reason=reason)
    for outer in ("", *paths_above(path)):
        if isinstance(modules[outer], torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"cannot plan {f'{path!r} of ' if path else ''}{type(model).__name__}: {f'{outer!r} in it' if outer else 'it'} "
                "was scripted or traced by torch.jit, and runs the modules that it contains without Python. "
                + (f"Name {outer!r}, or script" if outer else "Script")
                + " the layers one by one, not what contains them."
            )
    return modules[path]


def user_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's forward without plans and without the compiler."""
    while isinstance(forward, PlacedForward):
        forward = forward.forward
    return compiled_function(forward) or forward


def compiled_by_user(module: nn.Module) -> list[Any]:
    """Return the compiled version of a module, of its call or of its forward."""
    forward = vars(module).get("forward")
    while isinstance(forward, PlacedForward):
        forward = forward.forward
    found = [module if without_compiler(module) is not module else None, getattr(module, "_compiled_call_impl", None)]
    return [one for one in (*found, forward if compiled_function(forward) else None) if one is not None]


def _without_wrappers(path: str) -> list[str]:
    return [part for part in path.split(".") if part != "_orig_mod"]
