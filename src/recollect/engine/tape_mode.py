"""Watches one running unit: remembers how dropped results are made, and hands autograd recipes in place of tensors.

It follows the rules in `engine/tape.py`.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter

from recollect._torch_parallel import name_of_group, waited_for
from recollect._torch_private import (
    desugars,
    has_saved_tensors_hooks,
    is_capturing,
    is_opaque_subclass,
    is_traceable_wrapper_subclass,
    pop_dispatch_mode,
    pop_saved_tensors_hooks,
    push_dispatch_mode,
    push_saved_tensors_hooks,
    raises_version_first,
    transforms_are_active,
    untraced,
)
from recollect.engine.content import glance_at
from recollect.engine.draws import Draw, draws_unknown, first_run, refuse_draws
from recollect.engine.facts import OpFacts, OpMode, facts_of, must_keep_result, results_of
from recollect.engine.offload.flight import is_constant
from recollect.engine.offload.offloaded import settle
from recollect.engine.opcall import Arguments, CollectiveCall, OpCall, WriteCall, current_settings, is_replaying
from recollect.engine.policy import ALL_KEPT, ModuleKey, OpActions, OpKey, TapeState, Watch, is_alias
from recollect.engine.self_check import SwitchedOff, switched_off
from recollect.engine.subclasses import PackedSubclass, held_whole
from recollect.engine.unseen_writes import Comparison, forget_content, forget_overwritten, forget_updated
from recollect.engine.values import (
    Layout,
    StorageRecord,
    TapeValue,
    attach_record,
    expect_bump,
    forget_record,
    is_dropped,
    is_new,
    layout_of,
    record_of,
    snapshot_targets,
    watch,
)
from recollect.plans.action import Action
from recollect.plans.value_names import value_stem
from recollect.replay import Node, Recipes
from recollect.tensors import has_strides, version_of

# Module globals, because they are looked up several times per op.
_RECOMPUTE = Action.RECOMPUTE
_SHARD = Action.SHARD
_OFFLOAD = Action.OFFLOAD

_EVERYTHING = Watch(ops=True, saves=True)


class TapeMode(OpMode):
    """Sees the ops of one call of a unit."""

    def __init__(self, tape: TapeState, unit_path: str) -> None:
        super().__init__()
        self.tape = tape
        self.unit_path = unit_path
        self.is_captured = is_capturing()
        # Stands for the running call of a unit; a nested unit gets its own.
        self.call = Recipes()
        self.place = tape.next_place()
        self.scope = ""
        self._unnamed = tape.unnamed
        self.settings = current_settings()
        self._modes_around = self.settings.modes
        self.is_watching = True
        # Whether the running autograd Function is one whose ops can be recorded.
        self.is_in_collective = False
        # The tape's hooks while they are off. Not held otherwise, because they hold this mode.
        self._hooks: tuple[Any, Any] | None = None
        self._may_step_aside = SwitchedOff.STEPPING_ASIDE not in switched_off()
        # Outer hooks see only tensors that the tape's hooks let through; a checkpoint around several units would lose count.
        # Where values are offloaded, every saved tensor shows where backward is.
        self._may_unhook = self._may_step_aside and not has_saved_tensors_hooks() and tape.offload is None
        # Observations of modules that the tape has not yet settled.
        self.unsettled: dict[ModuleKey, Watch] = {}
        self._writes: set[ModuleKey] = set()
        self._saves_dropped: set[ModuleKey] = set()
        self.counts: dict[OpKey, int] = {}
        self._op = ""
        # By whether a hook took them: after a write through `.data`, autograd reads the new content, and recipes the old one.
        self._parameters: dict[tuple[int, bool], TapeValue] = {}
        # The storages with a recipe.
        self.dropped: list[weakref.ref[torch.UntypedStorage]] = []
        # Of what recipes make and read, to find writes that nothing else shows; None: there is none.
        self.comparison: Comparison | None = None

    def run_module(self, module_path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a module of the unit under its own names, watching its ops and saves only where that is useful."""
        outer = self.scope, self.is_watching, self._hooks is None
        self.scope = module_path
        key = (self.unit_path, module_path)
        self._watch(*self.tape.settled.get(key, _EVERYTHING))
        try:
            output = forward(*args, **kwargs)
            if key not in self.tape.settled and self.is_watching and self._hooks is None:
                self.unsettled[key] = Watch(ops=key in self._writes, saves=key in self._saves_dropped)
            return output
        finally:
            self.scope, *watch_of = outer
            self._watch(*watch_of)

    def _watch(self, ops: bool, saves: bool) -> None:
        """Switch the watching of ops and of saved tensors on or off.

        Nothing is switched off while the model's own mode or hooks are on top. The model's own hooks (a checkpoint
        inside the unit) stay on top: their reruns in backward are without the tape's hooks. `torch.func` forbids new ones.
        """
        if not self._may_step_aside:
            return
        if ops and not self.is_watching:
            push_dispatch_mode(self)
            self.is_watching = True
        elif self.is_watching and not ops:
            self.is_watching = not pop_dispatch_mode(self)
        if saves and self._hooks is not None and not has_saved_tensors_hooks():
            push_saved_tensors_hooks(*self._hooks)
            self._hooks = None
        elif self._hooks is None and not saves and self._may_unhook and not transforms_are_active():
            self._hooks = pop_saved_tensors_hooks(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(desugars(kind) for kind in types):
            return NotImplemented  # Rule 5: DTensor and its kin reappear as ops on their inner tensors.
        if self.is_foreign() or is_replaying():  # A backward within the unit asks for what was dropped.
            return func(*args, **kwargs)
        facts = facts_of(func)
        self._op = facts.name
        if facts.is_view:
            return func(*args, **kwargs)  # A view is made from its base when something asks for it.
        if updated := facts.updated_by(args):
            statistics = [args[position] for position in updated if args[position] is not None]
            forget_updated(statistics, facts.name, (self.unit_path, self.scope, ""))
        if updated or facts.changes_storage:
            self._writes.add((self.unit_path, self.scope))
        if facts.changes_layout_only:
            if self.tape.offload is not None:
                settle([args[0].untyped_storage()])
            expect_bump(args[0])
            return func(*args, **kwargs)
        if facts.is_lazy:
            forget_record(args[0].untyped_storage())
            return func(*args, **kwargs)
        # Rule 7: a custom autograd Function, or a compiled region, runs with gradients switched off.
        actions = ALL_KEPT
        agreement = self.tape.agreement if facts.may_replay else None
        if agreement is not None:
            agreement.meet(name_of_group(args, kwargs))
        if torch.is_grad_enabled() or self.is_in_collective:
            may_bind = not facts.writes or (facts.writes[0] == 0 and is_dropped(args[0] if args else None))
            actions = self._op_actions(facts, may_bind)
        if facts.writes or not actions:
            output = self._run_write(func, facts, args, kwargs, actions) if facts.writes else func(*args, **kwargs)
            return self.told(facts, output) if self._unnamed else output
        runs_again = _RECOMPUTE in actions
        output, draw = self.run_once(facts, func, args, kwargs) if runs_again else (func(*args, **kwargs), None)
        if self._unnamed:
            self.told(facts, output)
        if _OFFLOAD in actions:
            self._send_results(facts, output, actions)
            if not runs_again:
                return output
        if facts.may_keep and must_keep_result(facts, args, output, kwargs):
            return output
        if facts.is_random and draws_unknown(facts, args, kwargs):
            return output
        arguments = Arguments(self._value_in_mode, facts, args, kwargs)
        settings = self.settings.at_op(facts)
        if agreement is None:
            call = OpCall(func, arguments, draw, settings)
        else:
            call = CollectiveCall(func, arguments, settings, agreement)
        node = Node(call, arguments.values, recipes=self.call)
        for index, result in enumerate(results_of(output)):
            self._register(result, node, facts, actions[index] if len(actions) > 1 else actions[0])
        return output

    def run_once(self, facts: OpFacts, func: Any, args: Any, kwargs: Any) -> tuple[Any, Draw | None]:
        if self.is_captured and facts.is_random:
            refuse_draws(facts, func, args, kwargs, self.unit_path, self._name_of_result(facts, 0))
        return first_run(facts, func, args, kwargs) if facts.is_random else (func(*args, **kwargs), None)

    def _op_actions(self, facts: OpFacts, asks: bool) -> OpActions:
        """Count the op about to run; return the actions for its results, or that all are kept if `asks` is False."""
        key = (self.unit_path, self.scope, facts.name)
        count = self.counts.get(key, 0)
        self.counts[key] = count + 1
        return self.tape.op_actions(key, count, facts, asks)

    def told(self, facts: OpFacts, output: Any) -> Any:
        """Return the output of the op that has just run; say what of it the plan does not name."""
        key = (self.unit_path, self.scope, facts.name)
        # Others are numbers, or sparse tensors.
        are_values = [isinstance(one, torch.Tensor) and has_strides(one) for one in results_of(output)]
        self.tape.tell(key, self.counts.get(key, 0) - 1, facts, are_values)
        return output

    def _register(self, result: Any, node: Node, facts: OpFacts, action: Action) -> None:
        if action is _SHARD:
            self.hold_part(result, facts, len(node.outputs))
        if action is not _RECOMPUTE or not is_new(result):
            node.add_output(None)
            return
        value = TapeValue(None, node)
        node.add_output(value)
        record = self.note_recipe(result, value, facts.creates)
        # Else something unseen may fill it, or it is not there yet.
        if facts.creates is None and not facts.is_collective:
            self.compare(result, result.untyped_storage(), record.layout)

    def note_recipe(self, result: torch.Tensor, value: TapeValue, creates: str | None = None) -> StorageRecord:
        """Have a value stand for a result from here on; return the record of it."""
        record = StorageRecord(value, layout_of(result), result._version, creates, self.call)
        attach_record(result.untyped_storage(), record)
        self.dropped.append(weakref.ref(result.untyped_storage()))
        return record

    def compare(self, tensor: torch.Tensor, storage: torch.UntypedStorage, layout: Layout) -> None:
        """Compare the content of a tensor that a recipe makes or reads with what it was, if the unit's call does so."""
        # Within a function transform, tensors stand for others.
        if self.comparison is not None and not transforms_are_active():
            self.comparison.note(tensor, storage, layout, (self.unit_path, self.scope, self._op))

    def hold_part(self, result: Any, facts: OpFacts, index: int) -> None:
        """Have a result, the `index`-th of its op, gathered from parts, unless it is an unfilled buffer."""
        shards, agreement = self.tape.shards, self.tape.agreement
        if shards is None or agreement is None or facts.creates is not None or not is_new(result):
            return
        if facts.is_collective:
            waited_for(result)  # Its result may not be ready yet.
        call, part = shards.call(result, agreement, self.unit_path, self._name_of_result(facts, index))
        self._store(result, Node(call, [part], recipes=self.call))

    def _send_results(self, facts: OpFacts, output: Any, actions: OpActions) -> None:
        for index, result in enumerate(results_of(output)):
            if (actions[index] if len(actions) > 1 else actions[0]) is _OFFLOAD:
                self.send_away(result, facts, index)

    def send_away(self, result: Any, facts: OpFacts, index: int) -> None:
        """Offload a result, the `index`-th of its op, unless it is an unfilled buffer."""
        offload, place = self.tape.offload, self.place
        if offload is None or place is None or facts.creates is not None or not is_new(result):
            return
        if facts.is_collective:
            waited_for(result)
        held, name = self.tape.alias(result, False)[0], self._name_of_result(facts, index)
        sent = offload.send(held, self.unit_path, name, place)
        if sent is not None:
            self._store(result, Node(sent, (), recipes=self.call))

    def _name_of_result(self, facts: OpFacts, index: int) -> str:
        """Return the name of the `index`-th result of the op that has just run."""
        stem = value_stem(self.scope, facts.name, self.counts[self.unit_path, self.scope, facts.name] - 1)
        return f"{stem}.{index}" if facts.num_returns is not None and facts.num_returns > 1 else stem

    def _store(self, result: torch.Tensor, node: Node) -> None:
        """Remember that a result is stored elsewhere than in memory, and the node that brings it back."""
        value = TapeValue(None, node)
        node.add_output(value)
        self.note_recipe(result, value).is_stored = True

    def _run_write(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, actions: OpActions) -> Any:
        targets = facts.written_by(args, kwargs)
        is_raised = raises_version_first(func)
        storages = snapshot_targets(targets, is_raised=is_raised)
        if self.tape.offload is not None:
            settle(storages, is_raised=is_raised)
        write = self._bind_write(func, facts, args, kwargs) if _RECOMPUTE in actions and len(targets) == 1 else None
        version = targets[0]._version if write is not None else 0
        call = None if write is None else write.call
        if isinstance(call, WriteCall):
            output, call.draw = self.run_once(facts, func, args, kwargs)
            if call.draw is not None and call.draw.after is not None:
                write = None  # A second run may have to be repeated, which is not possible once it has written.
        else:
            output = func(*args, **kwargs)
        for target, storage in zip(targets, storages, strict=True):
            forget_content(storage)  # `_bind_write` has noted that of arguments.
            if facts.writes_unseen:
                forget_overwritten(target, facts.name, (self.unit_path, self.scope, ""))
            elif write is None or (facts.keeps_on_cuda and target.is_cuda):
                forget_record(storage)
        record = record_of(storages[0]) if write is not None else None
        if write is not None and record is not None:
            value = TapeValue(node=write)
            write.add_output(value)
            record.rebase(value, version, layout_of(targets[0]), is_raised=is_raised)
        return output

    def _bind_write(self, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> Node | None:
        """Describe an in-place op as a function from the storage's old content to its new one, if the old is known."""
        if facts.writes[0] != 0 or not isinstance(args[0], torch.Tensor):
            return None
        target = args[0]
        storage = target.untyped_storage()
        record = record_of(storage)
        layout = layout_of(target)
        version = target._version - raises_version_first(func)
        if record is None or not record.is_current(version) or layout[3] != record.layout[3]:
            return None
        if record.layout[0].numel() * target.element_size() != storage.nbytes():
            return None  # The base does not densely cover its storage, so a clone would have a different layout.
        if record.created == "undefined" and not (
            facts.overwrites and (layout == record.layout or record.part(layout) is not None)
        ):
            return None  # The write reads old content, which a foreign kernel may have put there.
        base = record.base
        arguments = Arguments(self._value_in_mode, facts, args[1:], kwargs)
        if any(value.holds(storage) for value in arguments.values):
            return None  # An argument is an alias of this same storage: holding it in the record would be a cycle.
        view = None if layout == record.layout else layout
        call = WriteCall(func, arguments, view, self.settings.at_op(facts))
        return Node(call, [base, *arguments.values], mutates=True, recipes=self.call)

    def known_value(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> TapeValue | None:
        """Return the value that stands for a dropped tensor, or None if the tape did not drop it."""
        record = record_of(storage)
        if record is None:
            return None
        if record.created is not None:
            forget_record(storage)
            return None
        if not record.is_current(tensor._version):
            return None
        made = record.base.node
        if made is None or type(made.call) is not CollectiveCall:  # Else autograd may save it before it is there.
            self.compare(tensor, storage, record.layout)
        return record.value_of(layout_of(tensor)) if record_of(storage) is record else None

    def _value_in_mode(self, tensor: torch.Tensor) -> TapeValue:
        """Return the value of an op's argument: the dropped one if known, else one that holds the tensor."""
        if not has_strides(tensor):
            return self._leaf(tensor, None, in_hook=False)
        if type(tensor) is Parameter:
            return self._parameter(tensor, in_hook=False)
        storage = tensor.untyped_storage()
        return self.known_value(tensor, storage) or self._leaf(tensor, storage, in_hook=False)

    def _parameter(self, tensor: torch.Tensor, *, in_hook: bool) -> TapeValue:
        """Return the value of a parameter: the same for all readers of one kind, until that is written or assigned to."""
        known = self._parameters.get((id(tensor), in_hook))
        if known is None or known.version != version_of(tensor) or not (in_hook or is_alias(known.tensor, tensor)):
            storage = None if in_hook else tensor.untyped_storage()
            known = self._parameters[id(tensor), in_hook] = self._leaf(tensor, storage, in_hook=in_hook)
        return known

    def _leaf(self, tensor: torch.Tensor, storage: torch.UntypedStorage | None, *, in_hook: bool) -> TapeValue:
        held, version = self.tape.alias(tensor, in_hook)
        # Autograd saves some ops' arguments before it runs them, so a hook cannot know which op it is called for.
        op = "" if in_hook else self._op
        # Autograd may use tensors that it saved itself after such a write, as without a plan.
        content = None if in_hook or self.is_captured else glance_at(held)
        value = TapeValue(held, None, version, (self.unit_path, self.scope, op), content)
        if storage is not None:
            if type(tensor) in (torch.Tensor, Parameter):
                self.compare(tensor, storage, layout_of(tensor))
            watch(value, storage)
        return value

    @untraced
    def pack_marked(self, tensor: torch.Tensor) -> Any:
        """Do the same, and from the first offloaded value on, use it to detect when backward reaches this call."""
        packed = self.pack(tensor)
        if self.place is None or is_constant(tensor):
            return packed
        flight, call = self.place
        return flight.mark(packed, call)

    @untraced
    def pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) is Parameter:
            return self._parameter(tensor, in_hook=True)
        if type(tensor) is not torch.Tensor:
            if is_traceable_wrapper_subclass(tensor):
                return PackedSubclass(tensor, self.pack)
            if is_opaque_subclass(tensor):
                return held_whole(tensor, (self.unit_path, self.scope, ""))
        known = self.known_value(tensor, tensor.untyped_storage()) if has_strides(tensor) else None
        if known is not None:
            self._saves_dropped.add((self.unit_path, self.scope))
            known.is_saved()
            return known
        # Not watched: writing to it before backward is an error in plain autograd too.
        return self._leaf(tensor, None, in_hook=True)
