"""Slowdown against peak, for every budget: the planner's ladder, sampled and simulated, with the classics beside it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from recollect.plan import Plan
from recollect.planning.classic import classic_plan
from recollect.planning.decisions import Simulate, simulated_plan
from recollect.planning.ladder import Ladder, Levels, Move
from recollect.planning.segments import dropped_outputs, longest_chain
from recollect.planning.simulate import simulate as simulate_step
from recollect.profile.graph import Profile
from recollect.quantities import format_bytes

__all__ = ["Frontier", "FrontierPoint", "frontier"]

_NUM_POINTS = 40
_STRIDES = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One plan, with its predicted peak in bytes and its predicted slowdown (0.03 is 3 %)."""

    peak_bytes: int
    slowdown: float
    plan: Plan
    name: str = ""


@dataclass(frozen=True, repr=False)
class Frontier:
    """Plans from the leanest to the fastest.

    Attributes:
        points: peaks rise and slowdowns fall; no point is beaten by another in both.
        classics: full recompute, every Nth layer and so on, by name; not filtered.
    """

    points: tuple[FrontierPoint, ...]
    classics: tuple[FrontierPoint, ...] = ()

    def __repr__(self) -> str:
        rows = [*self.points, *self.classics]
        lines = [f"{'peak':>10}  {'slowdown':>8}  plan"]
        for point in sorted(rows, key=lambda p: (p.peak_bytes, p.slowdown)):
            lines.append(f"{format_bytes(point.peak_bytes):>10}  {100 * point.slowdown:>6.1f} %  {point.name}".rstrip())
        return "\n".join(lines)

    def best_within(self, budget_bytes: int) -> FrontierPoint | None:
        """Return the fastest point whose peak is within the budget, or None."""
        return next((point for point in reversed(self.points) if point.peak_bytes <= budget_bytes), None)


def frontier(profile: Profile, *, simulate: Simulate = simulate_step) -> Frontier:
    """Return plans for all budgets, and the classic schedules on the same profile.

    Args:
        profile: the recorded step.
        simulate: predicts the peak and the recompute time of a choice.

    Returns:
        About 40 points at most, the first of them the leanest plan that is known, the last one keeping everything.

    Raises:
        ValueError: the profile's log does not fit its calls.

    Complexity: about 60 simulations.

    Example:
        >>> import torch, recollect
        >>> from recollect.models.llama import Llama, LlamaConfig
        >>> model = Llama(LlamaConfig(num_layers=2, hidden_size=32, num_heads=2, vocab_size=64))
        >>> tokens = torch.randint(0, 64, (1, 16))
        >>> found = recollect.frontier(recollect.record(model, {"tokens": tokens, "labels": tokens}, fake=True))
        >>> found.points[0].peak_bytes <= found.points[-1].peak_bytes
        True
    """
    ladder = Ladder(profile)
    moves = ladder.free_moves_first(lambda levels: simulate(profile, ladder.decisions(levels)).peak_bytes)
    points = [_simulated(ladder, ladder.climb(ladder.leanest, moves[:number]), simulate) for number in _lengths(moves)]
    for stride in _STRIDES:
        if stride <= longest_chain(profile):
            lean = Ladder(profile, dropped_outputs=dropped_outputs(profile, stride=stride))
            points.append(_simulated(lean, lean.leanest, simulate, note=f"keeps the input of every {stride} layers"))
    return Frontier(points=_undominated(points), classics=_classics(profile, simulate))


def _simulated(ladder: Ladder, levels: Levels, simulate: Simulate, *, note: str = "") -> FrontierPoint:
    simulation = simulate(ladder.profile, ladder.decisions(levels))
    return _point(simulated_plan(ladder.profile, ladder.plan(levels, note=note), simulation))


def _lengths(moves: list[Move]) -> list[int]:
    """Return lengths of prefixes that add about the same number of bytes each, none and all of the moves included."""
    spent_bytes = [0, *accumulate(move.extra_bytes for move in moves)]
    marks = [spent_bytes[-1] * step / (_NUM_POINTS - 1) for step in range(_NUM_POINTS)]
    return sorted({0, len(moves), *(bisect_left(spent_bytes, mark) for mark in marks)})


def _point(plan: Plan, name: str = "") -> FrontierPoint:
    return FrontierPoint(plan.predicted_peak_bytes or 0, plan.predicted_slowdown or 0.0, plan, name)


def _undominated(points: list[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    kept: list[FrontierPoint] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes, p.slowdown)):
        if not kept or point.slowdown < kept[-1].slowdown:
            kept.append(point)
    return tuple(kept)


def _classics(profile: Profile, simulate: Simulate) -> tuple[FrontierPoint, ...]:
    plans = [classic_plan(profile, name, simulate=simulate) for name in ("keep_all", "full")]
    if longest_chain(profile) >= 2:
        plans.append(classic_plan(profile, "sqrt", simulate=simulate))
    for n in _STRIDES:
        if 2 <= n <= longest_chain(profile):
            plans.append(classic_plan(profile, "every_nth", n, simulate=simulate))
    return tuple(_point(plan, plan.note) for plan in plans)
