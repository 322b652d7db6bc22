"""Predict a published table: Llama 3 70B on 32 H100, four recompute settings of Megatron, memory and time.

    python benchmarks/held_out_70b.py            half a minute, on any machine

The table is in Megatron-Bridge's guide to activation recompute, "Measured Results": SFT in FP8 by current scaling, TP4 PP4 VPP5
DP2, micro-batches of one sequence of 4,096 tokens, 32 sequences a step. Nothing here was fitted to it; docs/parallel.md says
what is assumed.

Megatron runs fused kernels, which keep less than the ops of the reference model: a norm its input and output, SwiGLU the result
of `linear_fc1`, a gathered input its part, and no weight's cast for each micro-batch, since there is one for all. Each setting
is a plan that keeps just that, less what its modules recompute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from recollect.costs.hardware_table import find_hardware
from recollect.costs.links import cluster_of
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.lab.parallel.cluster_step import ClusterStep, record_stages, schedule_of_step
from recollect.lab.parallel.layout import DeviceLayout
from recollect.pipelines.plan_pipeline import predict_pipeline
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.profile import Profile

GB = 1e9
LAYOUT = DeviceLayout(
    tensor_model_parallel_size=4,
    pipeline_model_parallel_size=4,
    data_parallel_size=2,
    sequence_parallel=True,
    num_layers_per_virtual_pipeline_stage=4,
)
# Llama 3, which has a larger vocabulary than the named 70B (Llama 2), by Bridge's `bf16_with_fp8_current_scaling_mixed`.
CONFIG = NAMED_CONFIGS["70b"].changed(
    vocab_size=128_256, fp8="hybrid", fp8_recipe="tensorwise", first_last_layers_bf16=True
)
TOKENS = 32 * 4096

# Of a layer, what fused kernels do not keep, and what each module of Megatron's recomputes besides.
FUSED = (
    *("layernorm._to_copy", "layernorm.rsqrt", "layernorm.mul", "all_gather_into_tensor", "silu"),
    # Casts, of which the ops before the last are in fp32, and the second one is the weight's.
    *("fp8.product.mul", "fp8.product.clamp_", "fp8.product._to_copy#1"),
    *("linear_qkv.fp8.product._to_copy", "linear_fc1.fp8.product._to_copy"),
)
MODULES = {
    # What `linear_proj` keeps of its result is the cast.
    "core_attn": ("core_attention.",),
    # Its norm is a part of `linear_fc1` in Transformer Engine.
    "mlp": (
        "mlp.linear_fc1",
        "mlp.activation_func",
        "mlp.linear_fc2.fp8.product._to_copy",
        "pre_mlp_layernorm._to_copy#1",
    ),
    "layernorm": ("layernorm._to_copy#1",),
}
# Settings, published TFLOP/s a GPU, published peak in GB, and what became of it.
PUBLISHED = (
    (("core_attn",), 704.0, 58.8, "(OOM on rank 0)"),
    (("mlp",), 593.6, 55.6, "(ran)"),
    (("mlp", "core_attn"), 586.8, 55.6, "(ran)"),
    (("core_attn", "layernorm"), 702.0, 59.6, "(OOM on rank 0)"),
)


def plan_of(profile: Profile, modules: Iterable[str]) -> Plan:
    """Return the plan of a stage: what fused kernels keep, less what some modules recompute."""
    dropped = [words for module in modules for words in MODULES[module]]
    units = {}
    for call in profile.calls:
        if "layers" not in call.path:
            continue
        values = [
            value for value in profile.graph_of(call).values if value.producer is not None and not value.must_keep
        ]
        units[call.path] = UnitPlan(
            {value.name: "recompute" for value in values if drops(value.name, FUSED, dropped)}, output="keep"
        )
    return Plan(units)


def drops(name: str, fused: Iterable[str], dropped: Iterable[str]) -> bool:
    """Tell whether a value is not kept; the output of a norm is, unless a module recomputes it."""
    if any(words in name for words in dropped):
        return True
    return not name.endswith("layernorm._to_copy#1") and any(words in name for words in fused)


def main() -> None:
    """Print the table."""
    step = ClusterStep(
        config=CONFIG,
        layout=LAYOUT,
        cluster=cluster_of(find_hardware("H100")),
        num_micro_batches=16,
        sharding="optimizer",
        pipeline_engine="megatron",
    )
    recorded = record_stages(step).profiles
    # Megatron-Bridge's recipes for performance reduce gradients in bf16.
    narrow = {
        id(profile): replace(
            profile, persistent={**profile.persistent, "gradients": profile.persistent["gradients"] // 2}
        )
        for profile in recorded
    }
    profiles = [narrow[id(profile)] for profile in recorded]
    schedule = schedule_of_step(step)
    flops = 6 * TOKENS * (CONFIG.num_parameters + 2 * CONFIG.num_layers * 4096 * CONFIG.hidden_size)
    always = [sum(profiles[stage].persistent_bytes for stage in schedule.stages_of(rank)) / GB for rank in range(4)]
    print("weights, gradients and optimizer:", " ".join(f"{size:.1f}" for size in always), "GB")
    print(f"{'':20} {'peak by rank, GB':23}  {'published':21} {'TFLOP/s':>12} {'published':>14}")
    first_s = 0.0
    for modules, tflops, peak, outcome in PUBLISHED:
        found = predict_pipeline(profiles, schedule, [plan_of(profile, modules) for profile in profiles])
        first_s = first_s or found.step_s
        peaks = " ".join(f"{nbytes / GB:5.1f}" for nbytes in found.peaks_bytes)
        print(
            f"{'+'.join(modules):20} {peaks}  {f'{peak} {outcome}':21}"
            f" {flops / 32 / found.step_s / 1e12:4.0f} ({first_s / found.step_s - 1:+.1%})"
            f" {tflops:6.0f} ({tflops / PUBLISHED[0][1] - 1:+.1%})"
        )


if __name__ == "__main__":
    main()
