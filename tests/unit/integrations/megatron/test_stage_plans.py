"""Megatron's settings on a pipeline: which micro-batches recompute what, and that it is predicted as it runs."""

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect.errors import ConfigWarning, ScheduleError
from recollect.integrations.megatron import megatron_stage_plans
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile

SHAPE = (32, 64)
LAYERS = 4
# What recording adds for bytes that ops do not report, and the gradient of the output, which a recorded stage makes itself.
ROOM = 1024 + 32 * 64 * 4
SCHEDULE = recollect.PipelineSchedule.one_f_one_b(num_stages=3, num_micro_batches=6)


def module() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(LAYERS))
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def profile() -> Profile:
    x = torch.randn(SHAPE, requires_grad=True)
    return recollect.record(module(), x, loss_fn=torch.sum, gradients="accumulated", holds_output=False)


def config(num_partial: int | None, method: str = "block") -> recollect.RecomputeConfig:
    return recollect.RecomputeConfig(
        recompute_granularity="full",
        recompute_method=method,  # type: ignore[arg-type]
        recompute_num_layers=1,
        num_microbatches_with_partial_activation_checkpoints=num_partial,
    )


def recomputed_layers(plan: Plan) -> int:
    return sum(unit.recomputes_anything for unit in plan.units.values())


@pytest.mark.parametrize(("num_partial", "expected"), [(0, [4] * 6), (1, [1, 4, 4, 1, 4, 4]), (2, [1, 1, 4] * 2)])
def test_windows_are_as_long_as_what_is_in_flight(profile: Profile, num_partial: int, expected: list[int]) -> None:
    plans = megatron_stage_plans([profile] * 3, SCHEDULE, config(num_partial))
    by_stage = [plan if isinstance(plan, tuple) else (plan,) for plan in plans]
    assert [recomputed_layers(plan) for plan in by_stage[0]] == expected
    # The window shrinks along the pipeline: on the last rank it is one micro-batch.
    assert [recomputed_layers(plan) for plan in by_stage[2]] == [1 if num_partial else 4] * 6


def test_without_it_all_micro_batches_follow_one_plan(profile: Profile) -> None:
    with pytest.warns(ConfigWarning, match="all micro-batches recompute the same"):
        uniform = config(1, "uniform")
    for one in (config(None), uniform):
        plans = megatron_stage_plans([profile] * 3, SCHEDULE, one)
        assert all(isinstance(plan, Plan) for plan in plans)


def test_the_peak_is_as_predicted(profile: Profile) -> None:
    plans = megatron_stage_plans([profile] * 3, SCHEDULE, config(1))
    predicted = recollect.predict_pipeline([profile] * 3, SCHEDULE, plans)
    own = plans[1]
    assert isinstance(own, tuple)
    stage = module()
    inputs = [torch.randn(SHAPE, requires_grad=True) for _ in range(6)]
    gradient = torch.ones(SHAPE)
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        outputs: dict[int, Tensor] = {}
        sent: Tensor | None = None
        held: Tensor | None = None
        for action in SCHEDULE.ranks[1]:
            batch = action.micro_batch
            if action.kind == "F":
                applied = recollect.apply(stage, own[batch])
                outputs[batch] = stage(inputs[batch])
                applied.remove()
                # The loop holds the last but one of the outputs before it alternates; two are in flight here.
                held = outputs[0].detach() if held is None else held
                continue
            torch.autograd.backward(outputs.pop(batch), gradient)
            sent, inputs[batch].grad = inputs[batch].grad, None
        del sent, held

    step()
    measured = recollect.measure_peak(step).peak_growth_bytes
    # One buffer for the gradient of each micro-batch, too.
    static = 12 * gradient.nbytes + 2 * sum(p.nbytes for p in stage.parameters())
    assert static + measured <= predicted.peaks_bytes[1] <= static + measured + ROOM
    uniform = [
        recollect.predict_pipeline([profile] * 3, SCHEDULE, [recollect.classic_plan(profile, name)] * 3)
        for name in ("keep_all", "full")
    ]
    assert uniform[1].peaks_bytes[1] < predicted.peaks_bytes[1] < uniform[0].peaks_bytes[1]
    assert uniform[0].step_s < predicted.step_s < uniform[1].step_s


def test_wrong_numbers_are_errors(profile: Profile) -> None:
    with pytest.raises(ScheduleError, match="got 2 profiles for a schedule of 3 stages, expected one for each"):
        megatron_stage_plans([profile] * 2, SCHEDULE, config(1))
    plans = [recollect.classic_plan(profile, "full")] * 2
    with pytest.raises(
        ScheduleError, match="stage 0: got 2 plans for 6 micro-batches, expected one for each, or one for all"
    ):
        recollect.predict_pipeline([profile] * 3, SCHEDULE, [plans, plans, plans])
