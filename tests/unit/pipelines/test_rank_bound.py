"""The bound of a rank whose micro-batches share a decision, against the bound that lets each decide, and against plans."""

import pytest
import torch
from torch import nn

import recollect
from recollect.pipelines.pipeline import Pipeline, RecordedPieces
from recollect.pipelines.rank_bound import rank_bound, rank_planner
from recollect.pipelines.rank_profile import rank_step
from recollect.pipelines.schedule import PipelineSchedule, schedule_of
from recollect.planning.bound import LowerBound
from recollect.planning.choose import Planner
from recollect.profile.host_times import HostTimes
from recollect.profile.profile import Profile
from recollect.simulation.predicted import predicted_plan
from tiers import long
from two_clocks import on_host

# Two ranks with two stages each, and a backward in halves.
V_SHAPE = [
    "0F0 0F1 3F0 3I0 0F2 3F1 3I1 3W0 0I0 3F2 3I2 0W0 0I1 3W1 0W1 0I2 3W2 0W2".split(),
    "1F0 2F0 1F1 2F1 2I0 1I0 1F2 2F2 2I1 1I1 2W0 1W0 2I2 1I2 2W1 1W1 2W2 1W2".split(),
]
SCHEDULES = {
    "interleaved": PipelineSchedule.interleaved_1f1b(num_ranks=4, stages_per_rank=2, num_micro_batches=8),
    "V": schedule_of(V_SHAPE),
}


def recorded(*, is_first: bool, split_backward: bool = False) -> Profile:
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True) for _ in range(4))
    return recollect.record(
        nn.Sequential(*layers),
        torch.randn(4, 32, 64, requires_grad=not is_first),
        loss_fn=torch.sum,
        gradients="accumulated",
        holds_output=False,
        fake=True,
        hardware="H100",
        split_backward=split_backward,
    )


@pytest.fixture(scope="module")
def pieces() -> dict[bool, tuple[Profile, Profile]]:
    """The first stage and the others, by whether backward is in halves."""
    return {
        split: (recorded(is_first=True, split_backward=split), recorded(is_first=False, split_backward=split))
        for split in (False, True)
    }


def stages(pieces: dict[bool, tuple[Profile, Profile]], number: int, *, split: bool = False) -> list[Profile]:
    first, other = pieces[split]
    return [first, *[other] * (number - 1)]


@pytest.mark.parametrize("name", [*long(["interleaved"]), "V"])
def test_it_is_above_the_bound_without_shared_decisions_and_below_plans(
    pieces: dict[bool, tuple[Profile, Profile]], name: str
) -> None:
    schedule = SCHEDULES[name]
    split = stages(pieces, schedule.num_stages, split=True) if name == "V" else ()
    rank = Pipeline(schedule, RecordedPieces(stages(pieces, schedule.num_stages), split)).ranks[0]
    step = rank_step(rank)
    shared, apart = rank_bound(rank, step), LowerBound(step.profile)
    planner = Planner(step.profile, make_bound=lambda: shared)
    budget_bytes = planner.plain_peak_bytes * 75 // 100
    found = planner.plan(budget_bytes)
    assert found.predicted_slowdown is not None
    bound_s, apart_s = shared.added_s(budget_bytes), apart.added_s(budget_bytes)
    assert apart_s * (1 - 1e-6) <= bound_s <= found.predicted_slowdown * step.profile.step_s * (1 + 1e-6)
    # Under the V, the most that the two bounds differ by is less.
    assert bound_s > 1.01 * apart_s or name == "V"
    assert shared.added_s(step.profile.persistent_bytes) == float("inf")


def test_a_rank_is_planned_on_the_clock_that_limits_it(pieces: dict[bool, tuple[Profile, Profile]]) -> None:
    """On the sum of both clocks, the tape's Python counts even while the device has work."""
    host = HostTimes(3e-6, 3e-6, unit_s=15e-6, module_s=3e-6, seen_op_s=1.5e-6, again_op_s=3e-6)
    clocked = [on_host(profile, host) for profile in stages(pieces, 4)]
    schedule = PipelineSchedule.one_f_one_b(num_stages=4, num_micro_batches=6)
    rank = Pipeline(schedule, RecordedPieces(clocked)).ranks[0]
    profile, planner = rank_step(rank).profile, rank_planner(rank)
    budget_bytes = planner.plain_peak_bytes * 90 // 100
    found, summed = planner.plan(budget_bytes), predicted_plan(profile, Planner(profile).plan(budget_bytes))
    assert found.predicted_slowdown is not None and summed.predicted_slowdown is not None
    assert found.predicted_slowdown + 0.005 < summed.predicted_slowdown
    bound = planner.bound_slowdown(budget_bytes)
    assert bound is not None and 0.75 * found.predicted_slowdown < bound <= found.predicted_slowdown
