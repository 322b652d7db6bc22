"""Layers divided among the stages of a cluster's pipeline, with the plans."""

from dataclasses import replace
from typing import Any

import pytest

from recollect.costs.hardware_table import find_hardware
from recollect.costs.links import cluster_of
from recollect.errors import ConfigError
from recollect.integrations.megatron.pipeline import split_flags
from recollect.lab.models.architectures import llama_config
from recollect.lab.parallel.cluster_plan import ClusterPlan, choose_split, plan_cluster
from recollect.lab.parallel.cluster_step import ClusterStep
from recollect.lab.parallel.layout import DeviceLayout

# The head computes as much as some layers, so that the last stage should have fewer.
STEP = ClusterStep(
    config=llama_config(num_layers=7, hidden_size=1024, ffn_hidden_size=2048, num_attention_heads=8, vocab_size=32000),
    layout=DeviceLayout(pipeline_model_parallel_size=2),
    cluster=cluster_of(find_hardware("H100")),
    seq_length=4096,
    num_micro_batches=4,
)


def step_with(**layout: Any) -> ClusterStep:
    return replace(STEP, layout=replace(STEP.layout, **layout))


@pytest.fixture(scope="module")
def chosen() -> ClusterPlan:
    return plan_cluster(STEP, "10GiB", chooses_split=True)


def test_the_stage_with_the_head_gets_fewer_layers(chosen: ClusterPlan) -> None:
    assert chosen.split is not None
    first, last = chosen.split.sizes
    assert first + last == 7 and first > last + 1
    assert chosen.step.layout.pipeline_split == (first, last)
    assert chosen.planned.peak_bytes <= (chosen.planned.budget_bytes or 0)


def test_it_is_faster_than_as_many_layers_in_each(chosen: ClusterPlan) -> None:
    assert chosen.split is not None and chosen.split.even_step_s is not None
    budget = chosen.planned.budget_bytes or 0
    even = plan_cluster(step_with(pipeline_split=(4, 3)), budget).planned
    assert chosen.planned.step_s < even.step_s == pytest.approx(chosen.split.even_step_s, rel=0.03)
    assert f"layers by stage: {chosen.split.sizes[0]}, {chosen.split.sizes[1]} (as many in each: step +" in str(chosen)


def test_stages_whose_backward_is_split_are_divided_too() -> None:
    found = choose_split(step_with(pipeline_parallel_schedule="ZBVZeroBubble"), "10GiB")
    assert len(found.sizes) == 4 and sum(found.sizes) == 7
    assert found.pipeline.peak_bytes <= (found.pipeline.budget_bytes or 0)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"pipeline_model_parallel_size": 1}, "there are 1 stages to divide the layers among"),
        ({"pipeline_model_parallel_size": 8}, "there are 8 stages to divide the layers among"),
        ({"pipeline_split": (4, 3)}, r"pipeline_split=\(4, 3\): both say"),
    ],
)
def test_what_cannot_be_chosen_is_an_error(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_split(step_with(**layout), "90%")


@pytest.mark.parametrize(
    ("sizes", "predicted", "flags"),
    [
        ([4, 4], 0, "no flags: as many layers in each stage"),
        ([2, 2, 2, 2], 0, "--num-layers-per-virtual-pipeline-stage 2"),
        ([3, 4], 0, "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 4"),
        ([3, 4, 2, 1], 1, "--pipeline-model-parallel-layout 'Et*3|t*4|t*2|tmL'"),
        ([1, 2, 2, 2, 1, 1], 0, "--pipeline-model-parallel-layout 'Et|(t*2|)*3t|tL'"),
    ],
)
def test_megatrons_flags_say_the_same_split(sizes: list[int], predicted: int, flags: str) -> None:
    assert split_flags(sizes, 2, num_predicted=predicted) == flags


def test_only_the_ends_need_flags_if_they_alone_differ() -> None:
    assert split_flags([3, 4, 4, 4], 4) == "--decoder-first-pipeline-num-layers 3"
    assert split_flags([4, 4, 4, 2], 4) == "--decoder-last-pipeline-num-layers 2"
    assert split_flags([4, 4, 3, 4], 4) == "--pipeline-model-parallel-layout 'Et*4|t*4|t*3|t*4L'"
