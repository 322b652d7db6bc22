"""The replacements for a watched model's forwards: the watch itself, and below it a plan or a recorder.

In the user's loop, the watch sees the outermost calls, with gradients on, of modules that contain units.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook

from recollect._torch_memory import some_profiler_is_active
from recollect._torch_parallel import learns_shapes
from recollect._torch_private import (
    current_backward,
    num_dispatch_modes,
    transforms_are_active,
    untraced,
)
from recollect.applying import apply_own, apply_policy
from recollect.attaching.planned_step import PlannedStep
from recollect.attaching.unit_watch import UnitWatch
from recollect.byte_format import format_bytes
from recollect.engine.placed_forward import Applied, PlacedForward, placed_call, time_reruns
from recollect.engine.policy import DropAll
from recollect.engine.subclasses import strided_tensors
from recollect.measuring.stopwatch import Stopwatch
from recollect.plans.paths import unit_words
from recollect.plans.unit_plan import UnitPlan
from recollect.recording.next_step import Returns, entry_modules
from recollect.recording.step_recording import StepRecording
from recollect.tensors import tensors_held
from recollect.thread_end import at_end_of_thread
from recollect.tracebacks import lets_go
from recollect.weak_map import WeakMap

# Small inputs that the recording itself copies: much for a toy's step, negligible for any other.
_OWN_BYTES: Final = 32 << 10


class Memory:
    """The storages of tensors, as long as anything else holds them."""

    def __init__(self) -> None:
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        self._storages += (weakref.ref(tensor.untyped_storage()) for tensor in strided_tensors(list(tensors)))

    def remove(self, tensors: Iterable[torch.Tensor]) -> None:
        gone = {id(tensor.untyped_storage()) for tensor in strided_tensors(list(tensors))} if self._storages else set()
        self._storages = [ref for ref in self._storages if id(ref()) not in gone]

    @property
    def nbytes(self) -> int:
        alive = {id(storage): storage.nbytes() for ref in self._storages if (storage := ref()) is not None}
        return sum(alive.values())


class Backwards:
    """How many backwards reached a call's outputs, or what its first unit returned; and whether one built its own graph.

    Those that begin within the call, `is_running`, also count if they reach what a later unit returned.

    Attributes:
        before: what the model returned in the step before.
        beside_bytes: of that, what is in memory when the first backward comes.
    """

    def __init__(self) -> None:
        self.before = Memory()
        self.number = self.beside_bytes = 0
        self.is_running = True
        self.build_graph = False
        self._latest = -1
        self._hooks: list[weakref.ref[Any]] = []

    @property
    def is_awaited(self) -> bool:
        """Whether none has come, and the call's graph, which holds the hooks, is still there."""
        return not self.number and any(hook() is not None for hook in self._hooks)

    def count_at(self, tensor: torch.Tensor, *, only_within: bool = False) -> None:
        """Count the backwards that reach a tensor, each once; or those that begin within the call."""

        @unserializable_hook  # Without a warning where the user saves an output.
        @untraced
        def note(_gradient: Any) -> None:
            if only_within and not self.is_running:
                return
            if not self.number:
                self.beside_bytes = self.before.nbytes
            now = current_backward()
            self.number += now != self._latest
            self._latest = now
            self.build_graph |= torch.is_grad_enabled()

        self._hooks.append(weakref.ref(note))
        tensor.register_hook(note)


class Removable(Protocol):
    """Something that can be undone."""

    def remove(self) -> None: ...


class EntryForward(PlacedForward):
    """Tells a watcher of a module's outermost calls; recomputes nothing."""

    def __init__(self, module: nn.Module, path: str, watcher: Watcher) -> None:
        super().__init__(module)
        self.path = path
        self.watcher = watcher

    @placed_call
    @lets_go
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on:
            return self.forward(*args, **kwargs)
        return self.watcher.run(self.path, self.module, self._run_inner, args, kwargs)

    def _run_inner(self, *args: Any, **kwargs: Any) -> Any:
        # Looked up now, since the watcher may replace this forward, or the one below it, before a call.
        forward = self.forward if self.is_placed else self.module.forward
        return forward(*args, **kwargs)


_watchers = WeakMap[bool]()


def some_loop_records() -> bool:
    """Whether a step of any loop in this process is being recorded."""
    return any(watcher.records for watcher, _ in _watchers.items())


def abandon_open_steps() -> None:
    """Forget the steps of other loops that this thread records: an error in them, as in the loss, keeps them from ending."""
    for watcher, _ in _watchers.items():
        if watcher.records_here:
            watcher.abandon()


class Watcher:
    """State shared by the entries of one model.

    Args:
        begin: told of each outermost call before it runs: the path of the module, the module, and its arguments.
        end: told what it has returned.
        abandon: told of a call that raised, and of the end of the thread that records a step: PyTorch's modes and profiler
            must not outlive their thread.
        departs: told of the first run of a unit in a step that no plan foresees; may raise. Or of a value in one.

    Attributes:
        rehearses: asked before a call whether it belongs to no step, though gradients are on.
        is_inside: a call with gradients is running.
        backwards: the last call's backwards.
        may_be_prepared: no step has shown yet that layers did something in the first step that they do not do again.
    """

    def __init__(
        self,
        begin: Callable[[str, nn.Module, Any, Any], object],
        end: Callable[[Any], object],
        abandon: Callable[[], object],
        departs: Callable[..., object],
    ) -> None:
        self.begin = begin
        self.end = end
        self.abandon = abandon
        self.departs = departs
        self.rehearses: Callable[[], object] = _nobody
        self.backwards = Backwards()
        self._returns: Returns | None = None
        self._thread_end: weakref.finalize[[], set[None]] | None = None
        self.is_inside = False
        self.may_be_prepared = True
        _watchers[self] = True

    def forget(self) -> None:
        self.begin = self.end = self.abandon = self.departs = self.rehearses = _nobody

    def tell(self, returns: Returns | None) -> None:
        """Report all calls to a recording from now on; None: nothing is being recorded."""
        self._returns = returns
        self._thread = threading.get_ident()
        if self._thread_end is not None:
            self._thread_end.detach()
        self._thread_end = None if returns is None else at_end_of_thread(self.abandon)

    @property
    def records(self) -> bool:
        return self._returns is not None

    @property
    def records_here(self) -> bool:
        return self.records and self._thread == threading.get_ident()

    def run(self, path: str, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the replacement for a module's call; report the call if it is an outermost one."""
        if self.is_inside or not torch.is_grad_enabled() or transforms_are_active() or self.rehearses():
            return self._noted(module, function, args, kwargs)
        self.is_inside = True
        self.backwards = Backwards()
        try:
            self.begin(path, module, args, kwargs)
            self.backwards.before.remove(tensors_held((args, kwargs)))  # A state that goes on counts as an input.
            output = self._noted(module, function, args, kwargs)
        except BaseException:
            self.abandon()
            raise
        finally:
            self.is_inside = self.backwards.is_running = False
        self.end(output)
        # The loop may make a loss of its own from any of them.
        for tensor in made_in(output):
            self.backwards.count_at(tensor)
        return output

    def watch_inside(self, output: Any, only_within: bool) -> bool:
        """Count the backwards that reach what a unit returns, such as one that begins within the model; whether any can."""
        made = made_in(output)
        for tensor in made[:1]:
            self.backwards.count_at(tensor, only_within=only_within)
        return bool(made)

    def _noted(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._returns is None:
            return function(*args, **kwargs)
        return self._returns.run(module, function, args, kwargs)


def made_in(output: Any) -> list[torch.Tensor]:
    """Return the tensors in a module's output that backward may reach."""
    return [tensor for tensor in tensors_held(output) if tensor.requires_grad and not tensor.is_leaf]


def _nobody(*_: object) -> None:
    """Does nothing."""


class State(Enum):
    """The forwards in place."""

    IDLE = "nothing"
    RECORDING = "the recorder"
    PLANNED = "a plan"
    LEAN = "what drops all that can be dropped"


class Placement:
    """Puts forwards in place, and removes them."""

    def __init__(self, model: nn.Module, watcher: Watcher) -> None:
        self.model = model
        self.active: PlannedStep | None = None
        self._watcher = watcher
        watcher.rehearses = self._rehearses
        self._applied: Applied | None = None
        # Steps may alternate: what was in place has traces, and has seen which modules it need not watch.
        self._known: list[tuple[weakref.ref[PlannedStep], Applied]] = []

    def begin(self, unit_paths: Sequence[str]) -> None:
        apply_policy(self.model, unit_paths, DropAll()).remove()  # Only to check whether this is possible.
        self.unit_paths = list(unit_paths)
        self.units = UnitWatch(self.model, unit_paths, self._watcher)
        modules = entry_modules(self.model, unit_paths).items()
        entries = [EntryForward(entry, path, self._watcher) for path, entry in modules]
        self._watching = Applied(self.model, [*self.units.units, *entries], None)
        self._watching.removal = "attached.remove()"

    def suspended(self) -> AbstractContextManager[None]:
        """Remove the watch during a with-block, to put plans below it."""
        return self._watching.suspended()

    def put(self, chosen: PlannedStep | None) -> None:
        if chosen is None or chosen is not self.active:
            self._replace(None if chosen is None else lambda: self._applied_plan(chosen))
        self.active = chosen

    def _applied_plan(self, chosen: PlannedStep) -> Applied:
        if known := next((applied for step, applied in self._known if step() is chosen), None):
            known._put()
            return known
        # Weakly, as a graph that is kept holds the tape.
        watcher = weakref.ref(self._watcher)
        units, is_first = chosen.plan.units, not chosen.number

        def departs(path: str, value: str) -> None:
            if (its := watcher()) is None:
                return
            where = f"{value!r} in {unit_words(path)}"
            if value not in units[path].actions:
                its.departs(f"computed {where}, which its plan does not name", unnamed=(path, value))
            elif its.may_be_prepared and is_first:
                its.may_be_prepared = False
                its.departs(f"did not compute {where}", more_bytes=0)

        applied = apply_own(self.model, chosen.plan)
        for forward in applied._forwards:
            forward.tell_departures(departs)
        if not chosen.plan.predicted_host_bytes:  # Else it holds host memory.
            for step, known in self._known:
                if step() is None:
                    known.remove()
            self._known = [entry for entry in self._known if entry[0]()] + [(weakref.ref(chosen), applied)]
        return applied

    def put_leanest(self, lean_units: Mapping[str, UnitPlan] | None) -> None:
        """Put in place a policy that drops everything except values that a plan keeps by name."""
        self._replace(lambda: apply_policy(self.model, self.unit_paths, DropAll(but=lean_units)))
        self.active = None

    def _rehearses(self) -> bool:
        """Whether a stage of a pipeline calls the model between two steps, to learn shapes; make it lean where no plan is."""
        if self.units.is_on or not learns_shapes():
            return False
        if self.active is None:
            self.put_leanest(None)
        return True

    def time_reruns(self, watch: Stopwatch | None) -> None:
        """Make a watch count what the plan in place reruns in backward, or stop it."""
        if self._applied is not None:
            time_reruns(self._applied, watch)

    def remove(self) -> None:
        self.put(None)
        for _, applied in self._known:
            applied.remove()
        self._known.clear()
        self._watching.remove()
        self.units.units.clear()

    def _replace(self, make: Callable[[], Applied] | None) -> None:
        with self.suspended():
            if self._applied in [known for _, known in self._known]:
                self._applied._take_off()
            elif self._applied is not None:
                self._applied.remove()
            self._applied = None if make is None else make()


def obstacle(device: torch.device) -> str:
    """Return why a step cannot be recorded now, in words; "" if it can."""
    if some_profiler_is_active() and device.type == "cpu":
        return "a profiler is active, beside which a step cannot be recorded: running at the leanest until it ends"
    if num_dispatch_modes():
        return "a dispatch mode is active around the model: running at the leanest until it ends"
    if current_backward() >= 0:
        # PyTorch restores the thread's state after each node, and with it would switch off the recorder's modes.
        return (
            "the model is called within backward, as by torch.utils.checkpoint with use_reentrant=True or a hook of a tensor "
            "(GradCache), where no step can be recorded: running at the leanest. Pass use_reentrant=False, or call the model "
            "outside of backward"
        )
    return ""


def excess_of(recording: StepRecording, planned: PlannedStep) -> str:
    """Return the message about a step that exceeded the budget while it was recorded; "" if it did not."""
    peak_bytes = recording.peak_bytes
    if peak_bytes <= max(planned.budget_bytes, planned.peak_bytes) + _OWN_BYTES:
        return ""
    return (
        f"while it was recorded, a step of {planned.calls[0]} needed {format_bytes(peak_bytes)}, "
        f"{format_bytes(peak_bytes - planned.budget_bytes)} more than the budget of {format_bytes(planned.budget_bytes)}, as "
        f"nothing leaner was known for it; from now on steps like it need {format_bytes(planned.peak_bytes)}"
    )
