"""Choose one option per unit by dynamic programming over the bytes that earlier units keep, with measured working sets.

Take units in forward order: unit l with option k keeps s(l, k) bytes and recomputes for t(l, k) seconds. In each window
w of l's forward or backward (`simulation/windows.py`), the step must satisfy

    base(w) + sum over earlier units j of s(j, k_j) + m(l, k, w) <= budget

Simulated steps measure base and m; identical units take different options in one simulation, which measures many at once.
The program carries exact bytes; states closer than a thousandth of the range of bytes share a cell, where the fastest
survives. Each result is simulated; if the peak of a window differs from the model's, its base is corrected and the
program runs again.

Units that run several times take one option for all their calls. A window then finds more alive than the units before its
own: other passes through the same layers. And values that the model's own code holds until the loss
(`planning/alive_until_loss.py`) cost bytes in backward only. A linear program then makes the choice (`planning/mix.py`).

Limitation: the model assumes that the peak of a window depends only on its own unit and the sum of what others keep. Where
that fails (dropped outputs), corrections make up for it, and the best simulated plan counts, whatever the model says.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from recollect.planning.alive_until_loss import HeldValues, held_bytes
from recollect.planning.mix import Limits, Mix, Stage
from recollect.planning.option_table import Candidate, Choice, KnownCosts, UnitRow
from recollect.profile.events import FORWARD
from recollect.profile.graph import UnitGraph
from recollect.simulation.windows import Window, calls_besides

# That the range of bytes is divided into; one state survives in each.
_NUM_CELLS = 1000
_NO_LIMIT = 2**62
_MOST_ROUNDS = 8
_MOST_SWITCHES = 24

_Kind = tuple[int, tuple[bool, ...], bool, int]
WorkingSets = dict[tuple[_Kind, int], dict[int, int]]
"""For each kind of unit and each of its windows: bytes of each option minus the bytes of the reference option."""


class Chain:
    """Solves the chain of one table for any number of budgets.

    Args:
        most_probes: the most simulations to measure working sets with; options in between are interpolated until a
            simulated plan contains them.
        working: working sets measured by chains over other tables of the same profile; this chain adds to them.
        held: for each graph, the values that are alive until the loss, if any are worth telling apart.

    Complexity: (options per unit / identical units) simulations once; then, for each budget, up to eight rounds of one
        program and one simulation.
    """

    def __init__(
        self, costs: KnownCosts, *, most_probes: int, working: WorkingSets | None = None, held: HeldValues = ()
    ) -> None:
        self.costs = costs
        self._table, windows = costs.table, costs.windows
        self._most_probes = most_probes
        self.order = sorted(range(len(self._table.rows)), key=lambda row: self._table.rows[row].calls[0])
        self._places = self._assign(windows)
        units = [self._table.rows[row] for row in self.order]
        self._others = calls_besides(
            self._table.profile, windows, [u.calls for u in units], [position for position, _ in self._places]
        )
        self._held = [_held_of(row, self._table.profile.graphs[row.graph], held) for row in self._table.rows]
        self._in_forward = np.array([window.phase == FORWARD for window in windows])
        if held and self._others is None:
            self._others = np.zeros((len(windows), len(units)))
        self._base = np.zeros(len(windows), dtype=np.int64)
        self._kinds = self._sort_into_kinds()
        self._working: WorkingSets = {} if working is None else working
        self._known_kinds = {kind for kind, _ in self._working}
        # The leanest options, with outputs kept where possible: a dropped output adds work to the next unit.
        self._reference = tuple(
            row.keeps_outputs.index(True) if any(row.keeps_outputs) else 0 for row in self._table.rows
        )
        # The probe with the lowest peak, for the model to fall back on.
        self._leanest: Candidate | None = None
        self._measure()

    def _assign(self, windows: Sequence[Window]) -> list[tuple[int, int]]:
        """Return, for each window, the chain position of its unit (-1: before the first), and its number there."""
        position_of = {call: p for p, row in enumerate(self.order) for call in self._table.rows[row].calls}
        numbers: dict[tuple[int, int], int] = {}
        rows = []
        for window in windows:
            position = position_of.get(window.call, -1)
            number = numbers.get((position, window.phase), 0)
            numbers[position, window.phase] = number + 1
            rows.append((position, 3 * number + window.phase))
        return rows

    def _measure(self) -> None:
        for choice in self._probes():
            candidate = self.costs.candidate(choice)
            if self._leanest is None or candidate.peak_bytes < self._leanest.peak_bytes:
                self._leanest = candidate
            peaks = candidate.cost.window_peaks
            earlier = self._earlier(choice)
            for window, (position, number) in enumerate(self._places):
                if position < 0:
                    continue
                row = self.order[position]
                known = self._working_of(row, number)
                if choice == self._reference:
                    self._base[window] = peaks[window] - earlier[window]
                    known[choice[row]] = 0
                else:
                    known.setdefault(choice[row], peaks[window] - earlier[window] - int(self._base[window]))

    def _probes(self) -> Iterator[Choice]:
        """Yield the reference, then choices that together cover each option of each distinct unit."""
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
                    # The windows of the last units matter most, so they get the fattest options first.
                    for place, index in enumerate(reversed(members)):
                        slot, num_slots = probe * len(members) + place, num_probes * len(members)
                        top = len(self._table.rows[index].options) - 1
                        choice[index] = max(0, top - slot if num_slots > top else round(top * (1 - slot / num_slots)))
                yield tuple(choice)

    def _groups(self) -> tuple[list[int], list[int], list[int]]:
        """Group rows to measure together; neighbors that can drop outputs are apart, as that adds work to the next."""
        fixed: list[int] = []
        free: tuple[list[int], list[int]] = ([], [])
        for position, index in enumerate(self.order):
            is_free = len(set(self._table.rows[index].keeps_outputs)) > 1
            (free[position % 2] if is_free else fixed).append(index)
        return fixed, *free

    def _sort_into_kinds(self) -> dict[int, _Kind]:
        """Return the kind of each row; a kind shares graph and options, and whether the input is dropped."""
        kinds: dict[int, _Kind] = {}
        reads_dropped = False
        for index in self.order:
            row = self._table.rows[index]
            kinds[index] = (row.graph, row.keeps_outputs, reads_dropped, len(row.calls))
            reads_dropped = not any(row.keeps_outputs)
        return kinds

    def _working_of(self, row: int, number: int) -> dict[int, int]:
        """Return the working set of each option minus the reference's, in one window of the unit."""
        return self._working.setdefault((self._kinds[row], number), {})

    def _earlier(self, choice: Choice) -> list[int]:
        """Return, for each window, the bytes kept by the calls that are alive, except its own: first of the units before it."""
        options = [self._table.rows[row].options[choice[row]] for row in self.order]
        kept_before = [0, *accumulate(option.kept_bytes for option in options)]
        before = [kept_before[max(0, position)] for position, _ in self._places]
        if self._others is None:
            return before
        kept = np.array([option.kept_bytes for option in options], dtype=float)
        held = np.array([self._held[row][choice[row]] for row in self.order], dtype=float)
        more = self._others @ kept - self._in_forward * (self._alive @ held)
        return [nbytes + int(other) for nbytes, other in zip(before, np.rint(more), strict=True)]

    @cached_property
    def _alive(self) -> NDArray[np.float64]:
        """For each window and unit, how many calls keep bytes, besides the window's own."""
        positions = np.array([position for position, _ in self._places])
        before = (np.arange(len(self.order)) < positions[:, None]).astype(float)
        return before if self._others is None else self._others + before

    def estimate_s(self, budget_bytes: int) -> float:
        """Return the recompute seconds of the model's best plan, not simulated; inf if there is none."""
        choice = self._solve(budget_bytes)
        if choice is None:
            return math.inf
        rows = self._table.rows
        return math.fsum(
            rows[row].num_runs * rows[row].options[column].recompute_s for row, column in enumerate(choice)
        )

    def correct(self, candidate: Candidate) -> None:
        earlier = self._earlier(candidate.choice)
        for window, (position, number) in enumerate(self._places):
            if position >= 0:
                row = self.order[position]
                known = self._working_of(row, number)
                growth_bytes = candidate.cost.window_peaks[window] - earlier[window]
                # An option without a measurement gets one here; with one, the base must have been wrong.
                working = known.setdefault(candidate.choice[row], growth_bytes - int(self._base[window]))
                self._base[window] = growth_bytes - working

    def best(self, budget_bytes: int) -> Iterator[Candidate]:
        """Yield candidates for a budget, each from a model corrected by the one before."""
        tried: set[Choice] = set()
        # Bytes withheld from the model, because plans that it thought would fit did not.
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
            candidate = self.costs.candidate(choice)
            yield candidate
            self.correct(candidate)
            excess_bytes = candidate.peak_bytes - budget_bytes

    def better(self, start: Candidate, budget_bytes: int) -> Iterator[Candidate]:
        """Yield candidates that differ in one unit from the last one within the budget, and are faster."""
        tried = {start.choice}
        for _ in range(_MOST_SWITCHES):
            self.correct(start)
            chosen = [start.choice[row] for row in self.order]
            found = Mix(self._stages(()), self._limits(), budget_bytes).faster(chosen)
            choice = next((one for one in map(self._choice_of, found) if one not in tried), None)
            if choice is None:
                return
            tried.add(choice)
            candidate = self.costs.candidate(choice)
            yield candidate
            if candidate.peak_bytes <= budget_bytes:
                start = candidate

    def _own_in(self, window: int) -> NDArray[np.int64]:
        """Return each option's peak in a window of its unit, minus the bytes kept before; on a line between those measured."""
        position, number = self._places[window]
        row = self.order[position]
        known = sorted(self._working_of(row, number).items())
        columns, nbytes = zip(*known, strict=True)
        working = np.interp(np.arange(len(self._table.rows[row].options)), columns, nbytes)
        return np.asarray(np.rint(working), dtype=np.int64) + int(self._base[window])

    def _stages(self, windows: Iterable[int]) -> list[Stage]:
        """Return the stages of the program, constrained by some windows only."""
        rows = [self._table.rows[row] for row in self.order]
        own = [np.full(len(row.options), -_NO_LIMIT) for row in rows]
        for window in windows:
            position = self._places[window][0]
            if position >= 0:
                own[position] = np.maximum(own[position], self._own_in(window))
        return [
            Stage(
                kept_bytes=np.array([option.kept_bytes for option in row.options], dtype=np.int64),
                recompute_s=row.num_runs * np.array([option.recompute_s for option in row.options]),
                own_bytes=own_bytes,
                held_bytes=self._held[number],
            )
            for number, row, own_bytes in zip(self.order, rows, own, strict=True)
        ]

    def stages_of(self, phase: int) -> list[Stage]:
        """Return the stages of the units in forward order, constrained by the windows of one phase only."""
        windows = [window for window, (_, number) in enumerate(self._places) if number % 3 == phase]
        return self._stages(windows)

    def _solve(self, budget_bytes: int) -> Choice | None:
        if self._others is None:
            chosen = cheapest(self._stages(range(len(self._places))), budget_bytes)
        else:
            chosen = Mix(self._stages(()), self._limits(), budget_bytes).chosen()
        return None if chosen is None else self._choice_of(chosen)

    def _limits(self) -> Limits:
        """Return the windows that belong to units, with everything alive in them."""
        used = [window for window, (position, _) in enumerate(self._places) if position >= 0]
        positions = np.array([self._places[window][0] for window in used], dtype=np.int64)
        own = [self._own_in(window) for window in used]
        return Limits(positions, self._alive[used], own, self._in_forward[used])

    def _choice_of(self, chosen: Sequence[int]) -> Choice:
        """Reorder chosen options from chain positions to table rows."""
        choice = [0] * len(self.order)
        for row, option in zip(self.order, chosen, strict=True):
            choice[row] = option
        return tuple(choice)


def _held_of(row: UnitRow, graph: UnitGraph, held: HeldValues) -> NDArray[np.int64]:
    """Return the bytes of each option of a row that are alive until the loss."""
    values = held[row.graph] if held else frozenset()
    return np.array([held_bytes(graph, option, values) for option in row.options], dtype=np.int64)


def cheapest(stages: Sequence[Stage], budget_bytes: int) -> list[int] | None:
    """Return the option of each stage, in chain order, that together cost least, or None if nothing fits.

    The budget limits the bytes that earlier stages keep plus the own bytes of a stage.
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
        survivors = _survivors(new_kept, new_seconds)
        kept, seconds = new_kept[survivors], new_seconds[survivors]
        history.append((parents[survivors], options[survivors]))
    state = int(np.argmin(seconds))
    chosen = []
    for parents, options in reversed(history):
        chosen.append(int(options[state]))
        state = int(parents[state])
    return chosen[::-1]


def _most_kept(stages: Sequence[Stage], budget_bytes: int) -> list[int]:
    """Return, for each stage, the most bytes that units up to it may keep so that the later ones can still fit."""
    most = [_NO_LIMIT]
    for stage in reversed(stages[1:]):
        most.append(int(np.minimum(budget_bytes - stage.own_bytes, most[-1] - stage.kept_bytes).max()))
    return most[::-1]


def _survivors(kept: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the fastest state of each cell, without those that a leaner state beats."""
    least = int(kept.min())
    width = max(1, -(-(int(kept.max()) - least + 1) // _NUM_CELLS))
    cell_of = (kept - least) // width
    num_used = int(cell_of.max()) + 1
    least_s = np.full(num_used, np.inf)
    np.minimum.at(least_s, cell_of, seconds)
    # Reversed: NumPy keeps the last of several writes to one place, and the first of the fastest should stay.
    among_fastest = np.flatnonzero(seconds == least_s[cell_of])[::-1]
    fastest = np.full(num_used, -1)
    fastest[cell_of[among_fastest]] = among_fastest
    cells = fastest[fastest >= 0]
    cells = cells[np.argsort(kept[cells], kind="stable")]
    fastest_so_far = np.concatenate(([np.inf], np.minimum.accumulate(seconds[cells])[:-1]))
    return cells[seconds[cells] < fastest_so_far]
