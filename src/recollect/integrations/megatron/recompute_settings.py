"""Megatron's settings for recompute and offload, by their names, with their values and defaults, before any check.

Read in Megatron-LM main at d98e8a64 (`TransformerConfig` and `ModelParallelConfig`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, cast

from recollect.integrations.megatron.choice import (
    MEGATRON_OUTPUT,
    BlockFull,
    Choice,
    ModuleName,
    NoRecompute,
    Selective,
    UniformFull,
)
from recollect.plans.action import Action


@dataclass(frozen=True, kw_only=True)
class RecomputeSettings:
    """The settings that the rules check. `RecomputeConfig` describes each of them, and is these settings once checked."""

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
        """Whether modules inside layers are recomputed."""
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
        """The modules to offload; () if that is not switched on."""
        return tuple(self.offload_modules) if self.fine_grained_activation_offloading else ()

    @property
    def choice(self) -> Choice:
        """The requested recompute, as one of four types."""
        if self.is_selective:
            outputs = {cast(ModuleName, name): self._output_of(cast(ModuleName, name)) for name in self.modules}
            return Selective(outputs) if outputs else NoRecompute()
        if self.recompute_granularity is None or self.recompute_num_layers is None:
            return NoRecompute()
        kind = UniformFull if self.recompute_method == "uniform" else BlockFull
        return kind(self.recompute_num_layers)

    def _output_of(self, module: ModuleName) -> Action:
        if self.recompute_discard_outputs is None:
            return MEGATRON_OUTPUT[module]
        return Action.RECOMPUTE if module in self.recompute_discard_outputs else Action.KEEP

    def changed(self) -> dict[str, object]:
        """Return the settings that differ from Megatron's defaults.

        Returns:
            Values by name, in the order of the fields.

        Example:
            >>> RecomputeSettings(recompute_granularity="selective").changed()
            {'recompute_granularity': 'selective'}
        """
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
