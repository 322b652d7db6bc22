"""The number of chunks of the loss in a step on a cluster."""

from dataclasses import replace

import pytest

from recollect.costs.hardware_table import find_hardware
from recollect.costs.links import cluster_of
from recollect.errors import BudgetTooSmallError
from recollect.lab.models.architectures import llama_config
from recollect.lab.parallel.cluster_plan import ClusterPlan, plan_cluster, plan_cluster_with_chunks
from recollect.lab.parallel.cluster_step import ClusterStep
from recollect.lab.parallel.layout import DeviceLayout

STEP = ClusterStep(
    config=llama_config(num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, vocab_size=8192),
    layout=DeviceLayout(tensor_model_parallel_size=2),
    cluster=cluster_of(find_hardware("H100")),
    seq_length=512,
)


@pytest.fixture(scope="module")
def whole() -> ClusterPlan:
    return plan_cluster(STEP, "100%")


def test_logits_that_do_not_fit_are_computed_in_chunks(whole: ClusterPlan) -> None:
    found = plan_cluster_with_chunks(STEP, "70%")
    with pytest.raises(BudgetTooSmallError):
        plan_cluster(STEP, "70%")
    assert found.step.loss_chunks == 4
    assert found.planned.peak_bytes <= 0.7 * whole.planned.peak_bytes + 1
    assert "LM head and loss in 4 chunks." in found.assumptions()


def test_what_fits_with_no_number_names_the_lowest_peak(whole: ClusterPlan) -> None:
    with pytest.raises(BudgetTooSmallError) as raised:
        plan_cluster_with_chunks(STEP, "1%")
    assert raised.value.least_peak_bytes < 0.7 * whole.planned.peak_bytes
    with pytest.raises(BudgetTooSmallError) as one_chunk:
        plan_cluster(replace(STEP, loss_chunks=1), "1%")
    assert raised.value.least_peak_bytes < one_chunk.value.least_peak_bytes
    # Of the same peak, that of the whole loss.
    assert raised.value.plain_peak_bytes == one_chunk.value.plain_peak_bytes
