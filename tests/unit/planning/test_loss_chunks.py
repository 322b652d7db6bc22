"""In how many parts the loss is computed: in as few as are about as fast as any."""

from dataclasses import replace

import pytest

from recollect.errors import BudgetTooSmallError
from recollect.planning.classic import classic_plan
from recollect.planning.loss_chunks import Planned, plan_with_chunks
from recollect.profile.profile import Profile
from toy_profile import stack

FRACTION = 0.55
"""Of the peak of the step as the model computes it, so that something has to run again."""


def planned(profiles: dict[int, Profile]) -> tuple[Planned, list[int]]:
    """What is planned with steps that were recorded with several numbers of chunks, and the numbers that were tried."""
    tried: list[int] = []

    def record(count: int) -> Profile:
        tried.append(count)
        return profiles[count]

    budget = int(FRACTION * (classic_plan(profiles[1], "keep_all").predicted_peak_bytes or 0))
    return plan_with_chunks(record, budget, "auto"), tried


def leaner(profile: Profile, nbytes: int) -> Profile:
    """The same step, with so many bytes less."""
    return replace(profile, persistent={"parameters": profile.persistent_bytes - nbytes})


def test_the_loss_stays_in_one_piece_where_chunks_gain_no_time() -> None:
    whole = stack(6)
    for number_of_more in (whole, replace(whole, step_s=0.995 * whole.step_s)):
        found, tried = planned({1: whole, 4: leaner(number_of_more, 1)})
        assert (found.plan.predicted_slowdown or 0.0) > 0.01
        assert found.profile is whole
        assert tried == [1, 4]


def test_more_chunks_are_taken_as_long_as_each_step_gains_time() -> None:
    whole = stack(6)
    profiles = {1: whole, 4: leaner(whole, 400), 16: leaner(whole, 800), 64: leaner(whole, 801)}
    found, tried = planned(profiles)
    assert found.profile is profiles[16]
    assert tried == [1, 4, 16, 64]


def test_a_number_that_is_given_is_all_that_is_tried() -> None:
    profiles = {1: stack(6), 4: stack(5)}
    assert plan_with_chunks(profiles.__getitem__, "90%", 4).profile is profiles[4]
    with pytest.raises(BudgetTooSmallError):
        plan_with_chunks(profiles.__getitem__, 1, 4)
