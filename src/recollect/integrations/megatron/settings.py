"""Megatron's settings by their names, with their values and defaults: for recompute and offload, and for other rules.

Read in Megatron-LM main at d98e8a64: `TransformerConfig`, whose `recompute_modules` say what happens to the output of each, and
`ModelParallelConfig`. For other settings, a default of 0 or "unknown" there is None here.

The recompute that checked settings ask for is one of four types, none of which can be inconsistent, so no meaningless
combination can reach the compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeAlias

from recollect.errors import ConfigError
from recollect.plans.action import Action

CUDA_GRAPH_MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")

MEGATRON_OUTPUT: Final = {
    **dict.fromkeys(("core_attn", "mlp", "moe", "shared_experts"), Action.KEEP),
    **dict.fromkeys(("layernorm", "moe_act", "mla_up_proj"), Action.RECOMPUTE),
    **dict.fromkeys(("gdn_norm_out", "gdp_in_proj", "gdp_qkv", "mhc"), Action.RECOMPUTE),
}
"""Megatron's action for a module's output: "keep" under `CheckpointFunction`, "recompute" under
`CheckpointWithoutOutput`, which it calls output-discarding."""
MODULES: Final = tuple(MEGATRON_OUTPUT)

OFFLOAD_MODULES: Final = (
    *("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp"),
    "gdp_qkv",
)
"""In the order that a layer runs them."""


@dataclass(frozen=True, slots=True)
class NoRecompute:
    """Keep everything."""

    def __str__(self) -> str:
        return "no recompute"


@dataclass(frozen=True, slots=True)
class UniformFull:
    """Keep the input of every `num_layers`th layer of a model chunk, and nothing else of its layers."""

    num_layers: int

    def __str__(self) -> str:
        return f"full, uniform, {self.num_layers}"


@dataclass(frozen=True, slots=True)
class BlockFull:
    """Keep only the inputs of the first `num_layers` layers of each model chunk, and everything of the rest."""

    num_layers: int

    def __str__(self) -> str:
        return f"full, block, {self.num_layers}"


@dataclass(frozen=True, slots=True)
class Selective:
    """Drop the values that some modules compute; `outputs` says for each whether its output is kept or dropped too."""

    outputs: Mapping[str, Action]

    def __str__(self) -> str:
        return "selective, " + " ".join(self.outputs)


Choice: TypeAlias = NoRecompute | UniformFull | BlockFull | Selective


@dataclass(frozen=True, kw_only=True)
class RecomputeSettings:
    """The settings that the rules check. `RecomputeConfig` describes each of them, and holds them after the checks."""

    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] | list[str] | None = None
    recompute_discard_outputs: tuple[str, ...] | list[str] | None = None
    distribute_saved_activations: bool = False
    moe_layer_recompute: bool = False
    mhc_recompute_layer_num: int | None = None
    gdp_num_chunk_states_to_recompute: int = 2
    moe_enable_routing_replay: bool = False
    num_microbatches_with_partial_activation_checkpoints: int | None = None
    cpu_offloading: bool = False
    cpu_offloading_num_layers: int = 0
    cpu_offloading_activations: bool = True
    cpu_offloading_weights: bool = False
    cpu_offloading_double_buffering: bool = False
    cpu_offloading_retain_pinned_cpu_buffers: bool = False
    fine_grained_activation_offloading: bool = False
    offload_modules: tuple[str, ...] | list[str] = ()
    min_offloaded_tensor_size: int = 1024 * 1024
    delay_offload_until_cuda_graph: bool = False
    delta_offload_bytes_across_pp_ranks: int = 0
    activation_offload_fraction: float = 1.0
    fine_grained_offloading_max_inflight_offloads: int | None = None
    moe_paged_stash: bool = False
    moe_paged_stash_page_size: int = 64
    moe_paged_stash_buffer_size_factor_cuda: float = 1.10
    moe_paged_stash_buffer_size_factor_cpu: float = 0.0

    @property
    def is_selective(self) -> bool:
        return self.recompute_granularity == "selective" or self.moe_layer_recompute

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules to recompute, including Megatron's default and its deprecated setting; () if not selective."""
        if not self.is_selective:
            return ()
        named = ("core_attn",) if self.recompute_modules is None else tuple(self.recompute_modules)
        return (*named, *(["moe"] if self.moe_layer_recompute and "moe" not in named else []))

    @property
    def offloaded(self) -> tuple[str, ...]:
        return tuple(self.offload_modules) if self.fine_grained_activation_offloading else ()

    @property
    def choice(self) -> Choice:
        if self.is_selective:
            outputs = {name: self._output_of(name) for name in MODULES if name in self.modules}
            return Selective(outputs) if outputs else NoRecompute()
        if self.recompute_granularity is None or self.recompute_num_layers is None:
            return NoRecompute()
        kind = UniformFull if self.recompute_method == "uniform" else BlockFull
        return kind(self.recompute_num_layers)

    def _output_of(self, module: str) -> Action:
        if self.recompute_discard_outputs is None:
            return MEGATRON_OUTPUT[module]
        return Action.RECOMPUTE if module in self.recompute_discard_outputs else Action.KEEP

    @classmethod
    def of(cls, model_config: Any) -> Any:
        """Read the settings of Megatron's `TransformerConfig`, or of any object with its attributes."""
        known = _known(cls, model_config)
        if known.get("recompute_granularity") != "selective" and known.get("recompute_modules") == ["core_attn"]:
            del known["recompute_modules"]  # the default, which Megatron fills in whether it has a meaning or not
        return cls(**known)

    def changed(self) -> dict[str, object]:
        """Return the settings that differ from Megatron's defaults, by name, in the order of the fields."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


@dataclass(frozen=True, kw_only=True)
class TrainingSetting:
    """Facts about a training run that the rules for recompute and offload refer to.

    Attributes:
        num_layers: of the whole model, without multi-token prediction; None if unknown.
        num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage: for uneven stages.
        transformer_engine_version: such as "2.6.0"; None if unknown or not installed.
        cuda_graph_modules: the parts that the graph of each layer captures; () or "full" is the whole layer.
        cuda_graph_scope: the old name of `cuda_graph_modules`, where "full_iteration" means the `cuda_graph_impl` of this name.

    All others are as in Megatron.

    Raises:
        ConfigError: a parallel size below 1, an unknown graph module, or both names of the graph modules.

    Example:
        >>> TrainingSetting(num_layers=32, pipeline_model_parallel_size=4).num_layers
        32
    """

    num_layers: int | None = None
    mtp_num_layers: int | None = None
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | Sequence[Sequence[str]] | None = None
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    expert_model_parallel_size: int = 1
    num_moe_experts: int | None = None
    moe_grouped_gemm: bool = False
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_overlap: bool = False
    moe_input_jitter_eps: float | None = None
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "allgather"
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep", "ncclep"] = "deepep"
    moe_latent_size: int | None = None
    moe_expert_rank_capacity_factor: float | None = None
    overlap_moe_expert_parallel_comm: bool = False
    multi_latent_attention: bool = False
    experimental_attention_variant: Literal["gdn", "gdn2", "dsa", "gated_delta_net"] | None = None
    enable_mhc_connections: bool = False
    gdp_cutedsl_kernel: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    fp8: Literal["e4m3", "hybrid"] | None = None
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise", "custom"] = "delayed"
    fp4: Literal["e2m1"] | None = None
    transformer_impl: Literal["local", "transformer_engine", "inference_optimized"] = "transformer_engine"
    transformer_engine_version: str | None = None
    use_transformer_engine_op_fuser: bool = False
    gtp_weight_remat_size: int = 1
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = "none"
    cuda_graph_modules: tuple[str, ...] | list[str] | str = ()
    cuda_graph_scope: tuple[str, ...] | list[str] | str | None = None
    cuda_graph_warmup_steps: int = 3

    def __post_init__(self) -> None:
        for name in ("pipeline", "tensor", "expert"):
            name = f"{name}_model_parallel_size"
            if type(size := getattr(self, name)) is not int or size < 1:
                raise ConfigError(settings={name: size}, reason="not a number of ranks", advice="Set it to 1 or more.")
        if self.cuda_graph_scope is not None and self.cuda_graph_modules not in ((), [], "full", ""):
            raise ConfigError(
                settings={"cuda_graph_scope": self.cuda_graph_scope, "cuda_graph_modules": self.cuda_graph_modules},
                reason="these are two names of one setting",
                advice="Leave out cuda_graph_scope, the old one.",
            )
        given = self.cuda_graph_modules if self.cuda_graph_scope is None else self.cuda_graph_scope
        names = tuple(name for name in (given.split(",") if isinstance(given, str) else given) if name)
        if "full_iteration" in names:
            object.__setattr__(self, "cuda_graph_impl", "full_iteration")
        names = tuple(name for name in names if name not in ("full", "full_iteration"))
        if unknown := [name for name in names if name not in CUDA_GRAPH_MODULES]:
            raise ConfigError(
                settings={"cuda_graph_modules": given},
                reason=f"nothing is called {unknown[0]!r}",
                advice=f"Choose from {', '.join(CUDA_GRAPH_MODULES)}.",
            )
        object.__setattr__(self, "cuda_graph_modules", names)
        object.__setattr__(self, "cuda_graph_scope", None)

    @property
    def captured(self) -> tuple[str, ...]:
        """The parts of each layer that CUDA graphs capture, by the names of `cuda_graph_modules`."""
        if self.cuda_graph_impl == "none":
            return ()
        is_whole = self.cuda_graph_impl == "full_iteration" or not self.cuda_graph_modules
        return CUDA_GRAPH_MODULES if is_whole else tuple(self.cuda_graph_modules)

    @classmethod
    def of(cls, model_config: Any, **others: Any) -> TrainingSetting:
        """Read the settings that a model's configuration has by the same names, such as Megatron's `TransformerConfig`.

        `others` are settings that it lacks, or that differ; those given by neither have their defaults.
        """
        return cls(**{**_known(cls, model_config), **others})


def with_module_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with each list of modules as a tuple, also where it is one text with commas."""
    found = dict(values)
    for name in ("recompute_modules", "recompute_discard_outputs", "offload_modules"):
        if isinstance(given := found.get(name), str):
            found[name] = tuple(part.strip() for part in given.split(",") if part.strip())
        elif isinstance(given, list):
            found[name] = tuple(given)
    return found


def taken_settings(kind: type[RecomputeSettings | TrainingSetting], values: Mapping[str, Any]) -> dict[str, Any]:
    return with_module_lists({f.name: values[f.name] for f in fields(kind) if values.get(f.name) is not None})


def _known(settings: Any, config: Any) -> dict[str, Any]:
    """Return those of the settings that a configuration has; Megatron's newer ones list members of enumerations."""
    found = {f.name: getattr(config, f.name) for f in fields(settings) if hasattr(config, f.name)}
    return {k: [getattr(v, "name", v) for v in its] if isinstance(its, list) else its for k, its in found.items()}
