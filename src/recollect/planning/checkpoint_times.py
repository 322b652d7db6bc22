"""The bytes that every plan has in memory at chosen moments of a step, and the values it must still be able to produce.

At a moment, these bytes are alive under *every* plan, because the recorded events say so:

- persistent bytes of the whole step, and storages outside of the units (gradients, the logits, optimizer temporaries);
- values of units that the model's own code still holds;
- saved values that backward has asked for and not yet released.

Each value that backward will still need is in memory at that moment, or ops that run later compute it from values in
memory.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recollect.profile.events import ALLOC, BACKWARD, DIES, FREE, OP, OPTIMIZER, PHASE, RELEASE, SAVE, USE, WORK
from recollect.profile.profile import Profile
from recollect.simulation.windows import windows


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointTimes:
    """Moments of a step in order, and the values of all calls as columns: call c's start at `first_value[c]`."""

    events: NDArray[np.int64]
    """Position in the log of each moment; statements about it hold after that event."""
    stages: NDArray[np.int64]
    """How often backward has asked for a value by then. Nothing runs again between moments of the same stage."""
    fixed_bytes: NDArray[np.int64]
    """Bytes alive then under every plan."""
    needed: NDArray[np.bool_]
    """(moment, value): backward still asks for the value."""
    can_cost: NDArray[np.bool_]
    """(moment, value): the value has been made, and a plan can be without it. Its bytes are not fixed ones. Among
    values that overwrite each other it is the last one that backward still needs, or else the last."""
    first_value: tuple[int, ...]
    """Column of each call's first value, and the number of columns."""
    first_op: tuple[int, ...]
    """Likewise for ops."""
    first_use: NDArray[np.int64]
    """For each value, the stage that begins when backward first asks for it; one more than all if it never does."""
    reads: NDArray[np.int64]
    """(op, value): the op read the value, computed by an op of any call and alive in the recorded step."""
    writes: NDArray[np.int64]
    """(op, value): the op wrote over the value."""


def checkpoint_times(profile: Profile, events: Iterable[int] | None = None) -> CheckpointTimes:
    """Return the constraints on a plan's memory at some moments of a step, given as positions in its log.

    By default these are, in each stretch of the step that belongs to one unit call: where backward begins it, where most bytes
    are alive under every plan, and where most are alive if everything is kept.
    """
    scan = _Scan(profile)
    fixed_bytes, phases, stages = (np.array(a, dtype=np.int64) for a in (scan.fixed_bytes, scan.phases, scan.stages))
    if events is None:
        events = _candidates(profile, fixed_bytes, np.array(scan.demanded_bytes, dtype=np.int64), phases)
    chosen = np.unique(np.fromiter(events, dtype=np.int64))
    needed = _at(chosen, scan.needed_changes, scan.first_value[-1])
    held = _at(chosen, scan.held_changes, scan.first_value[-1])
    made = _at(chosen, [(position, value, 1) for position, value in scan.made], scan.first_value[-1])
    return CheckpointTimes(
        events=chosen,
        stages=stages[chosen],
        fixed_bytes=fixed_bytes[chosen],
        needed=needed,
        can_cost=_one_per_storage(made & ~held[:, scan.first_in_storage], needed, np.array(scan.first_in_storage)),
        first_value=scan.first_value,
        first_op=scan.first_op,
        first_use=np.array(scan.first_use, dtype=np.int64),
        reads=np.array(sorted(scan.reads), dtype=np.int64).reshape(-1, 2),
        writes=np.array(scan.writes, dtype=np.int64).reshape(-1, 2),
    )


def fixed_bytes(profile: Profile) -> NDArray[np.int64]:
    """Return the bytes that every plan has alive after each event of a step, as `checkpoint_times` counts them."""
    return np.array(_Scan(profile).fixed_bytes, dtype=np.int64)


def _at(chosen: NDArray[np.int64], changes: Iterable[tuple[int, int, int]], num_values: int) -> NDArray[np.bool_]:
    """Return for each chosen moment and value whether its count is above 0, from all changes (event, value, change)."""
    counts = np.zeros((len(chosen) + 1, num_values), dtype=np.int32)
    rows = np.array(list(changes), dtype=np.int64).reshape(-1, 3)
    np.add.at(counts, (np.searchsorted(chosen, rows[:, 0]), rows[:, 1]), rows[:, 2])
    return np.cumsum(counts[:-1], axis=0, dtype=np.int32) > 0


def _one_per_storage(
    can_cost: NDArray[np.bool_], needed: NDArray[np.bool_], first_in_storage: NDArray[np.int64]
) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = can_cost.copy()
    for first in np.unique(first_in_storage[first_in_storage != np.arange(len(first_in_storage))]):
        latest_first = np.flatnonzero(first_in_storage == first)[::-1]
        present = can_cost[:, latest_first]
        counts = np.argmax(present * 1 + (present & needed[:, latest_first]), axis=1)
        found[:, latest_first] = present & (counts[:, None] == np.arange(len(latest_first)))
    return found


def _candidates(
    profile: Profile, fixed_bytes: NDArray[np.int64], demanded_bytes: NDArray[np.int64], phases: NDArray[np.int64]
) -> set[int]:
    chosen: set[int] = set()
    starts = [window.start for window in windows(profile)]
    for start, end in itertools.pairwise([*starts, len(fixed_bytes)]):
        if start == end:
            continue
        chosen.add(start + int(np.argmax((fixed_bytes + demanded_bytes)[start:end])))
        if phases[start] == BACKWARD:
            chosen.add(start)
        later = np.flatnonzero(phases[start:end] >= BACKWARD)
        if len(later):
            chosen.add(start + int(later[np.argmax(fixed_bytes[start:end][later])]))
    return chosen


class _Scan:
    """Walks over the events and notes the bytes that every plan has and the values it needs after each, and their changes."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._position = 0
        self._uses_left = Counter(handle for (handle,) in profile.log.operands(USE))
        graphs = [profile.graph_of(call) for call in profile.calls]
        self.first_value = (0, *itertools.accumulate(len(graph.values) for graph in graphs))
        self.first_op = (0, *itertools.accumulate(len(graph.ops) for graph in graphs))
        sizes = [[profile.block_bytes(value.nbytes) for value in graph.values] for graph in profile.graphs]
        self._nbytes = [nbytes for call in profile.calls for nbytes in sizes[call.graph]]
        self._origins = [{value: self.first_value[c] + v for value, c, v in call.origins} for call in profile.calls]
        self._outside = [dict(call.outside) for call in profile.calls]
        # Storages outside the units: their bytes, and their holders (the model's code, and autograd).
        self._storages: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._borrowed: dict[int, int] = {}
        self._handles: dict[int, int] = {}
        self._in_use: set[int] = set()
        self._undead: set[int] = set()
        # For each value, the first that was in its storage: others are written over that one.
        self.first_in_storage = list(range(len(self._nbytes)))
        # For each of these: the number of reasons why every plan has its bytes, and the number of uses still to come.
        self._held = [0] * len(self._nbytes)
        self._waiting = [0] * len(self._nbytes)
        self._alive_bytes = profile.persistent_bytes
        self._demanded_bytes = 0
        self._phase = 0
        # After each event.
        self.fixed_bytes: list[int] = []
        self.demanded_bytes: list[int] = []
        self.phases: list[int] = []
        self.stages: list[int] = []
        # (event, value, change), and where values are made.
        self.needed_changes: list[tuple[int, int, int]] = []
        self.held_changes: list[tuple[int, int, int]] = []
        self.made: list[tuple[int, int]] = []
        self.reads: set[tuple[int, int]] = set()
        self.writes: list[tuple[int, int]] = []
        self._num_uses = 0
        self.first_use = [1 + self._uses_left.total()] * len(self._nbytes)
        handlers: dict[int, Callable[..., object]] = {
            ALLOC: self._alloc, FREE: self._free, OP: self._op, DIES: self._dies, SAVE: self._save, USE: self._use,
            RELEASE: self._release, PHASE: self._begin_phase,
        }  # fmt: skip
        for event in self._profile.log.play(handlers):
            working_bytes = event[1] if event[0] == WORK else 0
            # As the simulator has it: the calibration is of forward and backward only.
            calibration_bytes = self._profile.calibration_bytes if self._phase != OPTIMIZER else 0
            self.fixed_bytes.append(self._alive_bytes + working_bytes + calibration_bytes)
            self.demanded_bytes.append(self._demanded_bytes)
            self.phases.append(self._phase)
            self.stages.append(self._num_uses)
            self._position += 1

    def _value(self, call: int, value: int) -> int:
        """Return the column of the value with index `value` in a call."""
        return self._origins[call].get(value, self.first_value[call] + value)

    def _hold(self, value: int, change: int) -> None:
        value = self.first_in_storage[value]
        before = self._held[value]
        self._held[value] += change
        self.held_changes.append((self._position, value, change))
        if (before == 0) != (before + change == 0):
            nbytes = self._nbytes[value] if before == 0 else -self._nbytes[value]
            self._alive_bytes += nbytes
            if self._waiting[value]:
                self._demanded_bytes -= nbytes

    def _wait(self, value: int, change: int) -> None:
        self.needed_changes.append((self._position, value, change))
        value = self.first_in_storage[value]
        before = self._waiting[value]
        self._waiting[value] += change
        if (before == 0) != (before + change == 0) and not self._held[value]:
            self._demanded_bytes += self._nbytes[value] if before == 0 else -self._nbytes[value]

    def _alloc(self, storage: int, nbytes: int) -> None:
        self._storages[storage] = self._profile.block_bytes(nbytes)
        self._holders[storage] = 1
        self._alive_bytes += self._storages[storage]

    def _free(self, storage: int) -> None:
        self._holders[storage] -= 1
        if not self._holders[storage]:
            del self._holders[storage]
            self._alive_bytes -= self._storages.pop(storage)

    def _op(self, call: int, op_index: int) -> None:
        op = self._profile.graph_of(self._profile.calls[call]).ops[op_index]
        for index in op.inputs:
            # Storages that the simulator does not hold at this point always exist: parameters and the batch.
            value = self._value(call, index)
            if value in self._undead:
                self.reads.add((self.first_op[call] + op_index, value))
        if op.mutates:
            # The storage continues under the new value's name.
            old, new = (self.first_value[call] + index for index in (op.inputs[0], op.outputs[0]))
            if self._dies(call, op.inputs[0]):
                self.first_in_storage[new] = self.first_in_storage[old]
                self.writes.append((self.first_op[call] + op_index, old))
                self._make(new)
            return
        for index in op.outputs:
            self._make(self.first_value[call] + index)

    def _make(self, value: int) -> None:
        self._undead.add(value)
        self.made.append((self._position, value))
        self._hold(value, 1)

    def _dies(self, call: int, index: int) -> bool:
        value = self.first_value[call] + index
        if value not in self._undead:
            return False
        self._undead.remove(value)
        self._hold(value, -1)
        return True

    def _save(self, call: int, index: int, handle: int, saver: int) -> None:
        storage = self._outside[call].get(index, -1)
        if storage in self._holders:
            self._borrowed[handle] = storage
            self._holders[storage] += 1
        value = self._value(call, index)
        # Values that the simulator does not hold cost no bytes.
        if value in self._undead:
            self._handles[handle] = value
            if self._uses_left[handle]:
                self._wait(value, 1)

    def _use(self, handle: int) -> None:
        self._num_uses += 1
        self._uses_left[handle] -= 1
        value = self._handles.get(handle)
        if value is None:
            return
        self.first_use[value] = min(self.first_use[value], self._num_uses)
        if handle not in self._in_use:
            self._in_use.add(handle)
            self._hold(value, 1)
        if not self._uses_left[handle]:
            self._wait(value, -1)

    def _release(self, handle: int) -> None:
        if handle in self._borrowed:
            self._free(self._borrowed.pop(handle))
        value = self._handles.pop(handle, None)
        if value is not None and handle in self._in_use:
            self._in_use.remove(handle)
            self._hold(value, -1)

    def _begin_phase(self, phase: int) -> None:
        self._phase = phase
