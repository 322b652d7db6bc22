"""Settings of Megatron that break one rule each, and what mends them."""

from dataclasses import dataclass, field
from typing import Any

OFFLOAD = {"fine_grained_activation_offloading": True}
LAYER_OFFLOAD = {"cpu_offloading": True, "cpu_offloading_num_layers": 1}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {**FULL, "recompute_method": "block"}
PARTIAL = {"num_microbatches_with_partial_activation_checkpoints": 1}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def offload(*modules: str) -> dict[str, Any]:
    return {**OFFLOAD, "offload_modules": modules}


def graph(impl: str = "local", *modules: str, **others: Any) -> dict[str, Any]:
    return {"cuda_graph_impl": impl, "cuda_graph_modules": modules, **others}


@dataclass(frozen=True)
class Broken:
    """Settings that break a rule, what is said of them, and a change to them that mends it."""

    rule: str
    config: dict[str, Any]
    message: str
    mend: dict[str, Any]
    setting: dict[str, Any] = field(default_factory=dict)


ALONE = [
    Broken("types", {"cpu_offloading": "false"}, "cpu_offloading='false': str is the wrong type. Set it to True", {}),
    Broken("types", {"moe_paged_stash_page_size": 64.0}, "float is the wrong type. Set it to a whole number", {}),
    Broken("types", {"activation_offload_fraction": None}, "NoneType is the wrong type. Set it to a number", {}),
    Broken("types", {"mhc_recompute_layer_num": True}, "bool is the wrong type. Set it to a whole number or None", {}),
    Broken(
        "granularity", {"recompute_granularity": "selectiv"}, "no such granularity. Did you mean 'selective'?", FULL
    ),
    Broken("granularity", {"recompute_granularity": "layer"}, "Set it to 'full', 'selective' or None.", FULL),
    Broken(
        "method",
        {**FULL, "recompute_method": "recompute"},
        "recompute_method='recompute': no such method. Set it to 'uniform' or 'block'",
        FULL,
    ),
    Broken("num-layers-positive", {**FULL, "recompute_num_layers": 0}, "recompute_num_layers=0: not a number of", FULL),
    Broken(
        "num-layers-positive", {**FULL, "recompute_num_layers": -1}, "recompute_num_layers=-1: not a number of", FULL
    ),
    Broken(
        "num-layers-positive", {**FULL, "recompute_num_layers": True}, "=True: not a number of layers. Set it", FULL
    ),
    Broken("num-layers-positive", {**FULL, "recompute_num_layers": 1.0}, "=1.0: not a number of layers. Set it", FULL),
    Broken(
        "full-needs-method",
        {**FULL, "recompute_method": None},
        "recompute_granularity='full', recompute_method=None: full recompute needs a method. Set recompute_method",
        FULL,
    ),
    Broken("full-needs-num-layers", {**FULL, "recompute_num_layers": None}, "needs a number of layers. Set", FULL),
    Broken(
        "selective-has-no-num-layers",
        {**selective("mlp"), "recompute_num_layers": 4},
        "recompute_granularity='selective', recompute_num_layers=4: selective recompute is the same in every layer",
        {"recompute_num_layers": None},
    ),
    Broken(
        "selective-has-no-method",
        {**selective("mlp"), "recompute_method": "uniform"},
        "recompute_method='uniform': a method says which whole layers to recompute",
        {"recompute_method": None},
    ),
    Broken(
        "needs-granularity",
        {"recompute_modules": ["mlp"], "recompute_num_layers": 1},
        "recompute_granularity=None, recompute_num_layers=1, recompute_modules=('mlp',): without a granularity nothing",
        FULL | {"recompute_modules": None},
    ),
    Broken("modules-with-full", {**FULL, "recompute_modules": ["mlp"]}, "whole layers", {"recompute_modules": None}),
    Broken(
        "moe-layer-recompute",
        {"moe_layer_recompute": True},
        "it is deprecated, and means selective recompute of core_attn moe. Set recompute_granularity to 'selective'",
        {"moe_layer_recompute": False},
    ),
    Broken(
        "moe-layer-recompute-with-full",
        {**FULL, "moe_layer_recompute": True},
        "one asks for whole layers, the other for modules. Leave out moe_layer_recompute",
        {"moe_layer_recompute": False},
    ),
    Broken(
        "distribute-needs-full",
        {**selective("mlp"), "distribute_saved_activations": True},
        "only the kept inputs of whole layers are ever distributed",
        {"distribute_saved_activations": False},
    ),
    Broken(
        "micro-batches-alike",
        {**FULL, **PARTIAL},
        "all micro-batches recompute the same. Leave it out, or set recompute_granularity to 'full' and recompute_method to",
        {"recompute_method": "block"},
    ),
    Broken(
        "micro-batches-alike",
        {**selective("mlp"), **PARTIAL},
        "recompute the same. Leave it out",
        {"recompute_modules": None, **BLOCK},
    ),
    Broken(
        "list-of-modules",
        {"recompute_granularity": "selective", "recompute_modules": "core_attn,mlp"},
        "recompute_modules='core_attn,mlp': a string, not a list. Write ['core_attn', 'mlp'].",
        selective("mlp"),
    ),
    Broken("list-of-modules", {"offload_modules": {"mlp"}}, "offload_modules={'mlp'}: not a list of names", {}),
    Broken("known-modules", selective("mpl"), "nothing is called 'mpl'. Did you mean 'mlp'? Choose", selective("mlp")),
    Broken("empty-modules", selective(), "an empty list, so nothing is recomputed. Leave out", selective("mlp")),
    Broken(
        "discard-outputs",
        {**selective("mlp"), "recompute_discard_outputs": ["core_attn"]},
        "the output of 'core_attn' can only be dropped if the module is recomputed. Add it to recompute_modules",
        {"recompute_discard_outputs": ["mlp"]},
    ),
    Broken(
        "offload-num-layers-type",
        {**LAYER_OFFLOAD, "cpu_offloading_num_layers": -1},
        "=-1: not a number",
        LAYER_OFFLOAD,
    ),
    Broken(
        "offload-layers-without-switch",
        {"cpu_offloading_num_layers": 2},
        "cpu_offloading=False, cpu_offloading_num_layers=2: nothing is offloaded. Set cpu_offloading, or leave",
        {"cpu_offloading": True},
    ),
    Broken("offload-no-layers", {"cpu_offloading": True}, "no layer is offloaded. Set cpu_off", LAYER_OFFLOAD),
    Broken(
        "offload-activations",
        {**LAYER_OFFLOAD, "cpu_offloading_activations": False},
        "cpu_offloading=True, cpu_offloading_activations=False: nothing is left to offload. Leave out",
        {"cpu_offloading_activations": True},
    ),
    Broken(
        "offload-weights",
        {**LAYER_OFFLOAD, "cpu_offloading_weights": True},
        "cpu_offloading_weights=True: it has no effect, since weights stay on the device. Leave it out.",
        {"cpu_offloading_weights": False},
    ),
    Broken(
        "offload-double-buffering",
        {**LAYER_OFFLOAD, "cpu_offloading_double_buffering": True},
        "it has no effect, since each value comes back at a planned moment",
        {"cpu_offloading_double_buffering": False},
    ),
    Broken(
        "offload-pinned-buffers",
        {**LAYER_OFFLOAD, "cpu_offloading_retain_pinned_cpu_buffers": True},
        "it has no effect, since host memory is always kept from step to step",
        {"cpu_offloading_retain_pinned_cpu_buffers": False},
    ),
    Broken(
        "offload-delay",
        {**offload("core_attn"), "delay_offload_until_cuda_graph": True},
        "it has no effect, since no graph is replayed",
        {"delay_offload_until_cuda_graph": False},
    ),
    Broken(
        "fine-grained-and-layers",
        {**LAYER_OFFLOAD, **offload("core_attn")},
        "both would offload",
        {"cpu_offloading": False, "cpu_offloading_num_layers": 0},
    ),
    Broken("offload-modules-empty", OFFLOAD, "nothing to offload is named. Set offload_modules", offload("core_attn")),
    Broken(
        "offload-modules-known",
        offload("atn_norm"),
        "offload_modules=('atn_norm',): nothing is called 'atn_norm'. Did you mean 'attn_norm'?",
        offload("attn_norm"),
    ),
    Broken("offload-modules-without-switch", {"offload_modules": ["core_attn"]}, "nothing is offloaded. Set", OFFLOAD),
    Broken(
        "offload-attn-proj",
        offload("attn_proj"),
        "which core_attn's backward holds. Add core_attn",
        offload("attn_proj", "core_attn"),
    ),
    Broken(
        "offload-gdp-qkv",
        {**offload("gdp_qkv"), **selective("gdp_in_proj")},
        "recompute of gdp_in_proj drops what gdp_qkv would offload",
        selective("gdp_qkv"),
    ),
    Broken(
        "offload-inside-moe",
        {**offload("moe_act", "expert_fc1"), **selective("moe")},
        "recompute of moe drops what moe_act and expert_fc1 would offload",
        selective("layernorm"),
    ),
    Broken(
        "offload-numbers",
        {"min_offloaded_tensor_size": -1},
        "min_offloaded_tensor_size=-1: out of range. Set it to 0 or",
        {"min_offloaded_tensor_size": 0},
    ),
    Broken(
        "offload-numbers",
        {"activation_offload_fraction": 1.5},
        "=1.5: out of range. Set it to 0 to 1.",
        {"activation_offload_fraction": 1},
    ),
    Broken(
        "offload-numbers",
        {"delta_offload_bytes_across_pp_ranks": -1},
        "=-1: out of range",
        {"delta_offload_bytes_across_pp_ranks": 0},
    ),
    Broken(
        "offload-fused-or-parts",
        offload("fused_group_mlp", "moe_act"),
        "fused_group_mlp includes the others. Leave out moe_act",
        offload("moe_act"),
    ),
    Broken(
        "stash-and-layers", {**LAYER_OFFLOAD, "moe_paged_stash": True}, "both would take", {"moe_paged_stash": False}
    ),
    Broken(
        "stash-or-offload",
        {**offload("moe_act"), "moe_paged_stash": True},
        "the stash holds these activations already. Leave out moe_act",
        offload("core_attn"),
    ),
    Broken("mhc-and-mlp", selective("mhc", "mlp"), "mhc recomputes around the mlp", selective("mhc")),
    Broken(
        "mhc-num-layers",
        {**selective("mhc"), "mhc_recompute_layer_num": 0},
        "=0: not a number of layers. Set it to 1",
        {"mhc_recompute_layer_num": 1},
    ),
    Broken(
        "mhc-and-offload", {**selective("mhc"), **offload("core_attn")}, "before its inputs are back", selective("mlp")
    ),
    Broken(
        "gdp-range",
        {"gdp_num_chunk_states_to_recompute": 65},
        "=65: out of range. Set it to 0 to 64",
        {"gdp_num_chunk_states_to_recompute": 64},
    ),
]

WITHIN = [
    Broken(
        "num-layers-range",
        {**FULL, "recompute_num_layers": 9},
        "recompute_num_layers=9: the model has 8 layers",
        {"num_layers": 9},
        {"num_layers": 8},
    ),
    Broken(
        "distribute-without-tensor-parallel",
        {**FULL, "distribute_saved_activations": True},
        "there are no ranks to distribute to",
        {"tensor_model_parallel_size": 2},
    ),
    Broken(
        "distribute-with-sequence-parallel",
        {**FULL, "distribute_saved_activations": True},
        "sequence parallelism has already split",
        {"sequence_parallel": False},
        {"sequence_parallel": True, "tensor_model_parallel_size": 2},
    ),
    Broken(
        "micro-batches-without-pipeline",
        {**BLOCK, **PARTIAL},
        "only a pipeline has several micro-batches in flight. Leave it out, or set pipeline_model_parallel_size",
        {"pipeline_model_parallel_size": 2},
    ),
    Broken(
        "moe-act-needs-experts", selective("moe_act"), "a model without experts has no moe_act", {"num_moe_experts": 8}
    ),
    Broken(
        "mla-up-proj-needs-mla",
        selective("mla_up_proj"),
        "multi_latent_attention=False: the model has no up-projection",
        {"multi_latent_attention": True},
    ),
    Broken(
        "gdn-needs-gdn",
        selective("gdn_norm_out"),
        "experimental_attention_variant='dsa': only a gated delta net",
        {"experimental_attention_variant": "gdn"},
        {"experimental_attention_variant": "dsa"},
    ),
    Broken(
        "offload-num-layers",
        LAYER_OFFLOAD,
        "cpu_offloading_num_layers=1, num_layers=1: all layers cannot be offloaded",
        {"num_layers": 2},
        {"num_layers": 1},
    ),
    Broken(
        "offload-pipeline",
        LAYER_OFFLOAD,
        "cpu_offloading=True, pipeline_model_parallel_size=2: whole layers are",
        {"pipeline_model_parallel_size": 1},
        {"pipeline_model_parallel_size": 2},
    ),
    Broken(
        "offload-delta",
        {**offload("core_attn"), "delta_offload_bytes_across_pp_ranks": 1024},
        "delta_offload_bytes_across_pp_ranks=1024, pipeline_model_parallel_size=1: it has no effect, since only later",
        {"pipeline_model_parallel_size": 2},
    ),
    Broken(
        "offload-fused-needs-fuser",
        offload("fused_group_mlp"),
        "there is no fused MLP of experts",
        {"use_transformer_engine_op_fuser": True},
    ),
    Broken(
        "stash-needs-capacity",
        {"moe_paged_stash": True},
        "without a capacity there is nothing to page",
        {"moe_expert_rank_capacity_factor": 1.0},
    ),
    Broken(
        "graph-impl",
        {},
        "cuda_graph_impl='triton': unknown way to capture",
        {"cuda_graph_impl": "none"},
        {"cuda_graph_impl": "triton"},
    ),
    Broken(
        "graph-layer-offload",
        LAYER_OFFLOAD,
        "a layer's graph cannot hold copies",
        graph("full_iteration"),
        graph("local"),
    ),
    Broken(
        "graph-full",
        FULL,
        "cuda_graph_impl='transformer_engine', cuda_graph_modules=('mlp',): full recompute is only supported",
        graph("full_iteration"),
        graph("transformer_engine", "mlp"),
    ),
    Broken(
        "graph-moe-router",
        selective("moe"),
        "the graph of the router lies inside",
        graph("transformer_engine", "attn"),
        graph("transformer_engine", "moe_router", hidden_dropout=0.0),
    ),
    Broken(
        "graph-attention-dropout",
        selective("core_attn"),
        "attention_dropout=0.1, cuda_graph_impl='local', cuda_graph_modules=('attn',): recomputed code in a graph",
        {"cuda_graph_modules": ("mlp",)},
        graph("local", "attn"),
    ),
    Broken(
        "graph-attention-dropout",
        selective("core_attn"),
        "must not draw random numbers. Set attention_dropout to 0",
        {"attention_dropout": 0.0},
        graph("full_iteration"),
    ),
    Broken(
        "graph-hidden-dropout",
        selective("mlp"),
        "hidden_dropout=0.1, cuda_graph_impl='local'",
        {"hidden_dropout": 0.0},
        graph("local"),
    ),
    Broken(
        "graph-hidden-dropout",
        selective("moe"),
        "leave moe out on one side",
        {"cuda_graph_modules": ("attn",)},
        graph("local", "moe"),
    ),
    Broken(
        "graph-jitter",
        selective("moe"),
        "moe_input_jitter_eps=0.01",
        {"moe_input_jitter_eps": None},
        graph("local", "moe", hidden_dropout=0.0, moe_input_jitter_eps=0.01),
    ),
    Broken(
        "graph-gtp",
        selective("shared_experts"),
        "gtp_weight_remat_size=2, fp8='hybrid'",
        {"gtp_weight_remat_size": 1},
        graph("local", "moe", gtp_weight_remat_size=2, fp8="hybrid", moe_shared_expert_intermediate_size=64),
    ),
    Broken(
        "graph-fine-grained",
        offload("core_attn"),
        "a local graph cannot offload core_attn",
        {"cuda_graph_impl": "transformer_engine"},
        graph("local", "attn"),
    ),
    Broken(
        "graph-fine-grained",
        offload("moe_act"),
        "a graph of the whole layer cannot offload",
        {"cuda_graph_modules": ("attn",)},
        graph("local"),
    ),
    Broken(
        "graph-fine-grained",
        offload("moe_act"),
        "a graph of the experts cannot offload",
        {"cuda_graph_modules": ("attn",)},
        graph("local", "moe"),
    ),
    Broken(
        "graph-fine-grained",
        offload("moe_act"),
        "cuda_graph_warmup_steps=0: a step before the capture learns",
        {"cuda_graph_warmup_steps": 1},
        graph("local", "attn", cuda_graph_warmup_steps=0),
    ),
    Broken(
        "graph-fine-grained",
        offload("moe_act"),
        "a limit on the copies in flight",
        {"cuda_graph_impl": "none"},
        graph("full_iteration"),
    ),
    Broken(
        "graph-offload-version",
        offload("core_attn"),
        "graphs can offload from Transformer Engine 2.14 on",
        {"cuda_graph_impl": "none"},
        graph("transformer_engine", "mlp", transformer_engine_version="2.9"),
    ),
    Broken(
        "graph-norm",
        selective("layernorm"),
        "at the edge of the graph of the router",
        {"cuda_graph_modules": ("moe_router", "moe_preprocess")},
        graph("transformer_engine", "moe_router", moe_token_dispatcher_type="alltoall"),
    ),
    Broken(
        "graph-offload-norm",
        offload("attn_norm"),
        "the input of attn_norm belongs to the graph",
        {"cuda_graph_modules": ("mlp",)},
        graph("transformer_engine", "attn"),
    ),
    Broken(
        "graph-offload-norm",
        offload("mlp_norm"),
        "the input of mlp_norm belongs to the graph",
        {"cuda_graph_modules": ("attn",)},
        graph("transformer_engine", "moe_router"),
    ),
    Broken(
        "mhc-needs-mhc",
        selective("mhc"),
        "there are no hyper-connections. Leave out mhc",
        {"enable_mhc_connections": True},
    ),
    Broken(
        "mhc-without-recompute",
        {},
        "several residual streams per layer. Consider recompute_modules with mhc",
        {"enable_mhc_connections": False},
        {"enable_mhc_connections": True},
    ),
    Broken(
        "mhc-and-full",
        FULL,
        "recompute_granularity='full': no model here has hyper-connections",
        {"enable_mhc_connections": False},
        {"enable_mhc_connections": True},
    ),
    Broken(
        "mhc-and-pipeline",
        selective("mhc"),
        "stages would pass on several residual streams",
        {"pipeline_model_parallel_size": 1},
        {"enable_mhc_connections": True, "pipeline_model_parallel_size": 2},
    ),
    Broken(
        "mhc-and-mtp",
        selective("mhc"),
        "multi-token prediction layers expect one residual stream",
        {"mtp_num_layers": None},
        {"enable_mhc_connections": True, "mtp_num_layers": 1},
    ),
    Broken(
        "expert-overlap",
        FULL,
        "recompute_num_layers=1, overlap_moe_expert_parallel_comm=True: a micro-batch's forward",
        {"overlap_moe_expert_parallel_comm": False},
        {"overlap_moe_expert_parallel_comm": True},
    ),
    Broken(
        "expert-overlap",
        selective("moe"),
        "recompute_modules=('moe',), overlap_moe_expert",
        {"overlap_moe_expert_parallel_comm": False},
        {"overlap_moe_expert_parallel_comm": True},
    ),
    Broken(
        "expert-overlap-offload",
        offload("expert_fc1"),
        "freed early on this path",
        {"moe_flex_dispatcher_backend": "deepep"},
        {
            "overlap_moe_expert_parallel_comm": True,
            "moe_token_dispatcher_type": "flex",
            "moe_flex_dispatcher_backend": "ncclep",
        },
    ),
    Broken(
        "mtp-block",
        {**FULL, "recompute_method": "block"},
        "block recomputes the first ones",
        {"mtp_num_layers": None},
        {"mtp_num_layers": 1},
    ),
]

# Megatron's answer is an error, and here it works, without a word. The doctor says it of Megatron's runs.
FREE = [
    Broken(
        "offload-and-recompute",
        {**LAYER_OFFLOAD, **selective("mlp")},
        "one brings back what the other drops",
        {"recompute_granularity": None, "recompute_modules": None},
    ),
    Broken(
        "offload-transformer-engine",
        offload("core_attn"),
        "modules are offloaded only in Transformer Engine's layers",
        {"transformer_impl": "transformer_engine"},
        {"transformer_impl": "local"},
    ),
    Broken(
        "offload-v1",
        offload("core_attn"),
        "from 2.10 on, this needs the older of its two offload paths",
        {"transformer_engine_version": "2.9.1"},
        {"transformer_engine_version": "2.10.0"},
    ),
    Broken(
        "fp8-delayed",
        selective("layernorm"),
        "delayed scaling records all it sees, and recompute would show it everything twice",
        {"fp8_recipe": "mxfp8"},
        {"fp8": "hybrid", "fp8_recipe": "delayed", "transformer_engine_version": "2.6.0"},
    ),
    Broken(
        "fp8-version",
        selective("moe_act"),
        "the layer after them has to keep its input in 16 bits, which Transformer Engine supports from 2.6 on",
        {"transformer_engine_version": "2.6.0.dev0"},
        {"fp8": "e4m3", "fp8_recipe": "mxfp8", "num_moe_experts": 8, "transformer_engine_version": "2.5.1"},
    ),
]
