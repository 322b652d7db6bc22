"""Valid settings for features that recollect lacks. `docs/megatron.md` has the table generated from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from recollect.errors import NotYetError
from recollect.integrations.megatron.recompute_settings import RecomputeSettings
from recollect.integrations.megatron.rule import found
from recollect.integrations.megatron.training_setting import TrainingSetting

__all__ = ["NOT_YET", "Missing", "refuse_not_yet"]

_Of: TypeAlias = Callable[[Any], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A missing feature.

    Attributes:
        settings: names of the settings that ask for it, all of `RecomputeConfig` or all of `TrainingSetting`.
        needs: what recollect would need.
        advice: what to do meanwhile.
        asks: whether they ask for it; by default, whether the first is not None, False or 0.
    """

    settings: tuple[str, ...]
    needs: str
    advice: str
    asks: _Of | None = None

    def values(self, source: object) -> Mapping[str, object] | None:
        """Return the settings with their values if they ask for the feature, else None."""
        is_asked = self.asks(source) if self.asks is not None else bool(getattr(source, self.settings[0]))
        return found(source, *self.settings) if is_asked else None


_BUDGET = "Leave it out; a plan for a budget (recollect.plan) needs no host memory."

NOT_YET = (
    Missing(
        settings=("cpu_offloading", "cpu_offloading_num_layers"),
        needs="values that are copied to host memory and back",
        advice=_BUDGET,
    ),
    Missing(
        settings=("fine_grained_activation_offloading", "offload_modules"),
        needs="values that are copied to host memory and back",
        advice=_BUDGET,
    ),
    Missing(
        settings=("moe_paged_stash",),
        needs="a store for experts' activations in pages",
        advice="Leave it out; recompute_modules with moe or moe_act saves the same activations.",
    ),
    Missing(
        settings=("num_microbatches_with_partial_activation_checkpoints",),
        needs="a stage of a pipeline that runs its micro-batches under different plans",
        advice="Leave it out; every micro-batch then follows the same plan. (In Megatron nothing reads it, issue 767.) "
        "In a pipeline megatron_stage_plans returns a plan for each micro-batch, for recollect.predict_pipeline and "
        "recollect.apply.",
        asks=lambda config: config.num_microbatches_with_partial_activation_checkpoints is not None,
    ),
    Missing(
        settings=("moe_enable_routing_replay",),
        needs="routers that follow recorded choices",
        advice="Leave it out; recompute needs no replay here, because the choices of a router are kept.",
    ),
    Missing(
        settings=("fp8", "fp8_recipe"),
        needs="models that compute in 8 bits, and recipes for their kernels",
        advice="Leave it out; bf16 is there.",
    ),
    Missing(
        settings=("fp4",),
        needs="models that compute in 4 bits, and recipes for their kernels",
        advice="Leave it out; bf16 is there.",
    ),
    Missing(
        settings=("cuda_graph_impl", "cuda_graph_modules"),
        needs="steps that are captured as CUDA graphs with a plan on them",
        advice="Set cuda_graph_impl to 'none'.",
        asks=lambda setting: setting.cuda_graph_impl != "none",
    ),
    Missing(
        settings=("overlap_moe_expert_parallel_comm",),
        needs="exchanges between experts that run beside other work",
        advice="Leave it out.",
    ),
)


def refuse_not_yet(config: RecomputeSettings, setting: TrainingSetting | None) -> None:
    """Raise NotYetError if a setting asks for a missing feature."""
    for missing in NOT_YET:
        source = config if hasattr(config, missing.settings[0]) else setting
        if source is not None and (values := missing.values(source)) is not None:
            raise NotYetError(settings=values, needs=missing.needs, advice=missing.advice)
