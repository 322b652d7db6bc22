"""Plans of a pipeline's stages, against ranks that really run in the order of their schedule, in one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from blocks import Computes
from recollect.errors import BudgetTooSmallError, ProfileFormatError, ScheduleError
from recollect.pipelines.pipeline import Pipeline, RecordedPieces
from recollect.pipelines.rank import StageParts
from recollect.pipelines.schedule import PipelineSchedule
from recollect.planning.bound import LowerBound
from recollect.planning.choose import Planner
from recollect.plans.plan import Plan
from recollect.profile.host_times import HostTimes
from recollect.profile.profile import Profile
from recollect.simulation.predicted import predicted_plan
from two_clocks import on_host

SHAPE = (32, 64)
MICRO_BATCHES = 8
# What recording adds for bytes that ops do not report, and the gradient of the output: a recorded stage makes it, by the sum's
# backward, where a pipeline has it in a buffer.
ROOM = 1024 + 32 * 64 * 4
# How much of what was sent is held at the fullest moment of an interleaved rank is an upper bound.
MORE_SENT = 3 * 32 * 64 * 4


def module(number: int = 0) -> nn.Module:
    torch.manual_seed(number)
    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(4))
    return nn.Sequential(*layers)


def recorded(stage: nn.Module, micro_batch: Tensor, **settings: Any) -> Profile:
    how = {"loss_fn": torch.sum, "gradients": "accumulated", "holds_output": False, **settings}
    return recollect.record(stage, micro_batch, **how)


@pytest.fixture(scope="module")
def profiles() -> list[Profile]:
    """Of four stages; the first gets an input that needs no gradient."""
    first, other = (recorded(module(), torch.randn(SHAPE, requires_grad=is_later)) for is_later in (False, True))
    return [first, *[other] * 3]


SCHEDULES = {
    "1F1B": recollect.PipelineSchedule.one_f_one_b(num_stages=4, num_micro_batches=MICRO_BATCHES),
    "GPipe": recollect.PipelineSchedule.gpipe(num_stages=4, num_micro_batches=MICRO_BATCHES),
    "interleaved": recollect.PipelineSchedule.interleaved_1f1b(
        num_ranks=2, stages_per_rank=2, num_micro_batches=MICRO_BATCHES
    ),
}


class Rank:
    """Runs one rank as torch.distributed.pipelining does, without other ranks: what they send is made up."""

    def __init__(
        self, schedule: PipelineSchedule, rank: int, plans: tuple[Plan, ...], *, returns: bool = False
    ) -> None:
        self.schedule = schedule
        self.returns = returns
        self.actions = schedule.ranks[rank]
        self.stages = {number: module(number) for number in schedule.stages_of(rank)}
        for number, stage in self.stages.items():
            recollect.apply(stage, plans[number])
        self.last = schedule.num_stages - 1
        keys = [(n, b) for n in self.stages for b in range(MICRO_BATCHES)]
        self.inputs = {key: torch.randn(SHAPE, requires_grad=key[0] > 0) for key in keys}
        self.gradients = {key: torch.ones(SHAPE) for key in keys if key[0] != self.last}

    def step(self) -> None:
        torch.manual_seed(7)
        outputs: dict[tuple[int, int], Tensor] = {}
        sent: dict[int, list[Tensor | None]] = {number: [] for number in self.stages}
        for stage in self.stages.values():
            # Gradients count from the beginning, as the prediction does.
            for parameter in stage.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        first_backward = next(place for place, action in enumerate(self.actions) if action.kind != "F")
        held = []
        returned = []
        for place, action in enumerate(self.actions):
            key = action.stage, action.micro_batch
            if action.kind == "F":
                outputs[key] = self.stages[action.stage](self.inputs[key])
                if self.schedule.loop.holds_sent and action.stage != self.last:
                    sent[action.stage].append(outputs[key].detach())
                elif place == first_backward - 2:
                    # The loop of 1F1B waits for this to be sent once it has ceased to alternate.
                    held.append(outputs[key].detach())
                continue
            output = outputs.pop(key)
            torch.autograd.backward(output if action.stage != self.last else output.sum(), self.gradients.get(key))
            if not self.schedule.loop.holds_sent:
                sent[action.stage].clear()
            sent[action.stage].append(self.inputs[key].grad)
            self.inputs[key].grad = None
            if self.returns and action.stage == self.last:
                returned.append(output.detach())
            del output
        if returned:
            del sent
            torch.cat(returned)

    def weights(self) -> list[Tensor | None]:
        return [parameter.grad for stage in self.stages.values() for parameter in stage.parameters()]

    def peak_bytes(self) -> int:
        self.step()
        return recollect.measure_peak(self.step).peak_growth_bytes


@cache
def plain_weights(name: str, rank: int) -> list[Tensor | None]:
    plain = Rank(SCHEDULES[name], rank, (Plan({}),) * SCHEDULES[name].num_stages)
    plain.peak_bytes()
    return plain.weights()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("budget", "returns"), [("100%", True), ("80%", True), ("65%", False)])
def test_each_rank_peaks_where_it_was_predicted_and_gradients_are_equal(
    profiles: list[Profile], name: str, budget: str, returns: bool
) -> None:
    schedule = SCHEDULES[name]
    planned = recollect.plan_pipeline(profiles, schedule, budget, return_outputs=returns)
    assert planned.budget_bytes is not None and planned.peak_bytes <= planned.budget_bytes
    for rank in range(len(schedule.ranks)):
        running = Rank(schedule, rank, planned.plans, returns=returns)
        buffers = [*running.inputs.values(), *running.gradients.values()]
        parameters = [p for stage in running.stages.values() for p in stage.parameters()]
        static = sum(t.nbytes for t in buffers) + 2 * sum(p.nbytes for p in parameters)
        measured = static + running.peak_bytes()
        room = ROOM + (MORE_SENT if name == "interleaved" else 0)
        assert measured <= planned.peaks_bytes[rank] <= measured + room
        pairs = zip(running.weights(), plain_weights(name, rank), strict=True)
        assert all(a is not None and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_an_output_that_has_arrived_is_not_there_in_backward(num_micro_batches: int) -> None:
    """Where torch receives as needed: the output of the first stage is far larger than all else."""
    narrow, wide = 8, 1024
    output_bytes = 256 * wide * 4
    profiles = [
        recorded(nn.Linear(num_in, num_out), torch.randn(256, num_in, requires_grad=num_in == wide))
        for num_in, num_out in ((narrow, wide), (wide, narrow))
    ]
    schedule = PipelineSchedule.one_f_one_b(num_stages=2, num_micro_batches=num_micro_batches)
    planned = recollect.predict_pipeline(profiles, replace(schedule, as_needed=True), [Plan({})] * 2)
    # One more would be there in backward if what was sent stayed.
    assert 2 * output_bytes < planned.peaks_bytes[0] < 2.2 * output_bytes


def timed_alike(profile: Profile) -> Profile:
    """With as many seconds for each op: stages that are alike are as slow as each other."""
    graphs = tuple(replace(g, ops=tuple(replace(op, time_s=1e-5) for op in g.ops)) for g in profile.graphs)
    return replace(profile, graphs=graphs, step_s=3e-5 * sum(len(graphs[call.graph].ops) for call in profile.calls))


def test_early_stages_recompute_more_where_they_hold_more(profiles: list[Profile]) -> None:
    profiles = [timed_alike(profile) for profile in profiles]
    planned = recollect.plan_pipeline(profiles, SCHEDULES["1F1B"], "60%")
    assert planned.in_flight == (4, 3, 2, 1)
    slowdowns = [plan.predicted_slowdown or 0.0 for plan in planned.plans]
    assert slowdowns[0] > slowdowns[2] and slowdowns[3] == 0.0
    assert planned.slowdown > 0
    uniform = recollect.predict_pipeline(profiles, SCHEDULES["1F1B"], [planned.plans[0]] * 4)
    assert planned.step_s < uniform.step_s
    assert "rank        peak  stage  in flight  recompute" in repr(planned)


@pytest.mark.parametrize(
    ("then", "loss", "num_held"),
    [
        (lambda x: x, lambda out: out.sum(), 1),
        (lambda x: x, lambda out: out.square().sum(), 1),
        (lambda x: x.double(), lambda out: out.sum(), 2),
        (lambda x: {"a": x, "b": [x * 2, x.flatten()]}, lambda out: (out["a"] * out["b"][0]).sum(), 2),
    ],
)
@pytest.mark.parametrize("holds_output", [False, True])
def test_what_the_last_stage_returns_is_held_whatever_it_is(
    then: Callable[[Tensor], object], loss: Callable[[object], Tensor], num_held: int, holds_output: bool
) -> None:
    """Made after the last unit, saved by the loss, several tensors; also if the recorded loop holds one."""
    x = torch.randn(SHAPE, requires_grad=True)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2)))
    profile = recorded(
        Computes(lambda self, x: then(self.layers(x)), layers=layers), x, loss_fn=loss, holds_output=holds_output
    )
    read = Profile.from_json(profile.to_json())
    assert read == profile and StageParts(1, read, is_last=True).output_bytes == num_held * x.nbytes
    # Two are held in the backward of the third; all are there twice when they are put together.
    schedule = PipelineSchedule.one_f_one_b(num_stages=2, num_micro_batches=3)
    peaks = [
        recollect.predict_pipeline([read] * 2, schedule, [Plan({})] * 2, return_outputs=returns).peaks_bytes[1]
        for returns in (False, True)
    ]
    assert 2 * num_held * x.nbytes <= peaks[1] - peaks[0] <= 6 * num_held * x.nbytes


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("kind", ["keep_all", "full"])
def test_few_micro_batches_say_what_all_of_them_do(profiles: list[Profile], kind: str, returns: bool) -> None:
    schedule = PipelineSchedule.interleaved_1f1b(num_ranks=2, stages_per_rank=2, num_micro_batches=16)
    pipeline = Pipeline(replace(schedule, return_outputs=returns), RecordedPieces(profiles))
    plans = [recollect.classic_plan(profile, kind) for profile in profiles]
    # With a plan for each micro-batch, all of them are counted.
    few, whole = pipeline.peaks_bytes(plans), pipeline.peaks_bytes([[plan] * 16 for plan in plans])
    assert all(0 <= a - b <= 2 * 32 * 64 * 4 for a, b in zip(few, whole, strict=True))


def test_slowdowns_are_of_both_clocks_where_a_device_runs_behind_its_host(profiles: list[Profile]) -> None:
    clocked = [on_host(profile, HostTimes(1e-6, 1e-6, unit_s=5e-6, again_op_s=5e-6)) for profile in profiles[:2]]
    stages = [clocked[0], *[clocked[1]] * 3]
    plans = [recollect.classic_plan(profile, "full") for profile in stages]
    found = recollect.predict_pipeline(stages, SCHEDULES["1F1B"], plans)
    expected = [predicted_plan(*both).predicted_slowdown for both in zip(stages, plans, strict=True)]
    assert found.slowdowns == pytest.approx(expected)


def test_outputs_that_leave_no_room_are_named(profiles: list[Profile]) -> None:
    wide = recorded(nn.Sequential(module(), nn.Linear(64, 4096)), torch.randn(SHAPE, requires_grad=True))
    with pytest.raises(BudgetTooSmallError, match=r"reads what the schedule returns, pass return_outputs=False to its"):
        recollect.plan_pipeline([*profiles[:3], wide], SCHEDULES["1F1B"], "70%")
    held = recollect.plan_pipeline([*profiles[:3], wide], SCHEDULES["1F1B"], "100%", return_outputs=False)
    assert held.schedule.return_outputs is False
    again = recollect.predict_pipeline([*profiles[:3], wide], held.schedule, held.plans)
    assert again.peaks_bytes == held.peaks_bytes
    # The outputs of eight micro-batches, and all of them in one.
    returned = recollect.predict_pipeline([*profiles[:3], wide], SCHEDULES["1F1B"], held.plans)
    assert returned.peaks_bytes[3] == wide.persistent_bytes + 7 * 4 * 32 * 64 + 16 * 4 * 32 * 4096 + 1024


def test_a_budget_below_the_leanest_names_the_rank(profiles: list[Profile]) -> None:
    with pytest.raises(BudgetTooSmallError, match=r"which rank 0 \(stages 0; .*needs.*a schedule with fewer of them"):
        recollect.plan_pipeline(profiles, SCHEDULES["1F1B"], "100KB")


def test_wrong_numbers_of_profiles_and_plans(profiles: list[Profile]) -> None:
    with pytest.raises(ScheduleError, match="got 3 profiles for a schedule of 4 stages, expected one for each"):
        recollect.plan_pipeline(profiles[:3], SCHEDULES["1F1B"], "70%")
    with pytest.raises(ScheduleError, match="got 1 plans for 4 stages, expected one for each"):
        recollect.predict_pipeline(profiles, SCHEDULES["1F1B"], [Plan({})])
    with pytest.raises(TypeError, match="as profiles, expected one of class recollect.Profile"):
        recollect.plan_pipeline([Plan({})] * 4, SCHEDULES["1F1B"], "70%")  # type: ignore[list-item]


def test_split_backwards_need_profiles_of_their_own(profiles: list[Profile]) -> None:
    zero_bubble = [["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]]
    with pytest.raises(
        ScheduleError, match="splits the backward of stage 1 in two .*expected split_profiles: record each"
    ):
        recollect.plan_pipeline(profiles[:2], zero_bubble, "70%")
    with pytest.raises(ScheduleError, match="got 1 split_profiles for a schedule of 2 stages, expected one for each"):
        recollect.plan_pipeline(profiles[:2], zero_bubble, "70%", split_profiles=profiles[:1])
    other = nn.Sequential(*list(module())[:2])
    x = torch.randn(SHAPE, requires_grad=True)
    split = recorded(other, x, split_backward=True)
    with pytest.raises(ProfileFormatError, match="stage 1: got other ops with split_backward=True than without it"):
        recollect.plan_pipeline(profiles[:2], zero_bubble, "70%", split_profiles=[split] * 2)


def test_ranks_that_do_alike_are_planned_once(profiles: list[Profile], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    init = Planner.__init__

    def counted(planner: Planner, profile: Profile, *, make_bound: Callable[[], LowerBound]) -> None:
        made.append(profile)
        init(planner, profile, make_bound=make_bound)

    monkeypatch.setattr(Planner, "__init__", counted)
    planned = recollect.plan_pipeline(profiles, SCHEDULES["GPipe"], "100%")
    assert len(made) == 3 and planned.peaks_bytes[1] == planned.peaks_bytes[2]


def test_a_frozen_stage_has_no_gradients_that_accumulate(profiles: list[Profile]) -> None:
    frozen = recorded(module().requires_grad_(False), torch.randn(SHAPE, requires_grad=True))
    first, other, *_ = profiles
    planned = recollect.plan_pipeline([first, frozen, other, other], SCHEDULES["1F1B"], "100%")
    with_gradients = recollect.plan_pipeline(profiles, SCHEDULES["1F1B"], "100%")
    saved_bytes = with_gradients.peaks_bytes[1] - planned.peaks_bytes[1]
    assert saved_bytes >= sum(parameter.nbytes for parameter in module().parameters())
    assert planned.peaks_bytes[2:] == with_gradients.peaks_bytes[2:]


def test_profiles_of_other_steps_are_refused(profiles: list[Profile]) -> None:
    x = torch.randn(SHAPE, requires_grad=True)
    fresh = recollect.record(module(), x, loss_fn=torch.sum, gradients="freed")
    with pytest.raises(ProfileFormatError, match="stage 0, .*got no gradients that accumulate"):
        recollect.plan_pipeline([fresh] * 4, SCHEDULES["1F1B"], "70%")
    stage = module()
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def two() -> None:
        # Of two sizes, so that they are not stored as one.
        for size in (32, 16):
            stage(x[:size]).sum().backward()

    with pytest.raises(ProfileFormatError, match="got a step of several micro-batches"):
        recollect.plan_pipeline([recollect.record(stage, step=two)] * 4, SCHEDULES["1F1B"], "70%")
