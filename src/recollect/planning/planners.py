"""Make the plan for a budget, with host memory or without; say what more memory, or a faster link, would be worth."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from recollect.planning.choose import Planner
from recollect.planning.offload_planner import OffloadPlanner
from recollect.planning.trips import LINK_SHARE
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.progress.stage import stage
from recollect.quantities import parse_bytes


def plan(profile: Profile, budget: int | str, host_budget: int | str = 0, *, link_share: float = LINK_SHARE) -> Plan:
    """Choose what to keep so that the peak of the whole step is within a budget, at the least slowdown.

    Args:
        profile: the recorded step.
        budget: bytes for the whole step (parameters, gradients, optimizer state, kept values, workspace): an int,
            or text such as "16GiB", "80GB", "60%" (of the peak when everything is kept), or "90% of the device".
        host_budget: bytes of host memory that values may be copied to in forward, and back in backward: an int, or text such
            as "64GiB". 0: nothing is offloaded.
        link_share: the part of the link's rate to plan for: other devices may use it, too, and a plan for all of it is much
            slower on a link that is a little slower.

    Returns:
        A plan with `predicted_peak_bytes <= budget_bytes`, the same for every run.

    Raises:
        BudgetTooSmallError: no plan fits; carries the lowest peak found, the unit at that peak, and advice.
        ArgumentError: the profile is none.
        PlanError: host memory is asked for, and the profile does not know how fast the link to it is.
        ProfileFormatError: the profile has units, but no memory events to predict a peak from.
        QuantityError: a budget is not a number of bytes.

    Complexity: about one simulation per option of a distinct unit. To plan for many budgets, use `planner_for`.

    Example:
        >>> import torch, recollect
        >>> from recollect.lab.models.architectures import llama_config
        >>> from recollect.lab.models.gpt import GPTModel
        >>> model = GPTModel(llama_config(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64))
        >>> tokens = torch.randint(0, 64, (1, 16))
        >>> profile = recollect.record(model, {"tokens": tokens, "labels": tokens}, fake=True)
        >>> made = plan(profile, "98%")
        >>> made.predicted_peak_bytes <= made.budget_bytes
        True
    """
    with stage("planning"):
        return planner_for(profile, host_budget, link_share=link_share).plan(budget)


def planner_for(profile: Profile, host_budget: int | str = 0, *, link_share: float = LINK_SHARE) -> Planner:
    """Return what plans one profile for any number of budgets.

    Args:
        profile: the recorded step.
        host_budget: as for `plan`.
        link_share: likewise.

    Raises:
        ArgumentError, PlanError, ProfileFormatError, QuantityError: as `plan`.

    Example:
        >>> from recollect.profile.events import StepLog
        >>> planner_for(Profile((), (), StepLog(), step_s=0.0)).plan("1GiB").predicted_peak_bytes
        0
    """
    host_bytes = parse_bytes(host_budget)
    return OffloadPlanner(profile, host_bytes, link_share=link_share) if host_bytes else Planner(profile)


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
