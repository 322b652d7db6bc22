"""The recording tape: it drops whatever it can, as full recompute would, and reports to a `StepRecorder`."""

from __future__ import annotations

from typing import Any

import torch

from recollect._torch_private import TorchDispatchMode, tree_leaves
from recollect.engine.facts import OpFacts, facts_of
from recollect.engine.tape import Tape
from recollect.engine.tape_mode import TapeMode
from recollect.engine.tape_state import ALL_KEPT, OpActions, OpKey, TapeState
from recollect.engine.values import UNWATCHED, record_of
from recollect.plans.action import Action
from recollect.plans.value_names import value_stem
from recollect.profile import events
from recollect.recording.step_recorder import RecordedCall, StepRecorder
from recollect.recording.trackers import TrackedOther, TrackedValue, storage_of, tracker_of


class _Handle:
    """Stands for a saved value; it dies when backward no longer needs the value."""

    __slots__ = ("index", "packed", "recorder")

    def __init__(self, recorder: StepRecorder, packed: Any) -> None:
        self.recorder = recorder
        self.packed = packed
        self.index = recorder.num_handles
        recorder.num_handles += 1

    def __del__(self) -> None:
        self.recorder.log(events.RELEASE, self.index)


class RecordingTape(Tape):
    """Drops everything and reports what runs."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__(DropAll())
        self.recorder = recorder

    def new_mode(self, unit_path: str) -> TapeMode:
        """Return a mode that reports to the recorder."""
        return _RecordingMode(self, unit_path, self.recorder)

    def run(self, unit_path: str, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run a unit's forward and record it as a call."""
        recorder = self.recorder
        outer = recorder.current
        recorder.calls.append(RecordedCall(unit_path))
        recorder.current = index = len(recorder.calls) - 1
        try:
            output = super().run(unit_path, forward, args, kwargs)
            for tensor in tree_leaves(output):
                storage = storage_of(tensor)
                value = None if storage is None else recorder.value_index(storage)
                if value is not None:
                    recorder.calls[index].values[value].is_output = True
        finally:
            recorder.current = outer
        recorder.log(events.RETURN, index)
        return output

    def op_actions(self, key: OpKey, count: int, facts: OpFacts, asks: bool) -> OpActions:
        """Tell the recorder the name of the next op, and drop its results."""
        self.recorder.pending_stem = value_stem(key[1], facts.name, count)
        return (Action.RECOMPUTE,) if asks and not facts.keeps else ALL_KEPT

    def unpack(self, packed: Any) -> torch.Tensor:
        """Log that backward asks for a value; leave its recompute out of the record."""
        if not isinstance(packed, _Handle):
            return super().unpack(packed)
        self.recorder.log(events.USE, packed.index)
        with self.recorder.unseen():
            return super().unpack(packed.packed)

    def alias(self, tensor: torch.Tensor, in_hook: bool) -> tuple[torch.Tensor, int]:
        """Hold a copy, so that the storage dies when the model releases it."""
        storage = storage_of(tensor)
        tracker = tracker_of(storage)
        if storage is None or not isinstance(tracker, (TrackedValue, TrackedOther)):
            return super().alias(tensor, in_hook)
        with self.recorder.unseen(), torch.no_grad():
            return tracker.copy_of(tensor, storage), UNWATCHED


class _RecordingMode(TapeMode):
    def __init__(self, tape: TapeState, unit_path: str, recorder: StepRecorder) -> None:
        super().__init__(tape, unit_path)
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = self.recorder
        recorder.pending_stem = ""  # The tape's own ops (a private copy before a write) have no name.
        index = recorder.current
        num_ops = 0 if index is None else len(recorder.calls[index].ops)
        if index is not None and not recorder.is_recomputing:
            recorder.calls[index].seen_ops[self.scope] += 1
            if facts_of(func).changes_storage:
                recorder.calls[index].watched_modules.add(self.scope)
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if index is not None and len(recorder.calls[index].ops) > num_ops:
            self._mark_must_keep(recorder.calls[index], args, output)
        return output

    def _mark_must_keep(self, call: RecordedCall, args: Any, output: Any) -> None:
        """Mark results that the tape has no recipe for: it keeps them under any plan."""
        op = call.ops[-1]
        for tensor in tree_leaves((output, args[:1])):
            storage = storage_of(tensor)
            tracker = tracker_of(storage)
            if storage is None or not isinstance(tracker, TrackedValue) or tracker.value not in op.outputs:
                continue
            record = record_of(storage)
            call.values[tracker.value].must_keep = record is None or record.created is not None
            # The state of a generator is in host memory.
            if tensor.device.type == "cpu" and record is not None and record.base.node is not None:
                op.state_bytes = getattr(record.base.node.call, "state_bytes", 0)
            if op.mutates and record is not None:
                # Recompute of the op that fills a buffer brings back the buffer: `empty` need not be kept.
                call.values[op.inputs[0]].must_keep = False

    def pack(self, tensor: torch.Tensor) -> Any:
        packed = super().pack(tensor)
        storage = storage_of(tensor)
        recorder = self.recorder
        tracker = tracker_of(storage)
        if tracker is None and storage is not None:
            tracker = recorder.note_opaque(storage)
        if storage is None or not isinstance(tracker, (TrackedValue, TrackedOther)):
            return packed
        handle = _Handle(recorder, packed)
        if isinstance(tracker, TrackedValue):
            recorder.calls[tracker.call].values[tracker.value].saved = True
            saver = tracker.call if recorder.current is None else recorder.current
            recorder.log(events.SAVE, tracker.call, tracker.value, handle.index, saver)
        elif (value := recorder.value_index(storage)) is not None and recorder.current is not None:
            recorder.log(events.SAVE, recorder.current, value, handle.index, recorder.current)
        return handle


class DropAll:
    """The leanest policy that keeps every unit's output."""

    def action(self, unit_path: str, value_name: str) -> Action:
        """Drop every value."""
        return Action.RECOMPUTE

    def acts_in(self, unit_path: str, module_path: str) -> bool:
        """Drop values of every module."""
        return True

    def output_action(self, unit_path: str) -> Action:
        """Keep every unit's output."""
        return Action.KEEP


class StepMode(TorchDispatchMode):
    """Sees every op of the step, below the tape, and runs it with the recorder's costs."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Run compiled regions compiled, as in training."""
        return True

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        if recorder.is_recomputing or recorder.is_over:
            return func(*args, **kwargs)
        facts = facts_of(func)
        if facts.is_view or facts.is_lazy:
            return func(*args, **kwargs)
        # Repeating an op holds its result twice: harmless inside a layer's forward, where memory is far from its peak.
        output, run = recorder.costs.run(func, facts, args, kwargs, may_repeat=recorder.current is not None)
        recorder.after_op(func, facts, args, kwargs, output, run)
        return output
