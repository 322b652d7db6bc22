"""The models of Megatron's training loop, as `get_model` returns them: wrapped, and one for each virtual stage."""

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from recollect.errors import AlreadyAppliedError, ConfigError

# Settings of its TransformerConfig under which it does not run as a plan needs it; with the values that leave it off.
_OFFLOAD = ("cpu_offloading", "fine_grained_activation_offloading")
_GRAPHS: dict[str, Any] = {"enable_cuda_graph": False, "external_cuda_graph": False, "cuda_graph_impl": "none"}


def models_inside(model: Any) -> Any:
    """Return Megatron's models without its wrappers, which hide what modules have; one as itself; others as they are.

    Raises:
        AlreadyAppliedError: one recomputes or offloads by its own settings.
        ConfigError: one runs in CUDA graphs.
    """
    chunks = list(model) if isinstance(model, Sequence) and not isinstance(model, str) else [model]
    inside = [_unwrapped(chunk) for chunk in chunks]
    own = [chunk for chunk in inside if _is_megatrons(chunk)]
    if not own:
        return model
    for chunk in own:
        _check(type(chunk).__name__, getattr(chunk, "config", None))
    return inside if len(inside) > 1 else inside[0]


def replica_group(model: Any) -> Any:
    """Return the ranks that have the same layers of Megatron's models as this one; None if it is alone, or of other models."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not any(map(_is_megatrons, model if isinstance(model, list) else [model])):
        return None
    if not state.model_parallel_is_initialized():
        return None
    group = state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return group if group.size() > 1 else None


def _is_megatrons(module: Any) -> bool:
    return any(base.__module__.startswith("megatron.core.") for base in type(module).__mro__)


def _unwrapped(module: Any) -> Any:
    while _is_megatrons(module) and isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return module


def _check(name: str, config: Any) -> None:
    granularity = getattr(config, "recompute_granularity", None)
    if granularity == "full" or (granularity == "selective" and getattr(config, "recompute_modules", None) != []):
        raise AlreadyAppliedError(
            f"cannot attach to {name}: it recomputes by itself (recompute_granularity={granularity!r}). Leave out "
            "--recompute-granularity; or plan that setting with recollect.megatron_plan, and apply the plan."
        )
    for setting in _OFFLOAD:
        if getattr(config, setting, False):
            raise AlreadyAppliedError(
                f"cannot attach to {name}: it offloads by itself ({setting}=True). Leave that out, and pass host_budget=."
            )
    for setting, off in _GRAPHS.items():
        if getattr(config, setting, off) != off:
            raise ConfigError(
                settings={setting: getattr(config, setting)},
                reason=f"{name} would run in CUDA graphs, whose kernels a plan cannot run again one by one",
                advice="Leave CUDA graphs off.",
            )
