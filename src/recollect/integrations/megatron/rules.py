"""All rules, from rules.yaml, and the checks that apply them: of a `RecomputeConfig`, and of one within a training.

The checks that compare more than single values are here, by the names of the rules.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from recollect.errors import ConfigError, ConfigWarning, NotYetError
from recollect.integrations.megatron.pipeline import chunk_sizes
from recollect.integrations.megatron.rule import Broken, Clash, Rule, read_table, version_of
from recollect.integrations.megatron.settings import MODULES, OFFLOAD_MODULES, RecomputeSettings, TrainingSetting
from recollect.warning import warn_user

# From the settings' annotations.
_TYPES: Final[Mapping[str, tuple[str, tuple[type, ...]]]] = {
    "bool": ("True or False", (bool,)),
    "bool | None": ("True, False or None", (bool, type(None))),
    "int": ("a whole number", (int,)),
    "int | None": ("a whole number or None", (int, type(None))),
    "float": ("a number", (int, float)),
}


def types_clash(config: Any) -> Clash | None:
    for field in fields(config):
        expected, right = _TYPES.get(str(field.type), ("", ()))
        value = getattr(config, field.name)
        # Not isinstance: a bool is an int to Python. And recompute_num_layers has its own rule.
        if expected and type(value) not in right and field.name != "recompute_num_layers":
            return Clash({field.name: value}, f"{type(value).__name__} is the wrong type", f"Set it to {expected}.")
    return None


def num_layers_clash(config: RecomputeSettings, sizes: list[int]) -> Clash | None:
    value = config.recompute_num_layers
    if config.recompute_granularity != "full" or type(value) is not int or value <= max(sizes):
        return None
    chunks = "the model has" if len(sizes) == 1 else f"the largest of {len(sizes)} model chunks has"
    return Clash(
        {"recompute_method": config.recompute_method, "recompute_num_layers": value},
        f"{chunks} {max(sizes)} layers",
        f"Set recompute_num_layers to 1 to {max(sizes)}; it is counted in each virtual pipeline stage.",
    )


def _without_granularity(config: RecomputeSettings) -> Clash | None:
    if config.is_selective or config.recompute_granularity is not None:
        return None
    names = ("recompute_method", "recompute_num_layers", "recompute_modules", "recompute_discard_outputs")
    given = {name: getattr(config, name) for name in names if getattr(config, name)}
    if not given:
        return None
    return Clash(
        {"recompute_granularity": None, **given},
        "without a granularity nothing is recomputed",
        "Set recompute_granularity to 'full' or 'selective', or leave the others out.",
    )


def _is_a_list(config: RecomputeSettings) -> Clash | None:
    for name in ("recompute_modules", "recompute_discard_outputs", "offload_modules"):
        value = getattr(config, name)
        if isinstance(value, str):
            return Clash({name: value}, "a string, not a list", f"Write {[part for part in value.split(',') if part]}.")
        if value is not None and not (isinstance(value, tuple) and all(isinstance(part, str) for part in value)):
            return Clash({name: value}, "not a list of names", "Write a list such as ['core_attn', 'mlp'].")
    return None


def _discarded_is_recomputed(config: RecomputeSettings) -> Clash | None:
    modules = config.modules if config.is_selective else (config.recompute_modules or ())
    others = [name for name in config.recompute_discard_outputs or () if name not in modules]
    if not others:
        return None
    return Clash(
        {"recompute_modules": modules, "recompute_discard_outputs": config.recompute_discard_outputs},
        f"the output of {others[0]!r} can only be dropped if the module is recomputed",
        "Add it to recompute_modules.",
    )


def _numbers(config: RecomputeSettings) -> Clash | None:
    names = ("min_offloaded_tensor_size", "activation_offload_fraction", "delta_offload_bytes_across_pp_ranks")
    for name in (*names, "fine_grained_offloading_max_inflight_offloads"):
        is_fraction, value = name == "activation_offload_fraction", getattr(config, name)
        if value is not None and not 0 <= value <= (1 if is_fraction else math.inf):
            return Clash({name: value}, "out of range", f"Set it to {'0 to 1' if is_fraction else '0 or more'}.")
    return None


def _is_gtp_in_8_bits(config: RecomputeSettings, setting: TrainingSetting) -> bool:
    """Return whether shared experts are recomputed that a local graph captures in 8 or 4 bits."""
    is_captured = setting.cuda_graph_impl == "local" and not {"moe", "moe_router"}.isdisjoint(setting.captured)
    is_8_bit = setting.fp8 is not None or setting.fp4 is not None
    has_shared = setting.moe_shared_expert_intermediate_size is not None and not setting.moe_shared_expert_overlap
    is_gtp = "shared_experts" in config.modules and setting.gtp_weight_remat_size != 1
    return is_gtp and is_captured and is_8_bit and has_shared


def _is_norm_at_edge(config: RecomputeSettings, setting: TrainingSetting) -> bool:
    """Return whether a recomputed norm lies between a router that Transformer Engine captures and uncaptured modules."""
    can_dispatch = setting.moe_token_dispatcher_type == "alltoall" or setting.moe_latent_size is not None
    is_inside = (
        "moe_preprocess" in setting.cuda_graph_modules and can_dispatch and not setting.moe_shared_expert_overlap
    )
    is_captured = setting.cuda_graph_impl == "transformer_engine" and "moe_router" in setting.cuda_graph_modules
    return is_captured and "layernorm" in config.modules and not is_inside


_ALONE: Final[Mapping[str, Callable[[RecomputeSettings], Broken]]] = {
    "types": types_clash,
    "needs-granularity": _without_granularity,
    "moe-layer-recompute": lambda config: (
        config.moe_layer_recompute
        and config.recompute_granularity != "full"
        and [" ".join(config.modules), list(config.modules)]
    ),
    "list-of-modules": _is_a_list,
    "discard-outputs": _discarded_is_recomputed,
    "offload-attn-proj": lambda config: "attn_proj" in config.offloaded and "core_attn" not in config.offloaded,
    "offload-numbers": _numbers,
    "gdp-range": lambda config: not 0 <= config.gdp_num_chunk_states_to_recompute <= 64,
}
"""By the configuration itself."""

_WITHIN: Final[Mapping[str, Callable[[RecomputeSettings, TrainingSetting], Broken]]] = {
    "num-layers-range": lambda config, setting: (
        setting.num_layers is not None and num_layers_clash(config, chunk_sizes(setting, setting.num_layers))
    ),
    "offload-num-layers": lambda config, setting: (
        config.cpu_offloading
        and setting.num_layers is not None
        and config.cpu_offloading_num_layers >= setting.num_layers
        and [setting.num_layers - 1]
    ),
    "offload-v1": lambda config, setting: (
        config.fine_grained_activation_offloading
        and version_of(setting.transformer_engine_version) >= (2, 10)
        and os.environ.get("NVTE_CPU_OFFLOAD_V1") != "1"
    ),
    "graph-gtp": _is_gtp_in_8_bits,
    "graph-offload-version": lambda config, setting: (
        config.fine_grained_activation_offloading
        and setting.cuda_graph_impl == "transformer_engine"
        and setting.transformer_engine_version is not None
        and version_of(setting.transformer_engine_version) < (2, 14)
    ),
    "graph-norm": _is_norm_at_edge,
    "mhc-without-recompute": lambda config, setting: (
        setting.enable_mhc_connections and "mhc" not in config.modules and config.recompute_granularity != "full"
    ),
}
"""Checked against the rest of the training's settings."""

_NAMES: Final = {"recompute_modules": MODULES, "offload_modules": OFFLOAD_MODULES}


def _rule(name: str, entry: dict[str, Any]) -> Rule:
    cases = tuple(_rule(name, {**entry, **case}) for case in entry.pop("cases", ()))
    known, breaks = entry.pop("known", ()), entry.get("breaks", {})
    entry["settings"] = tuple(entry.get("settings", breaks))
    entry.setdefault("advice", "Leave it out." if len(breaks) == 1 else "Leave out one of them.")
    return Rule(
        name=name,
        cases=cases,
        check=_ALONE.get(name) or _WITHIN.get(name),
        needs_training=(
            name in _WITHIN
            or any(hasattr(TrainingSetting, setting) for setting in breaks)
            or any(case.needs_training for case in cases)
        ),
        known=tuple(_NAMES[known] if isinstance(known, str) else known),
        **entry,
    )


_TABLE: Final = read_table(__package__, "rules.yaml")
RULES: tuple[Rule, ...] = tuple(_rule(name, entry) for name, entry in _TABLE["rules"].items())
"""In checking order: rules about single values first."""
NOT_YET: tuple[Rule, ...] = tuple(_rule("", entry) for entry in _TABLE["not yet"])
"""Settings that need a feature recollect lacks."""


def check(config: RecomputeSettings, setting: TrainingSetting | None = None) -> None:
    """Check the rules that compare the configuration with a setting; without one, those that need only the configuration."""
    for rule in RULES:
        if rule.ours != "free" and rule.needs_training == (setting is not None):
            report(rule.name, rule.clash(config, setting))


def check_rule(name: str, config: RecomputeSettings, setting: TrainingSetting) -> None:
    report(name, next(rule for rule in RULES if rule.name == name).clash(config, setting))


def report(name: str, clash: Clash | None) -> None:
    if clash is None:
        return
    error = ConfigError(rule=name, settings=clash.settings, reason=clash.reason, advice=clash.advice)
    if next(rule.ours for rule in RULES if rule.name == name) == "error":
        raise error
    warn_user(str(error), ConfigWarning)


def refuse_not_yet(config: RecomputeSettings, setting: TrainingSetting | None) -> None:
    for missing in NOT_YET:
        if (clash := missing.clash(config, setting)) is not None:
            raise NotYetError(settings=clash.settings, needs=clash.reason, advice=clash.advice)


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig(RecomputeSettings):
    """Megatron's settings for recompute and offload. `megatron_plan` turns it into a plan.

    Attributes:
        recompute_granularity: None keeps all; "full" recomputes whole layers; "selective" the named modules.
        recompute_method: with "full": "uniform" keeps the input of every Nth layer, "block" recomputes the first N layers.
        recompute_num_layers: N, counted in each virtual pipeline stage.
        recompute_modules: with "selective"; None is only core_attn.
        recompute_discard_outputs: the modules whose output is dropped too; None is Megatron's own choice. Megatron
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
        """Check against the rest of the training's settings: model, parallelism, and others that Megatron's rules consider.

        Raises:
            ConfigError: settings that clash; names the rule in docs/megatron.md.

        Warns:
            ConfigWarning: a setting without effect, or with an unexpected one.
        """
        check(self, setting)
