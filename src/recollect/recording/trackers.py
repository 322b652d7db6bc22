"""Trackers attached to storages while a step is recorded, to log their deaths and fillings.

Also the bytes of storages without trackers, which the step does not use, and holds a unit's call while it is recorded: its
values and ops, of which `assemble` makes a graph.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from recollect._torch_parallel import data_parallelism_runs
from recollect._torch_private import (
    accumulates_gradient,
    current_autograd_node,
    is_fake_tensor,
    is_opaque_subclass,
    is_traceable_wrapper_subclass,
    untraced,
)
from recollect.costs.op_costs import OpRun
from recollect.engine.subclasses import strided_tensors
from recollect.measuring.device_memory import allocated_bytes
from recollect.measuring.meter import storages_of
from recollect.profile import events
from recollect.profile.events import Event, Key
from recollect.recording.event_log import Death, EventLog, Need
from recollect.tensors import version_of

_TRACKER = "_recollect_tracker"
_NEEDS = "_recollect_needs"

Log: TypeAlias = Callable[..., None]
"""Adds an event to the record: `StepRecorder.log`."""


def storage_of(tensor: Any) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None for other objects, and for tensors without one."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return None
    if is_opaque_subclass(tensor) or is_traceable_wrapper_subclass(tensor):
        return None
    return tensor.untyped_storage()


def tracker_of(storage: torch.UntypedStorage | None) -> Tracker | None:
    death = getattr(storage, _TRACKER, None)
    return None if death is None else death.means


def keys_outside(tensors: Iterable[torch.Tensor | None]) -> set[Key]:
    """Return the keys of those tensors that were made outside the units' forward."""
    trackers = (tracker_of(part.untyped_storage()) for part in strided_tensors(list(tensors)))
    return {tracker.key for tracker in trackers if isinstance(tracker, TrackedOther)}


class Persistent:
    """Marks a storage that existed before the step: a parameter, a buffer, the batch; or that the recording itself made."""

    __slots__ = ()

    def end(self) -> None:
        """Return no event: its death does not count."""


class Trackers:
    """Attaches trackers to storages, and detaches them when the recording is over.

    A storage may outlive the step, and be met by the recording of a later one.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def attach(self, storage: torch.UntypedStorage, tracker: Tracker) -> None:
        """Make a tracker say what the death of a storage means, in place of an earlier one, which ends here."""
        old: Death | None = getattr(storage, _TRACKER, None)
        if old is not None:
            if (end := old.means.end()) is not None:
                self._log.append(end)
            old.means = Persistent()
        setattr(storage, _TRACKER, self._log.death_of(storage, tracker))

    def mark_persistent(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in strided_tensors(list(tensors)):
            self.attach(tensor.untyped_storage(), Persistent())

    def detach(self) -> None:
        for death in self._log.close():
            storage = death()
            if isinstance(storage, torch.UntypedStorage):
                vars(storage).pop(_TRACKER, None)
                vars(storage).pop(_NEEDS, None)


def hold_need(storage: torch.UntypedStorage, need: Need) -> None:
    vars(storage).setdefault(_NEEDS, []).append(need)


class Tracked:
    """Tracks a storage that was made in the step.

    The tape keeps a copy of such a tensor, and the storage dies when the model releases it: how long a plan keeps it is
    up to the simulator.

    `call`, `value`: of the unit that made it, and which of its values the storage holds now; -1 if no unit made it.
    """

    __slots__ = ("_copied_content", "_copy", "call", "value")

    def __init__(self, call: int = -1, value: int = -1) -> None:
        self.call = call
        self.value = value
        self._copy: weakref.ref[torch.UntypedStorage] | None = None
        self._copied_content = (-1, -1)

    def forget_copy(self) -> None:
        self._copy = None

    def copy_of(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor on a copy of the storage; callers share the copy while it lives."""
        if tensor.is_nested:
            return tensor.clone()
        # A copy has the stored bits; their interpretation is not part of the layout.
        if tensor.is_conj():
            return self.copy_of(tensor.conj(), storage).conj()
        if tensor.is_neg():
            return torch._neg_view(self.copy_of(torch._neg_view(tensor), storage))
        content = self.value, version_of(tensor)
        copy = self._copy() if self._copy is not None and self._copied_content == content else None
        layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        if copy is not None:
            return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(copy, layout[2], *layout[:2])
        whole = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0).clone()
        if not is_fake_tensor(tensor):
            self._copy = weakref.ref(whole.untyped_storage())
            self._copied_content = content
        return whole.as_strided(*layout)


class TrackedValue(Tracked):
    """Tracks a storage that a unit's forward made."""

    __slots__ = ()

    @property
    def key(self) -> Key:
        return self.call, self.value

    def end(self) -> Event:
        return events.DIES, *self.key


class TrackedOther(Tracked):
    """Tracks a storage that was made outside the units' forward.

    `made`, `used`: the autograd nodes whose formulas made it and last used it.
    """

    __slots__ = ("made", "storage", "used")

    def __init__(self, storage: int, made: int) -> None:
        super().__init__()
        self.storage = storage
        self.made = made
        self.used = -1

    @property
    def key(self) -> Key:
        return -1, self.storage

    def hand_over(self) -> int:
        """Return the storage's number, for a different tracker to log its end."""
        number, self.storage = self.storage, -1
        return number

    def end(self) -> Event | None:
        return (events.FREE, self.storage) if self.storage >= 0 else None


@dataclass(slots=True, eq=False)
class Filled:
    """Tracks a storage that its owner fills and empties, as FSDP2 does with the parameters that it gathers.

    It is not a value: its storage exists while its owner wants it, whatever a plan says.

    `storage`: its number while it holds something; -1 while it is empty.
    """

    log: Log
    storage: int = -1

    def fill(self, number: int, nbytes: int) -> None:
        """Log that it holds something from here on, under a new number."""
        self.empty()
        self.storage = number
        self.log(events.ALLOC, number, nbytes)

    def empty(self) -> None:
        if self.storage >= 0:
            self.log(events.FREE, self.storage)
        self.storage = -1

    def end(self) -> Event | None:
        return (events.FREE, self.storage) if self.storage >= 0 else None


Tracker: TypeAlias = TrackedValue | TrackedOther | Filled | Persistent


@contextmanager
def filled_storages(note: Callable[[torch.UntypedStorage], object]) -> Iterator[None]:
    """Within the block, report each storage that its owner fills or empties with `resize_`, which no dispatch mode sees.

    This is how FSDP2 gathers parameters and frees them.
    """
    resize = torch.UntypedStorage.resize_
    had_own = "resize_" in vars(torch.UntypedStorage)

    @untraced
    def resized(storage: torch.UntypedStorage, size: int) -> object:
        result = resize(storage, size)
        note(storage)
        return result

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        if had_own:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        else:
            del torch.UntypedStorage.resize_


@contextmanager
def freed_gradients(note: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Within the block, report each parameter whose gradient `zero_grad` frees, or would free if there were one."""
    originals: Any = torch.optim.Optimizer.zero_grad, torch.nn.Module.zero_grad
    # Emptied at the end: code that is compiled within the block holds `zero_grad` for good, and must not hold a step with it.
    told = [note]

    def zero_grad(its: Any, set_to_none: bool = True) -> None:
        is_module = isinstance(its, torch.nn.Module)
        groups = [{"params": its.parameters()}] if is_module else its.param_groups
        for parameter in (p for group in groups for p in group["params"] if told and set_to_none):
            told[0](parameter)
        originals[is_module](its, set_to_none)

    torch.optim.Optimizer.zero_grad = torch.nn.Module.zero_grad = zero_grad  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        told.clear()
        torch.optim.Optimizer.zero_grad, torch.nn.Module.zero_grad = originals  # type: ignore[method-assign]


class UnrelatedMemory:
    """Memory throughout a step that has nothing to do with it: other models, copies of weights, data.

    Make it before the step; ask for its bytes when the step has run. On CUDA the allocator knows: blocks allocated when
    the step ends that belong neither to the step nor to its inputs. That includes the workspaces of libraries. On the
    CPU there is no such count; instead, add up the storages that are `alive` before the step and after it, and that no op
    read.

    `known`: tensors of the device which the record counts itself. `set_aside_bytes`: others that a CUDA device holds, but
    only until the end.
    """

    def __init__(
        self,
        device: torch.device,
        known: Iterable[torch.Tensor],
        alive: Iterable[torch.UntypedStorage],
        *,
        set_aside_bytes: int = 0,
    ) -> None:
        self._device = device
        storages = storages_of(known)
        self._known = [(weakref.ref(storage), storage.nbytes()) for storage in storages]
        self._set_aside_bytes = set_aside_bytes
        ids = {id(storage) for storage in storages}
        self._present = [weakref.ref(storage) for storage in alive if id(storage) not in ids]

    def nbytes(self, step_bytes: int) -> int:
        """Return the bytes; call this before the recorder releases the storages that it saw.

        `step_bytes`: of what the step made and is still alive.
        """
        if self._device.type == "cuda":
            known_bytes = sum(nbytes for reference, nbytes in self._known if reference() is not None)
            return max(0, allocated_bytes(self._device) - known_bytes - self._set_aside_bytes - step_bytes)
        alive = (reference() for reference in self._present)
        return sum(storage.nbytes() for storage in alive if storage is not None and tracker_of(storage) is None)


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
    saved_elements: int = 0
    stays: bool = False


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
    # Of each value that it reads and that was computed outside of it: the index of its stand-in here.
    sources: dict[Key, int] = field(default_factory=dict)
    # Number of ops that the tape sees, by module; and modules that it always watches, since they write in place.
    seen_ops: Counter[str] = field(default_factory=Counter)
    watched_modules: set[str] = field(default_factory=set)
    # Calls of modules inside.
    num_modules: int = 0
    # Of values that may be the same on all ranks of a group: a number for their content.
    contents: dict[int, int] = field(default_factory=dict)
    # A backward built a graph of its own (`create_graph`) while it asked for what this call saved.
    builds_graph: bool = False
    # No plan may drop its output.
    output_stays: bool = False
    # Numbers of the nodes of autograd's graph that its forward made.
    nodes: range = range(0)

    def input(self, key: Key, nbytes: int) -> int:
        """Return the stand-in for a value that was computed outside the unit; add it if there is none."""
        if key not in self.sources:
            self.sources[key] = len(self.values)
            self.values.append(RecordedValue(f"input {len(self.sources) - 1}", nbytes, producer=None))
        return self.sources[key]

    def value_of(self, thing: Any, index: int) -> int:
        """Return the value of this call, whose index is given, that a tensor holds; -1 if it holds none, or is not a tensor."""
        tracker = tracker_of(storage_of(thing))
        if not isinstance(tracker, Tracked):
            return -1
        return tracker.value if tracker.call == index else self.sources.get(tracker.key, -1)


class Reached:
    """Logs where backward reaches units and leaves them, for units that run from traces."""

    def __init__(self, log: Log, calls: Sequence[RecordedCall], begin_backward: Callable[[], None]) -> None:
        self._log = log
        self._calls = calls
        self._begin_backward = begin_backward
        self._call = -1

    def note(self) -> None:
        """Note which formula runs, if any.

        What adds up a parameter's gradient belongs to the unit before it, and what gathers parameters to none.
        """
        node = current_autograd_node()
        if node < 0 or accumulates_gradient() or (self._call >= 0 and node in self._calls[self._call].nodes):
            return
        self._begin_backward()
        if self._call >= 0:
            self._log(events.LEAVE, self._call)
        self._call = next((index for index, call in enumerate(self._calls) if node in call.nodes), -1)
        if self._call >= 0 and data_parallelism_runs():
            self._call = -1
        if self._call >= 0:
            self._log(events.REACH, self._call)
