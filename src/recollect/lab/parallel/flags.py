"""How a model is spread over devices, as Megatron's flags, for `recollect plan` and `recollect train`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tyro.conf import FlagCreatePairsOff

from recollect.errors import ConfigError
from recollect.lab.parallel.layout import DeviceLayout

__all__ = ["ParallelFlags", "Sharding"]

Sharding = Literal["none", "optimizer", "all"]
"""What the ranks of data parallelism share: nothing (DDP), the optimizer's state (ZeRO-1), or all (FSDP2, ZeRO-3)."""


@dataclass(frozen=True, kw_only=True)
class ParallelFlags:
    """How a model is spread over devices.

    Raises:
        ValueError: two flags clash.

    Example:
        >>> ParallelFlags(tensor_model_parallel_size=2).layout_of(8).data_parallel_size
        4
    """

    tensor_model_parallel_size: int = 1
    """Ranks that share each matrix."""
    sequence_parallel: FlagCreatePairsOff[bool] = False
    """Split what is between the matrices along the sequence, over the same ranks."""
    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of one of several stages that each rank of the pipeline runs in turn."""
    context_parallel_size: int = 1
    """Ranks that share each sequence, in all layers."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that share each expert: all those that share each matrix, or 1."""
    use_distributed_optimizer: FlagCreatePairsOff[bool] = False
    """Share the optimizer's state over data parallelism (ZeRO-1)."""
    use_torch_fsdp2: FlagCreatePairsOff[bool] = False
    """Share weights, gradients and optimizer state over data parallelism (FSDP2)."""

    def __post_init__(self) -> None:
        if self.use_distributed_optimizer and self.use_torch_fsdp2:
            raise ValueError(
                "use_distributed_optimizer: got it with use_torch_fsdp2, expected one of the two: FSDP2 shares the "
                "optimizer's state, too."
            )

    @property
    def sharding(self) -> Sharding:
        """What the ranks of data parallelism share."""
        if self.use_torch_fsdp2:
            return "all"
        return "optimizer" if self.use_distributed_optimizer else "none"

    def layout(self, data_parallel_size: int = 1) -> DeviceLayout:
        """Return the layout with some number of ranks of data parallelism.

        Raises:
            ConfigError: a size is below 1, or sizes clash.
        """
        return DeviceLayout(
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            data_parallel_size=data_parallel_size,
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
            expert_tensor_parallel_size=self.expert_tensor_parallel_size,
            # As in Megatron: without ranks to split it over there is nothing to do.
            sequence_parallel=self.sequence_parallel and self.tensor_model_parallel_size > 1,
            num_layers_per_virtual_pipeline_stage=self.num_layers_per_virtual_pipeline_stage,
        )

    def layout_of_one(self) -> DeviceLayout:
        """Return the layout of a single replica of what is no expert: experts are shared by ranks that are there anyway.

        Raises:
            ConfigError: as `layout`.
        """
        return replace(self, expert_model_parallel_size=1, expert_tensor_parallel_size=None).layout()

    def layout_of(self, world_size: int) -> DeviceLayout:
        """Return the layout of some number of processes; data parallelism has what the other sizes leave.

        Raises:
            ConfigError: they are no multiple of what one model takes; or as `layout`.
        """
        each = self.layout_of_one().num_devices
        if world_size % each:
            sizes = {name: getattr(self, name) for name in _SIZES if getattr(self, name) != 1}
            raise ConfigError(
                settings={"world_size": world_size, **sizes},
                reason=f"one model takes {each} processes",
                advice=f"Start a multiple of {each} processes (torchrun --nproc-per-node), or change the sizes.",
            )
        return self.layout(world_size // each)


_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
