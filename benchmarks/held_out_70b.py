"""Predict a published table: Llama 3 70B on 32 H100, four recompute settings of Megatron, memory and time.

    python benchmarks/held_out_70b.py            a minute, on any machine

The table is in Megatron-Bridge's guide to activation recompute, "Measured Results": SFT in FP8 by current scaling, TP4 PP4
VPP5 DP2, micro-batches of one sequence of 4,096 tokens, 32 sequences a step. Nothing here was fitted to it; docs/parallel.md
says what is assumed.

Megatron runs fused kernels, which keep less than the ops of the reference model: a norm its input and output, SwiGLU the
result of `linear_fc1`, a gathered input its part; and one cast of a weight for all micro-batches. Each setting is a plan that
keeps just that, less what its modules recompute. Times are those of the reference model in 8 bits, whose casts are several ops
each; and, as a bound, those of the model in bf16 whose products take as long as in 8 bits, so that casts cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from recollect.costs.hardware import ArithmeticRate, Hardware
from recollect.costs.hardware_table import find_hardware
from recollect.costs.links import cluster_of
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.lab.parallel.cluster_step import ClusterStep, record_stages, schedule_of_step
from recollect.lab.parallel.layout import DeviceLayout
from recollect.pipelines.pipeline import PipelinePlan
from recollect.pipelines.plan_pipeline import predict_pipeline
from recollect.pipelines.schedule import PipelineSchedule
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
    return not name.endswith("layernorm._to_copy#1") and any(words in name for words in fused)


def forward_parts_ms(profile: Profile) -> dict[str, float]:
    """Return what a layer's forward consists of, in ms; without the ops on single numbers that make a scale."""
    kinds = {"_Product": "products", "fp8.": "casts", "c10d": "collectives", "attention_for": "attention", "": "rest"}
    found = dict.fromkeys(kinds.values(), 0.0)
    call = next(call for call in profile.calls if call.path.endswith("layers.1"))
    for op in profile.graph_of(call).ops:
        found[next(kind for words, kind in kinds.items() if words in op.name)] += op.time_s * 1e3
    return found


def predictions(
    config: TransformerConfig, hardware: Hardware
) -> tuple[list[Profile], PipelineSchedule, list[PipelinePlan]]:
    """Return the stages of a step, their schedule, and what is predicted for each row."""
    step = ClusterStep(
        config=config,
        layout=LAYOUT,
        cluster=replace(cluster_of(find_hardware("H100")), hardware=hardware),
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
    plans = [[plan_of(profile, modules) for profile in profiles] for modules, *_ in PUBLISHED]
    return profiles, schedule, [predict_pipeline(profiles, schedule, one) for one in plans]


def main() -> None:
    """Print the table."""
    hardware = find_hardware("H100")
    profiles, schedule, rows = predictions(CONFIG, hardware)
    _, _, bounds = predictions(
        CONFIG.changed(fp8=None, fp8_recipe="delayed", first_last_layers_bf16=False), in_fp8(hardware)
    )
    parts = forward_parts_ms(profiles[1])
    print("a layer's forward, ms:", ", ".join(f"{part} {time_ms:.2f}" for part, time_ms in parts.items()))
    flops = 6 * TOKENS * (CONFIG.num_parameters + 2 * CONFIG.num_layers * 4096 * CONFIG.hidden_size) / 32 / 1e12
    always = [sum(profiles[stage].persistent_bytes for stage in schedule.stages_of(rank)) / GB for rank in range(4)]
    print("weights, gradients and optimizer:", " ".join(f"{size:.1f}" for size in always), "GB")
    print(f"{'':20} {'peak by rank, GB':23}  {'published':21} {'TFLOP/s':>12} {'casts free':>12} {'published':>12}")
    for (modules, tflops, peak, outcome), row, bound in zip(PUBLISHED, rows, bounds, strict=True):
        peaks = " ".join(f"{nbytes / GB:5.1f}" for nbytes in row.peaks_bytes)
        rates = (flops / row.step_s, flops / rows[0].step_s), (flops / bound.step_s, flops / bounds[0].step_s)
        shown = [f"{rate:4.0f} ({rate / first - 1:+.1%})" for rate, first in (*rates, (tflops, PUBLISHED[0][1]))]
        print(f"{'+'.join(modules):20} {peaks}  {f'{peak} {outcome}':21} {' '.join(f'{one:>12}' for one in shown)}")


if __name__ == "__main__":
    main()
