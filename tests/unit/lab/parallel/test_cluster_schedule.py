"""Schedules by torch's names: what plans for a cluster say of them."""

from dataclasses import replace
from typing import Any

import pytest

from recollect.costs.hardware_table import find_hardware
from recollect.costs.links import cluster_of
from recollect.errors import ConfigError
from recollect.lab.models.architectures import llama_config
from recollect.lab.parallel.cluster_plan import ClusterPlan, plan_cluster
from recollect.lab.parallel.cluster_step import ClusterStep, schedule_of_step
from recollect.lab.parallel.layout import DeviceLayout

STEP = ClusterStep(
    config=llama_config(num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, vocab_size=96),
    layout=DeviceLayout(pipeline_model_parallel_size=2),
    cluster=cluster_of(find_hardware("H100")),
    seq_length=1024,
    num_micro_batches=4,
)


def step_under(schedule: Any, layers: int | None = None, **changes: Any) -> ClusterStep:
    layout = DeviceLayout(
        pipeline_model_parallel_size=2,
        pipeline_parallel_schedule=schedule,
        num_layers_per_virtual_pipeline_stage=layers,
    )
    return replace(STEP, layout=layout, **changes)


@pytest.fixture(scope="module")
def planned() -> dict[str, ClusterPlan]:
    schedules = {"1F1B": None, "GPipe": None, "LoopedBFS": 1, "InterleavedZeroBubble": None, "ZBVZeroBubble": None}
    return {name: plan_cluster(step_under(name, layers), "80%") for name, layers in schedules.items()}


def test_ranks_run_the_stages_that_torch_gives_them(planned: dict[str, ClusterPlan]) -> None:
    stages = {name: [use.stages for use in found.ranks] for name, found in planned.items()}
    assert stages["1F1B"] == stages["GPipe"] == stages["InterleavedZeroBubble"] == [(0,), (1,)]
    assert stages["LoopedBFS"] == [(0, 2), (1, 3)]
    assert stages["ZBVZeroBubble"] == [(0, 3), (1, 2)]


def test_budgets_are_kept_and_all_of_the_step_is_accounted_for(planned: dict[str, ClusterPlan]) -> None:
    for found in planned.values():
        assert found.planned.peak_bytes <= (found.planned.budget_bytes or 0)
        for use in found.ranks:
            assert use.compute_s + use.recompute_s + use.waiting_s == pytest.approx(found.planned.step_s)


def test_zero_bubbles_wait_less(planned: dict[str, ClusterPlan]) -> None:
    waiting = {name: sum(use.waiting_s for use in found.ranks) for name, found in planned.items()}
    assert waiting["ZBVZeroBubble"] < waiting["1F1B"] and waiting["InterleavedZeroBubble"] < waiting["1F1B"]
    assert planned["ZBVZeroBubble"].planned.plain_step_s < planned["1F1B"].planned.plain_step_s


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (step_under("DualPipeV"), "DualPipeV requires at least as many microbatches as stages, but got 3 microbatches"),
        (step_under("LoopedBFS", 1, pipeline_engine="megatron"), "Megatron has only 1F1B and Interleaved1F1B"),
    ],
)
def test_what_a_schedule_does_not_take_is_an_error(step: ClusterStep, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule_of_step(replace(step, num_micro_batches=3))
