"""Megatron's flags for recompute and offload, shared by several commands. Imports no torch.

`recollect.integrations.megatron` checks them, with the same rules for flags, YAML and Python.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, arg


@dataclass(frozen=True, kw_only=True)
class OffloadFlags:
    """What to offload to host memory."""

    cpu_offloading_num_layers: int | None = None
    """The first N layers: offload what they save for backward."""
    cpu_offloading_retain_pinned_cpu_buffers: bool = False
    """No effect: host memory is always kept from step to step."""
    fine_grained_activation_offloading: bool = False
    """Offload what the modules in --offload-modules save for backward."""
    offload_modules: tuple[str, ...] | None = None
    """attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, expert_fc1, moe_act, fused_group_mlp."""
    min_offloaded_tensor_size: int | None = None
    """Smallest tensor to offload, in elements."""
    delay_offload_until_cuda_graph: bool = False
    """No effect: no CUDA graph is replayed."""
    delta_offload_bytes_across_pp_ranks: int | None = None
    """How many bytes less each pipeline rank offloads than the one before; no effect, as pipelines cannot offload yet."""
    activation_offload_fraction: float | None = None
    """Fraction of the groups (a module in one layer) to offload, the first ones in forward order."""
    fine_grained_offloading_max_inflight_offloads: int | None = None
    """How many more layers may run until a value has left the device."""


# The names are headings of --help.
_Offload = Annotated[OmitArgPrefixes[OffloadFlags], arg(name="offload", prefix_name=False)]


@dataclass(frozen=True, kw_only=True)
class RecomputeFlags:
    """What to recompute, as Megatron's flags."""

    recompute_activations: bool = False
    """Short for --recompute-granularity selective."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """full: whole layers, chosen by --recompute-method; selective: the modules in --recompute-modules."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full. uniform: keep the input of every Nth layer; block: recompute the first N layers one by one."""
    recompute_num_layers: int | None = None
    """With full: N."""
    recompute_modules: tuple[str, ...] | None = None
    """With selective: core_attn (the default), mlp, moe, shared_experts, layernorm, moe_act, mla_up_proj."""
    num_microbatches_with_partial_activation_checkpoints: int | None = None
    """With full and block in a pipeline: of as many micro-batches as a rank has in flight, those that recompute only N layers;
    the others recompute all."""
    distribute_saved_activations: bool = False
    """Split kept values over the ranks of tensor parallelism: with full, layer inputs; with a budget, wherever it pays."""
    moe_layer_recompute: bool = False
    """Old spelling of --recompute-modules moe."""
    offload: _Offload = field(default_factory=OffloadFlags)

    def __post_init__(self) -> None:
        if self.recompute_activations and self.recompute_granularity == "full":
            raise ValueError(
                "recompute_activations: given with recompute_granularity full, expected one of the two: it is short for "
                "recompute_granularity selective."
            )

    def fields(self) -> dict[str, Any]:
        """Return the fields that were set, as keywords of `RecomputeConfig`; module names are split at commas."""
        given = {**vars(self), **vars(self.offload)}
        del given["recompute_activations"], given["offload"]
        found = {name: value for name, value in given.items() if value is not None and value is not False}
        if self.recompute_activations:
            found["recompute_granularity"] = "selective"
        for name in ("recompute_modules", "offload_modules"):
            if name in found:
                found[name] = tuple(part for text in found[name] for part in text.split(",") if part)
        # Megatron has no flag for `cpu_offloading`.
        if found.get("cpu_offloading_num_layers"):
            found["cpu_offloading"] = True
        return found
