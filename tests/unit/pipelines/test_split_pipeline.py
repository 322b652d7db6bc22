"""Layers divided among the stages of a pipeline, against every split there is, and against stages that were recorded whole."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

import recollect
from blocks import mean_square
from recollect.errors import BudgetTooSmallError, ScheduleError
from recollect.pipelines.pipeline import Pipeline, RecordedPieces
from recollect.pipelines.schedule import schedule_of
from recollect.pipelines.split_pipeline import _Search
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile

SHAPE = (4, 32, 64)
VOCABULARY = 256
BUFFER_BYTES = 4 * 4 * 32 * 64


def layer() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))


def head() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, VOCABULARY))


def recorded(
    module: nn.Module, batch: Tensor, loss_fn: Callable[..., Tensor] = torch.sum, *, split_backward: bool = False
) -> Profile:
    return recollect.record(
        module,
        batch,
        loss_fn=loss_fn,
        gradients="accumulated",
        holds_output=False,
        fake=True,
        hardware="H100",
        units=[""] if not isinstance(module, nn.Sequential) or not isinstance(module[0], nn.Sequential) else None,
        split_backward=split_backward,
    )


def layers(num_middle: int, *, split_backward: bool = False) -> list[Profile]:
    first = recorded(
        nn.Embedding(VOCABULARY, 64), torch.randint(0, VOCABULARY, SHAPE[:2]), split_backward=split_backward
    )
    middle = recorded(layer(), torch.randn(SHAPE, requires_grad=True), split_backward=split_backward)
    last = recorded(head(), torch.randn(SHAPE, requires_grad=True), mean_square, split_backward=split_backward)
    return [first, *[middle] * num_middle, last]


@pytest.fixture(scope="module")
def six() -> list[Profile]:
    return layers(4)


def one_f_one_b(num_stages: int) -> recollect.PipelineSchedule:
    return recollect.PipelineSchedule.one_f_one_b(num_stages=num_stages, num_micro_batches=2 * num_stages)


@pytest.mark.parametrize("budget", ["100%", "85%", "75%"])
def test_no_split_is_much_faster(six: list[Profile], budget: str) -> None:
    found = recollect.split_pipeline(six, one_f_one_b(3), budget)
    search = _Search(six, (), one_f_one_b(3), budget, 0.0)
    every = (search._at((first, second - first, 6 - second)) for first, second in combinations(range(1, 6), 2))
    best_s = min(split.step_s for split in every if not split.shortfall_bytes)
    assert best_s <= found.pipeline.step_s <= 1.01 * best_s
    assert found.pipeline.budget_bytes is not None and found.pipeline.peak_bytes <= found.pipeline.budget_bytes
    assert sum(found.sizes) == len(six) and [own.start for own in found.layers[1:]] == [
        own.stop for own in found.layers[:-1]
    ]
    assert repr(recollect.split_pipeline(six, one_f_one_b(3), budget)) == repr(found)


def test_a_slow_head_gets_fewer_layers_beside_it(six: list[Profile]) -> None:
    slow = recorded(nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))), torch.randn(SHAPE, requires_grad=True))
    found = recollect.split_pipeline([*six[:-1], slow], one_f_one_b(3), "100%")
    assert found.sizes[-1] < min(found.sizes[:-1])


def test_plans_fit_stages_that_are_sequences_of_the_layers() -> None:
    found = recollect.split_pipeline([layers(1)[1]] * 7, one_f_one_b(4), "60%")
    assert 1 in found.sizes and max(found.sizes) > 1
    assert any(isinstance(plan, Plan) and plan.units for plan in found.pipeline.plans)
    for size, plan in zip(found.sizes, found.pipeline.plans, strict=True):
        assert isinstance(plan, Plan)
        recollect.apply(nn.Sequential(*(layer() for _ in range(size))), plan).remove()


# Rank 1 runs two micro-batches between the halves of their backwards.
IN_HALVES = [
    ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"],
    ["", "1F0", "1I0", "1F1", "1I1", "1F2", "1I2", "1W0", "1W1", "1W2"],
]


@pytest.mark.parametrize("setting", ["keep_all", "full"])
def test_a_stage_of_layers_is_predicted_in_both_halves_of_its_backward(setting: str) -> None:
    """What the layers of a stage need at the same time they need together, though they were recorded one by one."""
    micro_batch = torch.randn(SHAPE, requires_grad=True)
    whole = [
        recorded(nn.Sequential(*(layer() for _ in range(3))), micro_batch, mean_square, split_backward=split)
        for split in (False, True)
    ]
    expected = recollect.predict_pipeline(
        [whole[0]] * 2, IN_HALVES, [recollect.classic_plan(whole[0], setting)] * 2, split_profiles=[whole[1]] * 2
    )
    single = [recorded(layer(), micro_batch, split_backward=split) for split in (False, True)]
    last = [recorded(layer(), micro_batch, mean_square, split_backward=split) for split in (False, True)]
    pieces = RecordedPieces([*[single[0]] * 5, last[0]], [*[single[1]] * 5, last[1]])
    plans = [recollect.classic_plan(single[0], setting)] * 6
    found = Pipeline(schedule_of(IN_HALVES), pieces, [3, 3]).peaks_bytes(plans)
    # What layers hand to each other between the halves is not known to one tensor.
    assert expected.peaks_bytes[1] - BUFFER_BYTES <= found[1] <= 1.15 * expected.peaks_bytes[1]


def test_a_stage_of_layers_is_predicted_as_one_that_was_recorded_whole() -> None:
    schedule = one_f_one_b(2)
    one = layers(1)[1]
    apart = recollect.split_pipeline([*[one] * 7, replace(one, loss_chunks=4)], schedule, "100%")
    whole = recorded(nn.Sequential(*(layer() for _ in range(4))), torch.randn(SHAPE, requires_grad=True))
    expected = recollect.predict_pipeline([whole] * 2, schedule, [recollect.classic_plan(whole, "keep_all")] * 2)
    assert apart.sizes == (4, 4)
    assert [plan.loss_chunks for plan in apart.pipeline.plans if isinstance(plan, Plan)] == [1, 4]
    # Each layer was recorded with a loss of its own.
    assert apart.pipeline.plain_step_s == pytest.approx(expected.plain_step_s, rel=0.06)
    # A layer hands on its gradient later than autograd does.
    for found, right in zip(apart.pipeline.peaks_bytes, expected.peaks_bytes, strict=True):
        assert abs(found - right) <= 3 * BUFFER_BYTES


def test_backwards_in_halves() -> None:
    schedule = [
        ["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"],
        ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"],
    ]
    made = layers(4)
    with pytest.raises(ScheduleError, match="splits the backward of stage 1 in two"):
        recollect.split_pipeline(made, schedule, "90%")
    found = recollect.split_pipeline(made, schedule, "90%", split_layers=layers(4, split_backward=True))
    assert found.pipeline.budget_bytes is not None and found.pipeline.peak_bytes <= found.pipeline.budget_bytes


def test_what_cannot_be_divided_is_an_error(six: list[Profile]) -> None:
    with pytest.raises(ScheduleError, match="got 6 layers for a schedule of 7 stages, expected one or more each"):
        recollect.split_pipeline(six, one_f_one_b(7), "90%")
    with pytest.raises(ScheduleError, match="got 2 split_layers for 6 layers, expected one for each"):
        recollect.split_pipeline(six, one_f_one_b(3), "90%", split_layers=six[:2])
    with pytest.raises(
        BudgetTooSmallError, match=r"the fullest rank of the leanest split that was found \(.* layers by stage"
    ):
        recollect.split_pipeline(six, one_f_one_b(3), "100KB")
    with pytest.raises(TypeError, match="as layers, expected one of class recollect.Profile"):
        recollect.split_pipeline([recollect.Plan({})] * 4, one_f_one_b(3), "90%")  # type: ignore[list-item]
