"""Budgets of a step, from the least peak of any plan to that of keeping everything."""

from collections.abc import Iterable

import pytest

from recollect.errors import BudgetTooSmallError
from recollect.planning.choose import Planner
from recollect.profile.profile import Profile


def least_bytes(step: Profile | Planner) -> int:
    """The least peak of which there is a plan, as the error says."""
    planner = Planner(step) if isinstance(step, Profile) else step
    with pytest.raises(BudgetTooSmallError) as refused:
        planner.plan(1)
    return refused.value.least_peak_bytes


def budgets(planner: Planner, fractions: Iterable[float]) -> list[int]:
    least, most = least_bytes(planner), planner.plain_peak_bytes
    return [round(least + fraction * (most - least)) for fraction in fractions]
