"""Lower the peaks of a step by changing what its units keep, one unit or one kind of unit at a time.

Keeping more of a unit's values needs less workspace in its own backward, but more bytes until then. In each window
(`simulation/windows.py`) the model adds up

    what is there + sum over units of (the bytes it keeps if it is alive + the effect of what it keeps)

Effects are measured: simulate the step with all units of a kind changed alike; what the kept bytes do not explain is the
effect. It is mostly workspace in the units' own windows, but nothing says that it must be. First measure what differs from
the present step by one value. Then take what the model thinks best if the simulator agrees.

Several windows are near the peak at once, and lowering one may raise another. So the descent lowers a soft maximum of
all windows, the logarithm of a sum of exponentials.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from recollect.planning.lean_units import LeanUnits
from recollect.planning.option_table import Fate
from recollect.plans.action import Action

__all__ = ["LeanDescent"]

# Softness of the maximum, as parts of what the step needs beside what is always there.
_SOFTNESS = (0.05, 0.003)
# Units matter whose windows have this part of the weight of all windows.
_LEAST_WEIGHT = 0.003
_MOST_ROUNDS = 20
# A soft maximum that is lower by less, in units of the softness, is not lower. Machines differ in the last digits.
_SMALLEST_GAIN = 1e-4
_NUM_DIGITS = 6

_Team = tuple[int, ...]
_Key = tuple[frozenset[int], Action]
_Peaks = NDArray[np.float64]


class LeanDescent:
    """Lowers the peaks of one step.

    Args:
        units: the units of the step.
        fates: what becomes of them at first.

    Attributes:
        fates: what becomes of each unit at present.
        peaks: the simulated peaks with these fates.
        best: the fates with the lowest peak so far.
        best_bytes: that peak.
    """

    def __init__(self, units: LeanUnits, fates: Sequence[Fate]) -> None:
        self._units = units
        self.fates = list(fates)
        self.peaks = units.peaks(fates)
        self.best, self.best_bytes = self.fates, float(self.peaks.max())
        self._scale = max(1.0, self.best_bytes - units.profile.persistent_bytes)
        self._teams = self._sorted_into_teams()
        self._team_of = {row: team for team in self._teams for row in team}
        self._first_output = {row: fates[row][1] for row in self._team_of}
        self._shares = {row: self._share(row) for row in self._team_of}
        # For each team and each single unit: fates, with their effects on all windows, less that of the first fate.
        self._effects: dict[_Team, dict[_Key, tuple[Fate, _Peaks]]] = {team: {} for team in self._movers()}
        nothing = np.zeros(len(self.peaks))
        for row in self._team_of:
            self._effects[row,][_key(fates[row])] = fates[row], nothing

    def run(self, free_outputs: Iterable[int]) -> None:
        """Lower the peaks until nothing helps.

        Args:
            free_outputs: rows that may keep or drop their output.
        """
        self._measure_ends(frozenset(free_outputs))
        for softness in _SOFTNESS:
            self._lower(softness * self._scale)

    def flip(self, rows: Iterable[int]) -> None:
        """Keep outputs that are dropped, or drop some that are kept, where that helps."""
        temperature = _SOFTNESS[-1] * self._scale
        can_flip = set(rows)
        teams = [tuple(row for row in team if row in can_flip) for team in self._teams]
        for mover in [*(team for team in teams if len(team) > 1), *((row,) for team in teams for row in team)]:
            for fates in self._flips(mover):
                if self._units.is_spent or self._take(fates, self._units.peaks(fates), temperature):
                    break

    def _flips(self, mover: _Team) -> Iterator[list[Fate]]:
        """Yield steps where these rows drop their output if they keep it, or the other way around."""
        for fate in self._units.flipped(mover[0], self.fates[mover[0]]):
            fates = self._changed(mover, fate)
            yield fates
            # Who reads an output that is dropped may rather keep what it computes from it.
            for reader in self._units.readers[mover[0]] if len(mover) == 1 else ():
                for other in self._units.neighbors(reader, fates[reader]):
                    if other[0].keep > fates[reader][0].keep:
                        yield [other if row == reader else known for row, known in enumerate(fates)]

    def _sorted_into_teams(self) -> list[_Team]:
        """Return the rows that are alike, so that what helps one of them may help all."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        for index, row in enumerate(self._units.rows):
            if self._units.phases[index]:
                reads_dropped = self._units.reads_dropped(index, self.fates)
                kind = row.graph, self.fates[index][1], reads_dropped, self._units.phases[index]
                kinds.setdefault(kind, []).append(index)
        return [tuple(rows) for rows in kinds.values()]

    def _movers(self) -> list[_Team]:
        """Return what moves together: teams, and each unit alone."""
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
            outputs = (Action.KEEP, Action.RECOMPUTE) if row in free_outputs else (self.fates[row][1],)
            for output in outputs:
                mover = self._mover(row, output)
                for fate in self._units.ends(row, output):
                    if _key(fate) not in self._effects[mover]:
                        self._measure(mover, fate)

    def _lower(self, temperature: float) -> None:
        self._improves(temperature)
        for _ in range(_MOST_ROUNDS):
            self._measure_nearby(temperature)
            if not self._improves(temperature):
                return

    def _measure_nearby(self, temperature: float) -> None:
        """Measure what units in high windows could keep or drop next."""
        weights = np.exp((self.peaks - self.peaks.max()) / temperature)
        weights /= weights.sum()
        for row in self._team_of:
            if weights[self._units.own_windows[row]].sum() >= _LEAST_WEIGHT:
                mover = self._mover(row, self.fates[row][1])
                for fate in self._units.neighbors(row, self.fates[row]):
                    if _key(fate) not in self._effects[mover] and not self._units.is_spent:
                        self._measure(mover, fate)

    def _mover(self, row: int, output: Action) -> _Team:
        """Return the team of a row, or the row alone if this output is not the team's."""
        return self._team_of[row] if output == self._first_output[row] else (row,)

    def _measure(self, mover: _Team, fate: Fate) -> tuple[list[Fate], _Peaks]:
        """Simulate a fate for these rows and remember its effect."""
        fates = self._changed(mover, fate)
        peaks = self._units.peaks(fates)
        change = peaks - self.peaks - self._kept_changes(mover, [fate])[0]
        self._effects[mover][_key(fate)] = fate, self._effect_now(mover) + change
        return fates, peaks

    def _changed(self, mover: _Team, fate: Fate) -> list[Fate]:
        return [fate if row in mover else known for row, known in enumerate(self.fates)]

    def _kept_changes(self, mover: _Team, fates: Sequence[Fate]) -> _Peaks:
        """Return, for each of these fates, how the bytes kept change in each window."""
        num_alive = self._units.num_alive[:, list(mover)]
        kept_bytes = np.array([option.kept_bytes for option, _ in fates])
        now = num_alive @ np.array([self.fates[row][0].kept_bytes for row in mover])
        changes: _Peaks = np.outer(kept_bytes, num_alive.sum(axis=1)) - now
        return changes

    def _effect_now(self, mover: _Team) -> _Peaks:
        total = np.zeros(len(self.peaks))
        for row in mover:
            key, team = _key(self.fates[row]), self._team_of[row]
            if key in self._effects[row,]:
                total += self._effects[row,][key][1]
            else:
                total += self._shares[row] * self._effects[team][key][1]
        return total

    def _known(self, mover: _Team) -> dict[_Key, tuple[Fate, _Peaks]]:
        """Return the known fates of these rows with their effects; a single unit has its share of its team's."""
        known = self._effects[mover]
        team = self._team_of[mover[0]]
        if mover == team:
            return known
        share = self._shares[mover[0]]
        shared = {key: (fate, share * effect) for key, (fate, effect) in self._effects[team].items()}
        return {**shared, **known}

    def _improves(self, temperature: float) -> bool:
        """Change units as long as that helps; return whether any was changed."""
        before = self.fates
        for _ in range(_MOST_ROUNDS):
            last = self.fates
            for mover in self._movers():
                self._improve(mover, temperature)
            if self.fates is last:
                break
        return self.fates is not before

    def _improve(self, mover: _Team, temperature: float) -> None:
        """Give these rows the fate that the model thinks best, if it is better."""
        known = self._known(mover)
        if not known or self._units.is_spent:
            return
        fates, effects = zip(*known.values(), strict=True)
        changes = self._kept_changes(mover, fates) + np.array(effects) - self._effect_now(mover)
        scores = _soft_maximum(self.peaks + changes, temperature)
        best = int(np.argmin(scores))
        if scores[best] <= _soft_maximum(self.peaks, temperature) - _SMALLEST_GAIN:
            self._take(*self._measure(mover, fates[best]), temperature)

    def _take(self, fates: list[Fate], peaks: _Peaks, temperature: float) -> bool:
        """Make these the present fates if they are better; return whether they are."""
        if _soft_maximum(peaks, temperature) > _soft_maximum(self.peaks, temperature) - _SMALLEST_GAIN:
            return False
        self.fates, self.peaks = fates, peaks
        if peaks.max() < self.best_bytes:
            self.best, self.best_bytes = fates, float(peaks.max())
        return True


def _key(fate: Fate) -> _Key:
    option, output = fate
    return option.keep, output


def _soft_maximum(peaks: _Peaks, temperature: float) -> NDArray[np.float64]:
    """Return the soft maximum over the last axis, in units of the temperature."""
    scaled = peaks / temperature
    top = scaled.max(axis=-1, keepdims=True)
    found: NDArray[np.float64] = top[..., 0] + np.log(np.exp(scaled - top).sum(axis=-1))
    return np.round(found, _NUM_DIGITS)
