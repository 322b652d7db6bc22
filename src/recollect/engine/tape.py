"""The tape: sees every op of a unit's forward, forgets what the plan drops, and computes it again when backward asks.

Two hooks do the work while a unit runs forward. `TapeMode` sees each ATen op below autograd and, for a result that is
to be dropped, remembers how it was made. The saved-tensor hooks then hand autograd a `TapeValue` for every tensor that
it wants to save: one that holds the tensor, or one that only knows how to make it.

NOTE [ Rules of the tape ]
1. Identity. A tensor is recognised by its storage, layout and version; what is not recognised is kept.
2. Mutation. An in-place op makes a new value on the same storage. Whoever holds the old content gets a private copy
   first. A change that the tape cannot see raises `MutatedValueError` at replay, never a wrong gradient.
3. Randomness. A random op is kept, or runs again under the generator state that it had.
4. Choices (`topk`, `sort`, ...), shapes that depend on data, and collectives are kept (`facts.py`).
5. Tensor subclasses desugar first; their inner tensors are recorded.
6. A leaf whose storage was freed (FSDP2 resharding) must be back before the unit's backward; else it is an error.
7. What runs behind the dispatcher is kept: buffers filled by foreign kernels, and whatever runs with gradients switched
   off, because custom autograd Functions and compiled regions may write to the results of ops out of sight.
8. No state but the frame of the running unit, per thread: any number of forwards may be in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from recollect._torch_private import (
    TorchDispatchMode,
    below_autograd,
    desugars,
    disable_autocast,
    is_fake_tensor,
    is_traceable_wrapper_subclass,
    tree_leaves,
    untraced,
)
from recollect.engine.facts import OpFacts, facts_of
from recollect.engine.opcall import Arguments, OpCall, WriteCall, generator_state
from recollect.engine.subclasses import PackedSubclass, strided_tensors
from recollect.engine.values import (
    UNWATCHED,
    StorageRecord,
    TapeValue,
    alias_in_hook,
    alias_in_mode,
    attach_record,
    expect_bump,
    forget_record,
    is_known,
    layout_of,
    record_of,
    snapshot_leaves,
    watch,
)
from recollect.replay import Node

# Looked up several times an op.
_STRIDED = torch.strided
# An index tensor of these says which elements to take, not where they are.
_MASKS = frozenset({torch.bool, torch.uint8})

Decision = bool | tuple[bool, ...]
"""Whether the results of an op are dropped: all alike, or one by one."""


class Policy(Protocol):
    """Decides which values are dropped. Asked once for each name; the answer holds for every later call."""

    def drops(self, unit_path: str, value_name: str) -> bool:
        """Whether a value is dropped in forward and computed again in backward."""
        ...

    def drops_output(self, unit_path: str) -> bool:
        """Whether what the unit returns may be dropped too, so that the next unit's backward computes it again."""
        ...


class Tape:
    """What the units of one applied model share: the policy, and which unit is running on this thread."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._decisions: dict[tuple[str, str, str], list[Decision]] = {}
        self._local = threading.local()

    @property
    def mode(self) -> TapeMode | None:
        """The mode of the unit that is running on this thread."""
        return getattr(self._local, "mode", None)

    def new_mode(self, unit_path: str) -> TapeMode:
        """Return the mode for one call of a unit."""
        return TapeMode(self, unit_path)

    def run(self, unit_path: str, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run a unit's forward on the tape."""
        outer = self.mode
        with self._watching(unit_path) if outer is None else _inside(outer, unit_path):
            output = forward(*args, **kwargs)
        if not self.policy.drops_output(unit_path):
            self.hold_outputs(unit_path, output)
        return output

    @contextmanager
    def _watching(self, unit_path: str) -> Iterator[None]:
        mode = self.new_mode(unit_path)
        self._local.mode = mode
        try:
            with saved_tensors_hooks(mode.pack, self.unpack), mode:
                yield
        finally:
            self._local.mode = None

    def alias(self, tensor: torch.Tensor, in_hook: bool) -> tuple[torch.Tensor, int]:
        """Return a tensor to hold in place of one that is kept, and the version at which it is right."""
        if is_fake_tensor(tensor):
            return tensor.detach(), UNWATCHED  # Fake tensors are made by a dispatch mode, so no guard goes around it.
        held = alias_in_hook(tensor) if in_hook else alias_in_mode(tensor)
        return held, UNWATCHED if tensor.is_inference() else tensor._version

    def hold_outputs(self, unit_path: str, output: Any) -> None:
        """Keep what a unit returns: from here on its storages are held by whoever needs them."""
        for tensor in strided_tensors(output):
            storage = tensor.untyped_storage()
            record = record_of(storage)
            if record is None:
                continue
            forget_record(storage)
            size, stride, offset, dtype = record.layout
            if record.is_current(tensor._version) and record.base.tensor is None and tensor.dtype == dtype:
                held, version = self.alias(tensor, True)
                with torch.no_grad():
                    record.base.hold(held.as_strided(size, stride, offset), version)
                record.base.label = (unit_path, "", "return")
                watch(record.base, storage)

    @untraced
    def unpack(self, packed: Any) -> torch.Tensor:
        """Give backward the tensor that it saved; compute it if it was dropped."""
        if type(packed) is not TapeValue:
            rebuilt: torch.Tensor = packed.rebuild(self.unpack)
            return rebuilt
        value: TapeValue = packed
        if value.tensor is not None:
            return value.fetch()
        # As the ops ran in forward: below autograd and autocast, with gradients switched on, which some kernels look at.
        with torch.enable_grad(), below_autograd(), disable_autocast():
            tensor: torch.Tensor = value.get()
        return tensor

    def decide(self, mode: TapeMode, facts: OpFacts, asks: bool) -> Decision:
        """Whether the results of the op that is about to run are dropped; counted but not asked for if `asks` is False."""
        key = (mode.unit_path, mode.scope, facts.name)
        count = mode.counts.get(key, 0)
        mode.counts[key] = count + 1
        if facts.keeps or not asks:
            return False
        decisions = self._decisions.get(key)
        if decisions is None:
            decisions = self._decisions[key] = []
        while len(decisions) <= count:
            decisions.append(self._ask(mode.unit_path, value_stem(mode.scope, facts.name, len(decisions)), facts))
        return decisions[count]

    def _ask(self, unit_path: str, stem: str, facts: OpFacts) -> Decision:
        names = value_names(stem, facts)
        answers = tuple(self.policy.drops(unit_path, name) for name in names)
        return answers[0] if len(set(answers)) == 1 else answers


def value_stem(scope: str, op_name: str, count: int) -> str:
    """Name the `count`-th call (from 0) of an op in a module: "mlp.act_fn.silu", "add#1"."""
    stem = f"{scope}.{op_name}" if scope else op_name
    return f"{stem}#{count}" if count else stem


def value_names(stem: str, facts: OpFacts) -> tuple[str, ...]:
    """Name the results of an op call: by the call itself where there is one result, else "stem.0", "stem.1", ..."""
    if facts.num_returns is None or facts.num_returns <= 1 or facts.writes:
        return (stem,)
    return tuple(f"{stem}.{index}" for index in range(facts.num_returns))


class TapeMode(TorchDispatchMode):
    """Sees the ops of one call of a unit."""

    def __init__(self, tape: Tape, unit_path: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.unit_path = unit_path
        self.scope = ""
        self.counts: dict[tuple[str, str, str], int] = {}
        self._op = ""
        self._parameters: dict[int, TapeValue] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled regions run compiled: the tape sees them as one opaque op and keeps what they save."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Keeps torch from wrapping `__torch_dispatch__` (1 us an op); `untraced` does what that is for.
        return False

    @untraced
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(desugars(kind) for kind in types):
            return NotImplemented  # Rule 5: DTensor and its kin come back as ops on their inner tensors.
        facts = facts_of(func)
        self._op = facts.name
        if facts.is_view:
            return func(*args, **kwargs)  # A view is made from its base when somebody asks for it.
        if facts.changes_layout_only:
            expect_bump(args[0])
            return func(*args, **kwargs)
        if facts.is_lazy:
            forget_record(args[0].untyped_storage())
            return func(*args, **kwargs)
        # Rule 7: a custom autograd Function, or a compiled region, runs with gradients switched off.
        decision = torch.is_grad_enabled() and self.tape.decide(self, facts, not facts.writes or _is_dropped(args))
        if facts.writes:
            return self._run_write(func, facts, args, kwargs, decision)
        if decision is False:
            return func(*args, **kwargs)
        state = generator_state(facts, args, kwargs) if facts.is_random else None
        output = func(*args, **kwargs)
        if facts.may_keep and _must_keep_result(facts, args, output, kwargs):
            return output
        arguments = Arguments(self._value_in_mode, facts, args, kwargs)
        node = Node(OpCall(func, arguments, state), arguments.values)
        if isinstance(output, torch.Tensor):
            self._register(output, node, facts, drop=True)
        elif isinstance(output, (tuple, list)):
            for index, result in enumerate(output):
                drop = decision if isinstance(decision, bool) else decision[index]
                self._register(result, node, facts, drop=drop)
        return output

    def _register(self, result: Any, node: Node, facts: OpFacts, *, drop: bool) -> None:
        if not drop or not isinstance(result, torch.Tensor) or result.layout is not _STRIDED:
            node.add_output(None)
            return
        storage = result.untyped_storage()
        if is_known(storage) or result.storage_offset():
            # The op returned a view that its schema does not mention: known through the storage, or kept.
            node.add_output(None)
            return
        value = TapeValue(None, node)
        node.add_output(value)
        record = StorageRecord(value, layout_of(result), result._version, facts.creates)
        attach_record(storage, record)

    def _run_write(self, func: Any, facts: OpFacts, args: Any, kwargs: Any, decision: Decision) -> Any:
        targets = [
            tensor
            for where in facts.writes
            for tensor in tree_leaves(
                args[where] if isinstance(where, int) and where < len(args) else kwargs.get(where)
            )
            if isinstance(tensor, torch.Tensor)
        ]
        storages = [tensor.untyped_storage() for tensor in targets]
        for storage in storages:
            snapshot_leaves(storage)
        write = self._bind_write(func, facts, args, kwargs) if decision and len(targets) == 1 else None
        version = targets[0]._version if write is not None else 0
        output = func(*args, **kwargs)
        for target, storage in zip(targets, storages, strict=True):
            if write is None or (facts.keeps_on_cuda and target.is_cuda):
                forget_record(storage)
        record = record_of(storages[0]) if write is not None else None
        if write is not None and record is not None:
            value = TapeValue(node=write)
            write.add_output(value)
            record.rebase(value, version, layout_of(targets[0]))
        return output

    def _bind_write(self, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> Node | None:
        """Describe an in-place op as a function from the old content of the storage to the new one, where that is known."""
        if facts.writes[0] != 0 or not isinstance(args[0], torch.Tensor):
            return None
        target = args[0]
        storage = target.untyped_storage()
        record = record_of(storage)
        layout = layout_of(target)
        if record is None or not record.is_current(target._version) or layout[3] != record.layout[3]:
            return None
        if record.layout[0].numel() * target.element_size() != storage.nbytes():
            return None  # The base does not cover its storage densely, so a clone would not have its layout.
        if record.created == "undefined" and not (
            facts.overwrites and (layout == record.layout or record.part(layout) is not None)
        ):
            return None  # A write that reads the old content reads what a kernel may have put there.
        base = record.base
        state = generator_state(facts, args, kwargs) if facts.is_random else None
        arguments = Arguments(self._value_in_mode, facts, args[1:], kwargs)
        if any(value.holds(storage) for value in arguments.values):
            return None  # A held alias of the very storage: holding it in its own record would be a cycle.
        view = None if layout == record.layout else layout
        return Node(WriteCall(func, arguments, state, view), [base, *arguments.values], mutates=True)

    def _known_value(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> TapeValue | None:
        """Return the dropped value that a tensor is, or None for a tensor that the tape did not drop."""
        record = record_of(storage)
        if record is None:
            return None
        if record.created is not None:
            forget_record(storage)
            return None
        return record.value_of(layout_of(tensor)) if record.is_current(tensor._version) else None

    def _value_in_mode(self, tensor: torch.Tensor) -> TapeValue:
        """Return the value of an op's argument: a dropped one where it is known, else one that holds the tensor."""
        if type(tensor) is Parameter:
            known = self._parameters.get(id(tensor))
            if known is None or known.version != tensor._version:
                known = self._parameters[id(tensor)] = self._leaf(tensor, tensor.untyped_storage(), in_hook=False)
            return known
        if tensor.layout is not _STRIDED:
            return self._leaf(tensor, None, in_hook=False)
        storage = tensor.untyped_storage()
        return self._known_value(tensor, storage) or self._leaf(tensor, storage, in_hook=False)

    def _leaf(self, tensor: torch.Tensor, storage: torch.UntypedStorage | None, *, in_hook: bool) -> TapeValue:
        held, version = self.tape.alias(tensor, in_hook)
        # Autograd saves the arguments of some ops before it runs them, so a hook does not know for which op it is called.
        op = "" if in_hook else self._op
        value = TapeValue(held, None, version, (self.unit_path, self.scope, op))
        if storage is not None:
            watch(value, storage)
        return value

    @untraced
    def pack(self, tensor: torch.Tensor) -> Any:
        """Give autograd something to hold instead of a tensor that it saves."""
        if type(tensor) is Parameter:
            known = self._parameters.get(id(tensor))
            if known is None or known.version != tensor._version:
                known = self._parameters[id(tensor)] = self._leaf(tensor, None, in_hook=True)
            return known
        if type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor):
            return PackedSubclass(tensor, self.pack)
        if tensor.layout is not _STRIDED:
            return self._leaf(tensor, None, in_hook=True)
        # Not watched: if it is written to before backward, that is an error with plain autograd too.
        return self._known_value(tensor, tensor.untyped_storage()) or self._leaf(tensor, None, in_hook=True)


@contextmanager
def _inside(mode: TapeMode, unit_path: str) -> Iterator[None]:
    """A unit runs within another one: its ops have its own names."""
    outer = mode.unit_path, mode.scope, mode.counts
    mode.unit_path, mode.scope, mode.counts = unit_path, "", {}
    try:
        yield
    finally:
        mode.unit_path, mode.scope, mode.counts = outer


def _is_dropped(args: Any) -> bool:
    """Whether the first argument of an in-place op has a recipe; a buffer, or what is kept, is written to as it is."""
    target = args[0] if args else None
    if not isinstance(target, torch.Tensor) or target.layout is not _STRIDED:
        return False
    return record_of(target.untyped_storage()) is not None


def _must_keep_result(facts: OpFacts, args: Any, output: Any, kwargs: Any) -> bool:
    """What only the call tells: rule 4 on CUDA and for masks, and copies from another device (a synchronisation)."""
    if facts.keeps_with_mask:
        return any(index is not None and index.dtype in _MASKS for index in args[1])
    if facts.keeps_on_cuda:
        return any(isinstance(t, torch.Tensor) and t.is_cuda for t in tree_leaves(output))
    # PyTorch names the device in copies that stay on it, too (the last op of `rms_norm` in bf16).
    return facts.device_keyword and kwargs.get("device") is not None and bool(output.device != args[0].device)
