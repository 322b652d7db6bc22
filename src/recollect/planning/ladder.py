"""All plans between the leanest and keeping everything, one step apart: what the planner and the frontier walk along.

Every unit starts at its leanest option. A move takes one unit to its next option; moves are ordered by the seconds that
they save per byte, so the first n moves are the best use of the bytes they cost, up to what one move costs (Dantzig's
rule for the multiple-choice knapsack, on the convex hull of each unit). Of equal moves, such as those of identical
layers, the last layer's comes first: its values live shortest, because its backward starts soonest after its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from recollect.planning.hull import Option, unit_hull
from recollect.planning.unit_plans import unit_plan
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.decisions import decide_call, keep_all_unit
from recollect.simulation.simulate import CallDecision

__all__ = ["Ladder", "Levels", "Move", "Rung"]

# Each costs one simulation; beyond the head, the norm and a layer or two nothing is free.
_MOST_LAST_UNITS = 6

Levels = tuple[int, ...]
"""For each rung, the index of its option."""


class OptionsOf(Protocol):
    """`unit_hull` and `unit_menu`."""

    def __call__(self, graph: UnitGraph, *, output: Action = Action.KEEP) -> tuple[Option, ...]:
        """Return options for one unit."""


@dataclass(frozen=True, slots=True)
class Rung:
    """What is decided as one: all calls of one path.

    Attributes:
        path: module path of the unit.
        calls: indices in `Profile.calls`; several if the model runs the module several times.
        graph: index in `Profile.graphs` of the first call.
        output: whether the plan keeps the unit's output, where the option does not say.
        options: from the leanest to the fattest.
        outputs: for each option, whether the plan keeps the unit's output.
    """

    path: str
    calls: tuple[int, ...]
    graph: int
    output: Action
    options: tuple[Option, ...]
    outputs: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Take one rung from an option to the next: bytes more, seconds less."""

    rung: int
    level: int
    extra_bytes: int
    saved_s: float

    @property
    def saved_s_per_byte(self) -> float:
        """What the move is worth."""
        return self.saved_s / self.extra_bytes if self.extra_bytes else float("inf")


class Ladder:
    """The rungs of a profile and their moves in order.

    Args:
        profile: what to plan for.
        dropped_outputs: paths of the units whose output is dropped too.
        options_of: what there is to choose from for one unit, from the leanest to the fattest.
        free_outputs: paths of the units for which either fate of the output is a choice.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        dropped_outputs: Collection[str] = (),
        options_of: OptionsOf = unit_hull,
        free_outputs: Collection[str] = (),
    ) -> None:
        self.profile = profile
        self.drops_outputs = frozenset(dropped_outputs)
        self._is_repeated = {call.path: call.repeated for call in profile.calls}
        self.rungs = _rungs(profile, dropped_outputs, options_of, free_outputs)
        moves = [move for index, rung in enumerate(self.rungs) for move in _moves(index, rung)]
        # Along one hull the value of moves falls, so sorting keeps each rung's moves in their order; the level decides
        # between two that floating point makes equal.
        self.moves = sorted(moves, key=lambda m: (-m.saved_s_per_byte, -self.rungs[m.rung].calls[-1], m.level))
        self._unit_plans: dict[tuple[int, tuple[Action, ...], int], UnitPlan] = {}
        self._decisions: dict[tuple[int, int, bool], tuple[CallDecision, ...]] = {}
        rung_of = {call: index for index, rung in enumerate(self.rungs) for call in rung.calls}
        self._sources = [
            {rung_of[source] for call in rung.calls for _, source, _ in profile.calls[call].origins} - {index}
            for index, rung in enumerate(self.rungs)
        ]

    @property
    def leanest(self) -> Levels:
        """Every rung at its first option."""
        return (0,) * len(self.rungs)

    def climb(self, levels: Levels, moves: Sequence[Move]) -> Levels:
        """Return the levels after these moves; a rung that is already there stays."""
        result = list(levels)
        for move in moves:
            result[move.rung] = max(result[move.rung], move.level)
        return tuple(result)

    def free_moves_first(self, peak_of: Callable[[Levels], int]) -> list[Move]:
        """Return the moves, those of the last units first as long as they do not raise the peak of the leanest plan.

        The last layer's backward starts where its forward ended, so what it keeps would be there anyway.

        Args:
            peak_of: simulated peak in bytes of a plan.
        """
        least_bytes = peak_of(self.leanest)
        last_first = sorted(range(len(self.rungs)), key=lambda rung: -self.rungs[rung].calls[-1])
        free: list[Move] = []
        for rung in last_first[:_MOST_LAST_UNITS]:
            candidate = free + [move for move in self.moves if move.rung == rung]
            if peak_of(self.climb(self.leanest, candidate)) > least_bytes:
                break
            free = candidate
        is_free = set(free)
        return free + [move for move in self.moves if move not in is_free]

    def decisions(self, levels: Levels) -> list[CallDecision]:
        """Return what each of the profile's calls drops."""
        result = [CallDecision(recompute=frozenset(), keep_output=True)] * len(self.profile.calls)
        for index, level in enumerate(levels):
            known = self._rung_decisions(index, level, is_named=self._is_named(index, levels))
            for call, decision in zip(self.rungs[index].calls, known, strict=True):
                result[call] = decision
        return result

    def _is_named(self, index: int, levels: Levels) -> bool:
        """Whether the plan names the rung: layers, what recomputes, and what reads a dropped output, through the tape then."""
        rung = self.rungs[index]
        return (
            self._is_repeated[rung.path]
            or self._unit_plan(index, levels[index]).recomputes_anything
            or any(self.rungs[source].outputs[levels[source]] == Action.RECOMPUTE for source in self._sources[index])
        )

    def _rung_decisions(self, index: int, level: int, *, is_named: bool) -> tuple[CallDecision, ...]:
        key = (index, level, is_named)
        if key not in self._decisions:
            unit = self._unit_plan(index, level) if is_named else None
            graphs = [self.profile.graph_of(self.profile.calls[call]) for call in self.rungs[index].calls]
            self._decisions[key] = tuple(decide_call(graph, unit) for graph in graphs)
        return self._decisions[key]

    def _unit_plan(self, index: int, level: int) -> UnitPlan:
        rung = self.rungs[index]
        key = (rung.graph, rung.outputs, level)
        if key not in self._unit_plans:
            graph = self.profile.graphs[rung.graph]
            self._unit_plans[key] = unit_plan(graph, rung.options[level], output=rung.outputs[level])
        shared = self._unit_plans[key]
        others = {self.profile.calls[call].graph for call in rung.calls} - {rung.graph}
        if not others:
            return shared
        # A module that runs in two shapes: what only the other run computes is kept, so that the plan names everything.
        rest: Mapping[str, Action] = {
            name: action
            for graph in others
            for name, action in keep_all_unit(self.profile.graphs[graph]).actions.items()
        }
        return UnitPlan({**rest, **shared.actions}, output=shared.output)

    def plan(self, levels: Levels, *, budget_bytes: int | None = None, note: str = "") -> Plan:
        """Return the plan; units outside the repeated layers are named only where they have to be on the tape."""
        units = {
            rung.path: self._unit_plan(index, levels[index])
            for index, rung in enumerate(self.rungs)
            if self._is_named(index, levels)
        }
        return Plan(units, budget_bytes=budget_bytes, note=note)


def _rungs(
    profile: Profile, dropped_outputs: Collection[str], options_of: OptionsOf, free_outputs: Collection[str]
) -> tuple[Rung, ...]:
    calls_of: dict[str, list[int]] = {}
    for index, call in enumerate(profile.calls):
        calls_of.setdefault(call.path, []).append(index)
    known: dict[tuple[int, tuple[Action, ...]], list[tuple[Option, Action]]] = {}
    rungs = []
    for path, calls in calls_of.items():
        graph = profile.calls[calls[0]].graph
        fates: tuple[Action, ...] = (Action.RECOMPUTE,) if path in dropped_outputs else (Action.KEEP,)
        if path in free_outputs and path not in dropped_outputs:
            fates = (Action.KEEP, Action.RECOMPUTE)
        if (graph, fates) not in known:
            known[graph, fates] = _choices(profile.graphs[graph], fates, options_of)
        options, outputs = zip(*known[graph, fates], strict=True)
        rungs.append(Rung(path, tuple(calls), graph, fates[0], options, outputs))
    return tuple(rungs)


def _choices(graph: UnitGraph, fates: Sequence[Action], options_of: OptionsOf) -> list[tuple[Option, Action]]:
    choices = [(option, fate) for fate in fates for option in options_of(graph, output=fate)]
    if len(fates) == 1:
        return choices
    # Between two that are as good, the output that is kept.
    choices.sort(key=lambda choice: (choice[0].kept_bytes, -choice[0].recompute_s, choice[1]))
    return choices


def _moves(index: int, rung: Rung) -> list[Move]:
    return [
        Move(
            rung=index,
            level=level,
            extra_bytes=rung.options[level].kept_bytes - rung.options[level - 1].kept_bytes,
            saved_s=rung.options[level - 1].recompute_s - rung.options[level].recompute_s,
        )
        for level in range(1, len(rung.options))
    ]
