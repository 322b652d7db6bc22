"""The search where the model's own code holds values until forward ends, after that of `planning/search.py`.

With the outputs dropped that the best plan there drops, a chain that tells bytes of forward from those of backward
(`planning/priced_chain.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from recollect.planning.held import held_values, with_held
from recollect.planning.hull import Option
from recollect.planning.ladder import Ladder, Levels, OptionsOf
from recollect.planning.priced_chain import PricedChain
from recollect.planning.segments import single_outputs
from recollect.plans.action import Action
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.simulation.peak_sums import Peaks, PeakSums
from recollect.simulation.windows import Window

__all__ = ["PricedSearch", "remembered_peaks"]

# Layers share simulations: more are for units that run once, whose options hardly count.
_MOST_PROBES = 12


class PricedSearch:
    """The priced chains of one profile, and the peaks of their plans.

    Args:
        profile: the recorded step.
        windows: of this profile.
        peak_sums: tells the peaks of plans, in these windows.
        options_of: what there is to choose from for a unit, before the held values are varied.
    """

    def __init__(self, profile: Profile, windows: Sequence[Window], peak_sums: PeakSums, options_of: OptionsOf) -> None:
        self.profile = profile
        self._windows = windows
        self._superposition = peak_sums
        self._held = held_values(profile)
        held_of = dict(zip(profile.graphs, self._held, strict=True))

        def options_with_held(graph: UnitGraph, *, output: Action = Action.KEEP) -> tuple[Option, ...]:
            return with_held(graph, options_of(graph, output=output), held_of[graph], output=output)

        self._options_of = cache(options_with_held)
        self._chains: dict[frozenset[str], tuple[Ladder, PricedChain]] = {}
        self._known: dict[frozenset[str], dict[Levels, Peaks]] = {}

    @property
    def is_worthwhile(self) -> bool:
        """Whether layers save values that forward holds anyway."""
        graphs = self.profile.graphs
        return any(
            graphs[call.graph].values[v].saved and not graphs[call.graph].values[v].is_output
            for call in self.profile.calls
            if call.repeated
            for v in self._held[call.graph]
        )

    def run(self, ladder: Ladder, levels: Levels, budget_bytes: int) -> None:
        """Look for plans that drop the same outputs as a given one, and are faster.

        Args:
            ladder: of the given plan.
            levels: of the given plan, which is within the budget.
            budget_bytes: of the whole step.
        """
        dropped = ladder.drops_outputs
        if dropped not in self._chains:
            self._chains[dropped] = self._new_chain(dropped)
        own_ladder, chain = self._chains[dropped]
        start = _same_levels(ladder, levels, own_ladder)
        best = start, self._peaks_of(dropped, own_ladder)(start)
        for found in chain.best(budget_bytes):
            if found[1].peak_bytes <= budget_bytes and found[1].recompute_s < best[1].recompute_s:
                best = found
        for _ in chain.better(*best, budget_bytes):
            pass

    def best(self, budget_bytes: int) -> tuple[Ladder, Levels, Peaks] | None:
        """Return the fastest plan within a budget of all that were looked at; None if there is none."""
        found = [
            ((peaks.recompute_s, peaks.peak_bytes, sorted(dropped), levels), (ladder, levels, peaks))
            for dropped, (ladder, _) in self._chains.items()
            for levels, peaks in self._known[dropped].items()
            if peaks.peak_bytes <= budget_bytes
        ]
        return min(found, key=lambda plan: plan[0])[1] if found else None

    def _new_chain(self, dropped: frozenset[str]) -> tuple[Ladder, PricedChain]:
        ladder = Ladder(
            self.profile,
            dropped_outputs=dropped,
            options_of=self._options_of,
            free_outputs=single_outputs(self.profile),
        )
        play = self._peaks_of(dropped, ladder)
        return ladder, PricedChain(ladder, self._windows, play, held=self._held, most_probes=_MOST_PROBES)

    def _peaks_of(self, dropped: frozenset[str], ladder: Ladder) -> Callable[[Levels], Peaks]:
        return remembered_peaks(self._superposition, ladder, self._known.setdefault(dropped, {}))


def remembered_peaks(peak_sums: PeakSums, ladder: Ladder, known: dict[Levels, Peaks]) -> Callable[[Levels], Peaks]:
    """Return what tells the peaks of a ladder's levels, and adds those that it is asked for to the known ones."""

    def peaks_of(levels: Levels) -> Peaks:
        if levels not in known:
            known[levels] = peak_sums.peaks(ladder.decisions(levels))
        return known[levels]

    return peaks_of


def _same_levels(ladder: Ladder, levels: Levels, other: Ladder) -> Levels:
    """Return the levels of a plan on another ladder, which has all its options."""
    same = []
    for rung, level, there in zip(ladder.rungs, levels, other.rungs, strict=True):
        choices = [(option.keep, output) for option, output in zip(there.options, there.outputs, strict=True)]
        same.append(choices.index((rung.options[level].keep, rung.outputs[level])))
    return tuple(same)
