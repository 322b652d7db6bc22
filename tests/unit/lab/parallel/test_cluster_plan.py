"""A step on a cluster that is not there: bytes and collectives against counts by hand, its plans, and its report."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import recollect
from recollect.costs.hardware_table import find_hardware
from recollect.costs.links import cluster_of
from recollect.errors import BudgetTooSmallError, ConfigError, ConfigWarning
from recollect.integrations.megatron.nearest import nearest_uniform_settings
from recollect.integrations.megatron.pipeline import split_flags
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.lab.parallel.cluster_plan import ClusterPlan, choose_split, plan_cluster, plan_cluster_with_chunks
from recollect.lab.parallel.cluster_step import ClusterStep, RecordedStages, record_stages, schedule_of_step
from recollect.lab.parallel.layout import DeviceLayout
from recollect.plans.action import Action

LAYERS, WIDTH, INNER, VOCABULARY, LENGTH = 2, 64, 128, 96, 32
CONFIG = llama_config(
    num_layers=LAYERS, hidden_size=WIDTH, ffn_hidden_size=INNER, num_attention_heads=4, vocab_size=VOCABULARY
)
STEP = ClusterStep(config=CONFIG, layout=DeviceLayout(), cluster=cluster_of(find_hardware("H100")), seq_length=LENGTH)
CHUNKED = replace(
    STEP,
    config=CONFIG.changed(num_layers=1, vocab_size=8192),
    layout=DeviceLayout(tensor_model_parallel_size=2),
    seq_length=512,
)
HELD = replace(
    STEP,
    layout=DeviceLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    seq_length=512,
    num_micro_batches=4,
    holds_parts=True,
)
SCHEDULED = replace(
    STEP,
    config=CONFIG.changed(num_layers=4),
    layout=DeviceLayout(pipeline_model_parallel_size=2),
    seq_length=1024,
    num_micro_batches=4,
)
# The head computes as much as some layers, so that the last stage should have fewer.
UNEVEN = replace(
    SCHEDULED,
    config=llama_config(num_layers=7, hidden_size=1024, ffn_hidden_size=2048, num_attention_heads=8, vocab_size=32000),
    seq_length=4096,
)


@cache
def recorded(*, sharding: Any = "none", **sizes: Any) -> RecordedStages:
    return record_stages(replace(STEP, layout=DeviceLayout(**sizes), sharding=sharding))


def test_weights_are_split_and_norms_are_not() -> None:
    """Per layer 4 d^2 of attention, 3 d f of the MLP, two norms; embedding, head, and the last norm."""
    found = recorded(tensor_model_parallel_size=2).profiles[0].persistent
    split = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * INNER) + 2 * VOCABULARY * WIDTH
    count = split // 2 + (2 * LAYERS + 1) * WIDTH
    assert found["parameters"] == 2 * count
    assert found["gradients"] == 4 * count
    assert found["optimizer_state"] == 12 * count


def test_the_distributed_optimizer_shares_its_state() -> None:
    alone = recorded(data_parallel_size=4).profiles[0].persistent
    shared = recorded(data_parallel_size=4, sharding="optimizer").profiles[0].persistent
    assert shared["optimizer_state"] == alone["optimizer_state"] // 4
    assert shared["gradients"] == alone["gradients"]


def test_fsdp2_shares_all() -> None:
    """In fp32, which the optimizer steps over; it is gathered in bf16."""
    alone = recorded().profiles[0].persistent
    shared = recorded(data_parallel_size=2, sharding="all")
    found = shared.profiles[0].persistent
    assert found["parameters"] == alone["parameters"] == found["gradients"]
    assert shared.traffic[0]["data"].count > 0
    assert shared.reduction_s == (0.0,)


@pytest.mark.parametrize(("sequence", "kinds"), [(False, 4), (True, 8)])
def test_tensor_parallelism_communicates_as_megatron_does(sequence: bool, kinds: int) -> None:
    """Four all-reduces of b s d a layer, or eight gathers and scatters (Korthikanti et al. 2022, section 4.2.2).

    On top one each, or two, for embedding and head; the three numbers a token of the loss; and under sequence parallelism the
    gradient of each norm. Gathered inputs are kept or gathered again by a plan.
    """
    found = recorded(tensor_model_parallel_size=2, sequence_parallel=sequence).traffic[0]["tensor"]
    large = kinds * LAYERS + 2 * (1 + sequence)
    norms = (2 * LAYERS + 1) * sequence
    assert found.count == large + norms + 1
    assert found.nbytes == large * 2 * LENGTH * WIDTH + norms * 2 * WIDTH + 2 * LENGTH * 3 * 4


def test_tensor_parallelism_over_nodes_is_warned_of() -> None:
    small = replace(STEP, cluster=cluster_of(find_hardware("H100"), devices_per_node=2))
    said = r"size=4: a node has 2 devices; the computation waits for InfiniBand NDR, at 40 GB/s a device\."
    with pytest.warns(ConfigWarning, match=said):
        record_stages(replace(small, layout=DeviceLayout(tensor_model_parallel_size=4)))


def test_collectives_of_data_parallelism_are_hidden() -> None:
    alone, shared = recorded(), recorded(data_parallel_size=2)
    assert shared.profiles[0].step_s == pytest.approx(alone.profiles[0].step_s)
    assert shared.reduction_s[0] > 0 == alone.reduction_s[0]


@pytest.fixture(scope="module")
def pipelined() -> ClusterPlan:
    layout = DeviceLayout(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1
    )
    step = replace(SCHEDULED, layout=layout, pipeline_engine="megatron")
    return plan_cluster(step, "80%")


def test_each_rank_of_a_pipeline_is_reported(pipelined: ClusterPlan) -> None:
    assert [use.stages for use in pipelined.ranks] == [(0, 2), (1, 3)]
    assert max(use.peak_bytes for use in pipelined.ranks) <= (pipelined.planned.budget_bytes or 0)
    for use in pipelined.ranks:
        parts = (use.compute_s, use.recompute_s, use.communication_s["tensor"], use.waiting_s)
        assert sum(parts) == pytest.approx(pipelined.planned.step_s)
    lines = str(pipelined).splitlines()
    assert lines[0].startswith("4 x NVIDIA H100 SXM: peak ")
    assert len(lines) == 4
    assert "NVLink 4 within, InfiniBand NDR between: 370 and 40 GB/s" in " ".join(pipelined.assumptions())


def test_fsdp2_holds_all_of_a_stage_in_a_pipeline() -> None:
    """As torch's schedules do: weights in bf16 beside a rank's own part in fp32, and sums of gradients in fp32, all whole."""
    layout = {"data_parallel_size": 2, "pipeline_model_parallel_size": 2}
    optimizer, fsdp2 = (recorded(sharding=sharding, **layout) for sharding in ("optimizer", "all"))
    for whole, found in zip(optimizer.profiles, fsdp2.profiles, strict=True):
        weights = whole.persistent["parameters"]
        assert found.persistent["parameters"] == weights + 2 * weights // 2
        assert found.persistent["gradients"] == whole.persistent["gradients"] == 2 * weights
    # Gathered and reduced once, not in each micro-batch.
    assert fsdp2.reduction_s == optimizer.reduction_s
    assert not any("data" in traffic for traffic in fsdp2.traffic)


def test_the_nearest_of_megatron_fits_and_is_no_faster(pipelined: ClusterPlan) -> None:
    settings, uniform = nearest_uniform_settings(pipelined.stages.profiles, pipelined.planned)
    assert settings.recompute_granularity is not None
    assert uniform.peak_bytes <= (pipelined.planned.budget_bytes or 0)
    assert uniform.step_s >= pipelined.planned.step_s


def test_megatrons_engine_holds_no_receive_buffers() -> None:
    layout = DeviceLayout(pipeline_model_parallel_size=2)
    steps = [
        replace(STEP, layout=layout, num_micro_batches=4, pipeline_engine=engine) for engine in ("torch", "megatron")
    ]  # type: ignore[arg-type]
    torchs, megatrons = (plan_cluster(step, "100%").planned.peaks_bytes[1] for step in steps)
    hidden_bytes = 2 * LENGTH * WIDTH
    assert torchs - megatrons >= 4 * hidden_bytes


def test_the_last_stage_computes_the_loss_in_chunks() -> None:
    """Of the wide logits and what the loss makes of them, one chunk of four is there; it has a gather of its own."""
    words, length = 4096, 128
    step = replace(STEP, config=CONFIG.changed(vocab_size=words), seq_length=length, num_micro_batches=2, dtype="fp32")
    layout = DeviceLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True)
    whole, chunked = (record_stages(replace(step, layout=layout, loss_chunks=chunks)) for chunks in (1, 4))
    assert [profile.loss_chunks for profile in chunked.profiles] == [1, 4]
    assert chunked.traffic[1]["tensor"].count == whole.traffic[1]["tensor"].count + 3
    peaks = [recollect.classic_plan(found.profiles[1], "full").predicted_peak_bytes or 0 for found in (whole, chunked)]
    assert peaks[0] - peaks[1] > length * words // 2 * 4


def test_a_step_without_micro_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_micro_batches=0: each rank of data parallelism has at least one"):
        record_stages(replace(STEP, num_micro_batches=0))
    layout = DeviceLayout(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1)
    with pytest.raises(ConfigError, match="groups of one a rank"):
        schedule_of_step(replace(SCHEDULED, layout=layout, num_micro_batches=3))


DEEPSEEK = NAMED_CONFIGS["deepseek-v3-tiny"].changed(num_layers=3)
SPREAD = replace(
    STEP,
    config=DEEPSEEK,
    layout=DeviceLayout(
        pipeline_model_parallel_size=2,
        pipeline_split=(1, 2),
        data_parallel_size=4,
        context_parallel_size=2,
        expert_model_parallel_size=4,
    ),
    sharding="optimizer",
    num_micro_batches=2,
    pipeline_engine="megatron",
)


@pytest.fixture(scope="module")
def spread() -> ClusterPlan:
    return plan_cluster(SPREAD, "90%")


def test_each_optimizer_state_is_shared_by_the_ranks_that_have_its_parameters(spread: ClusterPlan) -> None:
    """Of experts there are two replicas, of the rest eight."""
    routed = 2 * 3 * DEEPSEEK.num_moe_experts * DEEPSEEK.hidden_size * DEEPSEEK.moe_ffn_hidden_size // 4
    first = spread.stages.profiles[0].persistent
    assert first["optimizer_state"] == 3 * first["gradients"] // 8
    last = spread.stages.profiles[1].persistent
    dense = last["gradients"] // 4 - (routed + routed // 2)
    assert last["optimizer_state"] == 12 * dense // 8 + 12 * (routed + routed // 2) // 2


def test_rows_are_exchanged_with_their_weights(spread: ClusterPlan) -> None:
    """Of each layer with experts there and back, forward and backward, and the counts before."""
    found = spread.stages.traffic[1]["expert"]
    rows = LENGTH // 2 * DEEPSEEK.moe_router_topk
    layers = 2 + 1
    assert found.count == layers * (1 + 2 * 3)
    counts = 4 * DEEPSEEK.num_moe_experts
    assert found.nbytes == layers * (counts + 2 * rows * (2 * 2 * DEEPSEEK.hidden_size + 4))


def test_whole_experts_get_each_row_once() -> None:
    split = DeviceLayout(
        tensor_model_parallel_size=2, sequence_parallel=True, data_parallel_size=8, expert_model_parallel_size=4
    )
    layouts = (split, replace(split, expert_tensor_parallel_size=1))
    found = [record_stages(replace(SPREAD, layout=layout), [range(1, 2)]).traffic[0]["expert"] for layout in layouts]
    counts_bytes = 4 * DEEPSEEK.num_moe_experts * (found[0].count // 7)
    assert found[1].count == found[0].count and found[0].nbytes > counts_bytes
    assert found[0].nbytes - counts_bytes == 2 * (found[1].nbytes - counts_bytes)


def test_keys_and_values_are_gathered(spread: ClusterPlan) -> None:
    """In forward, and their gradients added up in backward; latent attention has keys and values of each head."""
    found = spread.stages.traffic[0]["context"]
    heads = DEEPSEEK.num_attention_heads * (DEEPSEEK.qk_head_dim + DEEPSEEK.qk_pos_emb_head_dim + DEEPSEEK.v_head_dim)
    assert found.count == 4
    assert found.nbytes == 2 * 2 * LENGTH * heads


def test_further_axes_are_reported_with_what_is_assumed(spread: ClusterPlan) -> None:
    assert str(spread).splitlines()[0].startswith("16 x NVIDIA H100 SXM: peak ")
    assert str(spread).splitlines()[1].split() == [
        *("rank", "peak", "weights", "gradients", "optimizer"),
        *("compute", "recompute", "tensor", "context", "expert", "waiting", "data"),
    ]
    assert "Each expert gets as many tokens as any other; a token's row" in " ".join(spread.assumptions())
    for use in spread.ranks:
        waits_s = use.communication_s["context"] + use.communication_s["expert"]
        assert use.compute_s + use.recompute_s + waits_s + use.waiting_s == pytest.approx(spread.planned.step_s)


@pytest.fixture(scope="module")
def whole() -> ClusterPlan:
    return plan_cluster(CHUNKED, "100%")


def test_logits_that_do_not_fit_are_computed_in_chunks(whole: ClusterPlan) -> None:
    found = plan_cluster_with_chunks(CHUNKED, "70%")
    with pytest.raises(BudgetTooSmallError):
        plan_cluster(CHUNKED, "70%")
    assert found.step.loss_chunks == 4
    assert found.planned.peak_bytes <= 0.7 * whole.planned.peak_bytes + 1
    assert "LM head and loss in 4 chunks." in found.assumptions()


def test_what_collectives_and_norms_make_can_be_parts_and_what_matrices_make_cannot() -> None:
    """A matrix is split over the ranks; the sum of what they make of it is not, nor is what is made of that alone."""
    profile = record_stages(HELD).profiles[1]
    graph = profile.graph_of(next(call for call in profile.calls if call.path == "decoder.layers.0"))
    names = {graph.values[part.value].name for part in graph.parts}
    assert {"self_attention._c10d_functional:all_reduce", "mlp._c10d_functional:all_reduce", "add"} <= names
    assert "input_layernorm.mul" in names
    assert not any("linear" in name or "attention.mul" in name or "activation_func" in name for name in names)
    assert profile.shard_ranks == 2 and all(part.gather_s > 0 for part in graph.parts)


def test_parts_lower_the_least_budget() -> None:
    with pytest.raises(BudgetTooSmallError) as without:
        plan_cluster(replace(HELD, holds_parts=False), "1%")
    budget = without.value.least_peak_bytes - 1
    found = plan_cluster(HELD, budget)
    assert found.planned.peak_bytes <= budget
    actions = [action for plan in found.plans for unit in plan.units.values() for action in unit.actions.values()]
    assert Action.SHARD in actions


@pytest.mark.parametrize("layout", [{}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}])
def test_layouts_without_such_values_are_refused(layout: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="distribute_saved_activations=True, .*: it is about what all ranks"):
        record_stages(replace(HELD, layout=DeviceLayout(**layout)))


def step_under(schedule: Any, layers: int | None = None, **changes: Any) -> ClusterStep:
    layout = DeviceLayout(
        pipeline_model_parallel_size=2,
        pipeline_parallel_schedule=schedule,
        num_layers_per_virtual_pipeline_stage=layers,
    )
    return replace(SCHEDULED, layout=layout, **changes)


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


def step_with(**layout: Any) -> ClusterStep:
    return replace(UNEVEN, layout=replace(UNEVEN.layout, **layout))


@pytest.fixture(scope="module")
def chosen() -> ClusterPlan:
    return plan_cluster(UNEVEN, "10GiB", chooses_split=True)


def test_the_stage_with_the_head_gets_fewer_layers(chosen: ClusterPlan) -> None:
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
