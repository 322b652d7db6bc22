"""`RecomputeConfig`: Megatron's settings for recompute and offload, checked by its rules."""

from __future__ import annotations

from dataclasses import dataclass

from recollect.integrations.megatron.rules import check
from recollect.integrations.megatron.settings import RecomputeSettings, TrainingSetting


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig(RecomputeSettings):
    """What Megatron would recompute and offload. `megatron_plan` turns it into a plan.

    Attributes:
        recompute_granularity: None keeps all; "full" recomputes whole layers; "selective" the named modules.
        recompute_method: with "full": "uniform" keeps the input of every Nth layer, "block" recomputes the first N layers.
        recompute_num_layers: N, counted in each virtual pipeline stage.
        recompute_modules: with "selective"; None is core_attn alone.
        recompute_discard_outputs: those of the modules whose output is dropped too; None is Megatron's own choice. Megatron
            has no such setting.
        distribute_saved_activations: split the kept inputs of layers among the ranks of tensor parallelism.
        moe_layer_recompute: the old spelling of "selective" with "moe" added.
        mhc_recompute_layer_num, gdp_num_chunk_states_to_recompute: of hyper-connections, and of a kernel for gated delta
            products.
        moe_enable_routing_replay: route by recorded choices.
        num_microbatches_with_partial_activation_checkpoints: micro-batches in flight that recompute only in part.
        cpu_offloading, cpu_offloading_num_layers, ...: layers offloaded as a whole.
        fine_grained_activation_offloading, offload_modules, ...: modules whose inputs are offloaded.
            `min_offloaded_tensor_size` counts elements, `delta_offload_bytes_across_pp_ranks` bytes.
        moe_paged_stash, ...: experts' activations in pages of `moe_paged_stash_page_size` tokens.

    Raises:
        ConfigError: an invalid value, or settings that clash; names the rule in docs/megatron.md.

    Warns:
        ConfigWarning: a setting without effect, or a deprecated one.

    Example:
        >>> print(RecomputeConfig(recompute_granularity="selective", recompute_modules=["layernorm", "mlp"]).choice)
        selective, mlp layernorm
        >>> RecomputeConfig(recompute_granularity="full", recompute_method="uniform")
        Traceback (most recent call last):
        recollect.errors.ConfigError: got recompute_granularity='full', recompute_num_layers=None: full recompute needs ...
    """

    def __post_init__(self) -> None:
        for name in ("recompute_modules", "recompute_discard_outputs", "offload_modules"):
            if isinstance(given := getattr(self, name), list):
                object.__setattr__(self, name, tuple(given))
        if self.offload_modules is None:  # Megatron's recipes write None for none.
            object.__setattr__(self, "offload_modules", ())
        check(self)

    def check(self, setting: TrainingSetting) -> None:
        """Check against the rest of the training's settings.

        Args:
            setting: model, parallelism, and whatever else Megatron's rules consider.

        Raises:
            ConfigError: settings that clash; names the rule in docs/megatron.md.

        Warns:
            ConfigWarning: a setting without effect, or with another effect than it seems to have.

        Example:
            >>> from recollect.integrations.megatron import TrainingSetting
            >>> RecomputeConfig(cpu_offloading=True, cpu_offloading_num_layers=2).check(TrainingSetting(num_layers=4))
        """
        check(self, setting)
