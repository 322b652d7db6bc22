"""Predict a published table: Llama 3 70B on 32 H100, four recompute settings of Megatron, memory and time.

    python benchmarks/held_out_70b.py            half a minute, on any machine

The table is in Megatron-Bridge's guide to activation recompute, "Measured Results": SFT in fp8, TP4 PP4 VPP5 DP2, micro-batches
of one sequence of 4,096 tokens, 32 sequences a step. Nothing here was fitted to it; docs/parallel.md says what is assumed.

Megatron runs fused kernels, which keep less than the ops of the reference model: a norm its input and output, SwiGLU the result
of `linear_fc1` and its own, a gathered input its part. Each setting is a plan that keeps just that, less what its modules
recompute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from recollect.costs.hardware import ArithmeticRate, Hardware
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
# Llama 3, which has a larger vocabulary than the named 70B (Llama 2).
CONFIG = NAMED_CONFIGS["70b"].changed(vocab_size=128_256)
TOKENS = 32 * 4096

# Of a layer, what fused kernels do not keep, and what each module of Megatron's recomputes besides.
FUSED = ("layernorm._to_copy", "layernorm.rsqrt", "layernorm.mul", "all_gather_into_tensor", "silu")
MODULES = {
    # Its result stays, as the input of `linear_proj`; what flash attention keeps besides is small.
    "core_attn": ("flash_attention_for_cpu.1",),
    # Its norm is a part of `linear_fc1` in Transformer Engine.
    "mlp": ("mlp.linear_fc1", "mlp.activation_func", "pre_mlp_layernorm._to_copy#1"),
    "layernorm": ("layernorm._to_copy#1",),
}
# Settings, published TFLOP/s a GPU, published peak in GB, and what became of it.
PUBLISHED = (
    (("core_attn",), 704.0, 58.8, "(OOM on rank 0)"),
    (("mlp",), 593.6, 55.6, "(ran)"),
    (("mlp", "core_attn"), 586.8, 55.6, "(ran)"),
    (("core_attn", "layernorm"), 702.0, 59.6, "(OOM on rank 0)"),
)


def in_fp8(hardware: Hardware) -> Hardware:
    """Return hardware whose matrix products run at the rate of fp8, and whose attention as before."""
    rates = []
    for rate in hardware.rates:
        if rate.dtype == "bf16":
            peak = hardware.rate("fp8").peak_flops_per_s
            share = rate.peak_flops_per_s / peak
            attention = rate.attention_efficiency * share, rate.attention_backward_efficiency * share
            rates.append(
                ArithmeticRate(
                    "bf16",
                    peak,
                    rate.matmul_efficiency,
                    *attention,
                    half_rate_outputs=rate.half_rate_outputs,
                    half_rate_depth=rate.half_rate_depth,
                )
            )
        else:
            rates.append(rate)
    return replace(hardware, rates=tuple(rates))


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
    return not name.endswith("_to_copy#1") and any(words in name for words in fused)


def main() -> None:
    """Print the table."""
    cluster = replace(cluster_of(find_hardware("H100")), hardware=in_fp8(find_hardware("H100")))
    step = ClusterStep(
        config=CONFIG,
        layout=LAYOUT,
        cluster=cluster,
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
