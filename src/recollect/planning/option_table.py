"""List the options of each unit, one row per unit, and turn a choice of one per row into decisions or a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from recollect.planning.hull import Evaluator, Option, part_index, unit_hull
from recollect.planning.unit_plans import unit_plan
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.call_actions import CallActions
from recollect.simulation.decisions import decide_call, keep_all_unit

__all__ = ["OptionTable", "Choice", "Fate", "UnitRow", "with_fates"]

Choice = tuple[int, ...]
"""The index of the chosen option of each row."""

Fate = tuple[Option, Action]
"""What becomes of a unit's values, and of its output."""


class OptionsOf(Protocol):
    """The signature of `unit_hull` and `unit_options`."""

    def __call__(self, graph: UnitGraph, *, output: Action = Action.KEEP) -> tuple[Option, ...]:
        """Return options for one unit, from the leanest to the fattest."""


@dataclass(frozen=True, slots=True)
class UnitRow:
    """The options of one unit, which all calls of its path share.

    Attributes:
        path: module path of the unit.
        calls: indices in `Profile.calls`; several if the model runs the module several times.
        graph: index in `Profile.graphs` of the call that saves most.
        num_runs: seconds of all calls, in those of one run of that graph.
        output: action of the unit's output; the first one if options differ in it.
        options: from the leanest to the fattest.
        outputs: action of the unit's output for each option.
    """

    path: str
    calls: tuple[int, ...]
    graph: int
    output: Action
    options: tuple[Option, ...]
    outputs: tuple[Action, ...]
    num_runs: float = 1.0


class OptionTable:
    """One row of options for each unit of a profile.

    Args:
        profile: the recorded step.
        dropped_outputs: paths of the units whose output is dropped too.
        options_of: returns the options of one unit, from the leanest to the fattest.
        free_outputs: paths of the units that may keep or drop their output.

    Attributes:
        rows: the units.
        sources: for each row, the rows whose outputs its unit reads.
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
        self.rows = _rows(profile, dropped_outputs, options_of, free_outputs)
        self._unit_plans: dict[tuple[int, frozenset[int], Action], UnitPlan] = {}
        self._decisions: dict[tuple[int, frozenset[int], Action, bool], tuple[CallActions, ...]] = {}
        row_of = {call: index for index, row in enumerate(self.rows) for call in row.calls}
        self.sources = [
            {row_of[source] for call in row.calls for _, source, _ in profile.calls[call].origins} - {index}
            for index, row in enumerate(self.rows)
        ]

    @property
    def leanest(self) -> Choice:
        """Return the choice of the first option of every row."""
        return (0,) * len(self.rows)

    @property
    def fattest(self) -> Choice:
        """Return the choice of the last option of every row."""
        return tuple(len(row.options) - 1 for row in self.rows)

    def fates(self, choice: Choice) -> list[Fate]:
        """Return what becomes of each row's unit."""
        return [(row.options[column], row.outputs[column]) for row, column in zip(self.rows, choice, strict=True)]

    def choice_of(self, fates: Sequence[Fate]) -> Choice:
        """Return the choice with these fates.

        Raises:
            ValueError: a row has no such option.
        """
        choice = []
        for row, (option, output) in zip(self.rows, fates, strict=True):
            choices = [(known.keep, action) for known, action in zip(row.options, row.outputs, strict=True)]
            choice.append(choices.index((option.keep, output)))
        return tuple(choice)

    def decisions(self, choice: Choice) -> list[CallActions]:
        """Return what each call of the profile drops."""
        return self.decisions_of(self.fates(choice))

    def decisions_of(self, fates: Sequence[Fate]) -> list[CallActions]:
        """Return what each call drops if these are the fates of the rows, which need not be among their options."""
        result = [CallActions()] * len(self.profile.calls)
        for index, fate in enumerate(fates):
            known = self._row_decisions(index, fate, is_named=self._is_named(index, fates))
            for call, decision in zip(self.rows[index].calls, known, strict=True):
                result[call] = decision
        return result

    def _is_named(self, index: int, fates: Sequence[Fate]) -> bool:
        """Return whether the plan names the row: it is a layer, recomputes, or reads an output that is dropped or a part."""
        return (
            self._is_repeated[self.rows[index].path]
            or self._unit_plan(index, fates[index]).recomputes_anything
            or any(self._lacks_output(source, fates[source]) for source in self.sources[index])
        )

    def _lacks_output(self, index: int, fate: Fate) -> bool:
        """Return whether a row's output is not in memory as a whole."""
        graph = self.profile.graphs[self.rows[index].graph]
        option, output = fate
        return output == Action.RECOMPUTE or any(
            part_index(graph, part.value) in option.keep for part in graph.parts if graph.values[part.value].is_output
        )

    def _row_decisions(self, index: int, fate: Fate, *, is_named: bool) -> tuple[CallActions, ...]:
        option, output = fate
        key = (index, option.keep, output, is_named)
        if key not in self._decisions:
            unit = self._unit_plan(index, fate) if is_named else None
            graphs = [self.profile.graph_of(self.profile.calls[call]) for call in self.rows[index].calls]
            self._decisions[key] = tuple(decide_call(graph, unit) for graph in graphs)
        return self._decisions[key]

    def _unit_plan(self, index: int, fate: Fate) -> UnitPlan:
        row, (option, output) = self.rows[index], fate
        key = (row.graph, option.keep, output)
        if key not in self._unit_plans:
            self._unit_plans[key] = unit_plan(self.profile.graphs[row.graph], option, output=output)
        shared = self._unit_plans[key]
        others = {self.profile.calls[call].graph for call in row.calls} - {row.graph}
        if not others:
            return shared
        # A module that runs with two graphs: keep what only the other one computes, so that the plan names everything.
        rest: Mapping[str, Action] = {
            name: action
            for graph in others
            for name, action in keep_all_unit(self.profile.graphs[graph]).actions.items()
        }
        return UnitPlan({**rest, **shared.actions}, output=shared.output)

    def plan(self, choice: Choice) -> Plan:
        """Return the plan; it names units outside the repeated layers only if they must be on the tape."""
        fates = self.fates(choice)
        units = {
            row.path: self._unit_plan(index, fates[index])
            for index, row in enumerate(self.rows)
            if self._is_named(index, fates)
        }
        return Plan(units)


def _rows(
    profile: Profile, dropped_outputs: Collection[str], options_of: OptionsOf, free_outputs: Collection[str]
) -> tuple[UnitRow, ...]:
    calls_of: dict[str, list[int]] = {}
    for index, call in enumerate(profile.calls):
        calls_of.setdefault(call.path, []).append(index)
    known: dict[tuple[int, tuple[Action, ...]], list[tuple[Option, Action]]] = {}
    rows = []
    for path, calls in calls_of.items():
        graph = max((profile.calls[call].graph for call in calls), key=lambda g: profile.graphs[g].saved_bytes)
        fates: tuple[Action, ...] = (Action.RECOMPUTE,) if path in dropped_outputs else (Action.KEEP,)
        if path in free_outputs and path not in dropped_outputs:
            fates = (Action.KEEP, Action.RECOMPUTE)
        if (graph, fates) not in known:
            known[graph, fates] = _choices(profile.graphs[graph], fates, options_of)
        options, outputs = zip(*known[graph, fates], strict=True)
        runs = [profile.calls[call] for call in calls]
        one_s = profile.graphs[graph].forward_s
        num_runs = sum(r.num_runs * (profile.graph_of(r).forward_s / one_s if one_s else 1.0) for r in runs)
        rows.append(UnitRow(path, tuple(calls), graph, fates[0], options, outputs, num_runs))
    return tuple(rows)


def with_fates(options_of: OptionsOf, table: OptionTable, fates: Sequence[Fate]) -> OptionsOf:
    """Return what gives the options of a unit, and those that keep what it keeps under these fates.

    Args:
        options_of: gives the other options.
        table: its rows have these fates.
        fates: what becomes of each row.
    """
    keeps: dict[UnitGraph, set[frozenset[int]]] = {}
    for row, (option, _) in zip(table.rows, fates, strict=True):
        keeps.setdefault(table.profile.graphs[row.graph], set()).add(option.keep)

    @cache
    def options_with_fates(graph: UnitGraph, *, output: Action = Action.KEEP) -> tuple[Option, ...]:
        evaluator = Evaluator(graph, output=output)
        options = *options_of(graph, output=output), *map(evaluator.option, keeps.get(graph, ()))
        found = {option.keep: option for option in options}
        return tuple(sorted(found.values(), key=lambda o: (o.kept_bytes, -o.recompute_s, sorted(o.keep))))

    return options_with_fates


def _choices(graph: UnitGraph, fates: Sequence[Action], options_of: OptionsOf) -> list[tuple[Option, Action]]:
    choices = [(option, fate) for fate in fates for option in options_of(graph, output=fate)]
    if len(fates) == 1:
        return choices
    # Of two options that cost the same, prefer the one that keeps the output.
    choices.sort(key=lambda choice: (choice[0].kept_bytes, -choice[0].recompute_s, choice[1]))
    return choices
