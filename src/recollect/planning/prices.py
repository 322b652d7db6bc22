"""Say what more memory, or a faster link, would be worth to a plan that may offload."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from recollect.planning.offload_planner import OffloadPlanner
from recollect.planning.trips import LINK_SHARE
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile

_GIB = 2**30
_GB = 10**9
# Where there is less than four times that, a quarter of what there is is tried, and scaled up.
_MOST_PART = 0.25


class Prices(NamedTuple):
    """What each would save, as a part of the step.

    Attributes:
        device_gib: one more GiB on the device.
        host_gib: one more GiB of host memory.
        link_gb_per_s: one more GB/s in each direction.
    """

    device_gib: float
    host_gib: float
    link_gb_per_s: float

    def __str__(self) -> str:
        device, host, link = (f"{100 * price:.2f} %" for price in self)
        return (
            f"one more GiB on the device would save {device} of the step, of host memory {host}, one more GB/s {link}"
        )


def prices(profile: Profile, plan: Plan, *, link_share: float = LINK_SHARE) -> Prices:
    """Return what more of each would save, from plans that have it.

    Args:
        profile: that the plan was made from.
        plan: within a budget of the device and one of host memory.
        link_share: see `recollect.plan`.

    Complexity: three plans.

    Example:
        >>> print(Prices(0.012, 0.0, 0.0005))
        one more GiB on the device would save 1.20 % of the step, of host memory 0.00 %, one more GB/s 0.05 %
    """
    budget_bytes, host_bytes = plan.budget_bytes or 0, plan.host_budget_bytes or 0
    rates = profile.to_host_bytes_per_s, profile.from_host_bytes_per_s
    more_device, more_host = (min(_GIB, int(_MOST_PART * nbytes)) for nbytes in (budget_bytes, host_bytes))
    more_rate = min(_GB, _MOST_PART * min(rates))
    faster = replace(profile, to_host_bytes_per_s=rates[0] + more_rate, from_host_bytes_per_s=rates[1] + more_rate)
    now = plan.predicted_slowdown or 0.0

    def saved(on: Profile, device_bytes: int, on_host_bytes: int) -> float:
        found = OffloadPlanner(on, on_host_bytes, link_share=link_share).plan(device_bytes)
        # A search may miss what it found with less.
        return max(0.0, now - (found.predicted_slowdown or 0.0))

    return Prices(
        saved(profile, budget_bytes + more_device, host_bytes) * _GIB / more_device,
        saved(profile, budget_bytes, host_bytes + more_host) * _GIB / more_host,
        saved(faster, budget_bytes, host_bytes) * _GB / more_rate,
    )
