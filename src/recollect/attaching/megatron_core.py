"""The models of Megatron's training loop, as `get_model` returns them: wrapped, and one for each virtual stage."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recollect._torch_parallel import megatrons_groups
from recollect.errors import AlreadyAppliedError, ConfigError, RecordError, UnsupportedModelError
from recollect.warning import warn_user

OLDEST_TESTED, NEWEST_TESTED = "0.16.1", "0.19.2"
# Settings of its TransformerConfig that plans cannot work with, and the values that turn them off.
_OFFLOAD = ("cpu_offloading", "fine_grained_activation_offloading", "moe_paged_stash")
_GRAPHS: dict[str, Any] = {"enable_cuda_graph": False, "external_cuda_graph": False, "cuda_graph_impl": "none"}


def models_inside(model: Any) -> Any:
    """Return Megatron's models without its wrappers, which hide module attributes; a single one as itself; others unchanged."""
    chunks = list(model) if isinstance(model, Sequence) and not isinstance(model, str) else [model]
    inside = [_unwrapped(chunk) for chunk in chunks]
    own = [chunk for chunk in inside if _is_megatrons(chunk)]
    if not own:
        return model
    _warn_of_version()
    for chunk in own:
        name, modules = type(chunk).__name__, list(chunk.modules())
        for config in {id(found): found for module in modules if (found := getattr(module, "config", None))}.values():
            _check(name, config)
    _check_stages(own)
    return inside if len(inside) > 1 else inside[0]


def replica_group(model: Any) -> Any:
    """Return the ranks that have the same layers of Megatron's models as this one; None if no others, or for other models."""
    own = [module for module in (model if isinstance(model, list) else [model]) if _is_megatrons(module)]
    if not own:
        return None
    groups = megatrons_groups()
    if groups is None:
        if (size := getattr(getattr(own[0], "config", None), "tensor_model_parallel_size", 1)) > 1:
            raise ConfigError(
                settings={"tensor_model_parallel_size": size},
                reason=f"megatron.core.parallel_state has no groups, and the ranks of {type(own[0]).__name__} are not known",
                advice="Call parallel_state.initialize_model_parallel first; or pass group=, the ranks with the same layers.",
            )
        return None
    group = groups.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return group if group.size() > 1 else None


def _is_megatrons(module: Any) -> bool:
    return any(base.__module__.startswith(("megatron.core.", "megatron_fsdp.")) for base in type(module).__mro__)


def _unwrapped(module: Any) -> Any:
    while isinstance(inner := getattr(module, "module", None), nn.Module) and any(map(_is_megatrons, (module, inner))):
        wrapper, module = type(module), inner
        if wrapper is DistributedDataParallel:
            raise RecordError(
                f"cannot attach to {type(module).__name__}: PyTorch's DistributedDataParallel wraps it, expected Megatron's, "
                "whose gradient buffers its optimizers step from. Pass what get_model returns, which wraps by itself."
            )
        if wrapper.__name__ == "MegatronFSDP":
            raise UnsupportedModelError(
                f"cannot attach to {type(module).__name__}: MegatronFSDP wraps it, which frees parameters after each layer's "
                "forward, and a plan needs them to run ops again. Use --use-distributed-optimizer in its place."
            )
    return module


@functools.cache
def _warn_of_version() -> None:
    version = str(getattr(sys.modules.get("megatron.core"), "__version__", OLDEST_TESTED))
    minor, oldest, newest = ([*map(int, v.split(".")[:2])] for v in (version, OLDEST_TESTED, NEWEST_TESTED))
    if not oldest <= minor <= newest:
        warn_user(
            f"megatron-core {version} has not been tried: recollect is tested with megatron-core {OLDEST_TESTED} and "
            f"{NEWEST_TESTED}. Compare the loss of the first steps with a run without recollect."
        )


def _check_stages(chunks: Sequence[Any]) -> None:
    found = [getattr(chunk, "vp_stage", None) for chunk in chunks]
    size = getattr(getattr(chunks[0], "config", None), "virtual_pipeline_model_parallel_size", None)
    expected = list(range(size or len(chunks)))
    if None not in found and found != expected:
        raise RecordError(
            f"cannot attach to {type(chunks[0]).__name__}: got the virtual stages {found}, expected {expected}. Pass the list "
            "that get_model returns, unchanged."
        )


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
        if getattr(config, setting, off) not in (off, None):
            raise ConfigError(
                settings={setting: getattr(config, setting)},
                reason=f"{name} would run in CUDA graphs, whose kernels a plan cannot run again one by one",
                advice="Leave CUDA graphs off.",
            )
