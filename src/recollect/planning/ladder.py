"""All plans between the leanest and keeping everything, one step apart: what the planner and the frontier walk along.

Every unit starts at its leanest option. A move takes one unit to its next option; moves are ordered by the seconds that
they save per byte, so the first n moves are the best use of the bytes they cost, up to what one move costs (Dantzig's
rule for the multiple-choice knapsack, on the convex hull of each unit). Of equal moves, such as those of identical
layers, the last layer's comes first: its values live shortest, because its backward starts soonest after its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from recollect.plan import Action, Plan, UnitPlan
from recollect.planning.decisions import decide_call, keep_all_unit, unit_plan
from recollect.planning.hull import Option, unit_hull
from recollect.planning.simulate import CallDecision
from recollect.profile.graph import Profile

__all__ = ["Ladder", "Levels", "Move", "Rung"]

# Each costs one simulation; beyond the head, the norm and a layer or two nothing is free.
_MOST_LAST_UNITS = 6

Levels = tuple[int, ...]
"""For each rung, the index of its option."""


@dataclass(frozen=True, slots=True)
class Rung:
    """What is decided as one: all calls of one path.

    Attributes:
        path: module path of the unit.
        calls: indices in `Profile.calls`; several if the model runs the module several times.
        graph: index in `Profile.graphs` of the first call.
        output: whether the plan keeps the unit's output.
        options: from the leanest to the fattest.
    """

    path: str
    calls: tuple[int, ...]
    graph: int
    output: Action
    options: tuple[Option, ...]


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
    """

    def __init__(self, profile: Profile, *, dropped_outputs: Collection[str] = ()) -> None:
        self.profile = profile
        self.drops_outputs = frozenset(dropped_outputs)
        self._is_repeated = {call.path: call.repeated for call in profile.calls}
        self.rungs = _rungs(profile, dropped_outputs)
        moves = [move for index, rung in enumerate(self.rungs) for move in _moves(index, rung)]
        # Along one hull the value of moves falls, so sorting keeps each rung's moves in their order; the level decides
        # between two that floating point makes equal.
        self.moves = sorted(moves, key=lambda m: (-m.saved_s_per_byte, -self.rungs[m.rung].calls[-1], m.level))
        self._unit_plans: dict[tuple[int, int, Action], UnitPlan] = {}
        self._decisions: dict[tuple[int, int], tuple[CallDecision, ...]] = {}

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
            for call, decision in zip(self.rungs[index].calls, self._rung_decisions(index, level), strict=True):
                result[call] = decision
        return result

    def _rung_decisions(self, index: int, level: int) -> tuple[CallDecision, ...]:
        if (index, level) not in self._decisions:
            unit = self._unit_plan(index, level)
            graphs = [self.profile.graph_of(self.profile.calls[call]) for call in self.rungs[index].calls]
            self._decisions[index, level] = tuple(decide_call(graph, unit) for graph in graphs)
        return self._decisions[index, level]

    def _unit_plan(self, index: int, level: int) -> UnitPlan:
        rung = self.rungs[index]
        key = (rung.graph, level, rung.output)
        if key not in self._unit_plans:
            graph = self.profile.graphs[rung.graph]
            self._unit_plans[key] = unit_plan(graph, rung.options[level], output=rung.output)
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
        """Return the plan; units outside the repeated layers are named only where they recompute something."""
        units = {rung.path: self._unit_plan(index, levels[index]) for index, rung in enumerate(self.rungs)}
        named = {path: unit for path, unit in units.items() if unit.recomputes_anything or self._is_repeated[path]}
        return Plan(named, budget_bytes=budget_bytes, note=note)


def _rungs(profile: Profile, dropped_outputs: Collection[str]) -> tuple[Rung, ...]:
    calls_of: dict[str, list[int]] = {}
    for index, call in enumerate(profile.calls):
        calls_of.setdefault(call.path, []).append(index)
    options: dict[tuple[int, Action], tuple[Option, ...]] = {}
    rungs = []
    for path, calls in calls_of.items():
        graph = profile.calls[calls[0]].graph
        output: Action = "recompute" if path in dropped_outputs else "keep"
        if (graph, output) not in options:
            options[graph, output] = unit_hull(profile.graphs[graph], output=output)
        rungs.append(Rung(path, tuple(calls), graph, output, options[graph, output]))
    return tuple(rungs)


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
