"""A local search around a plan: one or two units at other options, as far as the model finds that promising.

It makes up for what the chain's model does not know: how the option of one unit changes the working set of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, islice

from recollect.planning.chain import Chain
from recollect.planning.ladder import Ladder, Levels
from recollect.simulation.peak_sums import Peaks

__all__ = ["polish"]

# Neighbours that are looked at with the model, which costs a tenth of a millisecond each, in one round.
_MOST_NEIGHBOURS = 2000


def polish(
    ladder: Ladder,
    chain: Chain,
    start: tuple[Levels, Peaks],
    budget_bytes: int,
    simulate: Callable[[Levels], Peaks],
    *,
    most_trials: int,
) -> tuple[Levels, Peaks]:
    """Return the best plan found from `start` on: the fastest within the budget, or else the one with the least peak.

    Args:
        ladder: the rungs and their options.
        chain: predicts peaks, to try what is most promising first.
        start: levels and their simulation.
        budget_bytes: what the peak should not exceed.
        simulate: plays the plan of some levels back.
        most_trials: how many simulations this may take.

    Complexity: `most_trials` simulations at most.
    """
    best, trials = start, 0
    improved = True
    while improved and trials < most_trials:
        improved = False
        chain.correct(*best)
        for levels in _promising(ladder, chain, best, budget_bytes):
            if trials >= most_trials:
                break
            trials += 1
            simulation = simulate(levels)
            if _rank(simulation, budget_bytes) < _rank(best[1], budget_bytes):
                best, improved = (levels, simulation), True
                break
    return best


def _rank(simulation: Peaks, budget_bytes: int) -> tuple[int, float]:
    return max(0, simulation.peak_bytes - budget_bytes), simulation.recompute_s


def _promising(ladder: Ladder, chain: Chain, best: tuple[Levels, Peaks], budget_bytes: int) -> list[Levels]:
    """Return neighbours that would be better if they fit, those that fit best by the model first."""
    is_within = best[1].peak_bytes <= budget_bytes
    now_s = _recompute_s(ladder, best[0])
    ranked = []
    for levels in islice(_neighbours(ladder, best[0]), _MOST_NEIGHBOURS):
        recompute_s = _recompute_s(ladder, levels)
        if recompute_s < now_s or not is_within:
            excess_bytes = max(0, chain.predicted_peak(levels) - budget_bytes)
            ranked.append((excess_bytes, recompute_s, levels))
    return [levels for _, _, levels in sorted(ranked)]


def _recompute_s(ladder: Ladder, levels: Levels) -> float:
    return sum(rung.options[level].recompute_s for rung, level in zip(ladder.rungs, levels, strict=True))


def _neighbours(ladder: Ladder, levels: Levels) -> Iterator[Levels]:
    """Yield the levels with one rung changed, then with two."""
    rungs = [index for index, rung in enumerate(ladder.rungs) if len(rung.options) > 1]
    for index in rungs:
        for level in range(len(ladder.rungs[index].options)):
            if level != levels[index]:
                yield (*levels[:index], level, *levels[index + 1 :])
    for first, second in combinations(rungs, 2):
        for level in range(len(ladder.rungs[first].options)):
            for other in range(len(ladder.rungs[second].options)):
                if level != levels[first] and other != levels[second]:
                    yield (*levels[:first], level, *levels[first + 1 : second], other, *levels[second + 1 :])
