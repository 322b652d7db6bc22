"""Find the plan with the least peak from bytes alone, so that it is the same however long the ops took.

Try which outputs to drop, with everything else dropped too (`planning/output_choices.py`). From the best of these, lower
the peaks unit by unit (`planning/lean_descent.py`), and see whether more outputs or fewer would be better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from recollect.planning.candidate import Candidate
from recollect.planning.known_costs import KnownCosts
from recollect.planning.lean_descent import LeanDescent
from recollect.planning.lean_units import LeanUnits, everything_dropped
from recollect.planning.option_table import Fate, OptionTable, with_fates
from recollect.planning.output_choices import (
    folded_outputs,
    inner_outputs,
    most_folded,
    number_between,
    single_outputs,
)
from recollect.plans.action import Action
from recollect.profile.profile import Profile
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.windows import Window

__all__ = ["LeanSearch"]


class LeanSearch:
    """Searches for the least peak of one profile.

    Args:
        profile: the recorded step.
        windows: its windows.
        peak_sums: computes the peaks of plans.
    """

    def __init__(self, profile: Profile, windows: Sequence[Window], peak_sums: PeakSums) -> None:
        self._profile = profile
        self._peak_sums = peak_sums
        self._units = LeanUnits(profile, windows, peak_sums)
        self._single = single_outputs(profile)

    def found(self) -> Candidate:
        """Return the candidate with the lowest peak that the search finds; equal for equal bytes."""
        rows = range(len(self._units.rows))
        single = [row for row in rows if self._units.rows[row].path in self._single]
        inner_paths = inner_outputs(self._profile)
        inner = [row for row in rows if self._units.rows[row].path in inner_paths]
        fates, before_bytes = self._best_start(), math.inf
        while True:
            descent = LeanDescent(self._units, fates)
            descent.run(single)
            descent.flip(inner)
            if descent.best_bytes >= before_bytes:
                return self._candidate(descent.best)
            fates, before_bytes = descent.best, descent.best_bytes

    def _best_start(self) -> list[Fate]:
        """Return the step that drops everything in the layers, and those of their outputs that make its peak lowest."""
        starts: dict[int, list[Fate]] = {}
        peaks: dict[int, float] = {}
        most = most_folded(self._profile)
        number: int | None = 0
        while number is not None:
            starts[number] = self._start(number)
            peaks[number] = float(self._units.peaks(starts[number]).max())
            if max(peaks) < most:
                number = min(max(1, 2 * number), most)
            else:
                number = number_between(sorted(peaks), min(peaks, key=lambda known: peaks[known]))
        return starts[min(peaks, key=lambda known: peaks[known])]

    def _start(self, number: int) -> list[Fate]:
        """Return a step that drops everything in the layers, and so many of their outputs."""
        units = self._units
        dropped = folded_outputs(self._profile, units.working_bytes, num_dropped=number, num_alive=units.most_alive)
        return [
            units.fate(index, (), Action.RECOMPUTE if row.path in dropped else Action.KEEP)
            if self._profile.calls[row.calls[0]].repeated
            else units.ends(index, Action.KEEP)[-1]
            for index, row in enumerate(units.rows)
        ]

    def _candidate(self, fates: Sequence[Fate]) -> Candidate:
        dropped = {row.path for row, (_, output) in zip(self._units.rows, fates, strict=True) if output != Action.KEEP}
        table = OptionTable(
            self._profile,
            dropped_outputs=dropped - self._single,
            options_of=with_fates(everything_dropped, self._units.table, fates),
            free_outputs=self._single,
        )
        return KnownCosts(self._peak_sums, table).candidate(table.choice_of(fates))
