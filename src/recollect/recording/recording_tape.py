"""The recording tape: it drops values as a lean policy says, and reports to a `StepRecorder`."""

import sys
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from recollect._torch_fsdp import freed_after_forward, gathers_parameters
from recollect._torch_functions import is_compiled, python_backward
from recollect._torch_private import (
    is_fake_tensor,
    next_autograd_node,
    transforms_are_active,
    tree_leaves,
    untraced,
)
from recollect.costs.op_costs import RunsAgain
from recollect.engine.facts import OpFacts, facts_of
from recollect.engine.function_call import FunctionCall
from recollect.engine.function_mode import FunctionMode
from recollect.engine.function_run import FunctionRun
from recollect.engine.policy import ALL_KEPT, OpActions, OpKey, Policy
from recollect.engine.subclasses import PackedSubclass, strided_tensors
from recollect.engine.tape import Tape
from recollect.engine.together import Agreement, group_of
from recollect.engine.values import UNWATCHED, TapeValue, forget_record, laid_out, record_of
from recollect.plans.action import Action
from recollect.plans.value_names import result_names, value_stem
from recollect.profile import events
from recollect.recording.compiled_code import CompiledForward, UnseenStorages
from recollect.recording.event_log import Mark, Need
from recollect.recording.restored_state import attributes_of
from recollect.recording.step_recorder import StepRecorder
from recollect.recording.trackers import (
    Persistent,
    RecordedCall,
    RecordedOp,
    Tracked,
    TrackedValue,
    hold_need,
    storage_of,
    tracker_of,
)
from recollect.recording.unit_samples import UnitSamples
from recollect.warning import warn_user
from recollect.weak_map import WeakMap


class _Handle:
    """Stands for a saved value in autograd's graph.

    `need`: None if the value is not part of the record.
    """

    __slots__ = ("need", "packed", "saver")

    def __init__(self, packed: Any) -> None:
        self.packed = packed
        self.saver = -1
        self.need: Need | None = None

    def open(self, recorder: StepRecorder, saver: int) -> int:
        """Become part of the record, as a value that call `saver` saved; return its number there."""
        self.saver = saver
        self.need = recorder.event_log.needed()
        return self.need.index


class RecordingTape(Tape):
    """Drops values as its policy says, and reports ops.

    All values get recipes, since the record lists them all. A value that the policy keeps is held once
    something needs it.

    Attributes:
        kept: values to keep that nothing has needed so far.
        is_kept_op: the policy keeps all results of the op that is being noted: nobody will run it again.
        is_unfilled: autograd saves a tensor that the op about to run fills: noise.
        held_before: storages that modules hold as attributes since before the step, as tables made in their first call.
    """

    def __init__(
        self, policy: Policy, unseen: UnseenStorages, samples: UnitSamples, *, agreement: Agreement | None = None
    ) -> None:
        # Modules never settle: a unit is recorded in full each time it runs.
        super().__init__(policy, runs_to_settle=sys.maxsize, agreement=agreement)
        self.unseen, self.recorder = unseen, unseen.recorder
        self.samples = samples
        self.kept = WeakMap[bool]()
        self.is_kept_op = self.is_unfilled = False
        self.held_before = WeakMap[bool]()

    def note_attributes(self, model: nn.Module) -> None:
        pending: list[Any] = [attributes_of(module) for module in model.modules()]
        seen: dict[int, Any] = {}  # Containers may hold each other.
        while pending:
            one = pending.pop()
            if isinstance(one, torch.Tensor):
                for part in strided_tensors(one):
                    self.held_before[part.untyped_storage()] = True
            elif isinstance(one, (dict, list, tuple)) and id(one) not in seen:
                seen[id(one)] = one
                # Not as the model's own classes do, some of which forbid it (e3nn's `Irreps`).
                kind: Any = list if isinstance(one, list) else tuple
                pending += dict.values(one) if isinstance(one, dict) else kind.__iter__(one)

    def is_compared(self, runs: Any) -> bool:
        """Compare again: this step may be a different one."""
        return False

    def new_mode(self, unit_path: str) -> FunctionMode:
        return _RecordingMode(self, unit_path)

    def run(self, unit_path: str, forward: Any, args: Any, kwargs: Any) -> Any:
        recorder = self.recorder
        outer = recorder.current
        if recorder.begin_forward() and outer is None:
            recorder.note_reads((args, kwargs))
        with recorder.unseen():
            self.samples.take(unit_path, len(recorder.calls), args, kwargs)
        recorder.calls.append(RecordedCall(unit_path))
        recorder.current = index = len(recorder.calls) - 1
        first_node = next_autograd_node()
        given = tree_leaves((args, kwargs))  # Now: the unit may add to a list or dict.
        try:
            output = super().run(unit_path, forward, args, kwargs)
            recorder.calls[index].nodes = range(first_node, next_autograd_node())
            for tensor in strided_tensors(output):
                value = recorder.value_index(tensor.untyped_storage())
                if value is not None:
                    recorder.calls[index].values[value].is_output = True
            self.samples.note_values(index, partial(recorder.calls[index].value_of, index=index), given, output)
        finally:
            recorder.current = outer
        recorder.log(events.RETURN, index)
        return output

    def op_actions(self, key: OpKey, count: int, facts: OpFacts, asks: bool) -> OpActions:
        """Tell the recorder the name of the next op, and have recipes made for its results, unless it returns a list."""
        self.recorder.pending_stem = stem = value_stem(key[1], facts.name, count)
        names = result_names(stem, facts.num_returns)
        self.is_kept_op = not facts.writes and all(self.keeps(key[0], name) for name in names)
        is_list = facts.num_returns is None
        return (Action.RECOMPUTE,) if asks and not is_list and not self.must_keep(facts) else ALL_KEPT

    def keeps(self, unit_path: str, value_name: str) -> bool:
        return self.policy.action(unit_path, value_name) is Action.KEEP

    @untraced
    def unpack(self, packed: Any) -> torch.Tensor:
        """Log that backward needs a value; leave its recompute out of the record."""
        if not isinstance(packed, _Handle):
            return super().unpack(packed)
        if packed.need is not None:
            if self.recorder.reached is not None:
                self.recorder.reached.note()
            self.unseen.end_compiled()
            self.recorder.use(packed.need.index, packed.saver)
        with self.recorder.unseen():
            tensor = super().unpack(packed.packed)
        if tracker_of(storage_of(tensor)) is None:
            # A copy, or a value recomputed unseen, not an input of the step.
            self.recorder.trackers.mark_persistent([tensor])
        tensor = tensor if packed.need is None else self._needed(tensor, packed.need)
        self.unseen.begin_compiled(tensor, packed)
        return tensor

    def _needed(self, tensor: torch.Tensor, need: Need) -> torch.Tensor:
        """Return the tensor for backward; the need dies with the tensor if that may outlive autograd's hold on it."""
        storage = storage_of(tensor)
        if not isinstance(tracker_of(storage), Persistent) or storage is None:
            return tensor
        if not torch.is_grad_enabled():  # Else backward builds a graph, which holds it.
            if python_backward() is None:
                return tensor
            # A copy, as the tape may hold the tensor itself to compute other values from it.
            with self.recorder.unseen():
                if is_fake_tensor(tensor):  # A storage that `set_` gives to a fake tensor never dies.
                    whole = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0).clone()
                else:
                    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage.clone())
            self.recorder.trackers.mark_persistent([whole])
            tensor = whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        hold_need(tensor.untyped_storage(), need)
        return tensor

    def alias(self, tensor: torch.Tensor, in_hook: bool) -> tuple[torch.Tensor, int]:
        """Hold a copy: the storage dies when the model releases it."""
        storage = storage_of(tensor)
        tracker = tracker_of(storage)
        is_parameter = in_hook and type(tensor) is nn.Parameter  # Autograd reads what is assigned to its `.data` later.
        if storage is None or not isinstance(tracker, Tracked) or self.is_unfilled or is_parameter:
            return super().alias(tensor, in_hook)
        if tensor.is_nested:
            self.recorder.keep([tensor])  # The tape holds it whatever happens to other tensors on its memory.
        with self.recorder.unseen(), torch.no_grad():
            return tracker.copy_of(tensor, storage), UNWATCHED


class _RecordingMode(FunctionMode):
    tape: RecordingTape

    def __init__(self, tape: RecordingTape, unit_path: str) -> None:
        super().__init__(tape, unit_path)
        self.recorder = tape.recorder
        # Where the record of the Function that is running begins.
        self._function_mark = Mark(0, 0, 0)

    def is_foreign(self) -> bool:
        return self.recorder.is_recomputing or super().is_foreign()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = self.recorder
        recorder.pending_stem = ""  # The tape's own ops (a private copy before a write) have no name.
        index = None if self.is_foreign() else recorder.current
        num_ops = 0 if index is None else len(recorder.calls[index].ops)
        if index is not None:
            facts = facts_of(func)
            recorder.calls[index].seen_ops[self.scope] += 1
            if facts.changes_storage:
                recorder.calls[index].watched_modules.add(self.scope)
            if facts.is_lazy:
                recorder.keep(args[:1])
            _forget_copies(args[position] for position in facts.updated_by(args))
            if facts.writes and not torch.is_grad_enabled():
                recorder.keep(facts.written_by(args, kwargs))
        output = super().__torch_dispatch__(func, types, args, kwargs)
        self.tape.is_kept_op = False
        if index is not None:
            for op in recorder.calls[index].ops[num_ops:]:
                self._mark_results(index, op, facts_of(func), args, output)
        return output

    def known_value(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> TapeValue | None:
        """Return the value of a tensor that has a recipe; hold it from now on if the policy keeps it, and it is needed."""
        known, record = super().known_value(tensor, storage), record_of(storage)
        if known is not None and record is not None and record.base in self.tape.kept and not self.tape.is_kept_op:
            self.tape.kept.discard(record.base)
            with self.recorder.unseen(), torch.no_grad():
                held, version = self.tape.alias(tensor, True)
                record.base.hold(laid_out(held, record.layout), version)
        return known

    def _mark_results(self, index: int, op: RecordedOp, facts: OpFacts, args: Any, output: Any) -> None:
        """Mark results that the tape has no recipe for: it keeps them under any plan. Mark those that the policy keeps, too.

        Note the content of those that ranks may hold as parts.
        """
        call, ranks = self.recorder.calls[index], self.recorder.ranks
        results = {(index, value) for value in op.outputs}
        for tensor in tree_leaves((output, args[:1])):
            storage = storage_of(tensor)
            tracker = tracker_of(storage)
            if storage is None or not isinstance(tracker, TrackedValue) or tracker.key not in results:
                continue
            record = record_of(storage)
            call.values[tracker.value].must_keep = record is None or record.created is not None
            # The state of a generator is in host memory.
            if tensor.device.type == "cpu" and record is not None and record.base.node is not None:
                op.state_bytes = getattr(record.base.node.call, "state_bytes", 0)
            if record is not None and self.tape.keeps(self.unit_path, call.values[tracker.value].name):
                self.tape.kept[record.base] = True
            if op.mutates and record is not None:
                # Recompute of the op that fills a buffer brings back the buffer: `empty` need not be kept.
                call.values[op.inputs[0]].must_keep = False
            if ranks is not None and not (op.mutates or facts.creates):
                content = ranks.content_of(tensor)
                if content is not None:
                    call.contents[tracker.value] = content

    def run_module(self, module_path: str, forward: Any, args: Any, kwargs: Any) -> Any:
        """After the hooks that set them, note the tensors that the module's parameters hold."""
        module, index = getattr(forward, "__self__", None), self.recorder.current
        if module_path and index is not None:
            self.recorder.calls[index].num_modules += 1
        if isinstance(module, nn.Module) and not transforms_are_active():  # Within them, parameters have no storages.
            self.recorder.note_parameters(module.parameters())
        output = super().run_module(module_path, forward, args, kwargs)
        if isinstance(module, nn.Module) and gathers_parameters(module) and freed_after_forward(module):
            # The rest of the unit's backward needs it before the module's own backward has the parameters back.
            for tensor in strided_tensors(output):
                self.recorder.keep([tensor], stays=False)
                forget_record(tensor.untyped_storage())
        return output

    def watch_function(self, function: Any, args: Any, kwargs: Any) -> Any:
        if self.function is None:
            self._function_mark = self.recorder.mark()
        watcher = super().watch_function(function, args, kwargs)
        if watcher is None or not is_compiled(function):
            return watcher
        return CompiledForward(self.tape.unseen, function, watcher)

    def end_function(self, run: FunctionRun) -> None:
        super().end_function(run)
        if run.kept_because and run.function.__module__.startswith("transformer_engine."):
            _warn_of_kept(run.function.__name__, run.kept_because)
        # After an unseen write, the tape no longer has a recipe for them.
        self.recorder.keep_overwritten(run.wrote_unseen)
        _forget_copies(run.wrote_unseen)

    def function_actions(self, run: FunctionRun, call: FunctionCall) -> OpActions:
        recorder = self.recorder
        actions, again = super().function_actions(run, call), RunsAgain(run, call)
        is_kept = self.tape.is_kept_op
        if recorder.current is not None and any(map(group_of, run.partitioned)):
            recorder.communicating.add(recorder.current)
        inner = recorder.other_runs[self._function_mark.runs :]
        cost = recorder.costs.run_function(run.args, inner, again, is_joint=bool(run.groups))
        if not again.are_equal:
            recorder.differing.add(cost.key)
        # Tensors that it reads other than through arguments would have to be kept, and no plan knows them.
        may_drop = cost.key not in recorder.differing and not any(
            isinstance(tracker_of(storage_of(tensor)), Tracked) for tensor in run.others
        )
        recorder.note_function(
            self._function_mark,
            inputs=[storage_of(tensor) for tensor in (*run.arguments.tensors, *run.others)],
            results=list({made.storage: made.tensor.untyped_storage() for made in run.made}.values()),
            run=cost,
            must_keep=not may_drop,
            # The state of a generator is in host memory.
            state_bytes=call.state_bytes if all(made.tensor.device.type == "cpu" for made in run.made) else 0,
        )
        return actions if may_drop and not is_kept else ALL_KEPT

    @untraced
    def pack(self, tensor: torch.Tensor) -> Any:
        storage = storage_of(tensor)
        record = None if storage is None else record_of(storage)
        self.tape.is_unfilled = record is not None and record.created is not None
        packed = super().pack(tensor)
        self.tape.is_unfilled = False
        if type(packed) is PackedSubclass:
            return packed  # Its parts have handles.
        handle = _Handle(packed)
        return handle if self._log_save(handle, tensor) else handle.packed

    def _log_save(self, handle: _Handle, tensor: torch.Tensor) -> bool:
        """Record that autograd saves a tensor; return whether the record knows it."""
        storage = storage_of(tensor)
        recorder = self.recorder
        tracker = tracker_of(storage)
        if tracker is None and storage is not None:
            if self.tape.held_before.get(storage):
                recorder.note_reads([tensor])
            else:
                tracker = recorder.note_opaque(storage)
        if storage is None or not isinstance(tracker, Tracked):
            return False
        saver = tracker.call if recorder.current is None else recorder.current
        if isinstance(tracker, TrackedValue):
            value = recorder.calls[tracker.call].values[tracker.value]
            value.saved, value.saved_elements = True, max(value.saved_elements, tensor.numel())
            recorder.log(events.SAVE, *tracker.key, handle.open(recorder, saver), saver)
        elif (index := recorder.value_index(storage)) is not None:
            recorder.log(events.SAVE, saver, index, handle.open(recorder, saver), saver)
        return True


def _forget_copies(written: Iterable[torch.Tensor]) -> None:
    """Make new copies for the next readers, as the content changes without raising the version."""
    for tracker in map(tracker_of, map(storage_of, written)):
        if isinstance(tracker, Tracked):
            tracker.forget_copy()


@cache
def _warn_of_kept(function: str, reason: str) -> None:
    warn_user(
        f"No plan can drop what Transformer Engine's {function} makes and saves: {reason}. Its linear layers and its fused "
        "rotary embedding run again in 16 bits without Userbuffers; with collectives in them, if all ranks run one plan."
    )
