"""Find the fastest candidate within a budget by searching which layer outputs to drop, with one chain per choice.

For each number of dropped outputs, try a few choices of outputs (`planning/output_choices.py`). Chains share
measurements, so one simulation and one run of the chain's program (`planning/chain.py`) estimate a choice; only the
best get candidates. The number doubles from 1, then is refined around the best.

The convex hull of a unit leaves gaps in the budget between its options, which more of them fill (`unit_options`). Vary each
hull option by one value, kept instead of dropped or dropped instead of kept; and by one module, whose values are all kept so
that the tape need not watch it. Keep the options that no other dominates in kept bytes, recompute seconds, and workspace (bytes
of recomputed values, which the unit needs in backward).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, cached_property, partial

from recollect.planning.alive_until_loss import HeldValues, held_values, layers_hold, with_held
from recollect.planning.chain import Chain, WorkingSets
from recollect.planning.fill import Filling
from recollect.planning.hull import Evaluator, Option, Stored, spread, unit_hull
from recollect.planning.lean_search import leanest
from recollect.planning.option_table import Candidate, KnownCosts, OptionsOf, OptionTable, with_options, working_bytes
from recollect.planning.output_choices import (
    first_outputs,
    folded_outputs,
    inner_outputs,
    number_between,
    single_outputs,
)
from recollect.plans.value_names import module_of
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.program import Program
from recollect.simulation.windows import windows

# The most events to play for measuring working sets: about 0.1 s.
_PROBED_EVENTS = 320_000
_FEWEST_PROBES = 12
# With many units, mixing options across them replaces finer options within each.
_OPTIONS_OF_ALL_UNITS = 768
_FEWEST_OPTIONS = 16
# Each of these is a column of a linear program, and fewer simulations measure it: more options gave no faster plans.
_MOST_OPTIONS_OF_SEVERAL_RUNS = 32
# Numbers of dropped outputs to try between the best and its neighbors.
_MOST_REFINEMENTS = 3
# Segment lengths in layers to try at the front, besides segments that balance outputs and workspace.
_LONGEST_SEGMENTS = (2, 3)
# Choices of dropped outputs to make candidates for.
_MOST_FULL_RUNS = 3

# A part of the step that is not worth a plan in which more units differ.
_LITTLE_GAIN = 1e-3

# Ops of the units that all variations go through: a second or two.
_OPS_OF_ALL_VARIATIONS = 600_000
_FEWEST_VARIATIONS = 128
# Vary each hull option by at least this many values, before varying more of them.
_FEWEST_VALUES = 32

Dropped = frozenset[str] | None
"""Paths of units whose output is dropped, apart from single units, which choose for themselves. None: no unit drops its
output, and a unit that keeps everything stays off the tape."""


class ChainSolver:
    """Finds candidates for any number of budgets, with chains; deterministic, with no wall-clock limit.

    Args:
        program: the program of the profile and its windows, to reuse.
        like: a solver of the same profile to share options and simulated units with; its results do not change.
        lean: a candidate known from the start, whose options the solver also has.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        program: Program | None = None,
        like: ChainSolver | None = None,
        lean: Candidate | None = None,
    ) -> None:
        self.profile = profile
        self._peak_sums: PeakSums = like._peak_sums if like else PeakSums(program or Program(profile, windows(profile)))
        num_events = len(profile.log.events) or 1
        self._most_probes = max(_FEWEST_PROBES, _PROBED_EVENTS // num_events)
        # Hulls and options are the same for every chain.
        num_units = len({call.path for call in profile.calls})
        self._runs_several = num_units < len(profile.calls)
        most_options = max(_FEWEST_OPTIONS, _OPTIONS_OF_ALL_UNITS // max(1, num_units))
        if self._runs_several:
            most_options = min(most_options, _MOST_OPTIONS_OF_SEVERAL_RUNS)
        held = like._held if like else held_values(profile)
        self._held: HeldValues = held if like or layers_hold(profile, held) else ()
        self._own_options: OptionsOf = (
            like._own_options if like else cache(partial(unit_options, most_options=most_options))
        )
        self._lean = lean
        if lean is not None:
            self._own_options = with_options(self._own_options, lean.table, lean.options)
        self._options_of = _with_all_held(profile, self._held, self._own_options)
        self._most_dropped = len(inner_outputs(profile))
        self._working: WorkingSets = {}
        self._has_tape_s = any(graph.tape_s for graph in profile.graphs)
        self._chains: dict[Dropped, Chain] = {}
        self._filling: Filling = like._filling if like else Filling(self._peak_sums)
        self._filled: list[Candidate] = []

    @cached_property
    def _working_bytes(self) -> list[int]:
        return working_bytes(self.profile, self._options_of)

    @cached_property
    def leanest(self) -> Candidate:
        """The candidate with the lowest peak found, independent of earlier calls and of the times of ops."""
        return leanest(self._peak_sums)

    @cached_property
    def _near_least(self) -> ChainSolver:
        return ChainSolver(self.profile, like=self, lean=self.leanest)

    def measured(self) -> Chain:
        return self._chain(frozenset())

    def best(self, budget_bytes: int, enough_s: float) -> Candidate | None:
        """Return the fastest candidate found within the budget, or None; never None if `leanest` is within the budget."""
        found = self._searched(budget_bytes, enough_s)
        if found is None and budget_bytes >= self.leanest.peak_bytes:
            # Having seen the leanest plans, the chains find faster ones.
            self._near_least._searched(self.leanest.peak_bytes, 0.0)
            found = self._near_least._searched(budget_bytes, enough_s)
        if found is not None and found.recompute_s > enough_s:
            self._fill(found, budget_bytes)
        return _fastest(self._filled if found is None else (found, *self._filled), budget_bytes)

    def _fill(self, found: Candidate, budget_bytes: int) -> None:
        """Remember a candidate that stores more than this one, if there is room for it."""
        options, cost = self._filling.filled(found, budget_bytes)
        if found.recompute_s - cost.recompute_s <= _LITTLE_GAIN * self.profile.step_s:
            return
        table = OptionTable(
            self.profile,
            dropped_outputs=found.table.drops_outputs,
            options_of=with_options(self._own_options, found.table, options),
            free_outputs=found.table.free_outputs,
        )
        self._filled.append(Candidate(table, table.choice_of(options), cost))

    def _searched(self, budget_bytes: int, enough_s: float) -> Candidate | None:
        goal = (0, enough_s)
        if self._lean is not None:
            self._run(self._lean.table.drops_outputs, budget_bytes)
        if self._has_tape_s and self._run(None, budget_bytes) <= goal:
            return self._best_known(budget_bytes)
        score = self._run(frozenset(), budget_bytes)
        if score > goal:
            for dropped in self._promising(budget_bytes)[:_MOST_FULL_RUNS]:
                dropped_score = self._run(dropped, budget_bytes)
                is_slower = dropped_score > score
                score = min(score, dropped_score)
                # With several calls in flight a chain says little about dropped outputs: the first one is enough.
                if score <= goal or (is_slower and self._runs_several):
                    break
        best = self._best_known(budget_bytes)
        if best is not None and score > goal and self._held:
            chain = next(chain for chain in self._chains.values() if chain.costs.table is best.table)
            # Room that the linear program leaves, since its model is wrong by some bytes.
            for _ in chain.better(best, budget_bytes):
                pass
        return self._best_known(budget_bytes)

    def _promising(self, budget_bytes: int) -> list[frozenset[str]]:
        """Return choices of outputs to drop, the most promising first."""
        estimates: dict[frozenset[str], tuple[float, int]] = {}
        number = 1
        while number <= self._most_dropped:
            self._add_estimates(number, budget_bytes, estimates)
            number = min(2 * number, max(self._most_dropped, number + 1))
        for _ in range(_MOST_REFINEMENTS if estimates else 0):
            best_number = len(min(estimates, key=lambda dropped: estimates[dropped]))
            between = number_between(sorted({len(dropped) for dropped in estimates}), best_number)
            if between is None:
                break
            self._add_estimates(between, budget_bytes, estimates)
        return sorted(estimates, key=lambda dropped: (estimates[dropped], len(dropped), sorted(dropped)))

    def _add_estimates(
        self, number: int, budget_bytes: int, estimates: dict[frozenset[str], tuple[float, int]]
    ) -> None:
        """Estimate choices of `number` outputs: seconds by the chain's model, then the lowest known peak."""
        choices = {
            folded_outputs(self.profile, self._working_bytes, num_dropped=number, num_alive=self._peak_sums.most_alive),
        }
        choices |= {first_outputs(self.profile, longest=longest, num_dropped=number) for longest in _LONGEST_SEGMENTS}
        for dropped in sorted(choices - estimates.keys(), key=sorted):
            chain = self._chain(dropped)
            least_bytes = min(candidate.peak_bytes for candidate in chain.costs.known())
            estimates[dropped] = chain.estimate_s(budget_bytes), least_bytes

    def _run(self, dropped: Dropped, budget_bytes: int) -> tuple[int, float]:
        """Make the candidates of one chain for a budget, and return the best bytes over it, and then recompute seconds."""
        chain = self._chain(dropped)
        for _ in chain.best(budget_bytes):
            pass
        return min((max(0, found.peak_bytes - budget_bytes), found.recompute_s) for found in chain.costs.known())

    def _chain(self, dropped: Dropped) -> Chain:
        if dropped not in self._chains:
            table = OptionTable(
                self.profile,
                dropped_outputs=dropped or frozenset(),
                options_of=self._options_of,
                free_outputs=frozenset() if dropped is None else single_outputs(self.profile),
            )
            costs = KnownCosts(self._peak_sums, table)
            chain = Chain(costs, most_probes=self._most_probes, working=self._working, held=self._held)
            if self._lean is not None and self._lean.table.drops_outputs == dropped:
                chain.correct(costs.candidate(table.choice_of(self._lean.options)))
            self._chains[dropped] = chain
        return self._chains[dropped]

    def _best_known(self, budget_bytes: int) -> Candidate | None:
        known = (found for chain in self._chains.values() for found in chain.costs.known())
        return _fastest(known, budget_bytes)


def _fastest(known: Iterable[Candidate], budget_bytes: int) -> Candidate | None:
    return min((found for found in known if found.peak_bytes <= budget_bytes), key=_by_time, default=None)


def _by_time(candidate: Candidate) -> tuple[object, ...]:
    table = candidate.table
    order = candidate.recompute_s, candidate.peak_bytes
    return (*order, table.may_drop_outputs, sorted(table.drops_outputs), candidate.choice)


def _with_all_held(profile: Profile, held: HeldValues, options_of: OptionsOf) -> OptionsOf:
    """Return the source of a unit's options, and of variants that keep other values alive until the loss."""
    if not held:
        return options_of
    held_of = dict(zip(profile.graphs, held, strict=True))

    @cache
    def options_with_held(graph: UnitGraph, *, keeps_output: bool = True) -> tuple[Option, ...]:
        # A graph merged from several is not one of the profile's.
        options, its = options_of(graph, keeps_output=keeps_output), held_of.get(graph, frozenset())
        return with_held(graph, options, its, keeps_output=keeps_output)

    return options_with_held


def unit_options(graph: UnitGraph, *, keeps_output: bool = True, most_options: int = 64) -> tuple[Option, ...]:
    """Return options for one unit, including its hull, from the leanest to the fattest.

    Complexity: one pass over the unit for each hull option and value; in units of more than a few hundred ops, for some
        hull options and the largest values only.
    """
    hull = unit_hull(graph, keeps_output=keeps_output)
    # The hull without overhead of the tape adds corners: small savings that the overhead per module hides.
    without_tape = replace(graph, tape_s=0.0, module_tape_s=())
    free = unit_hull(without_tape, keeps_output=keeps_output) if graph.module_tape_s else hull
    corners = [*hull, *(option for option in free if option not in hull)]
    produced = frozenset(i for i, _ in graph.made)
    useful = {v for option in corners for v in option.stored.values} | {i for i in produced if graph.values[i].saved}
    most_variations = max(_FEWEST_VARIATIONS, _OPS_OF_ALL_VARIATIONS // max(1, len(graph.ops)))
    varied = spread(corners, most_variations // _FEWEST_VALUES)
    by_size = sorted(useful & produced, key=lambda v: (-graph.values[v].nbytes, v))
    values = sorted(by_size[: most_variations // len(varied)])
    can_be_parts = {part.value for part in graph.parts}
    parts = [value for value in values if value in can_be_parts]
    variations = itertools.chain(
        (option.stored for option in corners),
        (
            stored
            for option in varied
            for stored in (*map(option.stored.toggled, values), *map(option.stored.toggled_part, parts))
        ),
        itertools.islice((stored for option in varied for stored in _without_modules(graph, option)), most_variations),
    )
    rest = _undominated(graph, _evaluated(graph, variations, hull, keeps_output))
    return _thinned(rest, frozenset(option.stored for option in hull), most_options)


def _without_modules(graph: UnitGraph, option: Option) -> Iterator[Stored]:
    computed: dict[str, set[int]] = {}
    for op in sorted(option.recompute_ops):
        computed.setdefault(module_of(graph.ops[op].name), set()).update(graph.ops[op].outputs)
    yield from map(option.stored.with_whole, computed.values())


def _evaluated(
    graph: UnitGraph, variations: Iterable[Stored], hull: tuple[Option, ...], keeps_output: bool
) -> list[Option]:
    """Return the options of the hull and those that store these values, without duplicates."""
    seen = {option.stored: option for option in hull}
    evaluator = Evaluator(graph, keeps_output=keeps_output)
    lost = {i for i, value in enumerate(graph.values) if value.mutated_later and not value.saved}
    for stored in variations:
        option = evaluator.option(*stored)
        if lost.isdisjoint(option.stored.whole):
            seen.setdefault(option.stored, option)
    return list(seen.values())


def _undominated(graph: UnitGraph, options: Iterable[Option]) -> list[Option]:
    """Return the options that no other dominates, in order of bytes."""
    made_bytes = [sum(graph.values[v].nbytes for v in op.outputs) for op in graph.ops]
    measured = [
        (
            option.kept_bytes,
            option.recompute_s,
            sum(map(made_bytes.__getitem__, option.recompute_ops))
            + sum(graph.values[value].nbytes for value in option.stored.parts),
            option,
        )
        for option in options
    ]
    measured.sort(key=lambda m: m[:3])
    # Options so far, in order of seconds: each with fewer working bytes than all faster ones.
    seconds: list[float] = []
    working: list[int] = []
    kept: list[Option] = []
    for _, recompute_s, own_bytes, option in measured:
        after = bisect_right(seconds, recompute_s)
        if after and working[after - 1] <= own_bytes:
            continue
        kept.append(option)
        end = after
        while end < len(seconds) and working[end] >= own_bytes:
            end += 1
        seconds[after:end], working[after:end] = [recompute_s], [own_bytes]
    return kept


def _thinned(options: list[Option], hull: frozenset[Stored], most_options: int) -> tuple[Option, ...]:
    """Return at most `most_options` options, evenly spread; hull options always stay."""
    others = [option for option in options if option.stored not in hull]
    room = max(0, most_options - (len(options) - len(others)))
    chosen = {option.stored for option in spread(others, room)} | hull
    return tuple(option for option in options if option.stored in chosen)
