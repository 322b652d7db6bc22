"""In how many parts the loss is computed: in as few as are about as fast as any."""

from dataclasses import dataclass, replace

import pytest

from recollect.errors import BudgetTooSmallError
from recollect.planning.classic import classic_plan
from recollect.planning.loss_chunks import Planned, fewest_chunks, plan_with_chunks
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


@dataclass(frozen=True)
class Step:
    """A planned step of several devices; with the lowest peak of all plans, if none fits."""

    step_s: float = 1.0
    slowdown: float = 0.5
    budget_bytes: int = 800
    least_bytes: int = 0


def fewest(*steps: Step) -> tuple[Step, list[tuple[int, int | str]]]:
    """What is chosen of steps with 1, 4, 16 and 64 chunks, and the numbers and budgets that were tried."""
    tried: list[tuple[int, int | str]] = []

    def plan(count: int, budget: int | str) -> Step:
        tried.append((count, budget))
        step = steps[len(tried) - 1]
        if step.least_bytes:
            raise BudgetTooSmallError(
                budget_bytes=step.budget_bytes, least_peak_bytes=step.least_bytes, unit="head", plain_peak_bytes=2000
            )
        return step

    return fewest_chunks(plan, "40%"), tried


@pytest.mark.parametrize(
    ("steps", "chosen"),
    [
        ([Step(slowdown=0.01)], 0),
        ([Step(), Step(step_s=0.991)], 0),
        ([Step(), Step(step_s=0.98), Step(step_s=0.975, slowdown=0.005)], 1),
        ([Step(), Step(step_s=0.9, slowdown=0.01)], 1),
        ([Step(least_bytes=1000), Step(least_bytes=900), Step(), Step(step_s=0.5)], 3),
    ],
)
def test_steps_of_several_devices_have_as_few_chunks_as_are_about_as_fast_as_any(
    steps: list[Step], chosen: int
) -> None:
    found, tried = fewest(*steps)
    assert found is steps[chosen]
    # A percentage is of the loss as the model computes it.
    assert tried == list(zip([1, 4, 16, 64], ["40%", 800, 800, 800], strict=False))[: len(steps)]


def test_chunks_that_lower_no_peak_are_not_tried_further() -> None:
    with pytest.raises(BudgetTooSmallError) as failure:
        fewest(Step(least_bytes=1000), Step(least_bytes=900), Step(least_bytes=895))
    assert (failure.value.least_peak_bytes, failure.value.plain_peak_bytes) == (900, 2000)
