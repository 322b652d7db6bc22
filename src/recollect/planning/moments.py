"""What every plan has in memory at chosen moments of a step, and what it must still be able to produce then.

At a moment, these bytes are alive under *every* plan, because the recorded events say so:

- what lives through the whole step, and storages outside of the units (gradients, the logits, optimizer temporaries);
- values of units that the model's own code still holds;
- saved values that backward has asked for and not yet released.

And for each unit call there is a set of values that backward will still ask for: at the moment each of them is in
memory, or ops run later that compute it from what is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from recollect.planning.pivots import Pivot
from recollect.profile.events import (
    ALLOC,
    BACKWARD,
    DIES,
    FREE,
    OP,
    OPTIMIZER,
    PHASE,
    RELEASE,
    SAVE,
    USE,
    WORK,
)
from recollect.profile.profile import Profile
from recollect.simulation.program import rounded_bytes
from recollect.simulation.windows import windows

__all__ = ["Demand", "Moment", "moments"]

_Key = tuple[int, int]
_NO_PIVOTS: Mapping[int, Pivot] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Demand:
    """What a unit call must still be able to produce: values of its graph; `free` ones are in memory under every plan.

    `is_asked`: backward has asked for the unit's pivot.
    """

    graph: int
    needed: frozenset[int]
    free: frozenset[int]
    is_asked: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment: bytes that every plan has then, and the demands that changed since the moment before, by call."""

    event: int
    fixed_bytes: int
    changed: dict[int, Demand]


def moments(profile: Profile, pivots: Mapping[int, Pivot] = _NO_PIVOTS) -> list[Moment]:
    """Return the moments at which a plan's memory is worth a look, in order.

    In each stretch of the step that belongs to one unit call: where backward begins it, where most bytes are alive
    under every plan, and where most are alive if everything is kept. And where backward asks for a pivot.

    Args:
        profile: the recorded step.
        pivots: by number of the graph.

    Complexity: two walks over the events.
    """
    found = []
    scan = _Scan(profile, pivots)
    chosen = _candidates(profile) | scan.pivot_uses
    for event, position in scan.walk():
        if position in chosen:
            found.append(Moment(position, scan.fixed_bytes(event), scan.take_changes()))
    return found


def _candidates(profile: Profile) -> frozenset[int]:
    """Return the positions of the events to look at."""
    chosen: set[int] = set()
    scan = _Scan(profile)
    starts = {window.start for window in windows(profile)}
    best: dict[str, tuple[int, int]] = {}
    for event, position in scan.walk():
        if position in starts:
            chosen.update(at for _, at in best.values())
            best = {}
            if scan.phase == BACKWARD:
                chosen.add(position)
        fixed_bytes = scan.fixed_bytes(event)
        sizes = {"all": fixed_bytes + scan.demanded_bytes}
        if scan.phase >= BACKWARD:
            sizes["fixed"] = fixed_bytes
        for name, nbytes in sizes.items():
            if name not in best or nbytes > best[name][0]:
                best[name] = (nbytes, position)
    return frozenset(chosen.union(at for _, at in best.values()))


class _Scan:
    """Walks over the events and keeps count of what every plan has and needs."""

    def __init__(self, profile: Profile, pivots: Mapping[int, Pivot] = _NO_PIVOTS) -> None:
        self._profile = profile
        self._events = list(profile.log.events())
        self._last_use = {event[1]: at for at, event in enumerate(self._events) if event[0] == USE}
        calls = {index: pivots[call.graph].value for index, call in enumerate(profile.calls) if call.graph in pivots}
        pivot_handles = {e[3] for e in self._events if e[0] == SAVE and e[1] in calls and e[2] == calls[e[1]]}
        self.pivot_uses = frozenset(at for at, e in enumerate(self._events) if e[0] == USE and e[1] in pivot_handles)
        self._pivot_of = calls
        self._asked: set[int] = set()
        self._origins = [{value: (c, v) for value, c, v in call.origins} for call in profile.calls]
        self._outside = [dict(call.outside) for call in profile.calls]
        # Of storages outside of the units: their bytes, and who holds them (the model's code, and what autograd saved).
        self._storages: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._borrowed: dict[int, int] = {}
        self._handles: dict[int, _Key] = {}
        self._in_use: set[int] = set()
        self._undead: set[_Key] = set()
        # For each value: how many reasons there are that every plan has it, and how many uses are still to come.
        self._held: dict[_Key, int] = {}
        self._waiting: dict[_Key, int] = {}
        self._changed: set[int] = set()
        self._alive_bytes = profile.persistent_bytes
        self.demanded_bytes = 0
        self.phase = 0

    def walk(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield each event, after it has been counted, with its position."""
        play: dict[int, Callable[..., object]] = {
            ALLOC: self._alloc, FREE: self._free, OP: self._op, DIES: self._dies, SAVE: self._save, USE: self._use,
            RELEASE: self._release, PHASE: self._begin_phase,
        }  # fmt: skip
        for position, event in enumerate(self._events):
            action = play.get(event[0])
            if action is not None:
                action(position, *event[1:])
            yield event, position

    def fixed_bytes(self, event: tuple[int, ...]) -> int:
        """Return the bytes that every plan has alive at an event."""
        working_bytes = event[1] if event[0] == WORK else 0
        # As the simulator has it: the calibration is of forward and backward only.
        calibration_bytes = self._profile.calibration_bytes if self.phase != OPTIMIZER else 0
        return self._alive_bytes + working_bytes + calibration_bytes

    def take_changes(self) -> dict[int, Demand]:
        """Return the demands that changed since this was last asked."""
        needed: dict[int, set[int]] = {call: set() for call in self._changed}
        free: dict[int, set[int]] = {call: set() for call in self._changed}
        for target, counts in ((needed, self._waiting), (free, self._held)):
            for call, value in counts:
                if call in target:
                    target[call].add(value)
        self._changed.clear()
        return {
            call: Demand(
                self._profile.calls[call].graph, frozenset(needed[call]), frozenset(free[call]), call in self._asked
            )
            for call in needed
        }

    def _nbytes(self, key: _Key) -> int:
        value = self._profile.graph_of(self._profile.calls[key[0]]).values[key[1]]
        return rounded_bytes(self._profile, value.nbytes)

    def _hold(self, key: _Key, change: int) -> None:
        self._count(self._held, key, change)

    def _count(self, counts: dict[_Key, int], key: _Key, change: int) -> None:
        before = counts.get(key, 0)
        counts[key] = before + change
        if counts[key] == 0:
            del counts[key]
        if (before == 0) == (before + change == 0):
            return
        self._changed.add(key[0])
        nbytes = self._nbytes(key)
        if counts is self._held:
            self._alive_bytes += nbytes if before == 0 else -nbytes
            if key in self._waiting:
                self.demanded_bytes -= nbytes if before == 0 else -nbytes
        elif key not in self._held:
            self.demanded_bytes += nbytes if before == 0 else -nbytes

    def _alloc(self, _: int, storage: int, nbytes: int) -> None:
        self._storages[storage] = rounded_bytes(self._profile, nbytes)
        self._holders[storage] = 1
        self._alive_bytes += self._storages[storage]

    def _free(self, _: int, storage: int) -> None:
        self._holders[storage] -= 1
        if not self._holders[storage]:
            del self._holders[storage]
            self._alive_bytes -= self._storages.pop(storage)

    def _op(self, _: int, call: int, op_index: int) -> None:
        op = self._profile.graph_of(self._profile.calls[call]).ops[op_index]
        if op.mutates:
            # The storage goes on under the name of the new value.
            if self._dies(0, call, op.inputs[0]):
                self._is_made((call, op.outputs[0]))
            return
        for value in op.outputs:
            self._is_made((call, value))

    def _is_made(self, key: _Key) -> None:
        self._undead.add(key)
        self._hold(key, 1)

    def _dies(self, _: int, call: int, value: int) -> bool:
        if (call, value) not in self._undead:
            return False
        self._undead.remove((call, value))
        self._hold((call, value), -1)
        return True

    def _save(self, position: int, call: int, value: int, handle: int, saver: int) -> None:
        storage = self._outside[call].get(value, -1)
        if storage in self._holders:
            self._borrowed[handle] = storage
            self._holders[storage] += 1
        key = self._origins[call].get(value, (call, value))
        # What the simulator does not hold at this point costs no bytes there: parameters, what the batch brought.
        if key in self._undead:
            self._handles[handle] = key
            if self._last_use.get(handle, -1) > position:
                self._count(self._waiting, key, 1)

    def _use(self, position: int, handle: int) -> None:
        key = self._handles.get(handle)
        if key is None:
            return
        if handle not in self._in_use:
            self._in_use.add(handle)
            self._hold(key, 1)
        if self._pivot_of.get(key[0]) == key[1]:
            self._asked.add(key[0])
            self._changed.add(key[0])
        if self._last_use[handle] == position:
            self._count(self._waiting, key, -1)

    def _release(self, _: int, handle: int) -> None:
        if handle in self._borrowed:
            self._free(0, self._borrowed.pop(handle))
        key = self._handles.pop(handle, None)
        if key is not None and handle in self._in_use:
            self._in_use.remove(handle)
            self._hold(key, -1)

    def _begin_phase(self, _: int, phase: int) -> None:
        self.phase = phase
