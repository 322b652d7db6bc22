"""Plan a step that a device runs behind its host: on the limiting clock.

Host seconds count where the device waits for the host, device seconds elsewhere (`simulation/clocks.py`). Which applies depends
on the plan: the tape's Python may make a step wait that did not wait before. Then the other clock is tried, too.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial

from recollect.arguments import check_kind
from recollect.errors import BudgetTooSmallError
from recollect.planning.bound import LowerBound
from recollect.planning.choose import Planner
from recollect.plans.paths import compress_paths
from recollect.plans.plan import Plan
from recollect.profile.events import WAIT
from recollect.profile.profile import Profile
from recollect.simulation.clocks import StepTimes, has_two_clocks, plain_step_times, priced, step_times
from recollect.simulation.decisions import decide
from recollect.simulation.predicted import predicted_plan


class ClockedPlanner(Planner):
    """Plans one profile with two clocks (`has_two_clocks`) for any number of budgets.

    `bound_on`: makes the bound on a clock, given its host price (see `priced`); `LowerBound` by default.
    """

    tries_both = False
    """Whether the plan on the other clock may be the faster one even if that clock is not the limit."""

    def __init__(self, profile: Profile, *, bound_on: Callable[[float], LowerBound] | None = None) -> None:
        self._recorded = profile
        self._bound_on = bound_on
        self._plain_times = plain_step_times(profile)
        self._binds = float(_host_binds(self._plain_times))
        super().__init__(self._on_clock(self._binds), make_bound=bound_on and partial(bound_on, self._binds))

    @cached_property
    def _other(self) -> Planner:
        price = 1 - self._binds
        return Planner(self._on_clock(price), make_bound=self._bound_on and partial(self._bound_on, price))

    def _on_clock(self, host_price: float) -> Profile:
        host_s, device_s, _ = self._plain_times
        step_s = host_price * host_s + (1 - host_price) * device_s
        return replace(priced(self._recorded, host_price), step_s=step_s)

    def plan(self, budget: int | str) -> Plan:
        """Return the faster of the plans on either clock, if both may be the limit."""
        found, times = self._timed(self._planned(budget, self._binds))
        if self.tries_both or _host_binds(times) != self._binds:
            with suppress(BudgetTooSmallError):  # With host memory, what fits depends on when copies end.
                other, its = self._timed(self._planned(budget, 1 - self._binds))
                found, times = min((found, times), (other, its), key=lambda one: one[0].predicted_slowdown or 0.0)
        bound = self.bound_slowdown(found.budget_bytes or 0)
        found = replace(found, bound_slowdown=bound and min(bound, found.predicted_slowdown or 0.0))
        limit = f"the host is the limit: kernels take {1e3 * times.device_s:.0f} of {1e3 * times.step_s:.0f} ms"
        notes = found.note, limit if _host_binds(times) else "", self._waits
        return replace(found, note="; ".join(filter(None, notes)))

    @cached_property
    def _waits(self) -> str:
        calls = {call for (call,) in self._recorded.log.operands(WAIT)}
        paths = compress_paths(list(dict.fromkeys(self._recorded.calls[call].path for call in sorted(calls))))
        return (
            f"the host waits for the device in {', '.join(paths)}, whose code reads numbers (.item())" if paths else ""
        )

    def bound_slowdown(self, budget_bytes: int) -> float | None:
        """Each clock has a bound; the step takes at least as long as either says."""
        own = super().bound_slowdown(budget_bytes)
        if own is None:
            return None
        return max(0.0, self.profile.step_s * (1 + own) / self._plain_times.step_s - 1)

    def _planned(self, budget: int | str, host_price: float) -> Plan:
        return super().plan(budget) if host_price == self._binds else self._other.plan(budget)

    def _timed(self, plan: Plan) -> tuple[Plan, StepTimes]:
        times = step_times(self._recorded, decide(self._recorded, plan))
        return replace(predicted_plan(self._recorded, plan), note=plan.note), times


def tape_planner(profile: Profile) -> Planner:
    """Return a planner for units on the tape, by as many clocks as the step has."""
    check_kind("plan(profile, budget)", "profile", profile, Profile, "recollect.Profile")
    return ClockedPlanner(profile) if has_two_clocks(profile) else Planner(profile)


def _host_binds(times: StepTimes) -> bool:
    return times.host_s > times.device_s
