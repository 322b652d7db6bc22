"""The units of a step as the search for the least peak sees them: their choices, and the resulting peaks.

Times play no part here, so the least peak does not depend on them.
"""

from collections.abc import Collection, Sequence
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from recollect.planning.hull import Evaluator, Option, Stored
from recollect.planning.option_table import OptionTable, working_bytes
from recollect.profile.graph import UnitGraph
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.windows import num_alive

# Values below this part of the largest one of their unit are kept or dropped with the others.
_SMALLEST_PART = 1 / 256
# Events of all steps to simulate, and the fewest steps: about a second.
_SIMULATED_EVENTS = 2_000_000
_FEWEST_SIMULATIONS = 100
# Values to keep instead of a unit's output.
_MOST_CHECKPOINTS = 2


class LeanUnits:
    """The units of one profile.

    Attributes:
        rows: the units, one row each; the search decides on their options.
        own_windows: for each row, the windows that belong to its calls.
        phases: for each row, the phases of these windows.
        num_alive: for each window and row, how many calls of the row backward still needs, besides the window's own.
    """

    def __init__(self, peak_sums: PeakSums) -> None:
        self.profile = profile = peak_sums.profile
        self._peak_sums, windows = peak_sums, peak_sums.windows
        self.table = OptionTable(profile, options_of=everything_dropped)
        self.rows = self.table.rows
        row_of = {call: index for index, row in enumerate(self.rows) for call in row.calls}
        own: list[list[int]] = [[] for _ in self.rows]
        for number, window in enumerate(windows):
            if window.call >= 0:
                own[row_of[window.call]].append(number)
        self.own_windows = [np.array(numbers, dtype=np.int64) for numbers in own]
        self.phases = [tuple(windows[number].phase for number in numbers) for numbers in own]
        self.num_alive = num_alive(profile, windows, [row.calls for row in self.rows])
        self.readers: list[list[int]] = [[] for _ in self.rows]
        for index, sources in enumerate(self.table.sources):
            for source in sorted(sources):
                self.readers[source].append(index)
        self._num_left = max(_FEWEST_SIMULATIONS, _SIMULATED_EVENTS // (len(profile.log.events) or 1))
        self._options: dict[tuple[int, Stored, bool], Option] = {}
        self._evaluator = cache(lambda graph, keeps: Evaluator(profile.graphs[graph], keeps_output=keeps))
        self._worth_keeping = cache(lambda graph: worth_keeping(profile.graphs[graph]))
        self._checkpoints: dict[int, list[int]] = {}

    @property
    def is_spent(self) -> bool:
        return self._num_left <= 0

    @cached_property
    def working_bytes(self) -> list[int]:
        return working_bytes(self.profile, everything_dropped)

    def option(self, row: int, stored: Stored, keeps_output: bool) -> Option:
        graph = self.rows[row].graph
        key = graph, stored, keeps_output
        if key not in self._options:
            self._options[key] = self._evaluator(graph, keeps_output).option(*stored)
        return self._options[key]

    def ends(self, row: int, keeps_output: bool) -> list[Option]:
        """Return the options of a unit that drop everything, and that keep all values that autograd saves."""
        saved = self.profile.graphs[self.rows[row].graph].saved_values
        return [self.option(row, Stored(), keeps_output), self.option(row, Stored.whole_values(saved), keeps_output)]

    def neighbors(self, row: int, option: Option) -> list[Option]:
        graph = self.rows[row].graph
        parts = [part.value for part in self.profile.graphs[graph].parts]
        stored = *map(option.stored.toggled, self._worth_keeping(graph)), *map(option.stored.toggled_part, parts)
        return [self.option(row, one, option.keeps_output) for one in stored]

    def flipped(self, row: int, option: Option) -> list[Option]:
        """Return options of a unit that drop its output if this one keeps it, and the other way around."""
        graph = self.rows[row].graph
        values = self.profile.graphs[graph].values
        inner = option.stored.without([value for value in option.stored.values if values[value].is_output])
        if not option.keeps_output:
            return [self.option(row, stored, True) for stored in dict.fromkeys((Stored(), inner))]
        if graph not in self._checkpoints:
            inputs = {value for call in self.rows[row].calls for value, _, _ in self.profile.calls[call].origins}
            self._checkpoints[graph] = checkpoints(self.profile.graphs[graph], inputs)
        others = [inner.with_whole([value]) for value in self._checkpoints[graph][:_MOST_CHECKPOINTS]]
        return [self.option(row, stored, False) for stored in dict.fromkeys((Stored(), inner, *others))]

    def reads_dropped(self, row: int, options: Sequence[Option]) -> bool:
        return any(not options[source].keeps_output for source in self.table.sources[row])

    def peaks(self, options: Sequence[Option]) -> NDArray[np.float64]:
        self._num_left -= 1
        peaks = self._peak_sums.peaks(self.table.decisions_of(options))
        return np.array(peaks.window_peaks, dtype=np.float64)


def worth_keeping(graph: UnitGraph) -> list[int]:
    """Return the values of a unit that may be worth keeping, the largest first, those that autograd saves before others.

    Keeping a value that is read once, to compute no more bytes than it has, is never better than keeping these.
    """
    readers: list[set[int]] = [set() for _ in graph.values]
    for index, op in enumerate(graph.ops):
        for value in op.inputs:
            readers[value].add(index)
    can_keep = [v.producer is not None and not v.must_keep and (v.saved or not v.mutated_later) for v in graph.values]

    def is_beaten(value: int) -> bool:
        record = graph.values[value]
        if record.saved or record.is_output or len(readers[value]) != 1:
            return False
        results = graph.ops[next(iter(readers[value]))].outputs
        return all(can_keep[v] for v in results) and sum(graph.values[v].nbytes for v in results) <= record.nbytes

    least_bytes = _SMALLEST_PART * max(
        (v.nbytes for v, can in zip(graph.values, can_keep, strict=True) if can), default=0
    )
    found = [
        i for i, v in enumerate(graph.values) if can_keep[i] and v.nbytes >= max(1, least_bytes) and not is_beaten(i)
    ]
    return sorted(found, key=lambda i: (-graph.values[i].nbytes, not graph.values[i].saved, i))


def checkpoints(graph: UnitGraph, inputs: Collection[int]) -> list[int]:
    """Return the values, no larger than the unit's output, that suffice to compute it; the smallest first."""
    outputs = {index for index, value in graph.made if value.is_output}
    most_bytes = sum(graph.values[index].nbytes for index in outputs)

    def depend_on_inputs(kept: int) -> bool:
        depends = set(inputs)
        for op in graph.ops:
            if not depends.isdisjoint(op.inputs):
                depends.update(value for value in op.outputs if value != kept)
        return not depends.isdisjoint(outputs)

    found = [i for i in worth_keeping(graph) if graph.values[i].nbytes <= most_bytes and i not in outputs]
    return sorted((i for i in found if not depend_on_inputs(i)), key=lambda i: (graph.values[i].nbytes, -i))


def everything_dropped(graph: UnitGraph, *, keeps_output: bool = True) -> tuple[Option, ...]:
    """Return the only option of a unit that drops everything that can run again."""
    return (Evaluator(graph, keeps_output=keeps_output).option(()),)
