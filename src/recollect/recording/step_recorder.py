"""Collect the ops, values and memory events of one training step.

Two modes see every op (`recording_tape.py`): first, inside a unit's forward, the tape's own mode, which names all values
and drops them; then, around the whole step, `StepMode`, which measures ops. An object attached to each storage dies with it
(`trackers.py`), so deaths are logged exactly when they happen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from recollect._torch_private import current_autograd_node, tree_leaves
from recollect.costs.op_costs import OpRun
from recollect.engine.facts import OpFacts
from recollect.plans.value_names import result_names
from recollect.profile import events
from recollect.recording.trackers import TrackedOther, TrackedValue, attach_tracker, storage_of, tracker_of


class OpCosts(Protocol):
    """Runs ops and knows their costs: `MeasuredCosts` or `ModelledCosts`."""

    def run(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, *, may_repeat: bool) -> tuple[Any, OpRun]:
        """Run an op; return its result and the key to its costs."""
        ...


@dataclass
class RecordedValue:
    """A value while it is being recorded; see `ValueRecord` for the fields."""

    name: str
    nbytes: int
    producer: int | None
    must_keep: bool = False
    saved: bool = False
    is_output: bool = False
    mutated_later: bool = False


@dataclass
class RecordedOp:
    """An op while it is being recorded; see `OpRecord` for the fields."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    run: OpRun | None
    mutates: bool = False
    state_bytes: int = 0


@dataclass
class RecordedCall:
    """One run of a unit while it is being recorded."""

    path: str
    values: list[RecordedValue] = field(default_factory=list)
    ops: list[RecordedOp] = field(default_factory=list)
    origins: dict[tuple[int, int], int] = field(default_factory=dict)
    outside: dict[int, int] = field(default_factory=dict)
    # Number of ops that the tape sees, by module; and modules that it always watches, since they write in place.
    seen_ops: Counter[str] = field(default_factory=Counter)
    watched_modules: set[str] = field(default_factory=set)

    def add_input(self, nbytes: int) -> int:
        """Add a value that was computed outside the unit; return its index."""
        name = f"input {len(self.origins) + len(self.outside)}"
        self.values.append(RecordedValue(name, nbytes, producer=None))
        return len(self.values) - 1


class StepRecorder:
    """Collects what happens in one step."""

    def __init__(self, costs: OpCosts) -> None:
        self.costs = costs
        self.events: list[tuple[int, ...]] = []
        self.calls: list[RecordedCall] = []
        self.other_runs: list[OpRun] = []
        self.current: int | None = None
        self.pending_stem = ""
        self.is_recomputing = False
        self.is_over = False
        self.num_handles = 0
        self._num_storages = 0

    def log(self, *event: int) -> None:
        """Add an event, unless the step is over."""
        if not self.is_over:
            self.events.append(event)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Within the block, leave ops out of the record."""
        outer, self.is_recomputing = self.is_recomputing, True
        try:
            yield
        finally:
            self.is_recomputing = outer

    def begin_phase(self, phase: int) -> None:
        """Log that forward, backward or the optimizer step begins."""
        self.log(events.PHASE, phase)

    def log_optimizer_step(self, step: Iterable[tuple[int, ...]]) -> None:
        """Add the events of an optimizer step, whose storages are numbered from 0."""
        for code, number, *rest in step:
            self.log(code, self._num_storages + number, *rest)

    def after_op(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, output: Any, run: OpRun) -> None:
        """Add an op of a unit's forward; of any other op, add only its cost and the storages that it makes."""
        if facts.is_view or facts.is_lazy or facts.changes_layout_only:
            return
        if self.current is None or not self.pending_stem:
            self._note_other(run)
            node = current_autograd_node()
            if not self._note_sum(node, func, args, output):
                self._track_others(node, args, kwargs, output)
        elif facts.writes:
            self._note_write(self.current, args, kwargs, run)
        else:
            self._note_op(self.current, facts, args, kwargs, output, run)

    def _note_sum(self, node: int, func: Any, args: Any, output: Any) -> bool:
        """Add a sum of gradients if autograd's engine made it; return whether it did.

        The engine adds gradients in place, except under a dispatch mode such as this recorder's. It is the engine that
        adds, not a backward formula, if the first addend comes from another formula than the one that is running, which
        has not used it. The engine would have added in place if the addend dies now, since then nobody else held it.
        """
        if func is not torch.ops.aten.add.Tensor or node < 0:
            return False
        total, first = storage_of(output), storage_of(args[0])
        addend = tracker_of(first)
        if (
            total is None
            or total is first
            or not isinstance(addend, TrackedOther)
            or node in (addend.made, addend.used)
        ):
            return False
        self.log(events.SUM, self._num_storages, addend.storage, total.nbytes())
        attach_tracker(total, TrackedOther(self.log, self._num_storages, node))
        self._num_storages += 1
        return True

    def _note_other(self, run: OpRun) -> None:
        self.other_runs.append(run)
        self.log(events.WORK, len(self.other_runs) - 1)

    def value_index(self, storage: torch.UntypedStorage) -> int | None:
        """Return the index, in the current call, of the value that a storage holds now; None if it holds none."""
        tracker = tracker_of(storage)
        if self.current is None:
            return None
        call = self.calls[self.current]
        if isinstance(tracker, TrackedOther):
            if tracker.storage not in call.outside:
                call.outside[tracker.storage] = call.add_input(storage.nbytes())
            return call.outside[tracker.storage]
        if not isinstance(tracker, TrackedValue):
            return None
        if tracker.call == self.current:
            return tracker.value
        origin = (tracker.call, tracker.value)
        if origin not in call.origins:
            call.origins[origin] = call.add_input(self.calls[tracker.call].values[tracker.value].nbytes)
        return call.origins[origin]

    def _note_op(self, index: int, facts: OpFacts, args: Any, kwargs: Any, output: Any, run: OpRun) -> None:
        call = self.calls[index]
        arguments = [storage_of(t) for t in tree_leaves((args, kwargs))]
        results = output if isinstance(output, (tuple, list)) else (output,)
        fresh = [
            (position, storage)
            for position, result in enumerate(results)
            if (storage := storage_of(result)) is not None
            and tracker_of(storage) is None
            and not any(storage is other for other in arguments)
        ]
        if not fresh:
            self._note_other(run)
            return
        inputs = self._inputs(arguments)
        names = result_names(self.pending_stem, 1 if facts.writes else facts.num_returns)
        first = len(call.values)
        for position, storage in fresh:
            name = names[position] if len(names) > 1 else self.pending_stem
            call.values.append(RecordedValue(name, storage.nbytes(), producer=len(call.ops)))
            attach_tracker(storage, TrackedValue(self.log, index, len(call.values) - 1))
        outputs = tuple(range(first, len(call.values)))
        call.ops.append(RecordedOp(self.pending_stem, inputs, outputs, run))
        self.log(events.OP, index, len(call.ops) - 1)

    def note_opaque(self, storage: torch.UntypedStorage) -> TrackedValue | None:
        """Add a value that autograd saved and no op computed: the result of an unseen kernel, which can only be kept."""
        if self.current is None:
            return None
        call = self.calls[self.current]
        name = f"unseen#{len(call.values)}"
        call.values.append(RecordedValue(name, storage.nbytes(), producer=len(call.ops), must_keep=True))
        tracker = TrackedValue(self.log, self.current, len(call.values) - 1)
        attach_tracker(storage, tracker)
        call.ops.append(RecordedOp(name, (), (tracker.value,), run=None))
        self.log(events.OP, self.current, len(call.ops) - 1)
        return tracker

    def _note_write(self, index: int, args: Any, kwargs: Any, run: OpRun) -> None:
        call = self.calls[index]
        target = storage_of(args[0]) if args else None
        tracker = tracker_of(target)
        if target is None or not isinstance(tracker, TrackedValue) or tracker.call != index:
            self._note_other(run)
            return
        old = tracker.value
        # First, as other arguments may share the storage, which holds the result from here on.
        others = self._inputs(storage_of(t) for t in tree_leaves((args[1:], kwargs)))
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
        arguments = [storage_of(t) for t in tree_leaves((args, kwargs))]
        for argument in arguments:
            tracker = tracker_of(argument)
            if isinstance(tracker, TrackedOther):
                tracker.used = node
        for result in tree_leaves(output):
            storage = storage_of(result)
            if storage is None or tracker_of(storage) is not None or any(storage is other for other in arguments):
                continue
            attach_tracker(storage, TrackedOther(self.log, self._num_storages, node))
            self.log(events.ALLOC, self._num_storages, storage.nbytes())
            self._num_storages += 1

    def close(self) -> None:
        """Stop logging deaths."""
        self.is_over = True
