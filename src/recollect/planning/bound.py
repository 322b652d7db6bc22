"""How fast a plan within a budget can be at best: a lower bound on the recompute of any plan, by a linear program.

At every moment e of the step (`planning/moments.py`), with B the budget:

    fixed_e + sum over calls c of kept_e,c <= B           kept_e,c >= hull_c,e(t_c)         minimise sum of t_c

- fixed_e: bytes that are alive at e under every plan, because the events say so.
- t_c: seconds that call c's ops run again, in the whole step.
- hull_c,e(t): least bytes that c must have in memory at e if ops of at most t seconds of it run again: the lower convex
  hull over all choices of values and ops (`planning/hull.py`, minimum cuts), for what backward asks for after e.

Why no plan can be below: take any plan and look at its simulated step at e. What backward asks for after e is either in
memory, or computed after e by ops that run again, from values that are in memory or computed likewise. So what is in
memory at e of call c, and all ops of c that run again at any time, are a choice over which the hull was taken. Each of
these values is counted in one call, and none of them in fixed_e. Everything else is left out, in favour of the bound:
values that only a recompute in a later unit reads, other working memory of recomputing, saved generator states, values that
are written to later (taken to be keepable), and that calls of one module share a decision. An input from another unit is
taken to be available; the unit that made it must produce it only if backward itself asks for it.

Plans are of two kinds for each call (`planning/pivots.py`): one value of it, the pivot, is in memory from forward on until
backward first asks for it, or its op has run again by then, and its arguments that are asked for later are in memory from
there on. For each kind there are hulls of its own, in which these values have to be kept. A plan is of one kind; of both
the program takes shares that add up to one, so it allows all that either kind does (the convex hull of the two; Balas,
"Disjunctive programming", Annals of Discrete Mathematics 5, 1979).

What is returned does not hang on how exactly the program was solved: with the solver's prices for the rows, whatever they
are, the least of cost plus priced violations over all values that the variables can have is below every plan (weak duality).

"Any plan" means: keep or recompute, value by value, unit outputs dropped or not, what was computed again staying as long as
backward has still to ask for it, as on the tape; for the ops and the order of the recorded step. It does not hold for what
changes the step itself: offload, another micro-batch, a chunked loss, ops that are replaced by others.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array

from recollect.planning.hull import Option, unit_hull
from recollect.planning.moments import Demand, moments
from recollect.planning.pivots import pivots
from recollect.plans.action import Action
from recollect.plans.engines import Tape
from recollect.plans.plan import Plan
from recollect.profile.graph import OpRecord, UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from recollect.simulation.program import rounded_bytes

__all__ = ["LowerBound", "check_bound", "demand_hull", "is_all_on_tape"]

# Cuts and sums are in floating point: what is returned is lowered by more than their error.
_SAFETY = 1e-6
_BYTES_PER_UNIT = 2.0**20
# HiGHS's answer that no point satisfies all rows.
_INFEASIBLE = 2


@dataclass(frozen=True, slots=True)
class _Line:
    """Kept bytes of a demand are at least `least_bytes - bytes_per_s * t`."""

    least_bytes: float
    bytes_per_s: float


class _Shares(NamedTuple):
    """Variables of one call: what part of it is of each kind of plan (`planning/pivots.py`), and the seconds of both."""

    kept: int
    computed: int
    kept_s: int
    computed_s: int


class LowerBound:
    """The bound of one profile, for any number of budgets.

    Args:
        profile: the recorded step.

    Complexity: a few minimum-cut hulls per distinct unit, once; then one linear program per budget, whose size grows with
        the number of unit calls (80 layers: about 0.1 s).

    Example:
        >>> from recollect.profile.events import StepLog
        >>> from recollect.profile.events import ALLOC, FREE
        >>> step = StepLog(blocks=(((ALLOC, 0, 512), (FREE, 0)),), sequence=((0, -1),))
        >>> bound = LowerBound(Profile((), (), step, step_s=1.0))
        >>> bound.recompute_s(512), bound.recompute_s(511)
        (0.0, inf)
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._pivots = pivots(profile)
        self._shares: dict[int, _Shares] = {}
        self._lines: dict[tuple[Demand, frozenset[int]], tuple[_Line, ...]] = {}
        self._fixed_bytes: list[int] = []
        self._entries: list[tuple[int, int, float]] = []
        self._limits: list[float] = []
        self._equal: list[tuple[int, int, float]] = []
        self._most: list[float] = []
        self._build()

    def slowdown(self, budget_bytes: int) -> float:
        """Return the least slowdown of any plan whose peak is within the budget (0.03 is 3 %); inf if there is none."""
        recompute_s = self.recompute_s(budget_bytes)
        return recompute_s / self._profile.step_s if self._profile.step_s > 0 else min(recompute_s, 0.0)

    def recompute_s(self, budget_bytes: int) -> float:
        """Return the least seconds that ops run again under any plan whose peak is within the budget."""
        if any(fixed_bytes > budget_bytes for fixed_bytes in self._fixed_bytes):
            return math.inf
        if not self._rows:
            return 0.0
        upper = np.array(self._most)
        for row, fixed_bytes in zip(self._rows, self._fixed_bytes, strict=True):
            upper[row] = (budget_bytes - fixed_bytes) / _BYTES_PER_UNIT
        return self._seconds_per_unit * self._least_cost(upper)

    def _least_cost(self, upper: NDArray[np.float64]) -> float:
        """Return a lower bound on the program's optimum with these upper bounds of its variables; inf if it has no point."""
        cost = np.zeros(self._num_variables)
        cost[: len(self._profile.calls)] = 1.0
        at_most, equal = self._matrix(self._entries, len(self._limits)), self._matrix(self._equal, len(self._rows))
        limits = np.array(self._limits)
        result = linprog(
            cost,
            A_ub=at_most,
            b_ub=limits,
            A_eq=equal,
            b_eq=np.zeros(len(self._rows)),
            bounds=np.column_stack((np.zeros(self._num_variables), upper)),
            method="highs",
        )
        if result.status == _INFEASIBLE:
            return math.inf
        if result.status != 0:
            return 0.0  # No answer (a time limit, numbers that HiGHS cannot handle) proves nothing.
        prices = np.minimum(result.ineqlin.marginals, 0.0)
        reduced = cost - at_most.T @ prices - equal.T @ result.eqlin.marginals
        found = float(limits @ prices + np.minimum(reduced, 0.0) @ upper)
        return max(0.0, found * (1 - _SAFETY) - _SAFETY**2)

    def _matrix(self, entries: list[tuple[int, int, float]], num_rows: int) -> csr_array:
        rows, columns, numbers = zip(*entries, strict=True) if entries else ((), (), ())
        return coo_array((numbers, (rows, columns)), shape=(num_rows, self._num_variables)).tocsr()

    @property
    def _num_variables(self) -> int:
        return len(self._most)

    def _build(self) -> None:
        """Lay out the variables: seconds of each call, kept bytes of each (call, demand), bytes of each moment."""
        chosen = moments(self._profile, self._pivots)
        graphs = self._profile.graphs
        seconds = (s for g in graphs for s in (g.watched_s(range(len(g.values))), *(op.time_s for op in g.ops)))
        # The objective is in these units, or the solver's tolerance, which is absolute, would be a part of it.
        self._seconds_per_unit = max(seconds, default=0.0) or 1.0
        self._most += [self._most_seconds(call) for call in range(len(self._profile.calls))]
        self._rows: list[int] = []
        kept: dict[tuple[int, Demand], int] = {}
        current: dict[int, int] = {}
        previous = -1
        for moment in chosen:
            total = self._new_variable(math.inf)  # set for each budget
            row = len(self._rows)
            self._rows.append(total)
            self._fixed_bytes.append(moment.fixed_bytes)
            self._equal.append((row, total, 1.0))
            if previous >= 0:
                self._equal.append((row, previous, -1.0))
            for call, demand in moment.changed.items():
                if call in current:
                    self._equal.append((row, current.pop(call), 1.0))
                if demand.needed - demand.free:
                    if (call, demand) not in kept:
                        kept[call, demand] = self._kept_variable(call, demand)
                    current[call] = kept[call, demand]
                    self._equal.append((row, current[call], -1.0))
            previous = total

    def _new_variable(self, most: float) -> int:
        """Add a variable, 0 or more; `most` is what it is at most under any plan."""
        self._most.append(most)
        return len(self._most) - 1

    def _most_seconds(self, call: int) -> float:
        """Return the seconds of a call whose ops all run again, in units of the objective."""
        graph = self._profile.graph_of(self._profile.calls[call])
        seconds = graph.watched_s(range(len(graph.values))) + math.fsum(op.time_s for op in graph.ops)
        return seconds / self._seconds_per_unit

    def _most_kept(self, call: int) -> float:
        """Return the bytes of a call whose values are all kept, in units of the rows."""
        graph = self._profile.graph_of(self._profile.calls[call])
        return sum(rounded_bytes(self._profile, value.nbytes) for value in graph.values) / _BYTES_PER_UNIT

    def _add_row(self, limit: float, *entries: tuple[int, float]) -> None:
        """Demand that the sum of variables times factors is at most a limit."""
        self._entries += [(len(self._limits), variable, factor) for variable, factor in entries]
        self._limits.append(limit)

    def _kept_variable(self, call: int, demand: Demand) -> int:
        most_kept = self._most_kept(call)
        variable = self._new_variable(most_kept)
        pivot = self._pivots.get(demand.graph)
        if pivot is None:
            self._add_lines(demand, frozenset(), variable, call, share=None)
            return variable
        # Of the two kinds of plans, shares that add up to one; so do their bytes and seconds.
        if call not in self._shares:
            most_s = self._most_seconds(call)
            self._shares[call] = _Shares(*(self._new_variable(most) for most in (1.0, 1.0, most_s, most_s)))
            first = self._shares[call]
            self._add_row(1.0, (first.kept, 1.0), (first.computed, 1.0))
            self._add_row(-1.0, (first.kept, -1.0), (first.computed, -1.0))
            self._add_row(0.0, (first.kept_s, 1.0), (first.computed_s, 1.0), (call, -1.0))
        shares = self._shares[call]
        bytes_if_kept, bytes_if_computed = self._new_variable(most_kept), self._new_variable(most_kept)
        self._add_row(0.0, (bytes_if_kept, 1.0), (bytes_if_computed, 1.0), (variable, -1.0))
        there = demand.needed - demand.free
        forced = frozenset() if demand.is_asked else there & {pivot.value}
        self._add_lines(demand, forced, bytes_if_kept, shares.kept_s, share=shares.kept)
        forced = there & pivot.arguments if demand.is_asked else frozenset()
        self._add_lines(demand, forced, bytes_if_computed, shares.computed_s, share=shares.computed)
        return variable

    def _add_lines(
        self, demand: Demand, forced: frozenset[int], variable: int, seconds: int, *, share: int | None
    ) -> None:
        """Demand that kept bytes are above the hull at some seconds, for a share of all plans (None: all of them)."""
        if (demand, forced) not in self._lines:
            self._lines[demand, forced] = _lines(demand_hull(self._profile, demand, forced))
        for line in self._lines[demand, forced]:
            # least - rate * t <= kept
            least = line.least_bytes / _BYTES_PER_UNIT
            rate = line.bytes_per_s * self._seconds_per_unit / _BYTES_PER_UNIT
            if share is None:
                self._add_row(-least, (variable, -1.0), (seconds, -rate))
            else:
                self._add_row(0.0, (variable, -1.0), (seconds, -rate), (share, least))


def is_all_on_tape(plan: Plan) -> bool:
    """Whether the bound is of this plan: a module that runs again as a whole drops what the tape has to keep."""
    return all(isinstance(unit.engine, Tape) for unit in plan.units.values())


def check_bound(bound_s: float, recompute_s: float, budget_bytes: int) -> None:
    """Check that a plan's seconds of recompute are not below the bound for its budget.

    Raises:
        RuntimeError: they are, so the bound is wrong.
    """
    # Sums of the same seconds in another order differ in their last digits.
    if bound_s > recompute_s * (1 + _SAFETY) + _SAFETY**2:
        raise RuntimeError(
            f"no plan for {budget_bytes} bytes should take less than {bound_s} s of recompute, and one takes {recompute_s} s: "
            "this is a bug in recollect, please report it"
        )


def demand_hull(profile: Profile, demand: Demand, forced: frozenset[int] = frozenset()) -> tuple[Option, ...]:
    """Return the hull of one unit for one demand, with everything left out that not every plan needs.

    `forced` values are in memory, and count.
    """
    return unit_hull(_optimistic(profile, demand, forced), output=Action.RECOMPUTE)


def _optimistic(profile: Profile, demand: Demand, forced: frozenset[int]) -> UnitGraph:
    """Return the unit with the demanded values as the saved ones, and free values as leaves."""
    graph = profile.graphs[demand.graph]
    is_fixed = [i in forced or (v.must_keep and v.producer is not None) for i, v in enumerate(graph.values)]
    fixed = [i for i, is_there in enumerate(is_fixed) if is_there and i not in demand.free]
    values = []
    for index, value in enumerate(graph.values):
        is_leaf = value.producer is None or index in demand.free
        # A value that has to be kept gets an op of its own, so that what else its op computes can be run again.
        producer = fixed.index(index) if index in fixed else len(fixed) + (value.producer or 0)
        values.append(
            ValueRecord(
                name=f"{index}",
                nbytes=rounded_bytes(profile, value.nbytes),
                producer=None if is_leaf else producer,
                must_keep=index in fixed,
                saved=index in demand.needed and not is_leaf,
            )
        )
    ops = [OpRecord(f"fixed {index}", (), (index,), 0.0) for index in fixed]
    for op in graph.ops:
        outputs = tuple(v for v in op.outputs if v not in demand.free and v not in fixed)
        ops.append(replace(op, outputs=outputs, state_bytes=0, working_bytes=0))
    return UnitGraph(tuple(values), tuple(ops), graph.tape_s, graph.module_tape_s)


def _lines(options: tuple[Option, ...]) -> tuple[_Line, ...]:
    """Return the lines of which the hull is the upper envelope: its segments, and the least bytes."""
    lines = [_Line(options[0].kept_bytes, 0.0)]
    for lean, fat in itertools.pairwise(options):
        saved_s = lean.recompute_s - fat.recompute_s
        if saved_s > 0:
            bytes_per_s = (fat.kept_bytes - lean.kept_bytes) / saved_s
            lines.append(_Line(lean.kept_bytes + bytes_per_s * lean.recompute_s, bytes_per_s))
    return tuple(lines)
