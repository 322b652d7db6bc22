"""How a model is spread over devices, as Megatron's flags. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, arg

from recollect.lab.parallel.flags import ParallelFlags
from recollect.lab.parallel.layout import DeviceLayout
from recollect.lab.parallel.pipeline_layout import ScheduleName

__all__ = ["ClusterFlags", "NodeFlags"]


@dataclass(frozen=True, kw_only=True)
class NodeFlags:
    """How devices are connected."""

    devices_per_node: int | None = None
    """Devices in a node; default: 8."""
    node_link: str | None = None
    """Link between devices of a node, such as "NVLink 4" or "PCIe 5"; default: the usual one of the hardware."""
    network_link: str | None = None
    """Link between nodes, such as "InfiniBand NDR"; default: likewise."""


@dataclass(frozen=True, kw_only=True)
class ClusterFlags(ParallelFlags):
    """With --fake: plan for many devices, none of which is needed.

    Example:
        >>> ClusterFlags(tensor_model_parallel_size=4).is_given, ClusterFlags().is_given
        (True, False)
    """

    pipeline_parallel_schedule: ScheduleName | None = None
    """In which order ranks run their stages, with the names of torchtitan; default: 1F1B, or Interleaved1F1B where a rank has
    several. ZBVZeroBubble and DualPipeV run two on each rank."""
    pipeline_split: Literal["auto"] | tuple[int, ...] | None = None
    """Layers of each stage, such as 19 20 20 21; auto chooses them together with the plans; default: as many in each."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first rank of the pipeline; default: as many as the others."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last rank of the pipeline, likewise."""
    data_parallel_size: int = 1
    """Ranks with micro-batches of their own; in Megatron what is left of the devices."""
    global_batch_size: int | None = None
    """Sequences of a step on all devices; default: four micro-batches a rank of the pipeline, or one without a pipeline."""
    distribute_saved_activations: FlagCreatePairsOff[bool] = False
    """Let plans have each rank of tensor parallelism hold a part of what is the same on all of them."""
    pipeline_engine: Literal["torch", "megatron"] = "torch"
    """Whose pipelines: torch's hold receive buffers for all micro-batches, Megatron's free what they received and sent."""
    node: Annotated[OmitArgPrefixes[NodeFlags], arg(name="node", prefix_name=False)] = field(default_factory=NodeFlags)
    """How devices are connected."""

    def layout(self, data_parallel_size: int = 1) -> DeviceLayout:
        """Return the layout with some number of ranks of data parallelism.

        Raises:
            ConfigError: a size is below 1, or sizes clash.
        """
        return replace(
            super().layout(data_parallel_size),
            decoder_first_pipeline_num_layers=self.decoder_first_pipeline_num_layers,
            decoder_last_pipeline_num_layers=self.decoder_last_pipeline_num_layers,
            pipeline_split=None if self.pipeline_split == "auto" else self.pipeline_split,
            pipeline_parallel_schedule=self.pipeline_parallel_schedule,
        )

    @property
    def is_given(self) -> bool:
        """Whether there is more than one device, or a flag that asks for it."""
        return self != ClusterFlags(node=self.node)
