"""Keep more of what a candidate drops while memory has room: one value of one unit at a time.

Chains choose among options that vary each unit's hull by a value or a module. A candidate near the least peak stores other
values, and what would fit beside them is among no unit's options.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from recollect.planning.hull import Evaluator, Option
from recollect.planning.option_table import Candidate, OptionTable
from recollect.simulation.peak_sums import Peaks, PeakSums
from recollect.simulation.windows import alive_calls

# Simulations for one candidate.
_MOST_TRIES = 96
# Ops of a unit that all values tried for one option go through: about 20 ms. Recurrent layers have thousands of both.
_OPS_OF_ALL_VALUES = 40_000
_FEWEST_VALUES = 32


@dataclass(frozen=True, slots=True)
class _Step:
    """A row that stores one value more."""

    row: int
    option: Option
    added_bytes: int
    saved_s: float

    @property
    def order(self) -> tuple[float, int]:
        return -self.saved_s / max(1, self.added_bytes), self.row


class Filling:
    """Fills the room that candidates of one profile leave."""

    def __init__(self, peak_sums: PeakSums) -> None:
        self._peak_sums = peak_sums
        self._profile = peak_sums.profile
        self._evaluators: dict[tuple[int, bool], Evaluator] = {}
        self._larger: dict[tuple[int, object], list[Option]] = {}

    def filled(self, start: Candidate, budget_bytes: int) -> tuple[list[Option], Peaks]:
        """Return options of all rows that take less time than a candidate within the budget, or its own, and their cost.

        Each step stores the value that saves most seconds for a byte, if the simulated peak stays within the budget.
        """
        table, cost, options = start.table, start.cost, start.options
        refused: set[tuple[int, object]] = set()
        for _ in range(_MOST_TRIES):
            room = self._room(table, cost.window_peaks, budget_bytes)
            steps = (
                step
                for row, option in enumerate(options)
                for step in self._steps(table, row, option)
                if step.added_bytes <= room[row] and (row, step.option.key) not in refused
            )
            step = min(steps, key=lambda one: one.order, default=None)
            if step is None:
                break
            changed = [*options[: step.row], step.option, *options[step.row + 1 :]]
            found = self._peak_sums.peaks(table.decisions_of(changed))
            if found.peak_bytes <= budget_bytes and found.recompute_s < cost.recompute_s:
                options, cost = changed, found
            else:
                refused.add((step.row, step.option.key))
        return options, cost

    @cached_property
    def _alive(self) -> NDArray[np.bool_]:
        return alive_calls(self._profile, self._peak_sums.windows)

    def _room(self, table: OptionTable, window_peaks: Sequence[int], budget_bytes: int) -> list[float]:
        """Return, for each row, the bytes that each of its calls may hold from its forward to its backward."""
        free = (budget_bytes - np.array(window_peaks, dtype=float))[:, None]
        counts = np.stack([self._alive[:, list(row.calls)].sum(axis=1) for row in table.rows], axis=1)
        each = np.where(counts > 0, free / np.maximum(counts, 1), np.inf)
        return each.min(axis=0).tolist()

    def _steps(self, table: OptionTable, row: int, option: Option) -> list[_Step]:
        unit = table.rows[row]
        key = unit.graph, option.key
        if key not in self._larger:
            self._larger[key] = self._larger_options(unit.graph, option)
        return [
            _Step(row, one, one.kept_bytes - option.kept_bytes, unit.num_runs * (option.recompute_s - one.recompute_s))
            for one in self._larger[key]
        ]

    def _larger_options(self, number: int, option: Option) -> list[Option]:
        """Return the options that store one value more and take less time."""
        graph = self._profile.graphs[number]
        keeps_output = option.keeps_output
        evaluator = self._evaluators.setdefault((number, keeps_output), Evaluator(graph, keeps_output=keeps_output))
        others = [
            (-graph.again_s(graph.ops[op]) / max(1, graph.values[index].nbytes), index)
            for op in option.recompute_ops
            for index in graph.ops[op].outputs
            if index not in option.stored.values
            and (graph.values[index].saved or not graph.values[index].mutated_later)
        ]
        most = max(_FEWEST_VALUES, _OPS_OF_ALL_VALUES // max(1, len(graph.ops)))
        values = sorted(index for _, index in sorted(others)[:most])
        found = (evaluator.option(*option.stored.toggled(value)) for value in values)
        return [one for one in found if one.recompute_s < option.recompute_s]
