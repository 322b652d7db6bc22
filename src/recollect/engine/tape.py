"""Implements the tape: sees each op of a unit's forward, drops values as the plan says, and recomputes them for backward.

Two hooks do the work while a unit runs forward. `TapeMode` sees each ATen op below autograd and remembers how each
result to be dropped was made. The saved-tensor hooks then hand autograd a `TapeValue` for every tensor that it wants to
save: one that holds the tensor, or one that only knows how to make it.

NOTE [ Rules of the tape ]
1. Identity. A tensor is recognised by its storage, layout and version; anything not recognised is kept.
2. Mutation. An in-place op makes a new value on the same storage; whatever holds the old content first gets a private
   copy. A change out of its sight raises `MutatedValueError` at replay, if it raised the version or
   if the content is compared (`content.py`): not for large tensors written to through `.data`.
3. Randomness. A random op is kept, or runs again from its original generator state, in its own generator (`draws.py`),
   and other threads may draw meanwhile.
4. Choices (`topk`, `sort`, ...) and data-dependent shapes are kept (`facts.py`). So are collectives, unless they make new
   tensors and the plan names them: a recipe then runs the collective again and waits for it, in all ranks alike.
5. Tensor subclasses desugar first; their inner tensors are recorded.
6. A leaf whose storage was freed (FSDP2 resharding) must be back before the unit's backward; otherwise it is an error.
7. Results from behind the dispatcher's back are kept: buffers filled by foreign kernels, and whatever runs with gradients
   switched off, such as compiled regions, which may write to results of ops unseen. Not so PyTorch's own Functions
   around collectives, whose ops are recorded like any others. A call of a custom autograd Function
   is one op, whose recipe runs all of its forward again; where results may differ, they are kept
   (`function_run.py`).
8. The only state is the running unit's frame, one per thread: any number of forwards may be in flight.
9. Once a module has run twice, it runs out of the mode's sight if the plan drops none of its values and it writes
   nothing in place: the tape keeps the results of ops it does not see. If it saves nothing dropped, it also runs
   without the hooks. Should it save such a value later, that is kept; should it write to a held tensor, rule 2 applies.
10. A backward that keeps its graph computes on copies of the recipes, which stay for the next one (`replay.py`).
11. Ops run again under the settings and the user's dispatch modes of forward (`opcall.py`).
12. An offloaded value is a stored value whose recipe copies it back (`offload/`). It is copied out as soon as its op has run;
    a write that the tape sees waits for the copy. The times when it leaves and comes back depend only on units.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from recollect._torch_functions import CheckpointHooks, outside_vmap, watched_functions
from recollect._torch_private import (
    at_end_of_backward,
    below_autograd,
    current_backward,
    disable_autocast,
    dispatch_mode_stack,
    fake_mode,
    is_capturing,
    keeps_graph,
    of_no_key,
    owner_of_hook,
    pop_dispatch_mode,
    pop_saved_tensors_hooks,
    push_dispatch_mode,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
    untraced,
)
from recollect.engine.captured import not_warmed_up
from recollect.engine.function_mode import FunctionMode
from recollect.engine.function_run import may_run_again
from recollect.engine.opcall import Replaying
from recollect.engine.policy import PlanPolicy, TapeState
from recollect.engine.self_check import SwitchedOff, switched_off
from recollect.engine.subclasses import strided_tensors
from recollect.engine.tape_mode import TapeMode
from recollect.engine.unseen_writes import Comparison
from recollect.engine.values import TapeValue, forget_record, laid_out, record_of, watch
from recollect.errors import UnsupportedModelError
from recollect.plans.action import Action
from recollect.plans.paths import unit_words
from recollect.replay import KeptPass, Recipes
from recollect.tensors import tensors_held
from recollect.weak_map import WeakMap


class _LastStep(threading.local):
    """State that units of any tape leave on this thread.

    Attributes:
        went_backward: on any thread, since the last forward of a unit; backward has its own threads on CUDA.
        survivors: storages with a recipe that outlived the unit which made them.
    """

    went_backward = False

    def __init__(self) -> None:
        self.survivors: list[weakref.ref[torch.UntypedStorage]] = []


_last_step = _LastStep()

# Modules, and code of functions, compared while everything possible was dropped: with outputs of units, or without.
_compared = WeakMap[set[bool]]()


def forget_last_step() -> None:
    """Forget the recipes of values that a step left behind, such as a cache of keys and values: they hold the step's inputs."""
    _LastStep.went_backward = False
    for reference in _last_step.survivors:
        storage = reference()
        if storage is not None:
            forget_record(storage)
    _last_step.survivors = []


def _put_back(mode: TapeMode, hooks: CheckpointHooks) -> None:
    """Have both on top of their stacks once, whatever the mode has noted: an interrupt may come between a change and its note.

    Before torch 2.13, PyTorch's checkpoint takes its own off only when the error's traceback goes. They go below ours.
    """
    modes = of_no_key(dispatch_mode_stack())
    from_ours_on = modes[modes.index(mode) :] if mode in modes else []
    for one in reversed(from_ours_on):
        pop_dispatch_mode(one)
    for one in [*(other for other in from_ours_on if other is not mode), mode]:
        push_dispatch_mode(one)
    others: list[tuple[Any, Any]] = []
    while not pop_saved_tensors_hooks(mode) and (top := top_saved_tensors_hooks()) is not None:
        pop_saved_tensors_hooks(owner_of_hook(top[0]))
        others.append(top)
    while pop_saved_tensors_hooks(mode):
        pass
    for pair in [*reversed(others), (hooks.pack_hook, hooks.unpack_hook)]:
        push_saved_tensors_hooks(*pair)


class Tape(TapeState):
    """Runs the units of one applied model, and knows which one is running on this thread."""

    @property
    def mode(self) -> TapeMode | None:
        return getattr(self._local, "mode", None)

    def new_mode(self, unit_path: str) -> FunctionMode:
        return FunctionMode(self, unit_path)

    def tell_departures(self, departs: Callable[[str, str], object]) -> None:
        if isinstance(self.policy, PlanPolicy):
            self.policy.departs = departs

    def run(self, unit_path: str, forward: Any, args: Any, kwargs: Any) -> Any:
        if SwitchedOff.PLANS in switched_off():
            return forward(*args, **kwargs)
        outer = self.mode
        with self._watching(unit_path) if outer is None else _inside(outer, unit_path) as mode:
            if outer is None and self._must_compare(forward):
                if mode.is_captured:
                    raise not_warmed_up(unit_words(unit_path))
                mode.comparison = Comparison(self.overwritten)
            output = mode.run_module("", forward, args, kwargs)
            if outer is None and mode.comparison is not None:
                mode.comparison.end()
                self._note_compared(forward)
            call, place = mode.call, mode.place
        if SwitchedOff.FUNCTIONS in switched_off():
            _check_no_functions(unit_path, args, kwargs, output)
        if self.policy.output_action(unit_path) is Action.KEEP:
            self._hold_outputs(unit_path, output, call)
        elif unit_path in self.overwritten:
            for tensor in strided_tensors(output):
                forget_record(tensor.untyped_storage())
        if place is not None:
            place[0].end_call(place[1])
        return output

    def is_compared(self, runs: Any) -> bool:
        """Whether a module, or the code of a function, was compared when as much was dropped."""
        return self.policy.drops_outputs in (_compared.get(runs) or ())

    def _must_compare(self, forward: Any) -> bool:
        runs = _what_runs(forward)
        return self.compares and runs not in self.compared and fake_mode() is None and not self.is_compared(runs)

    def _note_compared(self, forward: Any) -> None:
        runs = _what_runs(forward)
        self.compared[runs] = True
        if self.policy.drops_outputs or not isinstance(self.policy, PlanPolicy):
            _compared.setdefault(runs, set()).add(self.policy.drops_outputs)

    @contextmanager
    def _watching(self, unit_path: str) -> Iterator[TapeMode]:
        if _last_step.went_backward:
            forget_last_step()
        mode = self.new_mode(unit_path)
        hooks = CheckpointHooks(mode.pack_marked if self.may_offload else mode.pack, self.unpack)
        functions = nullcontext() if SwitchedOff.FUNCTIONS in switched_off() else watched_functions(mode.watch_function)
        try:
            self._local.mode = mode
            with hooks, mode, functions:
                try:
                    yield mode
                except BaseException:
                    _put_back(mode, hooks)
                    raise
            if mode.unsettled:
                self.learn(unit_path, mode.counts, mode.unsettled)
        except BaseException:
            if mode.place is not None:
                mode.place[0].timetable.end()
            raise
        finally:
            self._local.mode = None
            if mode.place is not None:
                mode.place[0].is_running = False
            _last_step.survivors += [storage for storage in mode.dropped if storage() is not None]

    def _hold_outputs(self, unit_path: str, output: Any, call: Recipes) -> None:
        """Keep a unit's output: from here on, the readers of the storages that this call made hold them.

        Values passed on from a different unit follow that unit's plan.
        """
        for tensor in strided_tensors(output):
            storage = tensor.untyped_storage()
            record = record_of(storage)
            if record is None or record.call is not call or record.is_stored:
                continue
            is_current, layout, base = record.is_current(tensor._version), record.layout, weakref.ref(record.base)
            forget_record(storage)
            del record
            # Alive if something other than the record needs it.
            value = base()
            if is_current and value is not None and value.tensor is None:
                held, version = self.alias(tensor, True)
                with torch.no_grad():
                    value.hold(laid_out(held, layout), version)
                value.label = (unit_path, "", "return")
                watch(value, storage)

    @untraced
    def unpack(self, packed: Any) -> torch.Tensor:
        _LastStep.went_backward = True
        if type(packed) is not TapeValue:
            return packed.rebuild(self.unpack)
        value: TapeValue = packed
        if value.tensor is not None:
            return value.fetch_saved()
        kept = self._kept_pass() if asks_again() else None
        # As ops ran in forward: below autograd and autocast, with gradients switched on, which some kernels check.
        reruns = nullcontext() if self.reruns is None or is_capturing() else self.reruns.running()
        with outside_vmap(), reruns, Replaying(), torch.enable_grad(), below_autograd(), disable_autocast():
            tensor: torch.Tensor = value.get() if kept is None else kept.get(value)
        return tensor

    def _kept_pass(self) -> KeptPass:
        number = current_backward()
        known = self._passes.get(number)
        found = None if known is None else known()
        if found is None:
            found = KeptPass()
            self._passes = {number: weakref.ref(found), **{n: r for n, r in self._passes.items() if r() is not None}}
            at_end_of_backward(found.end_all)
        return found


def _what_runs(forward: Any) -> Any:
    """Return the module that runs, by itself or its forward, else a function's code: that of a lambda is the same each time."""
    while isinstance(forward, functools.partial):
        forward = forward.func
    module = forward if isinstance(forward, torch.nn.Module) else getattr(forward, "__self__", None)
    return module if isinstance(module, torch.nn.Module) else getattr(forward, "__code__", type(forward))


def asks_again() -> bool:
    """Whether a later backward will ask for the same values, and this one holds them only while it runs.

    One that builds its own graph (`create_graph`) holds them there, so recomputing them would gain nothing.
    """
    return keeps_graph() and not torch.is_grad_enabled()


@contextmanager
def _inside(mode: TapeMode, unit_path: str) -> Iterator[TapeMode]:
    """Run a unit within an outer one, with its ops under its own names."""
    outer = mode.unit_path, mode.counts, mode.call, mode.place
    mode.unit_path, mode.counts, mode.call, mode.place = unit_path, {}, Recipes(), mode.tape.next_place()
    try:
        yield mode
        if mode.unsettled:
            mode.tape.learn(unit_path, mode.counts, mode.unsettled)
    finally:
        mode.unit_path, mode.counts, mode.call, mode.place = outer


def _check_no_functions(unit_path: str, args: Any, kwargs: Any, output: Any) -> None:
    """Raise an error if a unit called a custom autograd Function between these arguments and its output.

    For versions of PyTorch that do not show such calls. Their ops were seen like any others, but not possible unseen writes to
    an argument, which the tape may have dropped.
    """
    seen: set[Any] = {tensor.grad_fn for tensor in tensors_held((args, kwargs))} | {None}
    pending: list[Any] = [tensor.grad_fn for tensor in tensors_held(output)]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        function: Any = getattr(node, "_forward_cls", None)
        if isinstance(node, torch.autograd.function.BackwardCFunction) and may_run_again(function):
            raise UnsupportedModelError(
                f"{unit_words(unit_path)} calls the autograd Function {function.__name__}, and in torch {torch.__version__} "
                "recollect does not see such calls, so a plan could give wrong gradients. Install a version of PyTorch "
                f"that recollect is tested with, or leave {unit_words(unit_path)} out of the plan."
            )
        pending += [following for following, _ in node.next_functions]
