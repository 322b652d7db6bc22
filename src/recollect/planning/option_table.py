"""List the options of each unit, one row per unit, and turn a choice of one per row into decisions or a plan.

A choice with its exact cost is a candidate. Solvers find candidates; the best becomes the plan.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

from recollect.planning.hull import Evaluator, Option, Stored, unit_hull
from recollect.plans.action import Action, EngineChoice
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.events import RETURN
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions, compiled_unit, decide_call, keep_all_unit
from recollect.simulation.peak_sums import Peaks, PeakSums

Choice = tuple[int, ...]
"""The index of the chosen option of each row."""


class OptionsOf(Protocol):
    """The signature of `unit_hull` and of `unit_options` in `planning/chain_solver.py`."""

    def __call__(self, graph: UnitGraph, *, keeps_output: bool = True) -> tuple[Option, ...]:
        """Return options for one unit, from the leanest to the fattest."""


@dataclass(frozen=True, slots=True)
class UnitRow:
    """The options of one unit, which all calls of its path share."""

    path: str
    calls: tuple[int, ...]
    """Indices in `Profile.calls`; several if the model runs the module several times."""
    graph: int
    """Index in `Profile.graphs` of the call that saves most."""
    options: tuple[Option, ...]
    """From the leanest to the fattest."""
    num_runs: float = 1.0
    """Seconds of all calls, in those of one run of that graph."""

    @property
    def keeps_outputs(self) -> tuple[bool, ...]:
        return tuple(option.keeps_output for option in self.options)


class OptionTable:
    """One row of options for each unit of a profile.

    Args:
        dropped_outputs: paths of the units whose output is dropped too.
        free_outputs: paths of the units that may keep or drop their output.
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
        self.free_outputs = frozenset(free_outputs)
        self.may_drop_outputs = bool(dropped_outputs or free_outputs)
        self._always_named = always_named(profile)
        self.rows = _rows(profile, dropped_outputs, options_of, free_outputs)
        self._unit_plans: dict[tuple[object, ...], UnitPlan] = {}
        self._decisions: dict[tuple[object, ...], tuple[CallActions, ...]] = {}
        row_of = {call: index for index, row in enumerate(self.rows) for call in row.calls}
        self.sources = [
            {row_of[source] for call in row.calls for _, source, _ in profile.calls[call].origins} - {index}
            for index, row in enumerate(self.rows)
        ]

    @property
    def fattest(self) -> Choice:
        return tuple(len(row.options) - 1 for row in self.rows)

    def options(self, choice: Choice) -> list[Option]:
        return [row.options[column] for row, column in zip(self.rows, choice, strict=True)]

    def choice_of(self, options: Sequence[Option]) -> Choice:
        """Return the choice of options that store the same."""
        return tuple(
            [known.key for known in row.options].index(option.key)
            for row, option in zip(self.rows, options, strict=True)
        )

    def decisions(self, choice: Choice) -> list[CallActions]:
        return self.decisions_of(self.options(choice))

    def decisions_of(self, options: Sequence[Option]) -> list[CallActions]:
        """Return the values that each call drops under one option per row, which need not be the row's own."""
        result = [CallActions()] * len(self.profile.calls)
        for index, option in enumerate(options):
            calls, is_named = self.rows[index].calls, self._is_named(index, options)
            key = (index, *option.key, is_named)
            if key not in self._decisions:
                unit = self._unit_plan(index, option) if is_named else None
                graphs = [self.profile.graph_of(self.profile.calls[call]) for call in calls]
                self._decisions[key] = tuple(decide_call(graph, unit) for graph in graphs)
            for call, decision in zip(calls, self._decisions[key], strict=True):
                result[call] = decision
        return result

    def _is_named(self, index: int, options: Sequence[Option]) -> bool:
        """Return whether the plan names the row: a layer, what runs in one, recomputes, or reads a dropped output or part."""
        return (
            self.rows[index].path in self._always_named
            or self._unit_plan(index, options[index]).recomputes_anything
            or any(self._lacks_output(source, options[source]) for source in self.sources[index])
        )

    def _lacks_output(self, index: int, option: Option) -> bool:
        graph = self.profile.graphs[self.rows[index].graph]
        return not option.keeps_output or any(graph.values[value].is_output for value in option.stored.parts)

    def _unit_plan(self, index: int, option: Option) -> UnitPlan:
        row = self.rows[index]
        key = (row.graph, *option.key)
        if key not in self._unit_plans:
            self._unit_plans[key] = unit_plan(self.profile.graphs[row.graph], option)
        shared = self._unit_plans[key]
        others = {self.profile.calls[call].graph for call in row.calls} - {row.graph}
        if not others or shared == compiled_unit(self.profile.graphs[row.graph], 0):
            return shared
        # A module that runs with two graphs: keep values that only the other one computes. The plan then names everything.
        rest: Mapping[str, Action] = {
            name: action
            for graph in others
            for name, action in keep_all_unit(self.profile.graphs[graph]).actions.items()
        }
        return UnitPlan({**rest, **shared.actions}, output=shared.output, engine=shared.engine)

    def plan(self, choice: Choice) -> Plan:
        """Return the plan; it names units outside the repeated layers only if they must be on the tape."""
        options = self.options(choice)
        units = {
            row.path: self._unit_plan(index, options[index])
            for index, row in enumerate(self.rows)
            if self._is_named(index, options)
        }
        return Plan(units)


def _rows(
    profile: Profile, dropped_outputs: Collection[str], options_of: OptionsOf, free_outputs: Collection[str]
) -> tuple[UnitRow, ...]:
    known: dict[tuple[object, ...], tuple[Option, ...]] = {}
    rows = []
    for path, calls in profile.calls_by_path.items():
        graph = max((profile.calls[call].graph for call in calls), key=lambda g: profile.graphs[g].saved_bytes)
        keeps_outputs: tuple[bool, ...] = (path not in dropped_outputs,)
        if path in free_outputs and path not in dropped_outputs:
            keeps_outputs = (True, False)
        key = graph, keeps_outputs, frozenset(profile.calls[call].graph for call in calls)
        if key not in known:
            record = _alike({call: profile.graph_of(profile.calls[call]) for call in calls}, profile.graphs[graph])
            own = [option for keeps in keeps_outputs for option in options_of(record, keeps_output=keeps)]
            if len(keeps_outputs) > 1:
                # Of two options with equal costs, prefer the one that keeps the output.
                own.sort(key=lambda option: (option.kept_bytes, -option.recompute_s, not option.keeps_output))
            known[key] = tuple(own)
        runs = [profile.calls[call] for call in calls]
        one_s = profile.graphs[graph].forward_s
        num_runs = sum(r.num_runs * (profile.graph_of(r).forward_s / one_s if one_s else 1.0) for r in runs)
        rows.append(UnitRow(path, tuple(calls), graph, known[key], num_runs))
    return tuple(rows)


def _alike(graphs: Mapping[int, UnitGraph], largest: UnitGraph) -> UnitGraph:
    """Return the largest graph of a unit with the variants that all its calls have; of several graphs, PyTorch's choice."""
    distinct = set(map(id, graphs.values()))
    if len(distinct) == 1 or not largest.variants:
        return largest
    is_in_all = all(graph.variants for graph in graphs.values())
    return replace(
        largest, variants=largest.variants[:1] if is_in_all else (), eager_s=largest.eager_s if is_in_all else 0.0
    )


def with_options(options_of: OptionsOf, table: OptionTable, known: Sequence[Option]) -> OptionsOf:
    """Return the source of a unit's options, and of options that store the same under known ones."""
    known_of: dict[UnitGraph, set[Stored]] = {}
    for row, option in zip(table.rows, known, strict=True):
        known_of.setdefault(table.profile.graphs[row.graph], set()).add(option.stored)

    @cache
    def options_with_known(graph: UnitGraph, *, keeps_output: bool = True) -> tuple[Option, ...]:
        evaluator = Evaluator(graph, keeps_output=keeps_output)
        more = (evaluator.option(*stored) for stored in known_of.get(graph, ()))
        found = {option.stored: option for option in (*options_of(graph, keeps_output=keeps_output), *more)}
        return tuple(sorted(found.values(), key=lambda o: (o.kept_bytes, -o.recompute_s, o.stored.order)))

    return options_with_known


def always_named(profile: Profile) -> set[str]:
    """Return the layers, and the units that run while others do, such as a module for positions that layers are given."""
    found = {call.path for call in profile.calls if call.repeated}
    first = len(profile.calls)
    for (call,) in reversed([*profile.log.operands(RETURN)]):
        if first < call:  # It began earlier, and returns later.
            found.add(profile.calls[call].path)
        first = min(first, call)
    return found


def unit_plan(graph: UnitGraph, option: Option) -> UnitPlan:
    """Return the plan of a unit for one option.

    Results of ops that run again get "recompute", unless a reader needs them kept; values kept as parts get "shard".
    Values that nobody needs after forward get "keep": that costs no bytes and lets the tape skip modules that compute
    nothing else. If the output is dropped, its readers may need it, so the ops that compute it run again too.
    """
    if option.engine is EngineChoice.COMPILE:
        return compiled_unit(graph, option.variant)
    ops = option.recompute_ops | (_ops_of_outputs(graph, option) if not option.keeps_output else frozenset())
    needed = {value for op in ops for value in graph.ops[op].inputs}
    actions: dict[str, Action] = {}
    for index, value in graph.made:
        is_kept = value.must_keep or (index in option.stored.whole and (value.saved or index in needed))
        actions[value.name] = Action.RECOMPUTE if value.producer in ops and not is_kept else Action.KEEP
        if index in option.stored.parts:
            actions[value.name] = Action.SHARD
    return UnitPlan(actions, output=Action.KEEP if option.keeps_output else Action.RECOMPUTE)


def _ops_of_outputs(graph: UnitGraph, option: Option) -> frozenset[int]:
    kept = option.stored.values
    needed = {index for index, value in enumerate(graph.values) if value.is_output} - kept
    ops = set()
    for index in range(len(graph.ops) - 1, -1, -1):
        if not needed.isdisjoint(graph.ops[index].outputs):
            ops.add(index)
            needed.update(v for v in graph.ops[index].inputs if v not in kept)
    return frozenset(ops)


def working_bytes(profile: Profile, options_of: OptionsOf) -> list[int]:
    """Return, for each call of a layer, the bytes that its leanest option without output recomputes; 0 for other calls."""
    found = {}
    for number in {call.graph for call in profile.calls if call.repeated}:
        graph = profile.graphs[number]
        ops = options_of(graph, keeps_output=False)[0].recompute_ops
        found[number] = sum(graph.values[v].nbytes for op in ops for v in graph.ops[op].outputs)
    return [found[call.graph] if call.repeated else 0 for call in profile.calls]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One option for each row of a table, and the cost of the step with them."""

    table: OptionTable
    choice: Choice
    cost: Peaks
    """Exact peaks and recompute time."""

    @property
    def peak_bytes(self) -> int:
        return self.cost.peak_bytes

    @property
    def recompute_s(self) -> float:
        return self.cost.recompute_s

    @property
    def options(self) -> list[Option]:
        return self.table.options(self.choice)

    def decisions(self) -> list[CallActions]:
        return self.table.decisions(self.choice)


class KnownCosts:
    """Makes candidates from choices of one table, and remembers their exact costs: each is computed once."""

    def __init__(self, peak_sums: PeakSums, table: OptionTable) -> None:
        self.table = table
        self.windows = peak_sums.windows
        self._peak_sums = peak_sums
        self._costs: dict[Choice, Peaks] = {}

    def candidate(self, choice: Choice) -> Candidate:
        if choice not in self._costs:
            self._costs[choice] = self._peak_sums.peaks(self.table.decisions(choice))
        return Candidate(self.table, choice, self._costs[choice])

    def known(self) -> Iterator[Candidate]:
        return (Candidate(self.table, choice, cost) for choice, cost in self._costs.items())
