"""The layout of a model over devices: its sizes, the numbers that they must divide, and the flags that set them.

The flags are Megatron's, for `recollect plan` and `recollect train`. Imports no torch.
"""

from dataclasses import dataclass, fields, replace
from math import prod
from typing import Literal

from tyro.conf import FlagCreatePairsOff

from recollect.errors import ConfigWarning, NotYetError
from recollect.lab.models.config import TransformerConfig
from recollect.lab.parallel.pipeline_layout import PipelineLayout, check_divides, clash
from recollect.warning import warn_user

Sharding = Literal["none", "optimizer", "all"]
"""The state that data-parallel ranks share: nothing (DDP), the optimizer's state (ZeRO-1), or all (FSDP2, ZeRO-3)."""

# From the outermost to the innermost.
_AXES = (
    *("pipeline_model_parallel_size", "data_parallel_size", "context_parallel_size"),
    "tensor_model_parallel_size",
)
_FLAGS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    "expert_model_parallel_size",
)


@dataclass(frozen=True, kw_only=True)
class DeviceLayout(PipelineLayout):
    """The sizes of a layout, with Megatron's names; ranks are numbered with tensor innermost, then context, data, pipeline."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each matrix."""
    sequence_parallel: bool = False
    """Split tensors between the matrices along the sequence, over the same ranks."""
    data_parallel_size: int = 1
    """Ranks with their own batches."""
    context_parallel_size: int = 1
    """Ranks that share each sequence, in all layers."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts; they are among the context and data ranks."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that share each expert: all those that share each matrix, or 1; None: all. With 1, the ranks of tensor are
    among those that share the experts of a layer."""

    def __post_init__(self) -> None:
        for name in (*_AXES, "expert_model_parallel_size"):
            if getattr(self, name) < 1:
                clash({name: getattr(self, name)}, "it counts devices", "Pass 1 or more.")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            clash(
                {"sequence_parallel": True, "tensor_model_parallel_size": 1},
                "the sequence is split over the ranks of tensor parallelism",
                "Set tensor_model_parallel_size, or leave sequence_parallel out.",
            )
        self._check_whole_experts()
        self._check_experts()
        self.check_pipeline()

    @property
    def has_whole_experts(self) -> bool:
        return self.tensor_model_parallel_size > 1 and self.expert_tensor_parallel_size == 1

    @property
    def num_devices(self) -> int:
        return prod(getattr(self, name) for name in _AXES)

    def check_model(self, config: TransformerConfig, *, seq_length: int | None = None) -> None:
        """Check that a model can be spread like this, with the same answer on every rank: it depends only on the numbers."""
        ranks = self.tensor_model_parallel_size
        if ranks > 1:
            _check_parts(config, ranks, has_whole_experts=self.has_whole_experts)
            for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "vocab_size"):
                check_divides(name, getattr(config, name), "tensor_model_parallel_size", ranks)
        experts = self.expert_model_parallel_size
        if experts > 1:
            if config.num_moe_experts is None:
                clash(
                    {"num_moe_experts": None, "expert_model_parallel_size": experts},
                    "there are no experts to share",
                    "Leave expert_model_parallel_size out, or choose a model with experts.",
                )
            check_divides("num_moe_experts", config.num_moe_experts or 0, "expert_model_parallel_size", experts)
        if seq_length is not None:
            self.check_sequence(seq_length)
        self.layers_of_stages(config.num_layers)

    def check_sequence(self, seq_length: int) -> None:
        ranks, parts = self.context_parallel_size, self.tensor_model_parallel_size if self.sequence_parallel else 1
        if ranks > 1:
            # Two chunks each, one from the front and one from the back.
            check_divides("seq_length", seq_length, "2 x context_parallel_size", 2 * ranks)
        if parts > 1:
            by = "tensor_model_parallel_size"
            check_divides(
                "seq_length", seq_length, by if ranks == 1 else f"context_parallel_size x {by}", ranks * parts
            )

    def check_devices(self, world_size: int) -> None:
        if world_size != self.num_devices:
            sizes = [f"{name.split('_')[0]} {getattr(self, name)}" for name in _AXES]
            clash(
                {"world_size": world_size},
                f"the layout has {self.num_devices} devices: {' x '.join(sizes)}",
                f"Start {self.num_devices} processes (torchrun --nproc-per-node), or change the layout.",
            )

    def _check_whole_experts(self) -> None:
        tensor, whole = self.tensor_model_parallel_size, self.expert_tensor_parallel_size
        sizes = {"expert_tensor_parallel_size": whole, "tensor_model_parallel_size": tensor}
        if whole not in (None, 1, tensor):
            clash(
                sizes,
                "experts are split over all ranks of tensor parallelism, or not at all",
                f"Pass {tensor} or 1, or leave it out.",
            )
        if not self.has_whole_experts:
            return
        if not self.sequence_parallel:
            clash(
                {**sizes, "sequence_parallel": False},
                "each rank of tensor parallelism sends the tokens of its own part of a sequence to experts",
                "Set sequence_parallel.",
            )
        if self.expert_model_parallel_size % tensor:
            raise NotYetError(
                settings={**sizes, "expert_model_parallel_size": self.expert_model_parallel_size},
                needs="the same whole experts on several ranks of tensor parallelism",
                advice=f"Set expert_model_parallel_size to a multiple of {tensor}, or leave expert_tensor_parallel_size out.",
            )

    def _check_experts(self) -> None:
        """Check that the ranks that share experts are consecutive ranks of context and data parallelism."""
        experts, context = self.expert_model_parallel_size, self.context_parallel_size
        beside, times = "", "."
        if self.has_whole_experts:
            experts //= self.tensor_model_parallel_size
            beside, times = ", and by all of tensor parallelism", f", times {self.tensor_model_parallel_size}."
        ranks = self.data_parallel_size * context
        if ranks % experts or (experts % context and context % experts):
            clash(
                {
                    "expert_model_parallel_size": self.expert_model_parallel_size,
                    "data_parallel_size": self.data_parallel_size,
                    "context_parallel_size": context,
                },
                f"experts are shared by some of the {ranks} ranks of data and context parallelism{beside}",
                "Choose a divisor of that number which is a multiple of context_parallel_size, or divides it" + times,
            )


def _check_parts(config: TransformerConfig, ranks: int, *, has_whole_experts: bool) -> None:
    """Check that experts, if there are any, can be split by channels; where they are whole, the shared one."""
    if config.num_moe_experts is None:
        return
    shared_size = config.moe_shared_expert_intermediate_size or 0
    by = "tensor_model_parallel_size"
    if has_whole_experts:
        check_divides("moe_shared_expert_intermediate_size", shared_size, by, ranks)
        return
    if config.add_bias_linear:
        raise NotYetError(
            settings={"add_bias_linear": True, "tensor_model_parallel_size": ranks},
            needs="tensor parallelism of experts that have biases",
            advice="Leave tensor parallelism out for this model.",
        )
    check_divides("moe_ffn_hidden_size", config.moe_ffn_hidden_size, by, ranks)
    check_divides("moe_shared_expert_intermediate_size", shared_size, by, ranks)
    if config.moe_grouped_gemm:
        # Grouped products read 16 bytes at once.
        check_divides("moe_ffn_hidden_size", config.moe_ffn_hidden_size, "8 x tensor_model_parallel_size", 8 * ranks)


_SIZES = {field.name for field in fields(DeviceLayout)}


@dataclass(frozen=True, kw_only=True)
class ParallelFlags:
    """How a model is spread over devices."""

    tensor_model_parallel_size: int = 1
    sequence_parallel: FlagCreatePairsOff[bool] = False
    pipeline_model_parallel_size: int = 1
    num_layers_per_virtual_pipeline_stage: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
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
        if self.use_torch_fsdp2:
            return "all"
        return "optimizer" if self.use_distributed_optimizer else "none"

    def layout(self, data_parallel_size: int = 1) -> DeviceLayout:
        # A pipeline_split of "auto" is chosen with the plans.
        sizes = {name: value for name, value in vars(self).items() if name in _SIZES and value != "auto"}
        # As in Megatron: without ranks to split it over there is nothing to do.
        sizes["sequence_parallel"] = self.sequence_parallel and self.tensor_model_parallel_size > 1
        return DeviceLayout(**{**sizes, "data_parallel_size": data_parallel_size})

    def layout_of_one(self) -> DeviceLayout:
        """Return the layout of one replica of everything but experts, which are shared by ranks that exist anyway."""
        return replace(self, expert_model_parallel_size=1, expert_tensor_parallel_size=None).layout()

    def layout_of(self, world_size: int) -> DeviceLayout:
        """Return the layout of some number of processes; data parallelism gets the ranks that the other sizes leave."""
        each = self.layout_of_one().num_devices
        if world_size % each:
            sizes = {name: getattr(self, name) for name in _FLAGS if getattr(self, name) != 1}
            clash(
                {"world_size": world_size, **sizes},
                f"one model takes {each} processes",
                f"Start a multiple of {each} processes (torchrun --nproc-per-node), or change the sizes.",
            )
        found = self.layout(world_size // each)
        if self.sharding != "none" and found.data_parallel_size * found.context_parallel_size == 1:
            name = "use_torch_fsdp2" if self.use_torch_fsdp2 else "use_distributed_optimizer"
            warn_user(
                f"{name}=True: no effect, since there are no ranks of data parallelism to share with. "
                f"Start {2 * each} processes or more (torchrun --nproc-per-node), or leave it out.",
                ConfigWarning,
            )
        return found
