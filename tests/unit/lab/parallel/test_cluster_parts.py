"""Plans for a cluster in which ranks hold parts of what is the same on all of them."""

from dataclasses import replace
from typing import Any

import pytest

from recollect.costs.hardware_table import find_hardware
from recollect.costs.links import cluster_of
from recollect.errors import BudgetTooSmallError, ConfigError
from recollect.lab.models.architectures import llama_config
from recollect.lab.parallel.cluster_plan import plan_cluster
from recollect.lab.parallel.cluster_step import ClusterStep, record_stages
from recollect.lab.parallel.layout import DeviceLayout
from recollect.plans.action import Action

STEP = ClusterStep(
    config=llama_config(num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, vocab_size=96),
    layout=DeviceLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    cluster=cluster_of(find_hardware("H100")),
    seq_length=512,
    num_micro_batches=4,
    holds_parts=True,
)


def test_what_collectives_and_norms_make_can_be_parts_and_what_matrices_make_cannot() -> None:
    """A matrix is split over the ranks; the sum of what they make of it is not, nor is what is made of that alone."""
    profile = record_stages(STEP).profiles[1]
    graph = profile.graph_of(next(call for call in profile.calls if call.path == "decoder.layers.0"))
    names = {graph.values[part.value].name for part in graph.parts}
    assert {"self_attention._c10d_functional:all_reduce", "mlp._c10d_functional:all_reduce", "add"} <= names
    assert "input_layernorm.mul" in names
    assert not any("linear" in name or "attention.mul" in name or "activation_func" in name for name in names)
    assert profile.shard_ranks == 2 and all(part.gather_s > 0 for part in graph.parts)


def test_parts_lower_the_least_budget() -> None:
    with pytest.raises(BudgetTooSmallError) as without:
        plan_cluster(replace(STEP, holds_parts=False), "1%")
    budget = without.value.least_peak_bytes - 1
    found = plan_cluster(STEP, budget)
    assert found.planned.peak_bytes <= budget
    actions = [action for plan in found.plans for unit in plan.units.values() for action in unit.actions.values()]
    assert Action.SHARD in actions


@pytest.mark.parametrize("layout", [{}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}])
def test_layouts_without_such_values_are_refused(layout: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="distribute_saved_activations=True, .*: it is about what all ranks"):
        record_stages(replace(STEP, layout=DeviceLayout(**layout)))
