"""Stores runs of equal micro-steps once: a step of 64 of them plans as fast as one of two.

In gradient accumulation, forward and backward run again and again on batches of one shape. The first micro-step makes the
gradients; each later one finds them, and does the same as the one before it. The last of such a run is stored and
represents them all (`UnitCall.num_runs`). The others' leftovers, such as a list of losses, exist when it begins.

A micro-step is left out only if nothing of it waits for backward when the next one begins, and no other one reads values of its
units. If the model's own code holds a unit's output into the next micro-step (`output` in a loop), the plan decides
what is alive with the output: then the last two are stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from recollect.profile import events
from recollect.profile.events import Event, Key, StepLog
from recollect.profile.graph import UnitCall
from recollect.profile.profile import Profile
from recollect.profile.stretches import StepReader, Stretch

# The most stretches that repeat together: a micro-step may have several forwards, each with its own backward.
_LONGEST_PERIOD = 8


def fold(profile: Profile) -> Profile:
    """Return a profile of the same step in which runs of equal micro-steps are stored once.

    The peak, recompute time and slowdown of every plan stay as they are; `step_s` covers the whole step. Calls are
    renumbered.
    """
    found = StepReader(profile).read()
    runs = _runs(found)
    if not runs:
        return profile
    left_out = {number for run in runs for number in range(run.first, run.end)}
    gone = {call for number in left_out for call in found[number].calls}
    if any(not gone.isdisjoint(s.reads_calls) for number, s in enumerate(found) if number not in left_out):
        return profile
    return _Folding(profile, found, runs, gone).folded()


@dataclass(frozen=True, slots=True)
class _Run:
    """Equal blocks of stretches."""

    first: int
    end: int
    """The stretches to leave out, from the first up to but excluding the end."""
    period: int
    """The number of stretches of a block."""

    @property
    def num_runs(self) -> int:
        """The number of blocks that the one at `end` stands for."""
        return (self.end - self.first) // self.period + 1


def _runs(found: Sequence[Stretch]) -> list[_Run]:
    runs: list[_Run] = []
    first = 0
    while first < len(found):
        candidates = [_run_at(found, first, period) for period in range(1, _LONGEST_PERIOD + 1)]
        best = max((run for run in candidates if run), key=lambda run: run.end - run.first, default=None)
        if best is None:
            first += 1
            continue
        runs.append(best)
        first = best.end + best.period
    return runs


def _run_at(found: Sequence[Stretch], first: int, period: int) -> _Run | None:
    """Return the run of equal blocks that begins at a stretch; None if nothing can be left out."""
    end = first + period
    while end < len(found) and found[end].form == found[end - period].form:
        end += 1
    num_blocks = (end - first) // period
    for num_stored in (1, 2):
        stored = first + (num_blocks - num_stored) * period
        if stored > first and _can_leave_out(found, first, stored, period, num_stored):
            return _Run(first, stored, period)
    return None


def _can_leave_out(found: Sequence[Stretch], first: int, stored: int, period: int, num_stored: int) -> bool:
    """Return whether the stored block finds most memory in use, and the values that it may find of the units left out."""
    is_growing = all(
        found[number].start_bytes <= found[stored + (number - first) % period].start_bytes
        for number in range(first, stored)
    )
    calls = range(found[first].calls.start, found[stored].calls.start)
    values = [item for item in found[stored].held if item[0] in calls]
    if num_stored == 1:
        return is_growing and not values
    # They die in the first of the two that are stored, so the second one is played exactly.
    last = found[min(stored + period, len(found)) - 1]
    return is_growing and all(found[stored].held[item].death < last.end for item in values)


class _Folding:
    """Writes the folded profile."""

    def __init__(self, profile: Profile, found: Sequence[Stretch], runs: Sequence[_Run], gone: set[int]) -> None:
        self._profile = profile
        self._events = list(profile.log.events)
        self._found = found
        self._run_before = {run.end: run for run in runs}
        self._left_out = {number for run in runs for number in range(run.first, run.end)}
        stays = [call for call in range(len(profile.calls)) if call not in gone]
        self._number_of = {call: number for number, call in enumerate(stays)}
        self._next_storage = 1 + max((event[1] for event in self._events if event[0] == events.ALLOC), default=-1)
        self._num_runs = {
            call: run.num_runs
            for run in runs
            for number in range(run.end, run.end + run.period)
            for call in found[number].calls
        }
        # Storages that represent values of removed calls.
        self._storage_of: dict[Key, int] = {}

    def folded(self) -> Profile:
        log: list[Event] = []
        for number, stretch in enumerate(self._found):
            if number in self._left_out:
                continue
            own = self._events[stretch.start : stretch.end]
            if number in self._run_before:
                # Starts of phases sort first.
                num_first = int(own[0][0] == events.PHASE)
                log += own[:num_first]
                log += self._left_behind(self._run_before[number])
                own = own[num_first:]
            for event in own:
                log += self._renumbered(event)
        return replace(
            self._profile,
            calls=tuple(self._call(call) for call in self._number_of),
            log=StepLog(tuple(log)),
        )

    def _left_behind(self, run: _Run) -> list[Event]:
        """Return events with the same effect as all omitted ones."""
        before, after = self._found[run.first].held, self._found[run.end].held
        found: list[Event] = []
        for item in before.keys() - after.keys():
            found += self._renumbered((events.FREE, item[1]) if item[0] < 0 else (events.DIES, *item))
        found.sort()
        for item in sorted(after.keys() - before.keys()):
            storage = item[1]
            if item[0] >= 0:
                storage = self._storage_of[item] = self._next_storage
                self._next_storage += 1
            found.append((events.ALLOC, storage, after[item].nbytes))
        return found

    def _renumbered(self, event: Event) -> list[Event]:
        code, *operands = event
        if code == events.DIES:
            item = operands[0], operands[1]
            if item in self._storage_of:
                return [(events.FREE, self._storage_of.pop(item))]
            return [(events.DIES, self._number_of[item[0]], item[1])] if item[0] in self._number_of else []
        if code in (events.OP, *events.OF_CALLS):
            return [(code, self._number_of[operands[0]], *operands[1:])]
        if code == events.SAVE:
            call, value, handle, saver = operands
            return [(events.SAVE, self._number_of[call], value, handle, self._number_of[saver])]
        return [event]

    def _call(self, index: int) -> UnitCall:
        call = self._profile.calls[index]
        origins = tuple((value, self._number_of[source], there) for value, source, there in call.origins)
        return replace(call, origins=origins, num_runs=call.num_runs * self._num_runs.get(index, 1))
