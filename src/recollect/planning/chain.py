"""The choice across units as a chain: dynamic programming over what earlier units keep, with measured working sets.

Units in forward order; unit l with option k keeps s(l, k) bytes and runs ops of t(l, k) seconds again. In each window
w of l's forward or backward (`simulation/windows.py`), the step holds

    base(w) + sum over earlier units j of s(j, k_j) + m(l, k, w) <= budget

where base and m come from simulated steps, in which identical units stand at different options, so that one simulation
measures many. The program carries exact bytes; states that differ by less than a thousandth of the range of bytes share
a cell, in which the fastest survives. What it returns is simulated; where a window's peak turns out to be another one than
the model says, the model's base is corrected and the program runs again.

Limitations: a window's peak is taken to depend on its own unit and the sum of the earlier ones. Where it does not (outputs
that are dropped, several calls of one module), corrections have to make up for it, and the best simulated plan is returned,
whatever the model says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from recollect.planning.candidate import Candidate
from recollect.planning.option_table import Choice, OptionTable
from recollect.plans.action import Action
from recollect.simulation.windows import Window

__all__ = ["Chain", "Play", "Stage", "WorkingSets", "cheapest"]

_NUM_CELLS = 1000
_NO_LIMIT = 2**62
_MOST_ROUNDS = 8

_Kind = tuple[int, tuple[Action, ...], bool, int]
WorkingSets = dict[tuple[_Kind, int], dict[int, int]]
"""Bytes by option, over those of the reference, for each kind of unit and each of its windows."""
Play = Callable[[Choice], Candidate]
"""Returns the cost of a choice."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the table in the program, by option: bytes that it keeps, what it costs, and the bytes of its windows."""

    kept_bytes: NDArray[np.int64]
    recompute_s: NDArray[np.float64]
    own_bytes: NDArray[np.int64]


class Chain:
    """The program for one table, for any number of budgets.

    Args:
        table: the rows and their options.
        windows: the windows of the step.
        play: returns the cost of a choice, with the peaks of these windows.
        most_probes: how many simulations may measure working sets; an option between two that were measured is taken to
            lie between them, until it is in a plan that is simulated.
        working: what chains over other tables of the same profile measured; this chain adds to it.

    Complexity: one simulation for each option that a unit has, divided by how many identical units there are; then, for
        each budget, up to six rounds of one program and one simulation.
    """

    def __init__(
        self,
        table: OptionTable,
        windows: Sequence[Window],
        play: Play,
        *,
        most_probes: int,
        working: WorkingSets | None = None,
    ) -> None:
        self._table = table
        self._play = play
        self._most_probes = most_probes
        self._order = sorted(range(len(table.rows)), key=lambda row: table.rows[row].calls[0])
        self._places = self._assign(windows)
        self._base = np.zeros(len(windows), dtype=np.int64)
        # Bytes of windows that the model is refused, because a plan that it took to fit did not.
        self._refused = np.zeros(len(windows), dtype=np.int64)
        self._kinds = self._sort_into_kinds()
        self._working: WorkingSets = {} if working is None else working
        self._known_kinds = {kind for kind, _ in self._working}
        # The leanest options; outputs stay where that is a choice, since a dropped one is work for the next unit.
        self._reference = tuple(
            row.outputs.index(Action.KEEP) if Action.KEEP in row.outputs else 0 for row in table.rows
        )
        # The probe with the least peak, which the model can fall back on.
        self._leanest: Candidate | None = None
        self._measure()

    def _assign(self, windows: Sequence[Window]) -> list[tuple[int, int]]:
        """Return, for each window, the position in the order of its unit (-1: before all), and its number there."""
        first_calls = [self._table.rows[row].calls[0] for row in self._order]
        numbers: dict[tuple[int, int], int] = {}
        rows = []
        for window in windows:
            position = int(np.searchsorted(first_calls, window.call, side="right")) - 1
            number = numbers.get((position, window.phase), 0)
            numbers[position, window.phase] = number + 1
            rows.append((position, 3 * number + window.phase))
        return rows

    def _measure(self) -> None:
        for choice in self._probes():
            candidate = self._play(choice)
            if self._leanest is None or candidate.peak_bytes < self._leanest.peak_bytes:
                self._leanest = candidate
            peaks = candidate.cost.window_peaks
            earlier = self._earlier(choice)
            for window, (position, number) in enumerate(self._places):
                if position < 0:
                    continue
                row = self._order[position]
                known = self._working_of(row, number)
                if choice == self._reference:
                    self._base[window] = peaks[window] - earlier[window]
                    known[choice[row]] = 0
                else:
                    known.setdefault(choice[row], peaks[window] - earlier[window] - int(self._base[window]))

    def _probes(self) -> Iterator[Choice]:
        """Yield choice that, together, have each option of each distinct unit somewhere; the reference first."""
        yield self._reference
        for part, group in enumerate(self._groups()):
            alike: dict[_Kind, list[int]] = {}
            for index in group:
                if self._kinds[index] in self._known_kinds:
                    continue
                alike.setdefault(self._kinds[index], []).append(index)
            longest = max((-(-len(self._table.rows[m[0]].options) // len(m)) for m in alike.values()), default=0)
            num_probes = min(
                longest, self._most_probes if part == 0 and not self._known_kinds else self._most_probes // 4
            )
            for probe in range(num_probes):
                choice = list(self._reference)
                for members in alike.values():
                    # The last ones have the windows that matter most; the probe walks from the fattest option down.
                    for place, index in enumerate(reversed(members)):
                        slot, num_slots = probe * len(members) + place, num_probes * len(members)
                        top = len(self._table.rows[index].options) - 1
                        choice[index] = max(0, top - slot if num_slots > top else round(top * (1 - slot / num_slots)))
                yield tuple(choice)

    def _groups(self) -> tuple[list[int], list[int], list[int]]:
        """Return the rows that may be measured together: an output that is dropped is work for the next unit."""
        fixed: list[int] = []
        free: tuple[list[int], list[int]] = ([], [])
        for position, index in enumerate(self._order):
            is_free = len(set(self._table.rows[index].outputs)) > 1
            (free[position % 2] if is_free else fixed).append(index)
        return fixed, *free

    def _sort_into_kinds(self) -> dict[int, _Kind]:
        """Say which rows work in the same way: same graph and options, and alike in whether they read a dropped output."""
        kinds: dict[int, _Kind] = {}
        reads_dropped = False
        for index in self._order:
            row = self._table.rows[index]
            kinds[index] = (row.graph, row.outputs, reads_dropped, index if len(row.calls) > 1 else -1)
            reads_dropped = row.output == Action.RECOMPUTE
        return kinds

    def _working_of(self, row: int, number: int) -> dict[int, int]:
        """Return the bytes of working set by option, over that of the reference, in one of the unit's windows."""
        return self._working.setdefault((self._kinds[row], number), {})

    def _earlier(self, choice: Choice) -> list[int]:
        """Return, for each window, the bytes that the units before its own keep."""
        kept = (self._table.rows[row].options[choice[row]].kept_bytes for row in self._order)
        before = [0, *accumulate(kept)]
        return [before[max(0, position)] for position, _ in self._places]

    def estimate_s(self, budget_bytes: int) -> float:
        """Return the seconds of recompute of the best plan by the model, without simulating it; inf if there is none."""
        choice = self._solve(budget_bytes)
        if choice is None:
            return math.inf
        return math.fsum(self._table.rows[row].options[column].recompute_s for row, column in enumerate(choice))

    def correct(self, candidate: Candidate) -> None:
        """Take over what a candidate's cost says about each window."""
        earlier = self._earlier(candidate.choice)
        for window, (position, number) in enumerate(self._places):
            if position >= 0:
                row = self._order[position]
                known = self._working_of(row, number)
                growth_bytes = candidate.cost.window_peaks[window] - earlier[window]
                # What was not measured before is now; where it was, the window is another one than the model thought.
                working = known.setdefault(candidate.choice[row], growth_bytes - int(self._base[window]))
                self._base[window] = growth_bytes - working

    def best(self, budget_bytes: int) -> Iterator[Candidate]:
        """Yield candidates for a budget, each made with what was learned from the one before.

        Ends when the model has no plan, or says of its best plan what the simulation said.
        """
        tried: set[Choice] = set()
        # Bytes that the model is refused, because plans that it took to fit did not.
        margin_bytes = excess_bytes = 0
        for _ in range(_MOST_ROUNDS):
            choice = self._solve(budget_bytes - margin_bytes)
            if choice is None and not tried and self._leanest is not None:
                self.correct(self._leanest)
                choice = self._solve(budget_bytes)
            if choice in tried and excess_bytes > 0:
                margin_bytes += excess_bytes
                choice = self._solve(budget_bytes - margin_bytes)
            if choice is None or choice in tried:
                return
            tried.add(choice)
            candidate = self._play(choice)
            yield candidate
            self.correct(candidate)
            excess_bytes = candidate.peak_bytes - budget_bytes

    def _own_bytes(self, windows: Iterable[int]) -> list[NDArray[np.int64]]:
        """Return, for each position and option, the most bytes in some windows, less what earlier units keep."""
        own = [np.full(len(self._table.rows[row].options), -_NO_LIMIT) for row in self._order]
        for window in windows:
            position, number = self._places[window]
            if position >= 0:
                bytes_of = _filled_in(self._working_of(self._order[position], number), len(own[position]))
                own[position] = np.maximum(own[position], int(self._base[window] + self._refused[window]) + bytes_of)
        return own

    def _stages(self, windows: Iterable[int]) -> list[Stage]:
        """Return the program's stages, for what it should look at of some windows."""
        options = [self._table.rows[row].options for row in self._order]
        return [
            Stage(
                kept_bytes=np.array([option.kept_bytes for option in choices], dtype=np.int64),
                recompute_s=np.array([option.recompute_s for option in choices]),
                own_bytes=own_bytes,
            )
            for choices, own_bytes in zip(options, self._own_bytes(windows), strict=True)
        ]

    def _solve(self, budget_bytes: int) -> Choice | None:
        chosen = cheapest(self._stages(range(len(self._places))), budget_bytes)
        return None if chosen is None else self._choice_of(chosen)

    def _choice_of(self, chosen: Sequence[int]) -> Choice:
        """Return the choice of the options that are chosen, position by position."""
        choice = [0] * len(self._order)
        for row, option in zip(self._order, chosen, strict=True):
            choice[row] = option
        return tuple(choice)


def cheapest(stages: Sequence[Stage], budget_bytes: int, *, num_cells: int = _NUM_CELLS) -> list[int] | None:
    """Return the option of each stage with which the chain costs least; None if nothing is within the budget.

    Args:
        stages: in the order of the chain.
        budget_bytes: for what earlier stages keep and an own working set together.
        num_cells: states that differ by less than this part of the range of bytes are one.

    Complexity: stages times options times cells.
    """
    kept, seconds = np.zeros(1, dtype=np.int64), np.zeros(1)
    history: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    most_after = _most_kept(stages, budget_bytes)
    for stage, most_kept in zip(stages, most_after, strict=True):
        fits_here = kept[:, None] + stage.own_bytes <= budget_bytes
        parents, options = np.nonzero(fits_here & (kept[:, None] + stage.kept_bytes <= most_kept))
        if not len(parents):
            return None
        new_kept = kept[parents] + stage.kept_bytes[options]
        new_seconds = seconds[parents] + stage.recompute_s[options]
        survivors = _survivors(new_kept, new_seconds, num_cells)
        kept, seconds = new_kept[survivors], new_seconds[survivors]
        history.append((parents[survivors], options[survivors]))
    state = int(np.argmin(seconds))
    chosen = []
    for parents, options in reversed(history):
        chosen.append(int(options[state]))
        state = int(parents[state])
    return chosen[::-1]


def _filled_in(known: Mapping[int, int], num_options: int) -> NDArray[np.int64]:
    """Return the bytes of all options; those of one that was not measured lie between its neighbours'."""
    choice = sorted(known)
    filled = np.interp(np.arange(num_options), choice, [known[column] for column in choice])
    return np.asarray(np.rint(filled), dtype=np.int64)


def _most_kept(stages: Sequence[Stage], budget_bytes: int) -> list[int]:
    """Return, for each stage, the most bytes that units up to it may keep for the later ones to fit at all."""
    most = [_NO_LIMIT]
    for stage in reversed(stages[1:]):
        most.append(int(np.minimum(budget_bytes - stage.own_bytes, most[-1] - stage.kept_bytes).max()))
    return most[::-1]


def _survivors(kept: NDArray[np.int64], seconds: NDArray[np.float64], num_cells: int) -> NDArray[np.int64]:
    """Return the fastest state of each cell of bytes, without those that a leaner state beats."""
    least = int(kept.min())
    width = max(1, -(-(int(kept.max()) - least + 1) // num_cells))
    cell_of = (kept - least) // width
    num_used = int(cell_of.max()) + 1
    least_s = np.full(num_used, np.inf)
    np.minimum.at(least_s, cell_of, seconds)
    # From the last one on, since of several that are written to one place the last one stays: the first of the fastest.
    among_fastest = np.flatnonzero(seconds == least_s[cell_of])[::-1]
    fastest = np.full(num_used, -1)
    fastest[cell_of[among_fastest]] = among_fastest
    cells = fastest[fastest >= 0]
    cells = cells[np.argsort(kept[cells], kind="stable")]
    fastest_so_far = np.concatenate(([np.inf], np.minimum.accumulate(seconds[cells])[:-1]))
    survivors: NDArray[np.int64] = cells[seconds[cells] < fastest_so_far]
    return survivors
