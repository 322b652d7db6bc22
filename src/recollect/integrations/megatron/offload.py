"""Find the values that Megatron's settings for offload copy to host memory.

Read in Megatron-LM main at d98e8a64 (`fine_grained_activation_offload.py`, its callers) and in Transformer Engine: all
values saved while a layer, or a module of one, runs. Such a run of a module is a group. A value that others save too stays,
as it would not leave the device; so do values that are recomputed or split among ranks. docs/megatron.md has each setting.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from recollect.errors import ConfigWarning
from recollect.integrations.megatron.module_values import LayerOps, values_of_module
from recollect.integrations.megatron.rules import RecomputeConfig
from recollect.integrations.megatron.settings import OFFLOAD_MODULES
from recollect.planning.trips import scheduled
from recollect.plans.action import Action, EngineChoice
from recollect.plans.plan import Plan
from recollect.plans.trip import Trip
from recollect.profile.events import OP, RETURN, SAVE
from recollect.profile.profile import Profile
from recollect.simulation.decisions import keep_all_unit
from recollect.simulation.windows import returning_values
from recollect.warning import warn_user

_LEAST_BYTES_OF_LAYERS: Final = 2**20
_OUTSIDE: Final = -1

_Key = tuple[int, int]
"""A call and a value in it; or a call and an op in it."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A run of a module, or of a layer: the ops that belong to it, as (call, op)."""

    name: str
    ops: frozenset[_Key]


def with_offload(profile: Profile, plan: Plan, config: RecomputeConfig, layers: Sequence[str]) -> Plan:
    """Return a plan that offloads, of the kept values, those that a configuration names."""
    savers = _savers(profile)
    candidates = {key for key in savers if _may_go(profile, plan, config, key)} & returning_values(profile)
    groups = _groups(profile, config, layers)
    if config.fine_grained_activation_offloading:
        groups = _first_groups(groups, {key: savers[key] for key in candidates}, config.activation_offload_fraction)
    asked = frozenset[_Key]().union(*(group.ops for group in groups))
    stays = {_name(profile, key) for key in savers if key not in candidates or not savers[key] <= asked}
    going: dict[tuple[str, str], int] = {}
    for key in sorted(candidates):
        if (name := _name(profile, key)) not in stays:
            # It may leave, and must be back, one unit after the last one that saves it.
            later = max(saver for saver, _ in savers[key]) - key[0] + 1
            going[name] = max(later, going.get(name, 0))
    if not going:
        _warn_of_nothing(config)
        return plan
    what = " ".join(config.offloaded) or f"the first {config.cpu_offloading_num_layers} layers"
    plan = plan.with_note(f"{plan.note}, offload of {what}")
    with_edges = scheduled(profile, _with_trips(profile, plan, going))
    return _limited(with_edges, config.fine_grained_offloading_max_inflight_offloads, going)


def _savers(profile: Profile) -> dict[_Key, set[_Key]]:
    """Return the savers of each value: ops of calls, or code outside units.

    Autograd saves the arguments of an op before the op runs, and its results after it has.
    """
    found: defaultdict[_Key, set[_Key]] = defaultdict(set)
    saved: defaultdict[int, Counter[_Key]] = defaultdict(Counter)
    last: dict[int, int] = {}
    returned: set[int] = set()
    for code, *operands in profile.log.events:
        if code == SAVE:
            call, value, _, saver = operands
            if saver in returned:
                found[call, value].add((_OUTSIDE, _OUTSIDE))
            else:
                saved[saver][call, value] += 1
        elif code in (OP, RETURN):
            call, following = operands[0], operands[1] if code == OP else None
            for key, times in saved.pop(call, {}).items():
                found[key].update(
                    (call, op) for op in _savers_between(profile, call, key, times, last.get(call), following)
                )
            if following is None:
                returned.add(call)
            else:
                last[call] = following
    return found


def _savers_between(
    profile: Profile, call: int, key: _Key, times: int, before: int | None, following: int | None
) -> list[int]:
    """Return which of two consecutive ops of a call save a value that they save this many times in total."""
    ops = profile.graph_of(profile.calls[call]).ops
    value = (
        key[1] if key[0] == call else next((v for v, *origin in profile.calls[call].origins if (*origin,) == key), -1)
    )
    is_result = before is not None and value in ops[before].outputs
    is_argument = following is not None and value in ops[following].inputs
    if is_result and is_argument and times == 1:
        is_result = False
    chosen = [before] * is_result + [following] * (is_argument or not is_result)
    return [_OUTSIDE if op is None else op for op in chosen]


def _may_go(profile: Profile, plan: Plan, config: RecomputeConfig, key: _Key) -> bool:
    call = profile.calls[key[0]]
    graph, unit = profile.graph_of(call), plan.units.get(call.path)
    value = graph.values[key[1]]
    if value.producer is None or graph.ops[value.producer].mutates:
        return False
    if unit is not None:
        action = unit.actions.get(value.name, Action.KEEP)
        # A unit's output is kept whatever its own action, unless that is to hold a part, or the plan drops outputs.
        is_kept = (
            unit.output is Action.KEEP and action is not Action.SHARD if value.is_output else action is Action.KEEP
        )
        if not is_kept or unit.engine is not EngineChoice.TAPE:
            return False
    if config.fine_grained_activation_offloading:
        return value.saved_elements >= config.min_offloaded_tensor_size
    return value.nbytes >= _LEAST_BYTES_OF_LAYERS


def _groups(profile: Profile, config: RecomputeConfig, layers: Sequence[str]) -> list[_Group]:
    names = [name for name in OFFLOAD_MODULES if name in config.offloaded]
    ops_of: dict[tuple[int, str], frozenset[int]] = {}
    found = []
    for path in layers:
        for call in profile.calls_by_path[path]:
            graph = profile.calls[call].graph
            if not names:
                found.append(_Group("", frozenset((call, op) for op in range(-1, len(profile.graphs[graph].ops)))))
            for name in names:
                if (graph, name) not in ops_of:
                    layer = LayerOps(profile.graphs[graph])
                    ops_of[graph, name] = layer.ops_of(values_of_module(layer, name))
                if ops_of[graph, name]:
                    found.append(_Group(name, frozenset((call, op) for op in ops_of[graph, name])))
    return found


def _first_groups(groups: Sequence[_Group], savers: Mapping[_Key, Collection[_Key]], fraction: float) -> list[_Group]:
    """Return the groups that offload: not the last one of each name, and of the rest that have anything, the first ones."""
    last = {group.name: group for group in groups}
    saving = {op for ops in savers.values() for op in ops}
    eligible = [group for group in groups if group is not last[group.name] and group.ops & saving]
    return eligible[: len(eligible) - int(len(eligible) * (1 - fraction))]


def _name(profile: Profile, key: _Key) -> tuple[str, str]:
    call = profile.calls[key[0]]
    return call.path, profile.graph_of(call).values[key[1]].name


def _with_trips(profile: Profile, plan: Plan, going: Mapping[tuple[str, str], int]) -> Plan:
    """Return a plan that offloads some values, each for a given number of units.

    Where outputs are dropped, the last layer of a region needs the input that the first is recomputed from. All units
    are named, as those that a plan does not name do not count on a trip.
    """
    firsts = {path: profile.graph_of(profile.calls[calls[0]]) for path, calls in profile.calls_by_path.items()}
    units = {path: plan.units.get(path) or keep_all_unit(graph) for path, graph in firsts.items()}
    drops = [units[call.path].output is Action.RECOMPUTE for call in profile.calls]
    ahead = max(sum(run) for _, run in groupby(drops))
    of_path: defaultdict[str, dict[str, Trip]] = defaultdict(dict)
    for (path, name), later in going.items():
        of_path[path][name] = Trip(later, later + ahead)
    for path, trips in of_path.items():
        actions = {**units[path].actions, **dict.fromkeys(trips, Action.OFFLOAD)}
        units[path] = replace(units[path], actions=actions, trips=trips)
    return replace(plan, units=units)


def _limited(plan: Plan, most: int | None, going: Mapping[tuple[str, str], int]) -> Plan:
    """Return a plan whose values leave after no more layers than may have copies in flight."""
    if most is None:
        return plan

    def earlier(path: str, name: str, trip: Trip) -> Trip:
        return trip if trip.leaves_in_backward else trip._replace(leaves=min(trip.leaves, going[path, name] + most))

    units = {
        path: replace(unit, trips={name: earlier(path, name, trip) for name, trip in unit.trips.items()})
        for path, unit in plan.units.items()
    }
    return replace(plan, units=units)


def _warn_of_nothing(config: RecomputeConfig) -> None:
    is_fine = config.fine_grained_activation_offloading
    least = f"{config.min_offloaded_tensor_size} elements" if is_fine else "1 MiB"
    warn_user(
        f"nothing is offloaded: of what is kept, nothing that only these {'modules' if is_fine else 'layers'} save has {least} "
        f"or more. {'Lower min_offloaded_tensor_size, or leave' if is_fine else 'Leave'} the setting out.",
        ConfigWarning,
    )
