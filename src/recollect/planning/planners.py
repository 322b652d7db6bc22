"""Make the plan for a budget, with host memory or without.

With host memory, choose together the values to keep, to recompute and to offload. Any plan that recomputes for a larger
budget becomes one for this budget, if enough of its kept bytes are away whenever memory is full. A byte is worth the same
in all layers, since the link cannot carry bytes for two layers at once; so the larger budget is the one number to
search for: the larger it is, the less runs again and the more crosses the link, until the step waits for copies.
Values are copied out in the order they are made: the first are away longest.

Planned for a part of the link's rate, a plan holds its time on a link that is slower than measured, for a little more
recompute.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Literal, TypeAlias

from recollect.byte_format import least_amount
from recollect.errors import BudgetTooSmallError, PlanError
from recollect.planning.bound import LowerBound, check_bound, host_bound
from recollect.planning.choose import HOST_ADVICE, Planner
from recollect.planning.clocked_planner import ClockedPlanner, tape_planner
from recollect.planning.offload_mix import OffloadUnits, measured_units
from recollect.planning.trace_planner import TracePlanner
from recollect.planning.trips import HASTES, LINK_SHARE, TripPlanner, link_of
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import digest_of
from recollect.profile.profile import Profile
from recollect.progress import stage
from recollect.quantities import parse_budget, parse_bytes
from recollect.simulation.clocks import has_two_clocks
from recollect.simulation.decisions import decide
from recollect.simulation.lifetimes import EveryEvent
from recollect.simulation.peak_sums import Peaks, PeakSums, checked
from recollect.simulation.predicted import simulated_plan
from recollect.simulation.program import Program
from recollect.simulation.simulate import simulate
from recollect.simulation.windows import edges, windows

Engine: TypeAlias = Literal["tape", "auto", "graph", "compile"]
"""What units may run on; steps are recorded for it. "auto" chooses between tape and graph; "compile" depends on the profile."""

# More than any host has.
_ANY_BYTES = 2**62
# Smaller values are never offloaded: the number of copies would cost more than their bytes are worth.
_LEAST_BYTES = 2**20
# In a small step, values down to this part of the kept bytes may be offloaded.
_LEAST_PART = 1e-3
# Where to look first between the budget and the peak of keeping everything; then the number of looks around the best.
_FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.0)
_NUM_REFINEMENTS = 3
# Stop searching when no more than this part of the step can be gained.
_LITTLE_GAIN = 0.01
# How often the linear program is solved, and the part of the budget that is withheld at first, which then doubles.
_MOST_ROUNDS = 8
_FIRST_MARGIN = 0.002


def plan(
    profile: Profile,
    budget: int | str,
    host_budget: int | str = 0,
    *,
    link_share: float = LINK_SHARE,
    engine: Engine = "tape",
) -> Plan:
    """Choose the values to keep so that the peak of the whole step is within a budget, at the least slowdown.

    Args:
        profile: the recorded step.
        budget: bytes for the whole step (parameters, gradients, optimizer state, kept values, workspace): an int,
            or text such as "16GiB", "80GB", "60%" (of the peak when everything is kept), or "90% of the device".
        host_budget: bytes of host memory that values may be copied to in forward, and back in backward: an int, or text such
            as "64GiB". 0: nothing is offloaded.
        link_share: the part of the link's rate to plan for: other devices may use it, too, and a plan for all of it is much
            slower on a slightly slower link.
        engine: "graph" keeps units' outputs and runs them from traces; if no such plan fits, some stay on the tape. "auto" does
            so if that is faster by more than 1 % of the step.

    Returns:
        A plan with `predicted_peak_bytes <= budget_bytes`, the same for every run.

    Raises:
        BudgetTooSmallError: no plan fits; carries the lowest peak found, the unit at that peak, and advice.
        ArgumentError: the profile is not a `Profile`.
        PlanError: a host budget is given, but the profile does not know the speed of the link.
        ProfileFormatError: the profile has units, but no memory events to predict a peak from.
        QuantityError: a budget is not a number of bytes.

    Complexity: about one simulation per option of a distinct unit. To plan for many budgets, use `planner_for`.

    Example:
        >>> import torch, recollect
        >>> from torch import nn
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))
        >>> profile = recollect.record(model, torch.randn(8, 32), loss_fn=torch.sum, fake=True)
        >>> made = plan(profile, "98%")
        >>> made.predicted_peak_bytes <= made.budget_bytes
        True
    """
    with stage("planning"):
        return planner_for(profile, host_budget, link_share=link_share, engine=engine).plan(budget)


def planner_for(
    profile: Profile, host_budget: int | str = 0, *, link_share: float = LINK_SHARE, engine: Engine = "tape"
) -> Planner:
    host_bytes = parse_bytes(host_budget)
    if host_bytes:
        make = ClockedOffloadPlanner if has_two_clocks(profile) else OffloadPlanner
        return make(profile, host_bytes, link_share=link_share)
    if engine in ("auto", "graph"):
        return TracePlanner(profile, engine)
    return tape_planner(profile)


@dataclass(frozen=True, slots=True)
class _Found:
    """A plan within the budget, its cost, and the seconds that it waits for copies."""

    plan: Plan
    cost: Peaks
    wait_s: float

    @property
    def added_s(self) -> float:
        return self.cost.recompute_s + self.wait_s


def _fastest(*found: _Found | None) -> _Found | None:
    return min((one for one in found if one is not None), key=lambda one: one.added_s, default=None)


class OffloadPlanner(Planner):
    """Plans one profile for any number of budgets, with host memory besides, for a part of the rate of the link to it.

    Args:
        profile: the step, on the clock whose seconds count.
        recorded: the step as recorded, which says when things happen, if it has two clocks: no bound is known then.
    """

    def __init__(
        self, profile: Profile, host_bytes: int, *, link_share: float = LINK_SHARE, recorded: Profile | None = None
    ) -> None:
        if not 0 < link_share <= 1:
            raise PlanError(f"link_share: got {link_share}, expected a part of the link's rate, above 0 and at most 1")
        super().__init__(profile)
        if self._is_compiled:
            raise PlanError(
                "plan with host_budget: got a profile for other engines, expected one recorded with engine='tape': they copy "
                "nothing to host memory. Leave out one of them."
            )
        link = link_of(profile, link_share)
        if link is None:
            raise PlanError(
                "plan with host_budget: the profile lacks the speed of copies to host memory and back, which decides what to "
                "offload. Record it with host_link=True, or on fake tensors for hardware with a host_link."
            )
        self._host_bytes = host_bytes
        self._least_bytes = min(_LEAST_BYTES, int(_LEAST_PART * self._plain.kept_bytes))
        self._link_share = link_share
        self._link = link
        self._program_with_edges = Program(profile, windows(profile), edges(profile))
        self._sums = PeakSums(self._program_with_edges)
        self._timed_program = EveryEvent(recorded or profile, edges=self._program_with_edges.edges)
        self._recorded = recorded
        self._trip_planners: dict[str, TripPlanner] = {}

    @cached_property
    def _host_bound(self) -> LowerBound:
        return host_bound(self.profile, self._link, self._host_bytes)

    def bound_slowdown(self, budget_bytes: int) -> float | None:
        if self.profile.step_s <= 0 or not self.profile.calls or self._recorded is not None:
            return None
        return self._least_s(budget_bytes) / self.profile.step_s

    def _least_s(self, budget_bytes: int) -> float:
        return self._host_bound.added_s(budget_bytes) if self._recorded is None else 0.0

    def plan(self, budget: int | str) -> Plan:
        """Return the fastest plan found; if none fits, the error's least peak is that without host memory."""
        device_bytes = self.profile.device_memory_bytes
        budget_bytes = parse_budget(budget, reference_bytes=self.plain_peak_bytes, device_bytes=device_bytes)
        without: Plan | None = None
        least_bytes = budget_bytes
        try:
            without = super().plan(budget_bytes)
            if not without.predicted_slowdown:
                return replace(without, host_budget_bytes=self._host_bytes)
        except BudgetTooSmallError as error:
            # A copy: with a traceback, this frame and those around it would hold it and each other.
            too_small, least_bytes = error.changed(), error.least_peak_bytes
        found = self._searched(budget_bytes, least_bytes)
        if found is None or (without is not None and self._cost(without).recompute_s <= found.added_s):
            if without is None:
                others = [sentence for sentence in too_small.advice if sentence != HOST_ADVICE]
                own = [] if self._host_bytes == _ANY_BYTES else [self._advice(budget_bytes)]
                raise too_small.changed(advice=[*own, *others])
            bound = self.bound_slowdown(without.budget_bytes or 0)
            return replace(without, host_budget_bytes=self._host_bytes, bound_slowdown=bound)
        return self._finished(found, budget_bytes)

    def _advice(self, budget_bytes: int) -> str:
        """Say how much host memory would suffice, if any would."""
        try:
            any_bytes = OffloadPlanner(self.profile, _ANY_BYTES, link_share=self._link_share, recorded=self._recorded)
            with_all = any_bytes.plan(budget_bytes)
        except BudgetTooSmallError:
            return (
                "No amount of host memory would do: the peak is of what cannot go, or not in time over this link. With "
                "it, a budget between this one and that peak may do."
            )
        needed, percent = least_amount(with_all.predicted_host_bytes or 0), 100 * (with_all.predicted_slowdown or 0.0)
        return f"With more host memory it can be met: host_budget={needed!r}, at a slowdown of {percent:.1f} %."

    def offloading(self, base: Plan, budget_bytes: int) -> Plan | None:
        """Return the plan with as few kept values offloaded as the budget requires; None if it cannot fit."""
        found = self._offloaded(base, budget_bytes)
        return None if found is None else self._finished(found, budget_bytes)

    def _searched(self, budget_bytes: int, least_bytes: int) -> _Found | None:
        mixed = self._mixed(budget_bytes)
        if mixed is not None and mixed.added_s <= self._least_s(budget_bytes) + _LITTLE_GAIN * self.profile.step_s:
            return mixed
        # If outputs are dropped or units run several times, the linear program knows less than the search for a budget.
        return _fastest(mixed, self._of_larger_budgets(budget_bytes, least_bytes))

    def _of_larger_budgets(self, budget_bytes: int, least_bytes: int) -> _Found | None:
        stretch = max(0, self.plain_peak_bytes - least_bytes)
        tried: dict[float, _Found | None] = {}

        def at(fraction: float) -> float:
            if fraction not in tried:
                base = Planner.plan(self, least_bytes + math.ceil(stretch * fraction))
                tried[fraction] = self._offloaded(base, budget_bytes)
            found = tried[fraction]
            return math.inf if found is None else found.added_s

        for fraction in _FRACTIONS:
            at(fraction)
        step = _FRACTIONS[0] - _FRACTIONS[1]
        for _ in range(_NUM_REFINEMENTS):
            best, step = min(tried, key=at), step / 2
            for fraction in (best - step, best + step):
                if 0 <= fraction <= 1:
                    at(fraction)
        return _fastest(*tried.values())

    def _offloaded(self, base: Plan, budget_bytes: int, hastes: Sequence[float] = HASTES) -> _Found | None:
        """Return a plan that offloads the fewest of its kept values that bring it within the budget; None if it cannot fit."""
        planner = self._trip_planner(base)
        # The first values that fit in host memory.
        sums_bytes = accumulate(map(planner.host_bytes, planner.names))
        names = [name for name, nbytes in zip(planner.names, sums_bytes, strict=True) if nbytes <= self._host_bytes]
        for haste in hastes:
            found = self._with_fewest(planner, names, budget_bytes, haste)
            if found is not None:
                return found
        return None

    @cached_property
    def _units(self) -> OffloadUnits | None:
        """The linear program's view of the units; None if units run several times."""
        return measured_units(self.profile, self._trip_planner(Plan({})).course, self._least_bytes)

    def _mixed(self, budget_bytes: int) -> _Found | None:
        """Return the fastest plan found by the linear program, whose budget falls until the plan is within the real one."""
        units = self._units
        best: _Found | None = None
        # Bytes withheld: the most with which a plan was still too large, and the least with which one fits.
        too_few, enough, step = 0, math.inf, _FIRST_MARGIN * budget_bytes
        for _ in range(_MOST_ROUNDS):
            if units is None:
                break
            margin_bytes = too_few if best is None else int(too_few + enough) // 2
            base = units.plan(self._link, budget_bytes - margin_bytes, self._host_bytes)
            if base is None:
                break
            found = self._offloaded(base, budget_bytes, HASTES[:1])
            if found is None:
                too_few, step = int(margin_bytes + step), 2 * step
            else:
                best, enough = _fastest(best, found), margin_bytes
            if not enough:
                break
        return best

    def _trip_planner(self, base: Plan) -> TripPlanner:
        digest = digest_of(base.units)
        if digest not in self._trip_planners:
            self._trip_planners[digest] = TripPlanner(
                self._timed_program, base, self._link, least_bytes=self._least_bytes
            )
        return self._trip_planners[digest]

    def _with_fewest(
        self, planner: TripPlanner, names: Sequence[tuple[str, str]], budget_bytes: int, haste: float
    ) -> _Found | None:
        """Return the plan within the budget that offloads the fewest of these values, the first ones; None if none fits."""

        def with_first(number: int) -> _Found:
            plan, wait_s = planner.scheduled(names[:number], haste=haste)
            return _Found(plan, self._cost(plan), wait_s)

        best = with_first(len(names))
        if best.cost.peak_bytes > budget_bytes:
            return None
        fewest, most = 0, len(names)
        while fewest < most:
            middle = (fewest + most) // 2
            found = with_first(middle)
            if found.cost.peak_bytes <= budget_bytes:
                best, most = found, middle
            else:
                fewest = middle + 1
        return best

    def _cost(self, plan: Plan) -> Peaks:
        return self._sums.peaks(decide(self.profile, plan))

    def _finished(self, found: _Found, budget_bytes: int) -> Plan:
        simulation = simulate(self.profile, decide(self.profile, found.plan), program=self._program_with_edges)
        made = simulated_plan(self.profile, found.plan, checked(simulation, found.cost))
        check_bound(self._least_s(budget_bytes), found.added_s, budget_bytes)
        return replace(
            made,
            budget_bytes=budget_bytes,
            predicted_slowdown=found.added_s / self.profile.step_s,
            bound_slowdown=self.bound_slowdown(budget_bytes),
            host_budget_bytes=self._host_bytes,
            to_host_bytes_per_s=self._link.to_host_bytes_per_s,
            from_host_bytes_per_s=self._link.from_host_bytes_per_s,
            host_wait_slowdown=found.wait_s / self.profile.step_s,
            note=self.profile.times_text,
        )


class ClockedOffloadPlanner(ClockedPlanner):
    """Plans a step that a device runs behind its host, with host memory besides: on the limiting clock."""

    tries_both = True  # A step that waits for copies is longer than either clock says.

    def __init__(self, profile: Profile, host_bytes: int, *, link_share: float = LINK_SHARE) -> None:
        super().__init__(profile)
        self._on = cache(
            lambda host_price: OffloadPlanner(
                self._on_clock(host_price), host_bytes, link_share=link_share, recorded=profile
            )
        )

    def bound_slowdown(self, budget_bytes: int) -> None:
        """Return None: copies may cross the link while either clock waits for the other."""

    def _planned(self, budget: int | str, host_price: float) -> Plan:
        return self._on(host_price).plan(budget)
