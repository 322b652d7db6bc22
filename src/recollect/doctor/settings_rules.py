"""Rules about settings of Megatron that it accepts, and that do not do what they seem to."""

from __future__ import annotations

from recollect.doctor.finding import Rule

__all__ = [
    "CORE_ATTN_FUSED",
    "DISTRIBUTED_OPTIMIZER",
    "FP8_LAYERNORM",
    "FULL_IS_SLOW",
    "LAYERNORM_ALONE",
    "LOGITS_LARGE",
    "MEGATRON_RULES",
    "MLP_AND_CORE_ATTN",
    "MLP_IS_SLOW",
    "ONE_REGION",
    "ROUTER_COUNTS",
    "STAGES",
]

_EXPLAIN = (
    "See what it keeps, layer by layer, and what a budget of the same peak would: recollect explain --yaml CONFIG.yaml"
)

CORE_ATTN_FUSED = Rule(
    name="core-attn-fused",
    sees="core_attn as the only useful module to recompute, under fused attention",
    problem="Recomputing core_attn saves next to nothing here.",
    cause="Fused attention (flash, or cuDNN's, Transformer Engine's default) never stores the scores that core_attn would "
    "drop, and recomputes them itself: 25.52 GB became 24.94 GB. core_attn then costs another run of attention.",
    fix=(
        "Recompute modules that hold something: --recompute-modules mlp, or for experts moe_act, or mla_up_proj.",
        _EXPLAIN,
        "Or leave recompute out, and compare.",
    ),
    source="NVIDIA/Megatron-LM#1225; Bridge: Moonlight-16B, core_attn -0.01 % memory, +3.85 % time",
    certainty="likely",
)
MLP_AND_CORE_ATTN = Rule(
    name="mlp-and-core-attn",
    sees="mlp and core_attn recomputed together, under fused attention",
    problem="mlp with core_attn is slower than mlp alone, and needs as much memory.",
    cause="Under fused attention core_attn drops next to nothing; Llama 3 70B: 586.8 instead of 593.6 TFLOP/s, at the same "
    "55.6 GB.",
    fix=("Leave core_attn out of --recompute-modules.", _EXPLAIN),
    source="Megatron Bridge, activation recompute guide",
    certainty="likely",
)
LAYERNORM_ALONE = Rule(
    name="layernorm-saves-little",
    sees="layernorm recomputed, and nothing else that holds much",
    problem="Recomputing layernorm saves next to nothing.",
    cause="Its outputs are a small part of a layer: Llama 3 70B still ran out of memory with it, at 59.6 instead of 58.8 GB.",
    fix=(
        "Rule out fragmentation first: export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "Then add mlp to --recompute-modules, or recompute whole layers.",
        _EXPLAIN,
    ),
    source="Megatron Bridge, activation recompute guide",
    certainty="likely",
)
MLP_IS_SLOW = Rule(
    name="mlp-is-slow",
    sees="mlp recomputed",
    problem="Recomputing mlp costs more time than other modules{size}.",
    cause="It is most of a layer's arithmetic: Llama 3 70B (FFN 28672) lost 16.4 % of its throughput for 3 GB.",
    fix=(
        "Drop it if memory allows, or recompute part of it: a budget chooses the values that cost least, "
        'recollect.attach(model, optimizer, budget="80%").',
        _EXPLAIN,
        "With PP = 1: offload instead (--cpu-offloading-num-layers).",
    ),
    source="Megatron Bridge, activation recompute guide",
    certainty="possible",
)
FULL_IS_SLOW = Rule(
    name="full-is-slow",
    sees="recompute of whole layers",
    problem="Whole layers are recomputed: each step runs forward twice.",
    cause="full drops also what is dear to compute and small to keep; it costs about a third of the step's time.",
    fix=(
        "Recompute modules only: --recompute-granularity selective --recompute-modules mlp",
        "Or keep what costs most per byte, within a budget: recollect plan --hf-config config.json --fake --dtype bf16 "
        "--memory-budget 80%",
        _EXPLAIN,
    ),
    source="Megatron-LM guide, issue 4 of its troubleshooting",
    certainty="possible",
)
ONE_REGION = Rule(
    name="one-huge-region",
    sees="uniform recompute with as many layers in a region as a stage has",
    problem="The whole stage is one region, so recompute saves next to nothing at the peak.",
    cause="Backward runs the region again as a whole, and then all of its activations are alive at once, as without recompute. "
    "recompute_num_layers is the size of a region ({layers}), not the number of layers that are recomputed.",
    fix=("Set --recompute-num-layers 1, or about the square root of the layers of a stage.", _EXPLAIN),
    source="NVIDIA/Megatron-LM#307, #1300; pytorch/pytorch#147449, #77284",
)
STAGES = Rule(
    name="stage-imbalance",
    sees="pipeline parallelism with the same recompute in every stage",
    problem="The first pipeline stages need more memory than the last ones: up to {stages} micro-batches are in flight in the "
    "first, one in the last.",
    cause="recompute_num_layers is the same in each stage, so the last stages recompute more than they have to, or the first "
    "less.",
    fix=(
        "Choose for the first stage, and give later stages more layers (--decoder-first-pipeline-num-layers).",
        "Or plan each stage for its own budget: recollect.plan(profile, budget) on a profile of that stage.",
    ),
    source="NVIDIA/Megatron-LM#1226",
    certainty="possible",
)
FP8_LAYERNORM = Rule(
    name="fp8-and-recompute",
    sees="FP8 with recompute of layernorm or of whole layers; more certain with NaN in a log",
    problem="FP8 with recompute of {what}{nan}.",
    cause="A norm or layer that runs again must use the scaling of its first run. Transformer Engine before 2.6 cannot keep it "
    "for layernorm; whole layers with a pipeline and several micro-batches gave NaN (fixed since).",
    fix=(
        "Recompute without layernorm: --recompute-modules core_attn, or mlp.",
        "Or update Transformer Engine and Megatron, and do not use --fp8-recipe delayed with layernorm or moe_act.",
        "If NaN stays without recompute, recompute is not the cause.",
    ),
    source="Megatron-LM guide, issue 5; NVIDIA/Megatron-LM#607, NVIDIA/TransformerEngine#539",
    certainty="possible",
)
LOGITS_LARGE = Rule(
    name="logits-large",
    sees="tokens x vocabulary of 1 GiB or more at the loss, by the settings",
    problem="Logits and their loss need about {size} on a device.",
    cause="{tokens} tokens x {vocabulary} tokens of vocabulary{split}, in bf16, again in fp32, and as a gradient (10 bytes "
    "each). Recomputing layers does not change that.",
    fix=(
        "Compute head and loss in chunks: recollect plan --hf-config config.json --fake --dtype bf16 --loss-chunks auto "
        "--memory-budget 80%",
        "Or --cross-entropy-loss-fusion, Liger, or more tensor parallelism.",
    ),
    source="NVIDIA-NeMo/Automodel#3907, pytorch/torchtitan#996",
    certainty="likely",
)
DISTRIBUTED_OPTIMIZER = Rule(
    name="optimizer-not-sharded",
    sees="out of memory in a log, and Megatron's arguments without --use-distributed-optimizer",
    problem="Every rank holds the whole optimizer state.",
    cause="Weights, gradients and Adam's state take 18 bytes a parameter, and 6 + 12 / (data-parallel ranks) with the state "
    "sharded; recompute makes activations smaller, not these.",
    fix=("Add --use-distributed-optimizer if there is more than one data-parallel rank.",),
    source="Megatron-LM guide, issue 3 of its troubleshooting; theoretical_memory_usage.py",
    certainty="possible",
)
ROUTER_COUNTS = Rule(
    name="router-counts-twice",
    sees="recompute of experts or of whole layers in a model with experts",
    problem="Code in the router that counts (expert loads, auxiliary loss in the log) runs twice for each micro-batch.",
    cause="Recompute runs the router's Python again. In Megatron up to core 0.11 the logged load-balancing loss is twice its "
    "value; the gradients are right. Code of your own that adds to a counter is wrong in the same way.",
    fix=(
        "Update Megatron, or divide the logged value by two; do not change --moe-aux-loss-coeff.",
        "In code of your own: count outside of the region; under Megatron's (reentrant) checkpoint, or only while "
        "torch.is_grad_enabled().",
        "recollect runs ops again, not Python, so that counters stay right.",
    ),
    source="NVIDIA/Megatron-LM#1330, #1433, #1478, #1514; NVIDIA-NeMo/Automodel#3247",
    certainty="possible",
)
MEGATRON_RULES = (
    CORE_ATTN_FUSED,
    MLP_AND_CORE_ATTN,
    LAYERNORM_ALONE,
    MLP_IS_SLOW,
    FULL_IS_SLOW,
    ONE_REGION,
    STAGES,
    FP8_LAYERNORM,
    LOGITS_LARGE,
    DISTRIBUTED_OPTIMIZER,
    ROUTER_COUNTS,
)
