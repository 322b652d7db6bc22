"""Bounds how fast a rank's plan can be: `planning/bound.py` with one decision for all micro-batches of a stage.

All micro-batches of a stage do the same work, since they run under one plan. Its memory depends only on
where it is: inside one of its actions, or waiting for the next. So at each moment of a rank

    kept = own(where the running micro-batch is) + sum over stages s of n_s waiting(s) + h_s between(s)

where n_s of stage s wait for backward, and h_s for the second half of one. The cheapest choice at some prices is then a minimum
cut for each stage, of one micro-batch, whose prices add up over all of them; and of the moments with the same running
action, those with most in flight suffice.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from recollect.pipelines.rank import Rank, RankStage, RecordedStage, StageParts
from recollect.pipelines.rank_profile import RankStep, rank_step
from recollect.pipelines.schedule import BACKWARD, FORWARD, INPUT, WEIGHT
from recollect.planning.bound import LowerBound
from recollect.planning.cheapest_step import CheapestStep, StepChoice, StepCut
from recollect.planning.checkpoint_times import checkpoint_times, fixed_bytes
from recollect.planning.choose import Planner
from recollect.planning.clocked_planner import ClockedPlanner
from recollect.profile.events import StepLog
from recollect.simulation.clocks import has_two_clocks, priced

_PARTS = {BACKWARD: (FORWARD, BACKWARD), INPUT: (FORWARD, INPUT, WEIGHT)}


def rank_planner(rank: Rank) -> Planner:
    """Return a planner of a rank's step, with a bound that knows that its micro-batches are alike."""
    step = rank_step(rank)
    if has_two_clocks(step.profile):
        return ClockedPlanner(step.profile, bound_on=partial(_bound_on_clock, rank, step))
    return Planner(step.profile, make_bound=partial(rank_bound, rank, step))


def rank_bound(rank: Rank, step: RankStep) -> LowerBound:
    moments = _Moments(rank, step)
    return LowerBound(step.profile, steps=moments, fixed_bytes=moments.fixed_bytes)


def _bound_on_clock(rank: Rank, step: RankStep, host_price: float) -> LowerBound:
    def on_clock(parts: StageParts) -> StageParts:
        found = copy.copy(parts)
        found.profile = priced(parts.profile, host_price)
        return found

    def recorded(stage: RankStage) -> RecordedStage:
        whole, halves = stage.recorded.whole, stage.recorded.halves
        return replace(stage.recorded, whole=on_clock(whole), halves=halves and on_clock(halves))

    stages = tuple(replace(stage, recorded=recorded(stage)) for stage in rank.stages)
    return rank_bound(replace(rank, stages=stages), replace(step, profile=priced(step.profile, host_price)))


class _Kind:
    """The micro-batches of a stage with a backward of one kind: the cheapest choices of one, and the places of its moments."""

    def __init__(self, parts: StageParts, backward: str) -> None:
        events = [(kind, parts.parts[kind]) for kind in _PARTS[backward]]
        log = StepLog(tuple(event for _, own in events for event in own))
        ends = np.cumsum([len(own) for _, own in events])
        self.start = {kind: int(end) - len(own) for (kind, own), end in zip(events, ends, strict=True)}
        profile = replace(parts.profile, log=log)
        # Where the micro-batch waits is a moment, too.
        times = checkpoint_times(profile)
        waits = [int(end) - 1 for end in ends[:-1]]
        times = checkpoint_times(profile, [*times.events.tolist(), *waits])
        self.step = CheapestStep(profile, times)
        self.events = times.events
        self.waiting = {
            kind: int(np.searchsorted(times.events, wait)) for (kind, _), wait in zip(events, waits, strict=False)
        }
        self.num_micro_batches = 0

    def moments_of(self, kind: str) -> list[int]:
        later = min((start for start in self.start.values() if start > self.start[kind]), default=math.inf)
        return [number for number, event in enumerate(self.events.tolist()) if self.start[kind] <= event < later]


class _Moments:
    """The moments of a rank's step, as sums of moments of single micro-batches. See `planning.bound.Steps`."""

    def __init__(self, rank: Rank, step: RankStep) -> None:
        self._kinds: dict[tuple[int, str], _Kind] = {}
        for (stage, _), backward in rank.backwards.items():
            if (stage, backward) not in self._kinds:
                self._kinds[stage, backward] = _Kind(rank.stages[stage].recorded.parts_of(backward), backward)
            self._kinds[stage, backward].num_micro_batches += 1
        self._columns = {key: number for number, key in enumerate(self._kinds)}
        fixed = fixed_bytes(step.profile)
        rows: dict[tuple[tuple[int, str], str, int], dict[tuple[int, ...], int]] = {}
        waiting: dict[tuple[int, int], tuple[tuple[int, str], str]] = {}
        for action, start in zip(rank.actions, step.starts, strict=True):
            batch = action.stage, action.micro_batch
            key = action.stage, rank.backwards[batch]
            waiting.pop(batch, None)
            states = list(waiting.values())
            # How many micro-batches wait, by kind and by the action that they wait after.
            counts = tuple(states.count((of, after)) for of, other in self._kinds.items() for after in other.waiting)
            kind = self._kinds[key]
            for moment in kind.moments_of(action.kind):
                known = rows.setdefault((key, action.kind, moment), {})
                position = start + int(kind.events[moment]) - kind.start[action.kind]
                known[counts] = max(known.get(counts, 0), int(fixed[position]))
            if action.kind in (FORWARD, INPUT):
                waiting[batch] = key, action.kind
        found = [
            (key, moment, counts, nbytes) for (key, _, moment), known in rows.items() for counts, nbytes in _most(known)
        ]
        self.fixed_bytes = np.array([nbytes for *_, nbytes in found], dtype=np.int64)
        self._counts_of = [np.zeros((len(found), len(kind.events))) for kind in self._kinds.values()]
        places = [(column, kind.waiting[w]) for column, kind in enumerate(self._kinds.values()) for w in kind.waiting]
        for row, (key, moment, counts, _) in enumerate(found):
            for (column, waits), count in zip(places, counts, strict=True):
                self._counts_of[column][row, waits] += count
            self._counts_of[self._columns[key]][row, moment] += 1

    @property
    def most_s(self) -> float:
        return math.fsum(kind.num_micro_batches * kind.step.most_s for kind in self._kinds.values())

    def everything_kept(self) -> StepChoice:
        return self._sum([kind.step.everything_kept() for kind in self._kinds.values()])

    def at(self, prices: NDArray[np.float64], *, missing_s: float = 0.0) -> StepCut:
        cuts = []
        for kind, counts in zip(self._kinds.values(), self._counts_of, strict=True):
            number = kind.num_micro_batches
            cuts.append(kind.step.at(prices @ counts / number, missing_s=missing_s / number / len(self._kinds)))
        numbers = (kind.num_micro_batches for kind in self._kinds.values())
        cost_s = math.fsum(number * cut.cost_s for number, cut in zip(numbers, cuts, strict=True))
        return StepCut(cost_s, self._sum([cut.choice for cut in cuts]))

    def _sum(self, choices: Sequence[StepChoice]) -> StepChoice:
        kept = sum(
            (counts @ choice.kept_bytes for counts, choice in zip(self._counts_of, choices, strict=True)),
            np.zeros(len(self.fixed_bytes)),
        )
        numbers = (kind.num_micro_batches for kind in self._kinds.values())
        return StepChoice(
            np.concatenate([choice.runs_until for choice in choices]),
            math.fsum(number * choice.recompute_s for number, choice in zip(numbers, choices, strict=True)),
            np.asarray(np.rint(kept), dtype=np.int64),
        )


def _most(known: dict[tuple[int, ...], int]) -> list[tuple[tuple[int, ...], int]]:
    """Return the counts with their bytes, without those that others dominate."""
    rows = sorted(known.items(), key=lambda item: (-sum(item[0]), -item[1], item[0]))
    found: list[tuple[tuple[int, ...], int]] = []
    for counts, nbytes in rows:
        if not any(m >= nbytes and all(a >= b for a, b in zip(other, counts, strict=True)) for other, m in found):
            found.append((counts, nbytes))
    return found
