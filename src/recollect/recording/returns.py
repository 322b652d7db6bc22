"""When the models of a step return, and so when what they returned in the last step is replaced."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from recollect._torch_private import current_autograd_node, uncompiled
from recollect.engine.subclasses import strided_tensors
from recollect.plans.paths import paths_above
from recollect.profile import events
from recollect.profile.events import Event
from recollect.recording.find_units import NOT_CALLED
from recollect.recording.step_recorder import StepRecorder
from recollect.recording.trackers import TrackedOther, TrackedValue, tracker_of
from recollect.tensors import tensors_held

_Caller: TypeAlias = tuple[nn.Module, bool]
"""A module that is called, and whether gradients are on."""


class Returns:
    """Notes when the outermost calls of a model, or of the models in a list, return.

    Calls with gradients and those without are different: of a model that is its own teacher, either output is held.

    Args:
        recorder: collects what happens in the step.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._outermost: nn.Module | None = None
        # Where in the log each one returned, and from which of its calls an output is.
        self._positions: dict[_Caller, list[int]] = {}
        self._outputs: dict[Any, tuple[_Caller, int]] = {}

    @contextmanager
    def seen_by_hooks(self, model: nn.Module, unit_paths: Collection[str]) -> Iterator[None]:
        """Within the block, note the calls that begin in it."""
        with ExitStack() as stack:
            for module in entry_modules(model, unit_paths).values():
                stack.callback(module.register_forward_pre_hook(self._begin).remove)
                stack.callback(module.register_forward_hook(self._end, always_call=True).remove)
            yield

    def run(self, module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run what stands for a call of a module, and note it.

        A recording that begins in a call is told of it in this way: PyTorch looks for hooks before.
        """
        self._begin(module, args)
        output = None
        try:
            output = function(*args, **kwargs)
        finally:
            self._end(module, args, output)
        return output

    def replaced_at(self, alive: Container[Any]) -> dict[Any, int]:
        """Return where in the log an output of the last step is replaced, for each that the step leaves alive.

        Of the calls whose outputs are held, the first one's are replaced when the module returns for the first time, and so
        on: in accumulation, those of the last call by those of the first.

        Args:
            alive: what the step leaves alive.
        """
        held = {key: where for key, where in self._outputs.items() if key in alive}
        numbers = {caller: sorted({n for other, n in held.values() if other == caller}) for caller in self._positions}
        return {key: self._positions[caller][numbers[caller].index(n)] for key, (caller, n) in held.items()}

    def deaths(self) -> Iterator[Event]:
        """Yield the events that say, or would say, that an output died."""
        for key in self._outputs:
            yield (events.DIES, *key) if isinstance(key, tuple) else (events.FREE, key)

    @uncompiled
    def _begin(self, module: nn.Module, _args: Any) -> None:
        # Backward may run a module again.
        if self._outermost is None and current_autograd_node() < 0:
            self._outermost = module
            self._recorder.begin_forward()

    @uncompiled
    def _end(self, module: nn.Module, _args: Any, output: Any) -> None:
        if self._outermost is not module:
            return
        self._outermost = None
        caller = module, torch.is_grad_enabled()
        positions = self._positions.setdefault(caller, [])
        for tensor in strided_tensors(tensors_held(output)):
            tracker = tracker_of(tensor.untyped_storage())
            if isinstance(tracker, TrackedValue):
                self._outputs[tracker.call, tracker.value] = caller, len(positions)
            elif isinstance(tracker, TrackedOther):
                self._outputs[tracker.storage] = caller, len(positions)
        positions.append(len(self._recorder.events))


def entry_modules(model: nn.Module, unit_paths: Collection[str]) -> dict[str, nn.Module]:
    """Return what a training loop may call: the model and every module between it and a unit, by path.

    Nobody calls a list of modules, and nobody a model without a forward, which holds other models: those are called.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    paths = {"", *itertools.chain.from_iterable(paths_above(path) for path in unit_paths)}
    if type(model).forward is nn.Module.forward:
        paths.update(path for path, _ in model.named_children())
    return {path: modules[path] for path in sorted(paths) if not isinstance(modules[path], NOT_CALLED)}
