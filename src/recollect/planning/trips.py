"""Schedule the trips of offloaded values: each leaves as soon as it has been copied, and comes back as late as possible.

Copies out go in the order in which values are made, so values of early layers leave first: they are away longest.
Copies back end just when the value is needed, or when the next one has to begin.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from recollect.plans.action import Action, EngineChoice
from recollect.plans.plan import Plan
from recollect.plans.trip import Trip
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.events import BACKWARD, Key
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.copy_clock import Course, Journey, Link, course, journey, nbytes_of, waits
from recollect.simulation.decisions import decide, keep_all_unit
from recollect.simulation.lifetimes import EveryEvent
from recollect.simulation.windows import EdgeTable, edges
from recollect.slots import slot_bytes

Name = tuple[str, str]
"""A value that may be offloaded: path of its unit, and its name there."""

HASTES = (1.0, 1.5, 2.5, 5.0, 20.0, 1e6)
"""If values can only be away in time when the step waits for them, plan as if the link were this many times as fast."""

# For the clock, all values are away for this whole trip: it records when backward asks for each.
_WHOLE_WAY = Trip(1, 10**6)


class TripPlanner:
    """Schedules trips for values that a plan keeps.

    Attributes:
        names: the values that can be offloaded, which backward asks for in all calls of their unit, in the order in which they
            are made first.
    """

    def __init__(self, program: EveryEvent, plan: Plan, link: Link, *, least_bytes: int = 0) -> None:
        self._profile = profile = program.profile
        self._plan = plan
        self._link = link
        self._offloads_all = with_trips(profile, plan, dict.fromkeys(_kept(profile, plan, least_bytes), _WHOLE_WAY))
        self.course: Course = course(program, decide(profile, self._offloads_all))
        made_s, asked = self.course.made_s, self.course.asked
        used = [name for name, keys in self._keys.items() if all(key in asked for key in keys)]
        self.names = sorted(used, key=lambda name: min(made_s[key] for key in self._keys[name]))

    @cached_property
    def _edges(self) -> EdgeTable:
        return EdgeTable(self.course.edges)

    @cached_property
    def _keys(self) -> dict[Name, list[Key]]:
        found: defaultdict[Name, list[Key]] = defaultdict(list)
        for call, decision in enumerate(decide(self._profile, self._offloads_all)):
            record = self._profile.calls[call]
            for value, _ in decision.trips:
                found[record.path, self._profile.graph_of(record).values[value].name].append((call, value))
        return found

    def host_bytes(self, name: Name) -> int:
        return sum(slot_bytes(nbytes_of(self._profile, key)) for key in self._keys[name])

    def scheduled(self, names: Collection[Name], *, haste: float = 1.0) -> tuple[Plan, float]:
        """Return the plan with trips for some values, and the seconds that it waits for copies.

        Values without time for a trip are kept. With more haste, edges are planned as if the link were so many times as fast:
        values leave earlier and come back later, and the step waits for copies.
        """
        out, back, latency_s = self._link
        link = Link(out * haste, back * haste, latency_s / haste)
        found = self._journeys(names, link)
        trips: dict[Name, Trip] = {}
        for name in names:
            keys = self._keys[name]
            if all(key in found for key in keys):
                trips[name] = _common(self._trip(key, found[key]) for key in keys)
        journeys: dict[Key, Journey] = {}
        for name, trip in list(trips.items()):
            own = {key: journey(self._profile, self.course, self._edges, key, trip) for key in self._keys[name]}
            known = {key: one for key, one in own.items() if one is not None}
            if len(known) < len(own):
                del trips[name]
            else:
                journeys |= known
        return with_trips(self._profile, self._plan, trips), waits(self.course, journeys, self._link)

    def _journeys(self, names: Iterable[Name], link: Link) -> dict[Key, Journey]:
        """Return the edges of each value that has time to be copied out and back."""
        all_keys = [key for name in names for key in self._keys[name]]
        time = self.course
        leaves: dict[Key, int] = {}
        free_s = 0.0
        for key in sorted(all_keys, key=time.made_s.__getitem__):
            end_s = max(free_s, time.made_s[key]) + link.out_s(nbytes_of(self._profile, key))
            edge = bisect_left(time.edge_s, end_s)
            if edge < time.asked[key][0]:
                leaves[key] = edge
                free_s = end_s
        found: dict[Key, Journey] = {}
        free_s = time.end_s
        for key in sorted(leaves, key=lambda key: -time.asked[key][1]):
            last, asked_s = time.asked[key]
            begin_s = min(free_s, asked_s) - link.back_s(nbytes_of(self._profile, key))
            edge = min(max(bisect_right(time.edge_s, begin_s) - 1, leaves[key] + 1), last)
            while edge <= last and time.edges[edge].phase != BACKWARD:
                edge += 1
            if leaves[key] < edge <= last:
                found[key] = Journey(leaves[key], edge, nbytes_of(self._profile, key))
                free_s = begin_s
        return found

    def _trip(self, key: Key, found: Journey) -> Trip:
        leaves, returns = (self.course.edges[number] for number in found[:2])
        return Trip(leaves.call - key[0], returns.call - key[0], leaves_in_backward=leaves.phase == BACKWARD)


def _common(trips: Iterable[Trip]) -> Trip:
    """Return one trip for all calls of a unit: leaving as late, and coming back as early, as any of them."""
    all_trips = list(trips)
    returns = max(trip.returns for trip in all_trips)
    late = [trip.leaves for trip in all_trips if trip.leaves_in_backward]
    if late:
        return Trip(max(min(late), returns + 1), returns, leaves_in_backward=True)
    return Trip(max(trip.leaves for trip in all_trips), returns)


def with_trips(profile: Profile, plan: Plan, trips: Mapping[Name, Trip]) -> Plan:
    """Return the plan that offloads these values, keeps the others that it offloaded, and names every unit of the profile."""
    graphs = {call.path: profile.graph_of(call) for call in profile.calls}
    of_unit: defaultdict[str, dict[str, Trip]] = defaultdict(dict)
    for (path, name), trip in trips.items():
        of_unit[path][name] = trip
    units = {}
    for path, graph in graphs.items():
        unit = plan.units.get(path, keep_all_unit(graph))
        actions: dict[str, Action] = {n: Action.KEEP if a is Action.OFFLOAD else a for n, a in unit.actions.items()}
        actions |= dict.fromkeys(of_unit[path], Action.OFFLOAD)
        units[path] = UnitPlan(actions, output=unit.output, engine=unit.engine, trips=of_unit[path])
    return replace(plan, units=units if trips or plan.offloads else plan.units)


def _kept(profile: Profile, plan: Plan, least_bytes: int) -> list[Name]:
    found: dict[Name, None] = {}
    refused: set[Name] = set()
    for call, decision in zip(profile.calls, decide(profile, with_trips(profile, plan, {})), strict=True):
        graph = profile.graph_of(call)
        for index, value in enumerate(graph.values):
            name = call.path, value.name
            is_stored = decision.values.action(index) is Action.KEEP and decision.engine is EngineChoice.TAPE
            if is_stored and may_leave(graph, index, least_bytes):
                found[name] = None
            else:
                refused.add(name)
    return [name for name in found if name not in refused]


def may_leave(graph: UnitGraph, index: int, least_bytes: int) -> bool:
    """Return whether a value of a unit can be offloaded if it is stored: an op made it, and none writes to it."""
    value = graph.values[index]
    is_made = value.producer is not None and not graph.ops[value.producer].mutates
    return is_made and not (value.mutated_later or value.stays) and value.nbytes >= max(1, least_bytes)


LINK_SHARE = 0.75
"""The part of the link's rate to plan for, by default."""


def link_of(profile: Profile, share: float = LINK_SHARE) -> Link | None:
    """Return the cost of copies over this share of the profile's link; None if unknown."""
    rates = profile.to_host_bytes_per_s, profile.from_host_bytes_per_s
    return Link(share * rates[0], share * rates[1], profile.host_latency_s) if all(rates) else None


def scheduled(profile: Profile, plan: Plan, link: Link | None = None) -> Plan:
    """Return a plan whose offloaded values have trips with the least waiting at these rates.

    Values that backward does not need in units are kept. If no rates are known, the trips stay. By default the usual share
    of the profile's link is taken.
    """
    link = link or link_of(profile)
    if link is None:
        return plan
    wanted: Sequence[Name] = [(path, name) for path, unit in plan.units.items() for name in unit.trips]
    planner = TripPlanner(EveryEvent(profile, edges=edges(profile)), plan, link)
    known = set(planner.names)
    names = [name for name in wanted if name in known]
    made = plan
    for haste in HASTES:
        made, _ = planner.scheduled(names, haste=haste)
        if sum(len(unit.trips) for unit in made.units.values()) == len(names):
            break
    return made
