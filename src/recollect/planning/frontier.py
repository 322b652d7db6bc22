"""Trace slowdown against peak over all budgets: the planner's plans, the bound, and the classic schedules.

Also tells the value of more memory, or a faster link.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from recollect.arguments import check_kind
from recollect.byte_format import format_bytes
from recollect.errors import PlanError
from recollect.notebooks import ShownInNotebooks
from recollect.planning.bound import check_bound
from recollect.planning.choose import Planner
from recollect.planning.classic import classic_plan
from recollect.planning.output_choices import longest_chain
from recollect.planning.planners import planner_for
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.progress import stage

# Where to plan between the lowest peak (0) and the plain one (1): closer together where the curve bends most.
_FRACTIONS = (0.0, 0.01, 0.02, 0.04, 0.07, *(step / 16 for step in range(2, 16)), 0.98, 1.0)
# Where to compute the bound below the lowest peak, as fractions of that range, until it rules out any plan.
_FRACTIONS_BELOW = (0.02, 0.05, 0.1, 0.2, 0.4)
_NUM_HALVINGS = 5
_STRIDES = (2, 4, 8)
_GIB = 2**30
_GB = 10**9
# With less than four times that, a quarter of the available amount is tried, and the result scaled up.
_MOST_PART = 0.25


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One plan, with its predicted peak in bytes and its predicted slowdown (0.03 is 3 %).

    `name`: "plan 1" is the leanest of a frontier, "keep all" the one that recomputes nothing. `bound_slowdown`: lower bound on
    the slowdown of any plan with a peak within `peak_bytes`; None if unknown.
    """

    peak_bytes: int
    slowdown: float
    plan: Plan
    name: str = ""
    bound_slowdown: float | None = None

    @property
    def keeps_all(self) -> bool:
        return self.slowdown == 0 and not any(unit.recomputes_anything for unit in self.plan.units.values())


@dataclass(frozen=True, slots=True)
class BoundPoint:
    """Lower bound on the slowdown of any plan within a budget; inf if no plan fits."""

    budget_bytes: int
    slowdown: float


@dataclass(frozen=True, repr=False)
class Frontier(ShownInNotebooks):
    """Plans from the leanest to the fastest.

    Attributes:
        points: plans with rising peaks and falling slowdowns, none dominated. A single point means that recompute
            cannot save a byte.
        classics: full recompute, every nth layer and so on, by name; dominated ones included.
        bound: lower bound on the slowdown by budget, smallest budget first; empty if unknown.
        plain_peak_bytes: predicted peak of the step that keeps everything.

    Raises:
        PlanError: no points.
    """

    points: tuple[FrontierPoint, ...]
    classics: tuple[FrontierPoint, ...] = ()
    bound: tuple[BoundPoint, ...] = ()
    plain_peak_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.points:
            raise PlanError("frontier: got no points, expected at least one plan; make it with recollect.frontier")

    def __repr__(self) -> str:
        lines = [f"{'peak':>10}  {'slowdown':>8}  {'no plan below':>13}  plan"]
        for point in self.with_classics:
            bound = "" if point.bound_slowdown is None else f"{100 * point.bound_slowdown:.1f} %"
            slowdown = f"{100 * point.slowdown:.1f} %"
            lines.append(f"{format_bytes(point.peak_bytes):>10}  {slowdown:>8}  {bound:>13}  {point.name}")
        return "\n".join(lines)

    @property
    def with_classics(self) -> list[FrontierPoint]:
        """The points and the classic schedules that recompute, by rising peak."""
        points = [*self.points, *(point for point in self.classics if point.name != "keep_all")]
        return sorted(points, key=lambda point: (point.peak_bytes, point.slowdown))

    def best_within(self, budget_bytes: int) -> FrontierPoint | None:
        """Return the fastest point with a peak within the budget, or None."""
        return next((point for point in reversed(self.points) if point.peak_bytes <= budget_bytes), None)


def frontier(profile: Profile, host_budget: int | str = 0) -> Frontier:
    """Return plans over all budgets, the bound on each, and the classic schedules for the same profile.

    Args:
        profile: the recorded step.
        host_budget: host memory for offloaded values; see `plan`.

    Returns:
        About 22 points at most, from the leanest known plan to the one without recompute; a single point if nothing can
        be saved. The budget of each plan is its own peak.

    Raises:
        ArgumentError: the profile is not a `Profile`.
        ProfileFormatError: the profile has units, but no memory events to predict a peak from.

    Complexity: one plan per point (`Planner`), and two linear programs; a few seconds for 32 recorded layers.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> found = recollect.frontier(recollect.record(model, torch.randn(8, 32), loss_fn=torch.sum, fake=True))
        >>> found.points[0].peak_bytes <= found.points[-1].peak_bytes <= found.plain_peak_bytes
        True
    """
    check_kind("frontier(profile)", "profile", profile, Profile, "recollect.Profile")
    with stage("planning for all budgets"):
        planner = planner_for(profile, host_budget)
        plans = _plans(planner)
        classics = _classics(profile)
        points = _undominated(itertools.chain(plans, (p for p in classics if p.note == "keep_all")))
        return Frontier(
            points=tuple(
                _named(number, _point(planner, replace(plan, note=""))) for number, plan in enumerate(points, start=1)
            ),
            classics=tuple(_point(planner, plan, plan.note) for plan in classics),
            bound=_bound(planner, [plan.predicted_peak_bytes or 0 for plan in points]),
            plain_peak_bytes=planner.plain_peak_bytes,
        )


def _plans(planner: Planner) -> list[Plan]:
    """Return plans from the lowest known peak to the plain one."""
    leanest, _ = planner.plan_or_leanest(0)
    least_bytes = leanest.predicted_peak_bytes or 0
    stretch_bytes = planner.plain_peak_bytes - least_bytes
    budgets = {least_bytes + round(stretch_bytes * fraction) for fraction in _FRACTIONS} - {least_bytes}
    plans = [leanest]
    with stage("planning for all budgets", total=len(budgets)) as done:
        for budget_bytes in sorted(budgets):
            plans.append(planner.plan(budget_bytes))
            done()
    return plans


def _point(planner: Planner, plan: Plan, name: str = "") -> FrontierPoint:
    peak_bytes, slowdown = plan.predicted_peak_bytes or 0, plan.predicted_slowdown or 0.0
    bound = planner.bound_slowdown(peak_bytes)
    if bound is not None:
        check_bound(bound * planner.profile.step_s, slowdown * planner.profile.step_s, peak_bytes)
    return FrontierPoint(
        peak_bytes, slowdown, replace(plan, budget_bytes=peak_bytes, bound_slowdown=bound), name, bound
    )


def _named(number: int, point: FrontierPoint) -> FrontierPoint:
    return replace(point, name="keep all" if point.keeps_all else f"plan {number}")


def _bound(planner: Planner, peaks_bytes: list[int]) -> tuple[BoundPoint, ...]:
    """Return the bound at these peaks, and below them until it rules out any plan."""
    stretch_bytes = max(planner.plain_peak_bytes - peaks_bytes[0], 0)
    below = [peaks_bytes[0] - round(stretch_bytes * fraction) for fraction in _FRACTIONS_BELOW]
    found = []
    for budget_bytes in sorted({*peaks_bytes, *(nbytes for nbytes in below if nbytes >= 0)}, reverse=True):
        slowdown = planner.bound_slowdown(budget_bytes)
        if slowdown is None:
            return ()
        found.append(BoundPoint(budget_bytes, slowdown))
        if math.isinf(slowdown):
            return tuple(reversed(_with_edge(planner, found)))
    return tuple(reversed(found))


def _with_edge(planner: Planner, found: list[BoundPoint]) -> list[BoundPoint]:
    """Bisect the range where the bound becomes infinite; return all points, largest budget first."""
    *finite, infinite = found
    for _ in range(_NUM_HALVINGS if finite else 0):
        budget_bytes = (finite[-1].budget_bytes + infinite.budget_bytes) // 2
        slowdown = planner.bound_slowdown(budget_bytes)
        if slowdown is None or math.isinf(slowdown):
            infinite = BoundPoint(budget_bytes, math.inf)
        else:
            finite.append(BoundPoint(budget_bytes, slowdown))
    return [*finite, infinite]


def _undominated(plans: Iterable[Plan]) -> list[Plan]:
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (p.predicted_peak_bytes or 0, p.predicted_slowdown or 0.0)):
        if not kept or (plan.predicted_slowdown or 0.0) < (kept[-1].predicted_slowdown or 0.0):
            kept.append(plan)
    return kept


def _classics(profile: Profile) -> list[Plan]:
    plans = [classic_plan(profile, name) for name in ("keep_all", "full")]
    if longest_chain(profile) >= 2:
        plans.append(classic_plan(profile, "sqrt"))
    strided = [classic_plan(profile, "every_nth", n) for n in _STRIDES if 2 <= n <= longest_chain(profile)]
    # The note of "sqrt" tells its stride.
    return [*plans, *(plan for plan in strided if plan.units != plans[-1].units)]


class Prices(NamedTuple):
    """The saving from each, as a part of the step."""

    device_gib: float
    """One more GiB on the device."""
    host_gib: float
    """One more GiB of host memory."""
    link_gb_per_s: float
    """One more GB/s in each direction."""

    def __str__(self) -> str:
        device, host, link = (f"{100 * price:.2f} %" for price in self)
        return (
            f"one more GiB on the device would save {device} of the step, of host memory {host}, one more GB/s {link}"
        )


def prices(profile: Profile, plan: Plan) -> Prices:
    """Return the saving from more of each, based on plans that have it."""
    budget_bytes, host_bytes = plan.budget_bytes or 0, plan.host_budget_bytes or 0
    rates = profile.to_host_bytes_per_s, profile.from_host_bytes_per_s
    more_device, more_host = (min(_GIB, int(_MOST_PART * nbytes)) for nbytes in (budget_bytes, host_bytes))
    more_rate = min(_GB, _MOST_PART * min(rates))
    faster = replace(profile, to_host_bytes_per_s=rates[0] + more_rate, from_host_bytes_per_s=rates[1] + more_rate)
    now = plan.predicted_slowdown or 0.0

    def saved(on: Profile, device_bytes: int, on_host_bytes: int) -> float:
        found = planner_for(on, on_host_bytes).plan(device_bytes)
        # A search may miss a plan that it found with less.
        return max(0.0, now - (found.predicted_slowdown or 0.0))

    return Prices(
        saved(profile, budget_bytes + more_device, host_bytes) * _GIB / more_device,
        saved(profile, budget_bytes, host_bytes + more_host) * _GIB / more_host,
        saved(faster, budget_bytes, host_bytes) * _GB / more_rate,
    )
