"""Choose one option per unit, and how many of its stored bytes are offloaded: a linear program over shares of options.

Take n units in forward order, and their 2n windows: the forward of each, then the backward of each in reverse. Unit l with
option k stores s(l, k) bytes, runs ops again for t(l, k) seconds, and needs f(l, k) and b(l, k) bytes in its own windows beside
what earlier units store. With the shares x(l, k) of options, the bytes o(l) of a unit that are offloaded, the bytes out(w) and
back(w) that the link carries in each window, and the seconds z(w) that the step waits in it, minimise the sum of all t x and z
subject to

    out(w) <= out rate x (seconds of w + z(w)),   back(w) <= back rate x (seconds of w, and of what runs again there, + z(w))
    what is out before a window <= the sum of o over the units that have run before it
    away(w) = out before w - back until the end of w:  0 <= away(w) <= sum of o over the units before that of w, in backward
    forward of l:   sum of s x over j < l - away(w) + f(l) <= budget
    backward of l:  sum of s x over j < l - away(w) + b(l) <= budget
    o(l) <= what the options of l store and can offload,   sum of o <= host memory

Values leaving in a window are gone by its end; values returning take room from its start, as at edges.
The loss follows the last unit's forward, but its memory counts as the unit's, and its time as the unit's backward.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from recollect.planning.chain_solver import ChainSolver
from recollect.planning.mix import Stage
from recollect.planning.option_table import OptionTable
from recollect.planning.trips import may_leave
from recollect.plans.plan import Plan
from recollect.profile.events import BACKWARD, FORWARD
from recollect.profile.profile import Profile
from recollect.simulation.copy_clock import Course, Link

# Of two choices that take equally long, prefer the one that copies less: seconds per byte copied, as a part of the link's.
_COPY_PRICE = 1e-3


@dataclass(frozen=True, slots=True)
class OffloadUnit:
    """A unit with its options, from the leanest."""

    forward: Stage
    backward: Stage
    """The bytes each option needs in the unit's windows of one phase."""
    leaving_bytes: NDArray[np.int64]
    """For each option, the part of its stored bytes that can be offloaded."""
    forward_s: float
    backward_s: float
    """Seconds of its windows, without recompute."""


class _Program:
    """Builds and solves the program; bytes are in parts of the budget."""

    def __init__(self, units: Sequence[OffloadUnit], link: Link, budget_bytes: int, host_bytes: int) -> None:
        self._units = units
        self._scale = float(budget_bytes) or 1.0
        self._link = link
        self._host = host_bytes / self._scale
        counts = [len(unit.leaving_bytes) for unit in units]
        self._first = np.concatenate(([0], np.cumsum(counts)[:-1])).astype(int)
        self._num_shares, self._num_units = sum(counts), len(units)
        self._rows: list[list[tuple[int, float]]] = []
        self._limits: list[float] = []
        for window in range(2 * self._num_units):
            self._add_window(window)
        for unit in range(self._num_units):
            self._add([(self._offloaded(unit), 1.0), *self._shares(unit, -self._part(units[unit].leaving_bytes))], 0.0)
        self._add([(self._offloaded(unit), 1.0) for unit in range(self._num_units)], self._host)

    def _part(self, nbytes: NDArray[np.int64]) -> NDArray[np.float64]:
        return nbytes / self._scale

    # The unknowns: shares, then for each unit the offloaded bytes, then for each window the bytes out and back, and the wait.

    def _shares(self, unit: int, factors: NDArray[np.float64]) -> list[tuple[int, float]]:
        return list(enumerate(factors.tolist(), start=int(self._first[unit])))

    def _offloaded(self, unit: int) -> int:
        return self._num_shares + unit

    def _of_window(self, window: int, what: int) -> int:
        return self._num_shares + self._num_units + 3 * window + what

    def _add(self, terms: list[tuple[int, float]], limit: float) -> None:
        self._rows.append(terms)
        self._limits.append(limit)

    def _add_window(self, window: int) -> None:
        is_forward = window < self._num_units
        number = window if is_forward else 2 * self._num_units - 1 - window
        unit = self._units[number]
        out, back, wait = (self._of_window(window, what) for what in range(3))
        out_rate, back_rate = (rate / self._scale for rate in self._link[:2])
        own_s = unit.forward_s if is_forward else unit.backward_s
        again = np.zeros(len(unit.leaving_bytes)) if is_forward else unit.backward.recompute_s
        for rate, carried in ((out_rate, out), (back_rate, back)):
            self._add([(carried, 1.0), (wait, -rate), *self._shares(number, -rate * again)], rate * own_s)
        gone = [(self._of_window(other, 0), 1.0) for other in range(window)]
        returned = [(self._of_window(other, 1), -1.0) for other in range(window + 1)]
        made = [(self._offloaded(other), -1.0) for other in range(number if is_forward else self._num_units)]
        self._add([*gone, (out, 1.0), *made], 0.0)
        self._add([(column, -factor) for column, factor in (*gone, *returned)], 0.0)
        if not is_forward:
            self._add([*gone, *returned, *((self._offloaded(other), -1.0) for other in range(number))], 0.0)
        earlier = [
            term for j in range(number) for term in self._shares(j, self._part(self._units[j].forward.kept_bytes))
        ]
        own = self._shares(number, self._part((unit.forward if is_forward else unit.backward).own_bytes))
        if window == self._num_units - 1:
            # The loss, where memory is often fullest, is after the last unit returns.
            gone = [*gone, (out, 1.0)]
        away = [(column, -factor) for column, factor in (*gone, *returned)]
        self._add([*earlier, *own, *away], 1.0)

    def solved(self) -> list[NDArray[np.float64]] | None:
        """Return the share of each option of each unit in the fastest mix; None if none fits the budget.

        Complexity: a linear program with an unknown for each option, and five for each unit.
        """
        num_unknowns = self._of_window(2 * self._num_units, 0)
        seconds = np.zeros(num_unknowns)
        seconds[: self._num_shares] = np.concatenate([unit.backward.recompute_s for unit in self._units])
        for window in range(2 * self._num_units):
            seconds[self._of_window(window, 0)] = _COPY_PRICE * self._scale / self._link.to_host_bytes_per_s
            seconds[self._of_window(window, 2)] = 1.0
        equal = np.zeros((self._num_units, num_unknowns))
        for unit in range(self._num_units):
            for column, _ in self._shares(unit, self._units[unit].backward.recompute_s):
                equal[unit, column] = 1.0
        entries = [(row, column, factor) for row, terms in enumerate(self._rows) for column, factor in terms]
        rows, columns, factors = zip(*entries, strict=True)
        matrix = coo_array((factors, (rows, columns)), shape=(len(self._rows), num_unknowns)).tocsr()
        result = linprog(
            seconds, A_ub=matrix, b_ub=self._limits, A_eq=equal, b_eq=np.ones(self._num_units), method="highs"
        )
        return None if result.status != 0 else np.split(result.x[: self._num_shares], self._first[1:])


@dataclass(frozen=True, slots=True)
class OffloadUnits:
    """The units of a step, in forward order."""

    table: OptionTable
    rows: tuple[int, ...]
    units: tuple[OffloadUnit, ...]
    """The linear program's view of each."""

    def plan(self, link: Link, budget_bytes: int, host_bytes: int) -> Plan | None:
        """Return a plan with the option of each unit that has the largest share, and no trips; None if nothing fits."""
        shares = _Program(self.units, link, budget_bytes, host_bytes).solved()
        if shares is None:
            return None
        choice = [0] * len(self.rows)
        for row, own in zip(self.rows, shares, strict=True):
            choice[row] = int(own.argmax())
        return self.table.plan(tuple(choice))


def measured_units(profile: Profile, course: Course, least_bytes: int) -> OffloadUnits | None:
    """Return the units of a step; None if there are none, or units run several times."""
    if not profile.calls:
        return None
    chain = ChainSolver(profile).measured()
    table = chain.costs.table
    if len(table.rows) != len(profile.calls):
        return None
    seconds: defaultdict[tuple[int, int], float] = defaultdict(float)
    ends_s = [*course.edge_s[1:], course.end_s]
    for edge, begin_s, end_s in zip(course.edges, course.edge_s, ends_s, strict=True):
        seconds[edge.phase, edge.call] += end_s - begin_s
    last = len(profile.calls) - 1
    seconds[BACKWARD, last] += seconds[FORWARD, last + 1]
    units = []
    for number, forward, backward in zip(chain.order, chain.stages_of(FORWARD), chain.stages_of(BACKWARD), strict=True):
        row = table.rows[number]
        graph = profile.graphs[row.graph]
        leaving = [
            sum(graph.values[value].nbytes for value in option.stored.whole if may_leave(graph, value, least_bytes))
            for option in row.options
        ]
        own_s = seconds[FORWARD, row.calls[0]], seconds[BACKWARD, row.calls[0]]
        units.append(OffloadUnit(forward, backward, np.array(leaving, dtype=np.int64), *own_s))
    return OffloadUnits(table, tuple(chain.order), tuple(units))
