"""Collect the ops, values and memory events of one training step.

Two modes see every op: first, inside a unit's forward, the tape's own (`recording_tape.py`), which names all values and drops
them; then, around the whole step, `StepMode` (`step_mode.py`), which measures ops. A weak reference to each storage is added to
the events when that dies (`trackers.py`), so deaths are logged exactly when they happen.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import torch

from recollect._torch_functions import python_backward
from recollect._torch_parallel import data_parallelism_runs
from recollect._torch_private import (
    at_end_of_backward,
    current_autograd_node,
    current_backward,
    fake_mode,
    tree_leaves,
)
from recollect.costs.modelled_costs import ModelledCosts
from recollect.costs.op_costs import MeasuredCosts, OpRun
from recollect.engine.facts import OpFacts, results_of
from recollect.engine.subclasses import strided_tensors
from recollect.engine.tape import asks_again
from recollect.plans.value_names import result_names
from recollect.profile import events
from recollect.profile.events import ALLOC, Event
from recollect.recording.event_log import EventLog, Mark
from recollect.recording.replicated_values import RanksWithParts
from recollect.recording.trackers import (
    Filled,
    Persistent,
    Reached,
    RecordedCall,
    RecordedOp,
    RecordedValue,
    Tracked,
    TrackedOther,
    TrackedValue,
    Trackers,
    storage_of,
    tracker_of,
)

Costs: TypeAlias = MeasuredCosts | ModelledCosts
"""Runs ops and knows their costs."""

_aten = torch.ops.aten
_ADD: Final = _aten.add.Tensor
_FILLS = {_aten.scatter_add.default, _aten.scatter.src, _aten.index_put.default, _aten.index_add.default}
_FILLS |= {_aten.masked_scatter.default, _aten.put.default, _aten.index_fill.int_Tensor}


class StepRecorder:
    """Collects what happens in one step."""

    def __init__(self, costs: Costs, device: torch.device, ranks: RanksWithParts | None, *, traces: bool) -> None:
        self.costs = costs
        self.event_log = EventLog()
        self.log = self.event_log.log
        self.trackers = Trackers(self.event_log)
        self.calls: list[RecordedCall] = []
        self.other_runs: list[OpRun] = []
        # Bytes that the step read, that existed before it, and that nobody told the recorder of: other models, inputs.
        self.read_bytes = 0
        # Whether a storage that is read is counted already: a bucket of gradients.
        self.is_counted: Callable[[torch.UntypedStorage], bool] = lambda _: False
        self.current: int | None = None
        self.pending_stem = ""
        self.is_recomputing = False
        self.has_run_backward = False
        self.num_storages = 0
        # Custom autograd Functions that gave different results when they ran again, by the keys of their costs.
        self.differing: set[Any] = set()
        # With them values may be held as parts; None if they may not.
        self.ranks = ranks
        # Calls that communicate, in forward or in backward: in one process only, they would deadlock.
        self.communicating: set[int] = set()
        self._device = device
        self._phase = self._backward_call = -1
        self.reached = Reached(self.log, self.calls, lambda: self.begin_phase(events.BACKWARD)) if traces else None
        # The running backward, if it keeps its graph; its running formula, and the values that this has asked for.
        self._kept_backward = self._peeking_node = -1
        self._peeked: list[int] = []

    @property
    def events(self) -> list[Event]:
        return self.event_log.settle()

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Within the block, leave ops out of the record."""
        outer, self.is_recomputing = self.is_recomputing, True
        try:
            yield
        finally:
            self.is_recomputing = outer

    def begin_phase(self, phase: int) -> None:
        """Log that forward, backward or the optimizer step begins, unless it is under way."""
        if phase != self._phase:
            self._phase = phase
            self._backward_call = -1
            self.has_run_backward |= phase == events.BACKWARD
            self.log(events.PHASE, phase)

    def begin_forward(self) -> bool:
        """Log that forward begins, unless backward runs a module again; return whether forward is under way."""
        if current_autograd_node() < 0:
            self.begin_phase(events.FORWARD)
        return self._phase == events.FORWARD

    def use(self, handle: int, saver: int) -> None:
        """Log that backward asks for a value that call `saver` saved."""
        self.begin_phase(events.BACKWARD)
        self._backward_call = saver
        self.calls[saver].builds_graph |= torch.is_grad_enabled()
        if not asks_again():
            self.log(events.USE, handle)
            return
        if self._kept_backward != current_backward():
            self._kept_backward = current_backward()
            at_end_of_backward(self._end_kept_backward)
        self._note_node(current_autograd_node())
        self.log(events.PEEK, handle)
        self._peeked.append(handle)

    def _note_node(self, node: int) -> None:
        """Log that formulas before this one have run, and no longer hold the values that they asked for."""
        if node != self._peeking_node:
            for handle in self._peeked:
                self.log(events.GIVE_BACK, handle)
            self._peeked, self._peeking_node = [], node

    def _end_kept_backward(self) -> None:
        self._note_node(-1)
        for call in range(len(self.calls)):
            self.log(events.LET_GO, call)
        # The next one starts from scratch.
        self._phase = self._kept_backward = -1

    def add_optimizer_step(self, step: Iterable[tuple[int, ...]]) -> None:
        """Add an optimizer step, whose storages are numbered from 0, to the recorded events."""
        added = [(code, self.num_storages + number, *rest) for code, number, *rest in step]
        self.event_log.replace([*self.events, (events.PHASE, events.OPTIMIZER), *added])

    def after_op(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, output: Any, run: OpRun) -> None:
        """Add an op of a unit's forward; of any other op, add only its cost and the storages that it makes."""
        if facts.is_collective and not data_parallelism_runs():
            in_backward = self._backward_call if current_autograd_node() >= 0 else -1
            self.communicating.add(in_backward if self.current is None else self.current)
        if facts.is_view or facts.is_lazy or facts.changes_layout_only:
            return
        if self.current is None or not self.pending_stem:
            node = current_autograd_node()
            self._note_node(node)
            if node >= 0:
                self.begin_phase(events.BACKWARD)
            elif self.current is None:
                self.note_reads((args, kwargs))
                self.keep_overwritten(facts.written_by(args, kwargs))
            self.note_other(run)
            if not self._note_sum(node, func, args, output):
                self._track_others(node, args, kwargs, output)
        elif facts.writes:
            self._note_write(self.current, facts, args, kwargs, run)
            # It may write statistics, or noise: the tape has no recipe for what it returns.
            for _, storage in _made(results_of(output), args, kwargs):
                self.note_opaque(storage)
        else:
            self._note_op(self.current, facts, args, kwargs, output, run)
            if func is torch.ops.aten._local_scalar_dense.default:
                self.log(events.WAIT, self.current)

    def _note_sum(self, node: int, func: Any, args: Any, output: Any) -> bool:
        """Add a result that is made in place, except under a dispatch mode such as this recorder's; return whether it is one.

        Formulas of autograd fill zeros of their own so, and its engine adds gradients. The engine adds, not a formula, if the
        first addend comes from a formula other than the running one, which has not used it. It would have added in place
        if the addend dies now, since then nobody else held it; but never to a view, which holds its base.
        """
        is_fill = func in _FILLS and python_backward() is None
        total, first = storage_of(output), storage_of(args[0]) if args else None
        addend = tracker_of(first)
        if node < 0 or not isinstance(addend, TrackedOther) or total is None or total is first:
            return False
        if not (addend.made == node if is_fill else func is _ADD and node not in (addend.made, addend.used)):
            return False
        sums = () if args[0]._is_view() else (addend.storage,)
        self.track(total, node, events.SUM if sums else events.ALLOC, *sums)
        return True

    def track(self, storage: torch.UntypedStorage, node: int, event: int = ALLOC, *operands: int) -> int:
        """Log a new storage from outside of the units, and track it; return its number.

        `node`: the formula of autograd that made it.
        """
        number = self.new_storage()
        self.log(event, number, *operands, storage.nbytes())
        self.trackers.attach(storage, TrackedOther(number, node))
        return number

    def new_storage(self) -> int:
        self.num_storages += 1
        return self.num_storages - 1

    def note_reads(self, arguments: Any) -> None:
        """Count tensors that forward reads and no op made: they existed before the step, and will in every step.

        Reads inside a unit or in backward do not count: those tensors may come from a kernel that no mode sees.
        """
        for tensor in strided_tensors(arguments):
            storage = tensor.untyped_storage()
            if tracker_of(storage) is None and tensor.device == self._device and tensor.dim():
                self.trackers.mark_persistent([tensor])
                if not (self.has_run_backward and self.is_counted(storage)):
                    self.read_bytes += storage.nbytes()

    def note_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Treat the tensors that parameters hold as theirs, though the step made them: FSDP2 has gathered them."""
        for parameter in strided_tensors(list(parameters)):
            storage = parameter.untyped_storage()
            tracker = tracker_of(storage)
            if isinstance(tracker, TrackedOther):
                self.trackers.attach(storage, Filled(self.log, tracker.hand_over()))

    def note_gathered(self, parameters: Iterable[torch.Tensor]) -> None:
        """Log the storages of parameters that are not always there: FSDP2 gathered them just before the step."""
        for parameter in strided_tensors(list(parameters)):
            storage = parameter.untyped_storage()
            if tracker_of(storage) is None and storage.nbytes():
                self.note_resize(storage)

    def note_resize(self, storage: torch.UntypedStorage) -> None:
        """Log that the owner of a storage has filled or emptied it."""
        tracker = tracker_of(storage)
        # The storages of fake tensors say that they are on meta, whatever their tensors say.
        is_here = storage.device == self._device or (storage.device.type == "meta" and fake_mode() is not None)
        if self.event_log.is_over or isinstance(tracker, (TrackedValue, Persistent)) or not is_here:
            return
        if not isinstance(tracker, Filled):
            tracker = Filled(self.log, -1 if tracker is None else tracker.hand_over())
            self.trackers.attach(storage, tracker)
        if storage.nbytes():
            tracker.fill(self.new_storage(), storage.nbytes())
        else:
            tracker.empty()

    def note_other(self, run: OpRun) -> None:
        self.other_runs.append(run)
        self.log(events.WORK, len(self.other_runs) - 1)

    def value_index(self, storage: torch.UntypedStorage) -> int | None:
        """Return the index, in the current call, of the value that a storage holds now; None if it holds none."""
        tracker = tracker_of(storage)
        if self.current is None or not isinstance(tracker, Tracked):
            return None
        if tracker.call == self.current:
            return tracker.value
        nbytes = storage.nbytes() if tracker.call < 0 else self.calls[tracker.call].values[tracker.value].nbytes
        return self.calls[self.current].input(tracker.key, nbytes)

    def keep(self, tensors: Iterable[torch.Tensor], *, stays: bool = True) -> None:
        """Have plans keep values that the tape is about to forget; if they do not stay in place, only their recipes."""
        for tracker in map(tracker_of, map(storage_of, tensors)):
            if isinstance(tracker, TrackedValue):
                value = self.calls[tracker.call].values[tracker.value]
                value.must_keep = True
                value.stays |= stays

    def keep_overwritten(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have plans keep what is written to, unknown to recipes, and what is made of it, whose recipe would hold a copy."""
        for tensor in tensors:
            self.keep([tensor])
            for index, call in enumerate(self.calls):
                if (read := call.value_of(tensor, index)) < 0:
                    continue
                for value in (value for op in call.ops if read in op.inputs for value in op.outputs):
                    call.values[value].must_keep = True

    def _note_op(self, index: int, facts: OpFacts, args: Any, kwargs: Any, output: Any, run: OpRun) -> None:
        call = self.calls[index]
        fresh = list(_made(results_of(output), args, kwargs))
        if not fresh:
            self.note_other(run)
            return
        arguments = tree_leaves((args, kwargs))[facts.ignores_first(args, kwargs) :]
        inputs = self._inputs(map(storage_of, arguments))
        names = result_names(self.pending_stem, facts.num_returns)
        first = len(call.values)
        for position, storage in fresh:
            # In a list, the first one has the name by which a plan is asked for all.
            further = f"{self.pending_stem}.{position}" if position > fresh[0][0] else self.pending_stem
            name = names[position] if len(names) > 1 else further
            stays = facts.creates is not None
            call.values.append(RecordedValue(name, storage.nbytes(), producer=len(call.ops), stays=stays))
            self.trackers.attach(storage, TrackedValue(index, len(call.values) - 1))
        outputs = tuple(range(first, len(call.values)))
        call.ops.append(RecordedOp(self.pending_stem, inputs, outputs, run))
        self.log(events.OP, index, len(call.ops) - 1)

    def note_opaque(self, storage: torch.UntypedStorage, run: OpRun | None = None) -> TrackedValue | None:
        """Add a value that no op computed: the result of an unseen kernel, which can only be kept."""
        if self.current is None:
            return None
        call = self.calls[self.current]
        name = f"unseen#{len(call.values)}"
        call.values.append(RecordedValue(name, storage.nbytes(), len(call.ops), must_keep=True, stays=True))
        tracker = TrackedValue(self.current, len(call.values) - 1)
        self.trackers.attach(storage, tracker)
        call.ops.append(RecordedOp(name, (), (tracker.value,), run))
        self.log(events.OP, self.current, len(call.ops) - 1)
        return tracker

    def mark(self) -> Mark:
        return Mark(len(self.events), len(self.other_runs), self.num_storages)

    def note_function(
        self,
        mark: Mark,
        *,
        inputs: Iterable[torch.UntypedStorage | None],
        results: Sequence[torch.UntypedStorage],
        run: OpRun,
        must_keep: bool,
        state_bytes: int,
    ) -> None:
        """Add a call of a custom autograd Function as one op, in place of the ops that it has run since `mark`."""
        if self.current is None or self.event_log.is_over:
            return
        call = self.calls[self.current]
        read = self._inputs(inputs)
        first = len(call.values)
        for name, storage in zip(result_names(self.pending_stem, len(results)), results, strict=True):
            call.values.append(RecordedValue(name, storage.nbytes(), producer=len(call.ops), must_keep=must_keep))
            # The tracker that it replaces logs a death, which is removed with the rest of its ops' log.
            self.trackers.attach(storage, TrackedValue(self.current, len(call.values) - 1))
        outputs = tuple(range(first, len(call.values)))
        call.ops.append(RecordedOp(self.pending_stem, read, outputs, run, state_bytes=state_bytes))
        # In place of the log of its inner ops, whose results that are still alive follow it.
        since = self.event_log.settle()[mark.events : self.event_log.num_settled]
        dead = {event[1] for event in since if event[0] == events.FREE}
        others = [
            event
            for event in since
            if event[0] != events.WORK
            and not (event[0] in (events.ALLOC, events.FREE) and event[1] >= mark.storages and event[1] in dead)
        ]
        self.event_log.replace_since(mark.events, [(events.OP, self.current, len(call.ops) - 1), *others])
        del self.other_runs[mark.runs :]

    def _note_write(self, index: int, facts: OpFacts, args: Any, kwargs: Any, run: OpRun) -> None:
        call = self.calls[index]
        written = facts.written_by(args, kwargs)
        target = next(map(storage_of, written), None)
        tracker = tracker_of(target)
        if target is None or not isinstance(tracker, TrackedValue) or tracker.call != index:
            self.keep_overwritten(written)
            self.note_other(run)
            return
        self.keep(written[1:])  # The record says of one value what it held before.
        old = tracker.value
        # First, as other arguments may share the storage, which holds the result from here on.
        others = self._inputs(storage_of(t) for t in tree_leaves((args, kwargs)))
        call.values[old].mutated_later = True
        call.values.append(RecordedValue(self.pending_stem, target.nbytes(), producer=len(call.ops)))
        tracker.value = len(call.values) - 1
        inputs = (old, *(other for other in others if other != old))
        call.ops.append(RecordedOp(self.pending_stem, inputs, (tracker.value,), run, mutates=True))
        self.log(events.OP, index, len(call.ops) - 1)

    def _inputs(self, storages: Iterable[torch.UntypedStorage | None]) -> tuple[int, ...]:
        indices = (self.value_index(storage) for storage in storages if storage is not None)
        return tuple(dict.fromkeys(index for index in indices if index is not None))

    def _track_others(self, node: int, args: Any, kwargs: Any, output: Any) -> None:
        for tracker in map(tracker_of, map(storage_of, tree_leaves((args, kwargs)))):
            if isinstance(tracker, TrackedOther):
                tracker.used = node
        for _, storage in _made(tree_leaves(output), args, kwargs):
            self.track(storage, node)

    def close(self) -> None:
        self.event_log.end()
        self.trackers.detach()


def _made(results: Sequence[Any], args: Any, kwargs: Any) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """Yield the storages that an op has made, with the positions of its results."""
    arguments = [storage_of(tensor) for tensor in tree_leaves((args, kwargs))]
    for position, result in enumerate(results):
        storage = storage_of(result)
        if storage is not None and tracker_of(storage) is None and not any(storage is its for its in arguments):
            yield position, storage
