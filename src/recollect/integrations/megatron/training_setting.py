"""The settings that Megatron's rules consider besides recompute and offload: model, parallelism, precision, graphs.

Names and defaults are Megatron's (main at d98e8a64), except that a default of 0 or "unknown" there is None here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from recollect.errors import ConfigError

CUDA_GRAPH_MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")


@dataclass(frozen=True, kw_only=True)
class TrainingSetting:
    """Facts about a training run that the rules for recompute and offload refer to.

    Attributes:
        num_layers: of the whole model, without multi-token prediction; None if unknown.
        num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage: for uneven stages.
        transformer_engine_version: such as "2.6.0"; None if unknown or not installed.
        cuda_graph_modules: what the graph of each layer captures; () or "full" is the whole layer.
        cuda_graph_scope: the old name of `cuda_graph_modules`, where "full_iteration" means that `cuda_graph_impl`.

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
                raise ConfigError(settings={name: size}, reason="no number of ranks", advice="Set it to 1 or more.")
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
        """What CUDA graphs capture of each layer, by the names of `cuda_graph_modules`."""
        if self.cuda_graph_impl == "none":
            return ()
        is_whole = self.cuda_graph_impl == "full_iteration" or not self.cuda_graph_modules
        return CUDA_GRAPH_MODULES if is_whole else tuple(self.cuda_graph_modules)

    @classmethod
    def of(cls, model_config: Any, **others: Any) -> TrainingSetting:
        """Read the settings that a model's configuration has by the same names.

        Args:
            model_config: `recollect.lab.models.config.TransformerConfig`, or any object with Megatron's attributes.
            **others: settings that it lacks, or that differ.

        Returns:
            The settings, with defaults for those given by neither.

        Example:
            >>> from types import SimpleNamespace
            >>> model = SimpleNamespace(num_layers=61, multi_latent_attention=True, hidden_size=7168)
            >>> TrainingSetting.of(model, pipeline_model_parallel_size=4).multi_latent_attention
            True
        """
        known = {f.name: getattr(model_config, f.name) for f in fields(cls) if hasattr(model_config, f.name)}
        return cls(**{**known, **others})
