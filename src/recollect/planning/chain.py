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

from recollect.planning.ladder import Ladder, Levels
from recollect.plans.action import Action
from recollect.simulation.peak_sums import Peaks
from recollect.simulation.windows import Window

__all__ = ["Chain", "SimulateLevels", "Stage", "WorkingSets", "cheapest"]

_NUM_CELLS = 1000
_NO_LIMIT = 2**62
_MOST_ROUNDS = 8

_Kind = tuple[int, tuple[Action, ...], bool, int]
WorkingSets = dict[tuple[_Kind, int], dict[int, int]]
"""Bytes by option, over those of the reference, for each kind of unit and each of its windows."""
SimulateLevels = Callable[[Levels], Peaks]


@dataclass(frozen=True, slots=True)
class Stage:
    """One rung of the ladder in the program, by option: bytes that it keeps, what it costs, and the bytes of its windows."""

    kept_bytes: NDArray[np.int64]
    recompute_s: NDArray[np.float64]
    own_bytes: NDArray[np.int64]


class Chain:
    """The program for one ladder, for any number of budgets.

    Args:
        ladder: the rungs and their options.
        windows: the windows of the step.
        simulate: plays the plan of these levels back, with the peaks of these windows.
        most_probes: how many simulations may measure working sets; an option between two that were measured is taken to
            lie between them, until it is in a plan that is simulated.
        working: what chains over other ladders of the same profile measured; this chain adds to it.

    Complexity: one simulation for each option that a unit has, divided by how many identical units there are; then, for
        each budget, up to six rounds of one program and one simulation.
    """

    def __init__(
        self,
        ladder: Ladder,
        windows: Sequence[Window],
        simulate: SimulateLevels,
        *,
        most_probes: int,
        working: WorkingSets | None = None,
    ) -> None:
        self._ladder = ladder
        self._simulate = simulate
        self._most_probes = most_probes
        self._order = sorted(range(len(ladder.rungs)), key=lambda rung: ladder.rungs[rung].calls[0])
        self._rows = self._assign(windows)
        self._base = np.zeros(len(windows), dtype=np.int64)
        # Bytes of windows that the model is refused, because a plan that it took to fit did not.
        self._refused = np.zeros(len(windows), dtype=np.int64)
        self._kinds = self._sort_into_kinds()
        self._working: WorkingSets = {} if working is None else working
        self._known_kinds = {kind for kind, _ in self._working}
        # The leanest options; outputs stay where that is a choice, since a dropped one is work for the next unit.
        self._reference = tuple(
            rung.outputs.index(Action.KEEP) if Action.KEEP in rung.outputs else 0 for rung in ladder.rungs
        )
        # The probe with the least peak, which the model can fall back on.
        self._leanest: tuple[Levels, Peaks] | None = None
        self._measure()

    def _assign(self, windows: Sequence[Window]) -> list[tuple[int, int]]:
        """Return, for each window, the position in the order of its unit (-1: before all), and its number there."""
        first_calls = [self._ladder.rungs[rung].calls[0] for rung in self._order]
        numbers: dict[tuple[int, int], int] = {}
        rows = []
        for window in windows:
            position = int(np.searchsorted(first_calls, window.call, side="right")) - 1
            number = numbers.get((position, window.phase), 0)
            numbers[position, window.phase] = number + 1
            rows.append((position, 3 * number + window.phase))
        return rows

    def _measure(self) -> None:
        for levels in self._probes():
            simulation = self._simulate(levels)
            if self._leanest is None or simulation.peak_bytes < self._leanest[1].peak_bytes:
                self._leanest = levels, simulation
            peaks = simulation.window_peaks
            earlier = self._earlier(levels)
            for window, (position, number) in enumerate(self._rows):
                if position < 0:
                    continue
                rung = self._order[position]
                known = self._working_of(rung, number)
                if levels == self._reference:
                    self._base[window] = peaks[window] - earlier[window]
                    known[levels[rung]] = 0
                else:
                    known.setdefault(levels[rung], peaks[window] - earlier[window] - int(self._base[window]))

    def _probes(self) -> Iterator[Levels]:
        """Yield levels that, together, have each option of each distinct unit somewhere; the reference first."""
        yield self._reference
        for part, group in enumerate(self._groups()):
            alike: dict[_Kind, list[int]] = {}
            for index in group:
                if self._kinds[index] in self._known_kinds:
                    continue
                alike.setdefault(self._kinds[index], []).append(index)
            longest = max((-(-len(self._ladder.rungs[m[0]].options) // len(m)) for m in alike.values()), default=0)
            num_probes = min(
                longest, self._most_probes if part == 0 and not self._known_kinds else self._most_probes // 4
            )
            for probe in range(num_probes):
                levels = list(self._reference)
                for members in alike.values():
                    # The last ones have the windows that matter most; the probe walks from the fattest option down.
                    for place, index in enumerate(reversed(members)):
                        slot, num_slots = probe * len(members) + place, num_probes * len(members)
                        top = len(self._ladder.rungs[index].options) - 1
                        levels[index] = max(0, top - slot if num_slots > top else round(top * (1 - slot / num_slots)))
                yield tuple(levels)

    def _groups(self) -> tuple[list[int], list[int], list[int]]:
        """Return the rungs that may be measured together: an output that is dropped is work for the next unit."""
        fixed: list[int] = []
        free: tuple[list[int], list[int]] = ([], [])
        for position, index in enumerate(self._order):
            is_free = len(set(self._ladder.rungs[index].outputs)) > 1
            (free[position % 2] if is_free else fixed).append(index)
        return fixed, *free

    def _sort_into_kinds(self) -> dict[int, _Kind]:
        """Say which rungs work in the same way: same graph and options, and alike in whether they read a dropped output."""
        kinds: dict[int, _Kind] = {}
        reads_dropped = False
        for index in self._order:
            rung = self._ladder.rungs[index]
            kinds[index] = (rung.graph, rung.outputs, reads_dropped, index if len(rung.calls) > 1 else -1)
            reads_dropped = rung.output == Action.RECOMPUTE
        return kinds

    def _working_of(self, rung: int, number: int) -> dict[int, int]:
        """Return the bytes of working set by option, over that of the reference, in one of the unit's windows."""
        return self._working.setdefault((self._kinds[rung], number), {})

    def _earlier(self, levels: Levels) -> list[int]:
        """Return, for each window, the bytes that the units before its own keep."""
        kept = (self._ladder.rungs[rung].options[levels[rung]].kept_bytes for rung in self._order)
        before = [0, *accumulate(kept)]
        return [before[max(0, position)] for position, _ in self._rows]

    def predicted_peak(self, levels: Levels) -> int:
        """Return what the model takes for the peak of some levels, in bytes."""
        earlier = self._earlier(levels)
        peak_bytes = 0
        for window, (position, number) in enumerate(self._rows):
            if position >= 0:
                rung = self._order[position]
                known = self._working_of(rung, number)
                working = known[levels[rung]] if levels[rung] in known else max(known.values())
                peak_bytes = max(peak_bytes, int(self._base[window]) + earlier[window] + working)
        return peak_bytes

    def estimate_s(self, budget_bytes: int) -> float:
        """Return the seconds of recompute of the best plan by the model, without simulating it; inf if there is none."""
        levels = self._solve(budget_bytes)
        if levels is None:
            return math.inf
        return math.fsum(self._ladder.rungs[rung].options[level].recompute_s for rung, level in enumerate(levels))

    def correct(self, levels: Levels, simulation: Peaks) -> None:
        """Take over what a simulation says about each window."""
        earlier = self._earlier(levels)
        for window, (position, number) in enumerate(self._rows):
            if position >= 0:
                rung = self._order[position]
                known = self._working_of(rung, number)
                growth_bytes = simulation.window_peaks[window] - earlier[window]
                # What was not measured before is now; where it was, the window is another one than the model thought.
                working = known.setdefault(levels[rung], growth_bytes - int(self._base[window]))
                self._base[window] = growth_bytes - working

    def best(self, budget_bytes: int) -> Iterator[tuple[Levels, Peaks]]:
        """Yield plans for a budget with their simulations, each made with what was learned from the one before.

        Ends when the model has no plan, or says of its best plan what the simulation said.
        """
        tried: set[Levels] = set()
        # Bytes that the model is refused, because plans that it took to fit did not.
        margin_bytes = excess_bytes = 0
        for _ in range(_MOST_ROUNDS):
            levels = self._solve(budget_bytes - margin_bytes)
            if levels is None and not tried and self._leanest is not None:
                self.correct(*self._leanest)
                levels = self._solve(budget_bytes)
            if levels in tried and excess_bytes > 0:
                margin_bytes += excess_bytes
                levels = self._solve(budget_bytes - margin_bytes)
            if levels is None or levels in tried:
                return
            tried.add(levels)
            simulation = self._simulate(levels)
            yield levels, simulation
            self.correct(levels, simulation)
            excess_bytes = simulation.peak_bytes - budget_bytes

    def _own_bytes(self, windows: Iterable[int]) -> list[NDArray[np.int64]]:
        """Return, for each position and option, the most bytes in some windows, less what earlier units keep."""
        own = [np.full(len(self._ladder.rungs[rung].options), -_NO_LIMIT) for rung in self._order]
        for window in windows:
            position, number = self._rows[window]
            if position >= 0:
                bytes_of = _filled_in(self._working_of(self._order[position], number), len(own[position]))
                own[position] = np.maximum(own[position], int(self._base[window] + self._refused[window]) + bytes_of)
        return own

    def _stages(self, windows: Iterable[int]) -> list[Stage]:
        """Return the program's stages, for what it should look at of some windows."""
        options = [self._ladder.rungs[rung].options for rung in self._order]
        return [
            Stage(
                kept_bytes=np.array([option.kept_bytes for option in choices], dtype=np.int64),
                recompute_s=np.array([option.recompute_s for option in choices]),
                own_bytes=own_bytes,
            )
            for choices, own_bytes in zip(options, self._own_bytes(windows), strict=True)
        ]

    def _solve(self, budget_bytes: int) -> Levels | None:
        chosen = cheapest(self._stages(range(len(self._rows))), budget_bytes)
        return None if chosen is None else self._levels(chosen)

    def _levels(self, chosen: Sequence[int]) -> Levels:
        """Return the levels of the options that are chosen, position by position."""
        levels = [0] * len(self._order)
        for rung, option in zip(self._order, chosen, strict=True):
            levels[rung] = option
        return tuple(levels)


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
    levels = sorted(known)
    filled = np.interp(np.arange(num_options), levels, [known[level] for level in levels])
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
