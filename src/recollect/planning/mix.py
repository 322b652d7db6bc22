"""Choose one option per unit under many sums of bytes at once: a linear program, rounded.

Unit r with option o keeps s(r, o) bytes for each of its calls in flight and recomputes for t(r, o) seconds, which are below 0
where compiled code that keeps less is faster than PyTorch's choice, as measured. Each window w of unit r(w) has to satisfy

    floor(w) + sum over all units j of n(w, j) s(j, o_j) + m(w, o_r(w)) <= budget

where n(w, j) counts the calls of j that are alive then. They differ between windows where units run several times at once, as
micro-batches do. And s does where the model's own code holds some values until the loss: keeping them costs nothing in the
windows of forward. Few windows matter: of each unit, those with most calls in flight.

With a share of each option in place of a choice this is a linear program, whose best point mixes options in no more units than
there are windows that are full. These units then take one option, and others faster ones as long as there is room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

# Relative error of byte sums in floating point.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Stage:
    """A unit; per option: bytes kept for each call in flight, seconds of all calls, and peak bytes of its windows."""

    kept_bytes: NDArray[np.int64]
    recompute_s: NDArray[np.float64]
    own_bytes: NDArray[np.int64]
    held_bytes: NDArray[np.int64] | int = 0
    """Of the bytes kept, those that forward has with every option."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Windows that have to fit."""

    unit: NDArray[np.int64]
    """Of each window, the number of the unit that it belongs to."""
    counts: NDArray[np.float64]
    """(window, unit): how many calls are alive."""
    own_bytes: Sequence[NDArray[np.int64]]
    """The other bytes of each window, by option of its unit."""
    in_forward: NDArray[np.bool_] | bool = False
    """Whether each window has the held bytes of all units anyway."""

    def fullest(self) -> Limits:
        """Return the windows of each unit that no other window of the unit dominates."""
        in_forward = np.broadcast_to(self.in_forward, self.unit.shape)
        kept: list[int] = []
        for unit in np.unique(self.unit):
            members = np.flatnonzero(self.unit == unit)
            # The fullest first: most others are then compared with few.
            own = np.array([self.own_bytes[int(window)] for window in members], dtype=np.float64)
            table = np.hstack((own, self.counts[members], ~in_forward[members, None]))
            found: list[int] = []
            for place in np.lexsort((-table.sum(axis=1),)):
                if not any((table[other] >= table[place]).all() for other in found):
                    found.append(int(place))
            kept += members[sorted(found)].tolist()
        return Limits(self.unit[kept], self.counts[kept], [self.own_bytes[w] for w in kept], in_forward[kept])


class Mix:
    """Finds options of all units that together fit a budget."""

    def __init__(self, units: Sequence[Stage], limits: Limits, budget_bytes: int) -> None:
        limits = limits.fullest()
        self._budget = float(budget_bytes)
        self._unit_of = np.concatenate([np.full(len(u.kept_bytes), r) for r, u in enumerate(units)])
        self._first = np.searchsorted(self._unit_of, np.arange(len(units)))
        self._seconds = np.concatenate([unit.recompute_s for unit in units])
        kept = np.concatenate([unit.kept_bytes for unit in units]).astype(float)
        held = np.concatenate([np.broadcast_to(unit.held_bytes, unit.kept_bytes.shape) for unit in units])
        # (window, option): bytes of the window if the option is taken.
        self._loads = limits.counts[:, self._unit_of] * (kept - np.reshape(limits.in_forward, (-1, 1)) * held)
        for window, unit in enumerate(limits.unit):
            own = limits.own_bytes[window]
            self._loads[window, self._first[unit] : self._first[unit] + len(own)] += own
        # Windows that always fit do not matter.
        most = np.maximum.reduceat(self._loads, self._first, axis=1).sum(axis=1)
        self._loads = self._loads[most > self._budget]
        self._tolerance = _ROUNDING * self._budget

    def chosen(self) -> list[int] | None:
        """Return options that together take few seconds, or None if none are found within the budget.

        Complexity: a linear program of an unknown for each option and a row for each of the fullest windows, then some passes
            over both.
        """
        point = self._point()
        if point is None:
            return None
        shares, prices = point
        fitting = [one for one in map(self._repaired, self._starts(shares)) if one is not None]
        found = [self._exchanged(self._filled(one, prices), prices) for one in fitting]
        best = min(found, key=lambda one: float(self._seconds[one].sum()), default=None)
        return None if best is None else (best - self._first).tolist()

    def faster(self, start: Sequence[int]) -> Iterator[list[int]]:
        """Yield choices that fit with a faster option for one unit, most seconds per byte first."""
        chosen = self._first + np.array(start)
        saved_s = self._seconds[chosen][self._unit_of] - self._seconds
        fits = (self._changed(chosen) <= self._tolerance).all(axis=0) & (saved_s > 0)
        more = np.maximum(self._loads - self._loads[:, chosen][:, self._unit_of], 0.0).sum(axis=0)
        for option in sorted(np.flatnonzero(fits).tolist(), key=lambda option: -saved_s[option] / (1 + more[option])):
            switched = list(start)
            switched[self._unit_of[option]] = int(option - self._first[self._unit_of[option]])
            yield switched

    def _point(self) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Return the program's best point: the share of each option, and seconds per byte of each window; None if none fits."""
        scale_s = float(np.abs(self._seconds).max(initial=0.0)) or 1.0
        result = linprog(
            self._seconds / scale_s,
            A_ub=self._loads / self._budget,
            b_ub=np.ones(len(self._loads)),
            A_eq=(np.arange(len(self._first))[:, None] == self._unit_of).astype(float),
            b_eq=np.ones(len(self._first)),
            method="highs",
        )
        if result.status != 0:
            return None
        return result.x, np.maximum(-result.ineqlin.marginals, 0.0) * (scale_s / self._budget)

    def _starts(self, shares: NDArray[np.float64]) -> list[NDArray[np.int64]]:
        """Return the option with the largest share of each unit, and the slowest one with a share."""
        ends = [*self._first[1:], len(shares)]
        most, slowest = [], []
        for first, end in zip(self._first, ends, strict=True):
            own = shares[first:end]
            most.append(first + int(own.argmax()))
            slowest.append(first + int(np.where(own > 1e-9, self._seconds[first:end], -np.inf).argmax()))
        return [np.array(most), np.array(slowest)]

    def _changed(self, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return (window, option): bytes over the budget if one unit takes the option and all others the chosen ones."""
        over = self._loads[:, chosen].sum(axis=1) - self._budget
        return over[:, None] + self._loads - self._loads[:, chosen][:, self._unit_of]

    def _repaired(self, chosen: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return a choice that fits: units switch to the cheapest options for the bytes that exceed the budget."""
        chosen = chosen.copy()
        for _ in range(4 * len(self._first)):
            over = np.maximum(self._loads[:, chosen].sum(axis=1) - self._budget, 0.0).sum()
            if over <= self._tolerance:
                return chosen
            excess = np.maximum(self._changed(chosen), 0.0).sum(axis=0)
            gained = over - excess
            lost_s = np.maximum(self._seconds - self._seconds[chosen][self._unit_of], 0.0)
            if not (gained > self._tolerance).any():
                return None
            ends_it = (excess <= self._tolerance) & (gained > 0)
            worth = np.where(gained > self._tolerance, gained / (lost_s + 1e-12), -1.0)
            option = int(np.where(ends_it, lost_s, np.inf).argmin() if ends_it.any() else worth.argmax())
            chosen[self._unit_of[option]] = option
        return None

    def _filled(self, chosen: NDArray[np.int64], prices: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return a choice with units switched to faster options while there is room, the best use of scarce bytes first."""
        chosen = chosen.copy()
        costs_s = self._seconds + prices @ self._loads
        while True:
            saved_s = self._seconds[chosen][self._unit_of] - self._seconds
            fits = (self._changed(chosen) <= self._tolerance).all(axis=0) & (saved_s > 0)
            if not fits.any():
                return chosen
            lost_s = np.where(fits, costs_s - costs_s[chosen][self._unit_of], np.inf)
            option = int(np.lexsort((-saved_s, lost_s))[0])
            chosen[self._unit_of[option]] = option

    def _exchanged(self, chosen: NDArray[np.int64], prices: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return a choice that no two units can make faster by taking other options at once."""
        costs_s = self._seconds + prices @ self._loads
        least_s = np.minimum.reduceat(costs_s, self._first)
        while True:
            # No choice is faster than the program's best point, and an option's price says by how much it is slower than that.
            gap_s = (costs_s[chosen] - least_s).sum() + prices @ (self._budget - self._loads[:, chosen].sum(axis=1))
            some = np.flatnonzero(costs_s - least_s[self._unit_of] < gap_s)
            change = self._loads[:, some] - self._loads[:, chosen][:, self._unit_of[some]]
            saved_s = (self._seconds[chosen][self._unit_of] - self._seconds)[some]
            room = self._budget - self._loads[:, chosen].sum(axis=1) + self._tolerance
            best: tuple[float, int, int] = (1e-9 * float(np.abs(self._seconds[chosen]).sum()), -1, -1)
            for place in np.flatnonzero(saved_s > 0):
                fits = (change <= (room - change[:, place])[:, None]).all(axis=0)
                both_s = np.where(
                    fits & (self._unit_of[some] != self._unit_of[some[place]]), saved_s[place] + saved_s, -1.0
                )
                if len(both_s) and both_s.max() > best[0]:
                    best = float(both_s.max()), int(some[place]), int(some[both_s.argmax()])
            if best[1] < 0:
                return chosen
            chosen = chosen.copy()
            chosen[self._unit_of[[best[1], best[2]]]] = best[1], best[2]
            chosen = self._filled(chosen, prices)
