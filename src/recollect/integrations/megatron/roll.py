"""Read ROLL's recompute settings: for its Megatron strategies, and its two switches for Hugging Face models.

Read in ROLL main at 8eb27cc2 (`mcore_adapter/.../training_args.py`, `model_config.py`, `roll/configs/model_args.py`,
`roll/models/model_providers.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from recollect.errors import ConfigError
from recollect.integrations.megatron.compile import megatron_plan
from recollect.integrations.megatron.rule import did_you_mean
from recollect.integrations.megatron.rules import RecomputeConfig, types_clash
from recollect.integrations.megatron.settings import with_module_lists
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile

_SETTINGS = tuple(field.name for field in fields(RecomputeConfig))
_OURS = ("recompute", "offload", "cpu_offload", "distribute_saved", "moe_layer_recompute", "moe_paged", "fine_grained")
_MOE_FIELDS = (
    *("num_experts", "n_experts", "moe_num_experts", "num_local_experts", "num_experts_per_tok"),
    *("router_aux_loss_coef", "output_router_logits", "moe_layer_freq"),
)


def roll_recompute_config(settings: Mapping[str, Any]) -> RecomputeConfig:
    """Read the recompute settings of a ROLL strategy for Megatron.

    Modules may be one text, separated by commas. "full" without method and number of layers means "uniform" and 1.
    `additional_configs` count like the other settings. Settings about other things are ignored.

    Raises:
        ConfigError: as `RecomputeConfig`; also a name that looks like one of these settings and is none, or `recompute_method:
            recompute`, which ROLL's help offers and Megatron rejects.

    Example:
        >>> str(roll_recompute_config({"recompute_granularity": "full", "tensor_model_parallel_size": 2}).choice)
        'full, uniform, 1'
    """
    given = {**settings, **(settings.get("additional_configs") or {})}
    for name, value in given.items():
        if name not in _SETTINGS and name.startswith(_OURS):
            advice = f"{did_you_mean(name, _SETTINGS)}Remove it, or write it as Megatron does."
            raise ConfigError(settings={name: value}, reason="there is no such setting", advice=advice)
    found = with_module_lists({name: given[name] for name in _SETTINGS if name in given})
    if found.get("recompute_method") == "recompute":
        raise ConfigError(
            settings={"recompute_method": "recompute"},
            reason="ROLL offers it by mistake, and Megatron rejects it",
            advice="Set it to 'block', which is what its help describes.",
            rule="method",
        )
    return RecomputeConfig(**with_roll_defaults(found))


def with_roll_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    is_bare = settings.get("recompute_method") is None and settings.get("recompute_num_layers") is None
    is_full = settings.get("recompute_granularity") == "full"
    return {**settings, **({"recompute_method": "uniform", "recompute_num_layers": 1} if is_bare and is_full else {})}


@dataclass(frozen=True, kw_only=True)
class RollCheckpointing:
    """ROLL's switches for models of Hugging Face, under FSDP or DeepSpeed.

    Attributes:
        disable_gradient_checkpointing: keep everything; otherwise each layer is recomputed.
        gradient_checkpointing_use_reentrant: which of PyTorch's two implementations. None: chosen by `use_reentrant`. On
            the tape there is one, with the limits of neither.

    Raises:
        ConfigError: a value other than True, False or None.

    Example:
        >>> RollCheckpointing().use_reentrant({"num_local_experts": 8})
        True
    """

    disable_gradient_checkpointing: bool | None = False
    gradient_checkpointing_use_reentrant: bool | None = None

    def __post_init__(self) -> None:
        if (clash := types_clash(self)) is not None:
            raise ConfigError(settings=clash.settings, reason=clash.reason, advice=clash.advice)

    def use_reentrant(self, model_config: object) -> bool:
        """Return the flag that ROLL passes to PyTorch: the one set, else whether the model has experts."""
        chosen = self.gradient_checkpointing_use_reentrant
        return is_moe_config(model_config) if chosen is None else chosen


def is_moe_config(model_config: object) -> bool:
    """Return whether ROLL treats a model as having experts: whether one of certain fields is set, not None, 0 or False.

    A dense model whose configuration has `router_aux_loss_coef` passes for one, as it does in ROLL. The configuration is one of
    Hugging Face, or its dictionary; of several, that of the text model counts.
    """

    def get(config: object, name: str) -> Any:
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    text_config = get(model_config, "text_config")
    return any(get(text_config or model_config, name) not in (None, 0, False) for name in _MOE_FIELDS)


def roll_plan(profile: Profile, checkpointing: RollCheckpointing) -> Plan:
    """Return ROLL's switches as a plan without a budget: every layer recomputed from its input, or nothing.

    Example:
        >>> from recollect.profile.events import StepLog
        >>> empty = Profile((), (), StepLog(), step_s=0.0)
        >>> roll_plan(empty, RollCheckpointing(disable_gradient_checkpointing=True)).note
        'ROLL: no gradient checkpointing'
    """
    if checkpointing.disable_gradient_checkpointing:
        return megatron_plan(profile, RecomputeConfig()).with_note("ROLL: no gradient checkpointing")
    full = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return megatron_plan(profile, full).with_note("ROLL: gradient checkpointing of each layer")
