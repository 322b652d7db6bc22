"""Make the plan for a budget, with host memory or without."""

from __future__ import annotations

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


def planner_for(
    profile: Profile, host_budget: int | str = 0, *, link_share: float = LINK_SHARE
) -> Planner | OffloadPlanner:
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
