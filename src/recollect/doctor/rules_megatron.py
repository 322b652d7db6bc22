"""What Megatron-LM and Megatron Bridge print when they refuse settings, by the text of their errors."""

from __future__ import annotations

from recollect.doctor.passage import TextRule

__all__ = ["MEGATRON_TEXT_RULES"]

_EXPLAIN = "See what a configuration keeps, layer by layer: recollect explain --yaml CONFIG.yaml."

MEGATRON_TEXT_RULES = (
    TextRule(
        name="megatron-full-and-graphs",
        sees='"full recompute is only supported with full iteration CUDA graph", "recompute_granularity must not be full ..."',
        pattern=r"[Ff]ull recompute is only supported with full iteration CUDA graph"
        r"|recompute_granularity must not be full when CUDA Graphs are enabled",
        problem="Recompute of whole layers clashes with CUDA graphs of single layers.",
        cause="A graph of a layer cannot lie inside a layer that runs again. FP8 recipes often switch such graphs on "
        "(cuda_graph_impl=transformer_engine with a cuda_graph_scope).",
        fix=(
            "Recompute modules instead: --recompute-granularity selective --recompute-modules core_attn.",
            "Or switch the graphs off: --cuda-graph-impl none.",
            "Or capture the whole step: cuda_graph_impl=local with cuda_graph_scope=full_iteration (in later versions "
            "cuda_graph_impl=full_iteration).",
        ),
        source="megatron/core/transformer/transformer_config.py, megatron/training/arguments.py",
    ),
    TextRule(
        name="megatron-selective-with-method",
        sees='"recompute method is not yet supported for selective ..."',
        pattern=r"recompute method is not yet supported for\s+selective"
        r"|recompute_method: \S+ must be None when recompute_granu\w+ is selective",
        problem="--recompute-method was given with --recompute-granularity selective.",
        cause="uniform and block choose whole layers, so they belong to full; selective recomputes its modules in every layer.",
        fix=("Leave out --recompute-method and --recompute-num-layers, or use --recompute-granularity full.",),
        source="megatron/training/arguments.py",
    ),
    TextRule(
        name="megatron-full-without-method",
        sees='"Using recompute_granularity: full so recompute_method must be ...", and for its number of layers',
        pattern=r"recompute_granu\w+: full (?:so )?recompute_(?P<what>method|num_layers) must be",
        problem="--recompute-granularity full was given without recompute_{what}.",
        cause="full has to be told which layers: uniform keeps the input of every Nth layer, block recomputes the first N "
        "layers of each stage.",
        fix=("Add --recompute-method uniform --recompute-num-layers 1.", _EXPLAIN),
        source="megatron/core/transformer/transformer_config.py",
    ),
    TextRule(
        name="megatron-offload-and-pipeline",
        sees='"no support for Pipeline parallelism with CPU offloading"',
        pattern=r"no support for Pipeline parallelism with CPU offloading",
        problem="Offload of layers (cpu_offloading) does not work with pipeline parallelism.",
        cause="It reloads layers in the order of one micro-batch; a pipeline has several in flight.",
        fix=(
            "Set --pipeline-model-parallel-size 1, or leave out cpu_offloading and recompute instead.",
            "Or offload modules: --fine-grained-activation-offloading --offload-modules, which pipelines allow.",
        ),
        source="megatron/core/transformer/transformer_config.py",
    ),
    TextRule(
        name="megatron-offload-and-recompute",
        sees='"CPU offloading does not work when activation recomputation is enabled"',
        pattern=r"CPU offloading does not work when activation recomputation is enabled",
        problem="Offload of layers (cpu_offloading) and recompute are both on.",
        cause="What a recomputed layer reads would have to come back from the host first; Megatron allows one of them.",
        fix=("Leave one out. --fine-grained-activation-offloading works beside selective recompute.",),
        source="megatron/core/transformer/transformer_config.py",
    ),
    TextRule(
        name="megatron-offload-layers",
        sees='"CPU offloading can be done only for layers less than ..."',
        pattern=r"CPU offloading can be done only for layers less than (?P<layers>\d+)",
        problem="cpu_offloading_num_layers must be below the model's {layers} layers.",
        cause="The last layer's backward runs at once, so there is no time to bring it back.",
        fix=("Set --cpu-offloading-num-layers to less than {layers}.",),
        source="megatron/core/transformer/transformer_config.py",
    ),
    TextRule(
        name="megatron-offload-and-graphs",
        sees='"CUDA graphs not supported with CPU offloading"',
        pattern=r"CUDA graphs not supported with CPU offloading",
        problem="Offload of layers (cpu_offloading) clashes with CUDA graphs.",
        cause="A layer's graph cannot hold copies to the host.",
        fix=("Set --cuda-graph-impl none, or leave out cpu_offloading.",),
        source="megatron/core/transformer/transformer_config.py",
    ),
    TextRule(
        name="megatron-distribute",
        sees='"distribute recomputed activations only across tensor model parallel groups" and its like',
        pattern=r"distribute recomputed activations only across tensor model parallel"
        r"|distributed recompute activations is only application to full"
        r"|distribute_saved_activations: .* must be false when sequence parallel",
        problem="--distribute-saved-activations does not fit the other settings.",
        cause="It splits the kept inputs of recomputed layers among the ranks of tensor parallelism: it needs full recompute, "
        "more than one such rank, and no sequence parallelism, which splits them already.",
        fix=("Leave it out; with --sequence-parallel the same is done without it.",),
        source="megatron/training/arguments.py, megatron/core/transformer/transformer_config.py",
    ),
    TextRule(
        name="megatron-uniform-rest",
        sees="an index error in Megatron's _checkpointed_forward",
        pattern=r"IndexError: .*(?:index \d+ is out of range|out of range)",
        near=r"_checkpointed_forward|transformer_block\.py",
        problem="uniform recompute ran past the last layer of a stage.",
        cause="recompute_num_layers does not divide the layers of a (virtual) pipeline stage, which older versions of Megatron "
        "did not expect.",
        fix=("Choose a divisor of the layers per (virtual) stage, or update Megatron.", _EXPLAIN),
        source="NVIDIA/Megatron-LM#1807",
        certainty="likely",
    ),
)
