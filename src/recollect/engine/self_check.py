"""Checks once per process that PyTorch's private hooks still work as exactness requires.

A release may move a hook so that it is still there and does nothing, and then a plan would be silently wrong. So before the
first plan is carried out or the first step recorded, tiny programs exercise each of them, in a few milliseconds.
Features that depend on a broken one are switched off, with a warning.

Not here: hooks that raise an error by themselves when they fail (`opcall.py` reads each switch that it sets, `AllocatorTrace`
looks for its own allocation), that only cost memory or time (values that are kept), or that need a process group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from recollect._torch_functions import above_autograd, watched_functions
from recollect._torch_private import (
    NEWEST_TESTED,
    OLDEST_TESTED,
    at_end_of_backward,
    below_autograd,
    current_backward,
    disable_autocast,
    disable_torch_dispatch,
    has_saved_tensors_hooks,
    keeps_graph,
    pop_dispatch_mode,
    pop_saved_tensors_hooks,
    push_dispatch_mode,
    push_saved_tensors_hooks,
    replaced_dispatch_modes,
    transforms_are_active,
)
from recollect.engine.draws import first_run
from recollect.engine.facts import OpMode, facts_of
from recollect.engine.values import alias_in_hook, alias_in_mode, attach_record
from recollect.errors import RecordError, TorchVersionWarning
from recollect.warning import warn_user


class SwitchedOff(Enum):
    """Features that are switched off if a hook does not work; the warning shows the value."""

    PLANS = "no plan is carried out: all is kept, and no step can be recorded"
    RANDOM_OPS = "results of random ops are kept"
    FUNCTIONS = "a unit that calls a custom autograd Function raises an error"
    STEPPING_ASIDE = "all modules of a unit are watched, which takes time"
    SECOND_BACKWARD = "a second backward over the same graph may raise an error"


class Hook(NamedTuple):
    """A private part of PyTorch, or a public one with undocumented behaviour."""

    name: str
    holds: Callable[[], bool]
    """Whether it still does; it may also raise an error."""
    without: SwitchedOff


@functools.cache
def switched_off() -> frozenset[SwitchedOff]:
    """Return the features switched off in this process; the first time, run all checks and warn of failures."""
    broken = [hook for hook in hooks() if not _holds(hook)]
    version = torch.__version__.partition("+")[0]
    tested = f"recollect is tested with torch {OLDEST_TESTED} to {NEWEST_TESTED}"
    if broken:
        found = "; ".join(f"{hook.name} ({hook.without.value})" for hook in broken)
        warn_user(
            f"this does not hold in torch {version}, and what depends on it is switched off: {found}. Gradients stay exact. "
            f"{tested}: install one of these, or a newer recollect.",
            TorchVersionWarning,
        )
    elif _minor(version) > _minor(NEWEST_TESTED):
        warn_user(
            f"torch {version} has not been tried: {tested}. What exact gradients rest on was checked just "
            "now and holds, but peaks may differ from what is predicted. recollect.verify(model, batch, plan) tells.",
            TorchVersionWarning,
        )
    return frozenset(hook.without for hook in broken)


def check_steps_can_be_recorded() -> None:
    if SwitchedOff.PLANS in switched_off():
        raise RecordError(
            f"torch {torch.__version__} lacks what plans depend on (the TorchVersionWarning says what), so no step "
            f"can be recorded. Install torch {OLDEST_TESTED} to {NEWEST_TESTED}, or a newer recollect."
        )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _holds(hook: Hook) -> bool:
    # In a separate thread, free of the caller's modes, hooks, autocast and `no_grad`, and where a failed check leaves
    # nothing behind.
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(hook.holds)
    try:
        return found.result()
    except Exception:  # noqa: BLE001 - whatever a changed hook raises, it does not hold
        return False


def hooks() -> list[Hook]:
    return [
        Hook("calls of custom autograd Functions are seen", _functions_are_seen, SwitchedOff.FUNCTIONS),
        Hook(
            "what autograd saves is handed to hooks, and asked for in the reverse order",
            _saves_are_seen,
            SwitchedOff.PLANS,
        ),
        Hook("hooks of saved tensors step aside and come back", _hooks_step_aside, SwitchedOff.STEPPING_ASIDE),
        Hook("ops are seen by dispatch modes", _ops_are_seen, SwitchedOff.PLANS),
        Hook("dispatch modes step aside and come back", _modes_step_aside, SwitchedOff.STEPPING_ASIDE),
        Hook("dispatch modes are exchanged", _modes_are_exchanged, SwitchedOff.PLANS),
        Hook("a storage is the same object each time", _storages_are_known_again, SwitchedOff.PLANS),
        Hook("writes raise the versions of all aliases", _versions_are_raised, SwitchedOff.PLANS),
        Hook("ops run again past autograd and autocast", _ops_run_below, SwitchedOff.PLANS),
        Hook("random ops draw the same numbers again", _draws_are_repeated, SwitchedOff.RANDOM_OPS),
        Hook("transforms of torch.func and forward-mode differentiation show", _transforms_show, SwitchedOff.PLANS),
        Hook("a backward that keeps its graph shows", _kept_graphs_show, SwitchedOff.SECOND_BACKWARD),
    ]


class _Seen(OpMode):
    """Lists the ops that it sees, with their version counters."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.versions: list[tuple[int, int]] = []
        self.aliases: list[torch.Tensor] = []

    def run_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.names.append(facts_of(func).name)
        before = args[0]._version
        self.aliases += [alias_in_mode(args[0])] if facts_of(func).writes else []
        output = func(*args, **kwargs)
        self.versions.append((before, args[0]._version))
        return output


def _leaf() -> torch.Tensor:
    return torch.tensor([1.0, 2.0], device="cpu", requires_grad=True)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        ctx.save_for_backward(doubled)
        return doubled

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class _SetUpDouble(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def _bound() -> list[Callable[[torch.Tensor], torch.Tensor]]:
    functions: tuple[Any, ...] = (_Double, _SetUpDouble)
    return [function.apply for function in functions]


# Bound before watching starts, as models bind them.
_EARLY = _bound()


class _Watcher:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def watch(self, function: Any, args: Any, kwargs: Any) -> _Watcher:
        self.calls.append(function)
        return self

    def run(self, code: Any, args: Any, kwargs: Any) -> Any:
        return code(*args, **kwargs)

    def end(self, output: Any, saved: list[torch.Tensor], has_written: bool) -> None:
        self.calls.append(len(saved) == 1 and saved[0] is output and not has_written)


def _functions_are_seen() -> bool:
    watcher, x = _Watcher(), _leaf()
    with watched_functions(watcher.watch):
        for apply in (*_EARLY, *_bound()):
            apply(x)
        with torch.no_grad():
            _EARLY[0](x)
    _EARLY[0](x)
    return watcher.calls == [_Double, True, _SetUpDouble, True] * 2


def _saves_are_seen() -> bool:
    asked: list[float] = []

    def unpack(packed: float) -> torch.Tensor:
        asked.append(packed)
        return torch.full((2,), packed, device="cpu")

    x = _leaf()
    with saved_tensors_hooks(lambda tensor: 10 * float(tensor.flatten()[0]), unpack):
        y = x.square().square()
    y.sum().backward()
    return asked == [10.0, 10.0] and x.grad is not None and x.grad.tolist() == [400.0, 400.0]


class _Hooks:
    def __init__(self) -> None:
        self.num_packed = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_packed += 1
        return alias_in_hook(tensor)

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def _hooks_step_aside() -> bool:
    hooks, x = _Hooks(), _leaf()
    had_others = has_saved_tensors_hooks()
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        are_others_left = pop_saved_tensors_hooks(_Hooks()) is None
        pair = pop_saved_tensors_hooks(hooks)
        x.square()
        is_aside = hooks.num_packed == 0 and has_saved_tensors_hooks() == had_others
        push_saved_tensors_hooks(hooks.pack, hooks.unpack)
        x.square()
    return are_others_left and pair is not None and is_aside and hooks.num_packed == 1


def _ops_are_seen() -> bool:
    seen, x = _Seen(), _leaf()
    with seen:
        y = (x * 2).sin()
        with disable_torch_dispatch():
            x.detach().cos()
    return seen.names == ["mul", "sin"] and y.requires_grad


def _modes_step_aside() -> bool:
    seen, x = _Seen(), _leaf().detach()
    with _Seen(), seen:
        is_aside = pop_dispatch_mode(seen)
        is_alone = not pop_dispatch_mode(seen)
        x.sin()
        push_dispatch_mode(seen)
        x.cos()
    return is_aside and is_alone and seen.names == ["cos"]


def _modes_are_exchanged() -> bool:
    inner, outer, x = _Seen(), _Seen(), _leaf().detach()
    with outer:
        with replaced_dispatch_modes([inner]):
            x.sin()
        x.cos()
    return inner.names == ["sin"] and outer.names == ["cos"]


def _storages_are_known_again() -> bool:
    x = _leaf()
    mark: Any = object()
    attach_record((y := x * 2).untyped_storage(), mark)
    found: list[object] = []

    def pack(tensor: torch.Tensor) -> None:
        found.extend(vars(tensor.untyped_storage()).values())

    with saved_tensors_hooks(pack, lambda packed: x):
        y.square()
    found.extend(vars(y.view(2, 1).untyped_storage()).values())
    return found == [mark, mark]


def _versions_are_raised() -> bool:
    seen, x = _Seen(), (_leaf() * 1)
    in_hook = alias_in_hook(x)
    with seen:
        x.add_(1)
    # The counter rises when autograd gets control back, once, for all who share the storage.
    is_shared = [tensor._version for tensor in (x, in_hook, *seen.aliases)] == [1, 1, 1]
    return is_shared and seen.versions == [(0, 0)] and in_hook.tolist() == [2.0, 3.0] and not in_hook.requires_grad


def _ops_run_below() -> bool:
    x = _leaf()
    with torch.autocast("cpu", torch.bfloat16):
        with below_autograd(), disable_autocast(), torch.enable_grad():
            again = x @ x
            with above_autograd():
                above = x * 2
        cast = x @ x
    return not again.requires_grad and again.dtype == x.dtype and cast.dtype == torch.bfloat16 and above.requires_grad


def _draws_are_repeated() -> bool:
    shared = torch.default_generator.get_state()
    try:
        bernoulli, x = torch.ops.aten.bernoulli_.float, torch.zeros(64, device="cpu")
        first, draw = first_run(facts_of(bernoulli), bernoulli, (x.clone(), 0.5), {})
        other = torch.rand(64, device="cpu")
        state = torch.default_generator.get_state()
        second = None if draw is None else draw.again(bernoulli, (x.clone(), 0.5), {})
        is_left_alone = torch.equal(torch.default_generator.get_state(), state)
        return second is not None and torch.equal(first, second) and is_left_alone and not torch.equal(first, other)
    finally:
        torch.default_generator.set_state(shared)


def _transforms_show() -> bool:
    found = [transforms_are_active()]
    with forward_ad.dual_level():
        found.append(transforms_are_active())

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(transforms_are_active())
        return x

    torch.func.vmap(note)(_leaf().detach())
    return found == [False, True, True]


def _kept_graphs_show() -> bool:
    found: list[tuple[bool, int]] = []
    ended: list[int] = []

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        found.append((keeps_graph(), current_backward()))
        at_end_of_backward(lambda: ended.append(len(found)))
        return packed

    x = _leaf()
    with saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
        y = x.square().square().sum()
    y.backward(retain_graph=True)
    y.backward()
    numbers = [number for _, number in found]
    is_told_apart = numbers[0] == numbers[1] != numbers[2] == numbers[3] and -1 not in numbers
    return [keeps for keeps, _ in found] == [True, True, False, False] and is_told_apart and ended == [2, 2, 4, 4]
