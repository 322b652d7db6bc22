"""Computes when things happen in a step under a plan, and how long copies to host memory and back make it wait.

Ops take the times of the profile, one after the other. A copy out begins when its value has been made, one back at its edge;
each direction carries one copy at a time, in the order in which they begin. Code that reaches an edge where a value
leaves, or needs a value, before its copy is over waits, and delays everything after it. Copies and ops are
assumed not to slow each other down; planning for less than the link's rate makes up for that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recollect.plans.trip import Trip
from recollect.profile.events import OP, WORK, Key
from recollect.profile.profile import Profile
from recollect.simulation.clocks import has_two_clocks, step_times
from recollect.simulation.decisions import CallActions
from recollect.simulation.lifetimes import ClockedPlayback, EveryEvent
from recollect.simulation.simulate import run
from recollect.simulation.windows import Edge, EdgeTable, edges_for


class Link(NamedTuple):
    """The cost of copies between a device and host memory."""

    to_host_bytes_per_s: float
    from_host_bytes_per_s: float
    latency_s: float = 0.0
    """Seconds of the smallest copy."""

    def out_s(self, nbytes: int) -> float:
        return self.latency_s + nbytes / self.to_host_bytes_per_s

    def back_s(self, nbytes: int) -> float:
        return self.latency_s + nbytes / self.from_host_bytes_per_s


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """When things happen in a step, if nothing waits; runs of equal micro-steps count once, as they are stored."""

    edges: Sequence[Edge]
    """Of units, in order."""
    edge_s: Sequence[float]
    made_s: Mapping[Key, float]
    """When each value that may be offloaded has been made, in order."""
    asked: Mapping[Key, tuple[int, float]]
    """For each value that may be offloaded: the number of the last edge before something first asks for it in backward, and the
    time."""
    end_s: float


class Journey(NamedTuple):
    """An offloaded value's path: the edges where it leaves and comes back, its bytes, and how many equal ones the step has."""

    leaves: int
    returns: int
    nbytes: int
    num_runs: int = 1


def course(program: EveryEvent, decisions: Sequence[CallActions]) -> Course:
    profile = program.profile
    playback = ClockedPlayback(program, decisions)
    recompute_s = run(playback).recompute_s
    # Where a device runs behind its host, seconds of both do not add up.
    step_s = step_times(profile, decisions).step_s if has_two_clocks(profile) else profile.step_s + recompute_s
    scale = step_s / playback.of_all_s if playback.of_all_s > 0 else 1.0
    return Course(
        program.edges,
        [scale * time_s for time_s in playback.edge_s],
        {key: scale * time_s for key, time_s in playback.made_s.items()},
        {key: (edge, scale * time_s) for key, (edge, time_s) in playback.asked_s.items()},
        scale * playback.clock_s,
    )


_MADE, _LEAVES, _RETURNS, _ASKED = range(4)


def waits(course: Course, journeys: Mapping[Key, Journey], link: Link) -> float:
    """Return the seconds that a step waits for copies: for values to leave, and for values to come back."""
    later_s = out_s = back_s = 0.0
    out_free_s = back_free_s = 0.0
    out_ends: dict[Key, float] = {}
    back_ends: dict[Key, float] = {}
    # At an edge, values leave before others come back.
    happenings: list[tuple[float, int, float, Key]] = []
    for key, journey in journeys.items():
        asked_s = course.asked[key][1]
        happenings.append((course.made_s[key], _MADE, 0.0, key))
        happenings.append((course.edge_s[journey.leaves], _LEAVES, 0.0, key))
        # Values needed first come back first.
        happenings.append((course.edge_s[journey.returns], _RETURNS, asked_s, key))
        happenings.append((asked_s, _ASKED, 0.0, key))
    for time_s, kind, _, key in sorted(happenings):
        now_s = time_s + later_s
        *_, nbytes, num_runs = journeys[key]
        wait_s = 0.0
        if kind == _MADE:
            out_free_s = out_ends[key] = max(out_free_s, now_s) + link.out_s(nbytes)
        elif kind == _LEAVES:
            wait_s = max(0.0, out_ends[key] - now_s)
            out_s += num_runs * wait_s
        elif kind == _RETURNS:
            back_free_s = back_ends[key] = max(back_free_s, now_s) + link.back_s(nbytes)
        else:
            wait_s = max(0.0, back_ends.get(key, now_s) - now_s)
            back_s += num_runs * wait_s
        later_s += wait_s
    return out_s + back_s


def waits_of(profile: Profile, decisions: Sequence[CallActions], link: Link) -> float:
    """Return the seconds that a step under a plan waits for copies on some link."""
    time = course(EveryEvent(profile, edges=edges_for(profile, decisions)), decisions)
    table = EdgeTable(time.edges)
    journeys = {}
    for call, decision in enumerate(decisions):
        for value, trip in decision.trips:
            found = journey(profile, time, table, (call, value), trip)
            if found is not None:
                journeys[call, value] = found
    return waits(time, journeys, link)


def journey(profile: Profile, course: Course, table: EdgeTable, key: Key, trip: Trip) -> Journey | None:
    """Return the path of a value on a trip; None if it does not leave, or is needed before it is to come back."""
    leaves, returns = table.leaves(key[0], trip), table.returns(key[0], trip)
    if leaves is None or returns is None or key not in course.asked or not leaves < returns <= course.asked[key][0]:
        return None
    return Journey(leaves, returns, nbytes_of(profile, key), profile.calls[key[0]].num_runs)


def nbytes_of(profile: Profile, key: Key) -> int:
    call, value = key
    return profile.graph_of(profile.calls[call]).values[value].nbytes


def event_times(profile: Profile) -> NDArray[np.float64]:
    """Return the time after each event of a step without recompute, in seconds."""
    own_s = np.zeros(len(profile.log.events))
    for position, (code, *operands) in enumerate(profile.log.events):
        if code == OP:
            own_s[position] = profile.graph_of(profile.calls[operands[0]]).ops[operands[1]].time_s
        elif code == WORK:
            own_s[position] = 1e-9 * sum(operands[1:])
    times_s: NDArray[np.float64] = np.cumsum(own_s)
    return times_s * (profile.step_s / times_s[-1]) if len(times_s) and times_s[-1] > 0 else times_s
