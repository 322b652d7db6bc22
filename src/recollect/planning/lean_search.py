"""Find the plan with the least peak, which depends only on bytes, not on how long the ops took.

Try which outputs to drop, with everything else dropped too (`planning/output_choices.py`). From the best of these, lower
the peaks by changing what units keep, one unit or one kind of unit at a time, and see whether more outputs or fewer would be
better.

Keeping more of a unit's values takes less workspace in its own backward, but more bytes until then. In each window
(`simulation/windows.py`) the model adds up

    what is there + sum over units of (the bytes it keeps if it is alive + the effect of what it keeps)

Effects are measured: simulate the step with all units of a kind changed alike; the effect is the change that kept
bytes do not explain. It is mostly, but not necessarily, workspace in the units' own windows. First measure
changes of the present step by one value. Then take the model's best choice if the simulator agrees.

Several windows are near the peak at once, and lowering one may raise the next. So the descent lowers a soft maximum of
all windows, the logarithm of a sum of exponentials.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from recollect.planning.hull import Option, Stored
from recollect.planning.lean_units import LeanUnits, everything_dropped
from recollect.planning.option_table import Candidate, KnownCosts, OptionTable, with_options
from recollect.planning.output_choices import folded_outputs, inner_outputs, number_between, single_outputs
from recollect.simulation.peak_sums import PeakSums

# Softness of the maximum, as parts of the step's memory minus the bytes that are always alive.
_SOFTNESS = (0.05, 0.003)
# Units matter whose windows have this part of the weight of all windows.
_LEAST_WEIGHT = 0.003
_MOST_ROUNDS = 20
# A soft maximum that is lower by less, in units of the softness, is not lower. Machines differ in the last digits.
_SMALLEST_GAIN = 1e-4
_NUM_DIGITS = 6

_Team = tuple[int, ...]
_Peaks = NDArray[np.float64]


def leanest(peak_sums: PeakSums) -> Candidate:
    """Return the candidate with the lowest peak that the search finds; equal for equal bytes."""
    units = LeanUnits(peak_sums)
    single_paths, inner_paths = single_outputs(units.profile), inner_outputs(units.profile)
    single = [index for index, row in enumerate(units.rows) if row.path in single_paths]
    inner = [index for index, row in enumerate(units.rows) if row.path in inner_paths]
    options, before_bytes = _best_start(units, peak_sums.most_alive), math.inf
    while True:
        descent = _Descent(units, options)
        descent.run(single)
        descent.flip(inner)
        if descent.best_bytes >= before_bytes:
            break
        options, before_bytes = descent.best, descent.best_bytes
    dropped = {row.path for row, option in zip(units.rows, descent.best, strict=True) if not option.keeps_output}
    table = OptionTable(
        units.profile,
        dropped_outputs=dropped - single_paths,
        options_of=with_options(everything_dropped, units.table, descent.best),
        free_outputs=single_paths,
    )
    return KnownCosts(peak_sums, table).candidate(table.choice_of(descent.best))


def _best_start(units: LeanUnits, num_alive: Mapping[str, int]) -> list[Option]:
    """Return the step that drops everything in the layers, and the outputs whose dropping makes its peak lowest."""
    starts: dict[int, list[Option]] = {}
    peaks: dict[int, float] = {}
    most = len(inner_outputs(units.profile))
    number: int | None = 0
    while number is not None:
        dropped = folded_outputs(units.profile, units.working_bytes, num_dropped=number, num_alive=num_alive)
        starts[number] = [
            units.option(index, Stored(), row.path not in dropped)
            if units.profile.calls[row.calls[0]].repeated
            else units.ends(index, True)[-1]
            for index, row in enumerate(units.rows)
        ]
        peaks[number] = float(units.peaks(starts[number]).max())
        if max(peaks) < most:
            number = min(max(1, 2 * number), most)
        else:
            number = number_between(sorted(peaks), min(peaks, key=lambda known: peaks[known]))
    return starts[min(peaks, key=lambda known: peaks[known])]


class _Descent:
    """Lowers the peaks of one step."""

    def __init__(self, units: LeanUnits, options: Sequence[Option]) -> None:
        self._units = units
        self.options = list(options)
        self.peaks = units.peaks(options)
        self.best, self.best_bytes = self.options, float(self.peaks.max())
        self._scale = max(1.0, self.best_bytes - units.profile.persistent_bytes)
        self._teams = self._sorted_into_teams()
        self._team_of = {row: team for team in self._teams for row in team}
        self._kept_output = {row: options[row].keeps_output for row in self._team_of}
        self._shares = {row: self._share(row) for row in self._team_of}
        # For each team and each single unit: the effects of options on all windows, minus the first option's.
        self._effects: dict[_Team, dict[Option, _Peaks]] = {team: {} for team in self._movers()}
        for row in self._team_of:
            self._effects[row,][options[row]] = np.zeros(len(self.peaks))

    def run(self, free_outputs: Iterable[int]) -> None:
        """Lower the peaks until nothing helps."""
        self._measure_ends(frozenset(free_outputs))
        for softness in _SOFTNESS:
            temperature = softness * self._scale
            self._improves(temperature)
            for _ in range(_MOST_ROUNDS):
                self._measure_nearby(temperature)
                if not self._improves(temperature):
                    break

    def flip(self, rows: Iterable[int]) -> None:
        """Keep dropped outputs, or drop kept ones, where that helps."""
        temperature = _SOFTNESS[-1] * self._scale
        can_flip = set(rows)
        teams = [tuple(row for row in team if row in can_flip) for team in self._teams]
        for mover in [*(team for team in teams if len(team) > 1), *((row,) for team in teams for row in team)]:
            for options in self._flips(mover):
                if self._units.is_spent or self._take(options, self._units.peaks(options), temperature):
                    break

    def _flips(self, mover: _Team) -> Iterator[list[Option]]:
        """Yield steps where these rows drop their output if they keep it, or the other way around."""
        for flipped in self._units.flipped(mover[0], self.options[mover[0]]):
            options = self._changed(mover, flipped)
            yield options
            # Readers of a dropped output may prefer to keep the values that they compute from it.
            for reader in self._units.readers[mover[0]] if len(mover) == 1 else ():
                for other in self._units.neighbors(reader, options[reader]):
                    if other.stored.has_more_than(options[reader].stored):
                        yield [other if row == reader else known for row, known in enumerate(options)]

    def _sorted_into_teams(self) -> list[_Team]:
        """Return the groups of rows that are alike: a change that helps one may help all."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        for index, row in enumerate(self._units.rows):
            if self._units.phases[index]:
                reads_dropped = self._units.reads_dropped(index, self.options)
                kind = row.graph, self.options[index].keeps_output, reads_dropped, self._units.phases[index]
                kinds.setdefault(kind, []).append(index)
        return [tuple(rows) for rows in kinds.values()]

    def _movers(self) -> list[_Team]:
        """Return the groups that move together: teams, and each single unit."""
        return list(dict.fromkeys([*self._teams, *((row,) for row in self._team_of)]))

    def _share(self, row: int) -> _Peaks:
        """Return the part of its team's effect that is this row's: all in its own windows, none in the others' own."""
        team = self._team_of[row]
        share = np.full(len(self.peaks), 1 / len(team))
        share[np.concatenate([self._units.own_windows[other] for other in team])] = 0.0
        share[self._units.own_windows[row]] = 1.0
        return share

    def _measure_ends(self, free_outputs: frozenset[int]) -> None:
        for row in self._team_of:
            for keeps_output in (True, False) if row in free_outputs else (self.options[row].keeps_output,):
                mover = self._mover(row, keeps_output)
                for option in self._units.ends(row, keeps_output):
                    if option not in self._effects[mover]:
                        self._measure(mover, option)

    def _measure_nearby(self, temperature: float) -> None:
        """Measure the next values that units in high windows could keep or drop."""
        weights = np.exp((self.peaks - self.peaks.max()) / temperature)
        weights /= weights.sum()
        for row in self._team_of:
            if weights[self._units.own_windows[row]].sum() >= _LEAST_WEIGHT:
                mover = self._mover(row, self.options[row].keeps_output)
                for option in self._units.neighbors(row, self.options[row]):
                    if option not in self._effects[mover] and not self._units.is_spent:
                        self._measure(mover, option)

    def _mover(self, row: int, keeps_output: bool) -> _Team:
        """Return the team of a row, or only the row if it keeps its output and the team does not, or the other way around."""
        return self._team_of[row] if keeps_output == self._kept_output[row] else (row,)

    def _measure(self, mover: _Team, option: Option) -> tuple[list[Option], _Peaks]:
        options = self._changed(mover, option)
        peaks = self._units.peaks(options)
        change = peaks - self.peaks - self._kept_changes(mover, [option])[0]
        self._effects[mover][option] = self._effect_now(mover) + change
        return options, peaks

    def _changed(self, mover: _Team, option: Option) -> list[Option]:
        return [option if row in mover else known for row, known in enumerate(self.options)]

    def _kept_changes(self, mover: _Team, options: Sequence[Option]) -> _Peaks:
        num_alive = self._units.num_alive[:, list(mover)]
        kept_bytes = np.array([option.kept_bytes for option in options])
        now = num_alive @ np.array([self.options[row].kept_bytes for row in mover])
        return np.outer(kept_bytes, num_alive.sum(axis=1)) - now

    def _effect_now(self, mover: _Team) -> _Peaks:
        total = np.zeros(len(self.peaks))
        for row in mover:
            option, own = self.options[row], self._effects[row,]
            total += own[option] if option in own else self._shares[row] * self._effects[self._team_of[row]][option]
        return total

    def _known(self, mover: _Team) -> dict[Option, _Peaks]:
        """Return the known options of these rows with their effects; a single unit has its share of its team's."""
        known = self._effects[mover]
        team = self._team_of[mover[0]]
        if mover == team:
            return known
        return {option: self._shares[mover[0]] * effect for option, effect in self._effects[team].items()} | known

    def _improves(self, temperature: float) -> bool:
        """Change units as long as that helps; return whether any was changed."""
        before = self.options
        for _ in range(_MOST_ROUNDS):
            last = self.options
            for mover in self._movers():
                self._improve(mover, temperature)
            if self.options is last:
                break
        return self.options is not before

    def _improve(self, mover: _Team, temperature: float) -> None:
        """Give these rows the option that the model thinks best, if it is better."""
        known = self._known(mover)
        if not known or self._units.is_spent:
            return
        options = list(known)
        changes = self._kept_changes(mover, options) + np.array(list(known.values())) - self._effect_now(mover)
        scores = _soft_maximum(self.peaks + changes, temperature)
        best = int(np.argmin(scores))
        if scores[best] <= _soft_maximum(self.peaks, temperature) - _SMALLEST_GAIN:
            self._take(*self._measure(mover, options[best]), temperature)

    def _take(self, options: list[Option], peaks: _Peaks, temperature: float) -> bool:
        """Make these the present options if they are better; return whether they are."""
        if _soft_maximum(peaks, temperature) > _soft_maximum(self.peaks, temperature) - _SMALLEST_GAIN:
            return False
        self.options, self.peaks = options, peaks
        if peaks.max() < self.best_bytes:
            self.best, self.best_bytes = options, float(peaks.max())
        return True


def _soft_maximum(peaks: _Peaks, temperature: float) -> NDArray[np.float64]:
    """Return the soft maximum over the last axis, in units of the temperature."""
    scaled = peaks / temperature
    top = scaled.max(axis=-1, keepdims=True)
    found: NDArray[np.float64] = top[..., 0] + np.log(np.exp(scaled - top).sum(axis=-1))
    return np.round(found, _NUM_DIGITS)
