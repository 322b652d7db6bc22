"""Megatron's flags for recompute and offload, for every command that takes them. Imports no torch.

They are read here and judged in `recollect.integrations.megatron`, by one set of rules for flags, YAML and Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tyro.conf import OmitArgPrefixes

__all__ = ["OffloadFlags", "RecomputeFlags"]


@dataclass(frozen=True, kw_only=True)
class OffloadFlags:
    """Which activations go to host memory, in Megatron's words."""

    cpu_offloading_num_layers: int | None = None
    """Layers whose activations are offloaded as a whole."""
    cpu_offloading_retain_pinned_cpu_buffers: bool = False
    """Keep the pinned host buffers of these from step to step."""
    fine_grained_activation_offloading: bool = False
    """Offload what the modules named by --offload-modules save."""
    offload_modules: tuple[str, ...] | None = None
    """attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, expert_fc1, moe_act."""
    min_offloaded_tensor_size: int | None = None
    """Elements below which a tensor stays."""
    delay_offload_until_cuda_graph: bool = False
    """Offload during the replay of CUDA graphs only."""
    delta_offload_bytes_across_pp_ranks: int | None = None
    """Bytes that each pipeline rank offloads less than the one before."""
    activation_offload_fraction: float | None = None
    """Part of what could be offloaded that is."""
    fine_grained_offloading_max_inflight_offloads: int | None = None
    """Copies to the host that may be under way at once."""


@dataclass(frozen=True, kw_only=True)
class RecomputeFlags:
    """Which activations are recomputed, in Megatron's words.

    Example:
        >>> RecomputeFlags(recompute_activations=True).fields()
        {'recompute_granularity': 'selective'}
        >>> RecomputeFlags(recompute_granularity="selective", recompute_modules=("core_attn,mlp", "layernorm")).fields()
        {'recompute_granularity': 'selective', 'recompute_modules': ('core_attn', 'mlp', 'layernorm')}
    """

    recompute_activations: bool = False
    """Short for --recompute-granularity selective."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """full: whole layers, chosen by --recompute-method; selective: the modules named by --recompute-modules."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full. uniform: keep the input of every Nth layer; block: recompute the first N layers one by one."""
    recompute_num_layers: int | None = None
    """With full: N."""
    recompute_modules: tuple[str, ...] | None = None
    """With selective: core_attn (the default), mlp, moe, shared_experts, layernorm, moe_act, mla_up_proj."""
    distribute_saved_activations: bool = False
    """Split the kept inputs of layers among the ranks of tensor parallelism."""
    moe_layer_recompute: bool = False
    """The old spelling of --recompute-modules moe."""
    offload: OmitArgPrefixes[OffloadFlags] = field(default_factory=OffloadFlags)
    """What goes to host memory."""

    def __post_init__(self) -> None:
        if self.recompute_activations and self.recompute_granularity == "full":
            raise ValueError(
                "recompute_activations: got it with recompute_granularity full, expected one of the two: it is short for "
                "recompute_granularity selective."
            )

    def fields(self) -> dict[str, Any]:
        """Return the fields of Megatron's configuration that were set, by its names; all others have their defaults.

        Returns:
            For example the keywords of a `RecomputeConfig`. Module names may have been separated by commas, too.
        """
        given = {**vars(self), **vars(self.offload)}
        del given["recompute_activations"], given["offload"]
        found = {name: value for name, value in given.items() if value is not None and value is not False}
        if self.recompute_activations:
            found["recompute_granularity"] = "selective"
        for name in ("recompute_modules", "offload_modules"):
            if name in found:
                found[name] = tuple(part for text in found[name] for part in text.split(",") if part)
        # The flag for a number of layers is the only one that Megatron has for this kind of offload.
        if found.get("cpu_offloading_num_layers"):
            found["cpu_offloading"] = True
        return found
