"""Records what compiled code allocates, which no mode sees, and storages of a step that were there before.

A call of compiled code is one op, whose results are known when it ends. What its backward has made shows when an op reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch

from recollect._torch_functions import FunctionWatcher, python_backward
from recollect._torch_private import current_autograd_node
from recollect.costs.op_costs import MeasuredCosts, OpRun
from recollect.engine.subclasses import strided_tensors
from recollect.profile import events
from recollect.profile.events import Key
from recollect.recording.step_recorder import StepRecorder
from recollect.recording.trackers import tracker_of


class CompiledForward:
    """Runs the forward of compiled code as one op, in place of a watcher's."""

    def __init__(self, unseen: UnseenStorages, function: type, watcher: FunctionWatcher) -> None:
        self._unseen, self._recorder, self._function, self._watcher = unseen, unseen.recorder, function, watcher
        self._given: list[torch.UntypedStorage] = []
        self._run: OpRun | None = None

    def run(self, code: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._given = [tensor.untyped_storage() for tensor in strided_tensors((args, kwargs))]
        costs, num_made = self._recorder.costs, self._recorder.num_storages
        if not isinstance(costs, MeasuredCosts):
            return self._watcher.run(code, args, kwargs)
        with costs.unseen() as run:
            output = self._watcher.run(code, args, kwargs)
        if self._recorder.num_storages == num_made:  # Else its ops are seen, as with `backend="aot_eager"`.
            self._run = run
            self._unseen.functions.add(self._function)
        return output

    def end(self, output: Any, saved: list[torch.Tensor], has_written: bool) -> None:
        self._watcher.end(output, saved, has_written)
        if self._run is None:
            return
        for tensor in strided_tensors((output, saved)):
            storage = tensor.untyped_storage()
            if tracker_of(storage) is None and not any(storage is one for one in self._given):
                self._recorder.note_opaque(storage, self._run)
                self._run = None
        if self._run is not None:
            self._recorder.note_other(self._run)


class UnseenStorages:
    """Adds what compiled backwards make to a record.

    `parameters`: returns those of the model, which DeepSpeed fills for a backward.

    Attributes:
        functions: as which compiled code runs whose ops no mode sees.
        ran_compiled: a backward of one has asked for a value that a unit saved.
    """

    def __init__(
        self, recorder: StepRecorder, device: torch.device, parameters: Callable[[], Iterable[torch.Tensor]]
    ) -> None:
        self.recorder, self._device, self._parameters = recorder, device, parameters
        self._met: set[int] = set()
        self.functions = set[type | None]()
        self.ran_compiled = False
        # Of the compiled backward that runs: its node, its costs, and where the record stood when it had all its values.
        self._node, self._place = -1, 0
        self._run: OpRun | None = None
        self._held: list[Any] = []

    def begin_compiled(self, *saved: Any) -> None:
        """Measure what the backward needs that is running if it is compiled, from its last saved value on.

        `saved`: the value that it gets, and the tape's copy. They are held: their ends would count as memory that it frees.
        """
        costs, node = self.recorder.costs, current_autograd_node()
        if python_backward() not in self.functions or not isinstance(costs, MeasuredCosts):
            return
        self.end_compiled()
        self.ran_compiled = True
        self._held += saved
        if self._run is None:
            self._run, self._node = costs.begin_unseen(), node
        else:
            costs.begin_unseen_again()
        self.recorder.event_log.settle()
        self._place = self.recorder.event_log.num_settled

    def end_compiled(self) -> None:
        """End this where a different formula or phase begins."""
        costs, log = self.recorder.costs, self.recorder.event_log
        if self._run is None or self._node == current_autograd_node() or not isinstance(costs, MeasuredCosts):
            return
        costs.end_unseen()
        since = log.settle()[self._place : log.num_settled]
        self.recorder.other_runs.append(self._run)
        log.replace_since(self._place, [(events.WORK, len(self.recorder.other_runs) - 1), *since])
        self._run = None
        self._held.clear()

    def note_present(self, tensor: torch.Tensor) -> None:
        """Log a storage that exists when the step begins, and may die in it."""
        for part in strided_tensors(tensor):
            if tracker_of(part.untyped_storage()) is None:
                self.recorder.track(part.untyped_storage(), -1)

    def note_read(self, arguments: Any) -> None:
        """Log storages that an op of backward reads first: a compiled backward has made them."""
        for tensor in strided_tensors(arguments):
            storage = tensor.untyped_storage()
            if tracker_of(storage) is not None or tensor.device != self._device or not storage.nbytes():
                continue
            if not any(own.untyped_storage() is storage for own in strided_tensors(list(self._parameters()))):
                self._met.add(self.recorder.track(storage, -1))

    def forget_present(self, gradients: Container[Key]) -> None:
        """Take out of the record what outlives the step, except gradients: it was there before."""
        recorded = self.recorder.events
        left = self._met - {event[1] for event in recorded if event[0] == events.FREE}
        left = {number for number in left if (-1, number) not in gradients}
        self.recorder.event_log.replace([one for one in recorded if one[0] != events.ALLOC or one[1] not in left])
