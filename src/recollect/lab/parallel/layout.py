"""How a model is spread over devices: the sizes of a layout, and what they must divide. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Final, Literal, get_args

from recollect.errors import ConfigError, NotYetError
from recollect.lab.models.config import TransformerConfig

__all__ = ["DeviceLayout", "ScheduleName"]

ScheduleName = Literal[
    "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
"""Schedules of `torch.distributed.pipelining`, as torchtitan's `pipeline_parallel_schedule` names them."""
_ONE_STAGE: Final = ("1F1B", "GPipe")
_SEVERAL_STAGES: Final = ("Interleaved1F1B", "LoopedBFS")
# The second half of a rank's two stages goes back: the first rank has the first stage and the last.
_V_SHAPED: Final = ("ZBVZeroBubble", "DualPipeV")
_ZERO_BUBBLE: Final = ("InterleavedZeroBubble", *_V_SHAPED)

# From the outermost to the innermost.
_AXES = (
    *("pipeline_model_parallel_size", "data_parallel_size", "context_parallel_size"),
    "tensor_model_parallel_size",
)


@dataclass(frozen=True, kw_only=True)
class DeviceLayout:
    """The sizes of a layout, with Megatron's names; ranks are numbered with tensor innermost, then context, data, pipeline.

    Attributes:
        tensor_model_parallel_size: ranks that share each matrix.
        pipeline_model_parallel_size: ranks that share the layers, in order.
        data_parallel_size: ranks with batches of their own.
        context_parallel_size: ranks that share each sequence.
        expert_model_parallel_size: ranks that share the experts of a layer; they are among those of context and data.
        sequence_parallel: whether what is between the matrices is split along the sequence, by the ranks of `tensor`.
        num_layers_per_virtual_pipeline_stage: layers of one of a rank's several stages; None: each rank has one stage.
        decoder_first_pipeline_num_layers: layers of the first rank; None: as many as the others.
        decoder_last_pipeline_num_layers: layers of the last rank, likewise.
        pipeline_parallel_schedule: in which order ranks run their stages; None: 1F1B, interleaved where a rank has several.

    Raises:
        ConfigError: a size below 1, or sequence parallelism without tensor parallelism.

    Example:
        >>> DeviceLayout(tensor_model_parallel_size=4, pipeline_model_parallel_size=4, data_parallel_size=2).num_devices
        32
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    data_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    sequence_parallel: bool = False
    num_layers_per_virtual_pipeline_stage: int | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    pipeline_parallel_schedule: ScheduleName | None = None

    def __post_init__(self) -> None:
        for name in (*_AXES, "expert_model_parallel_size"):
            if getattr(self, name) < 1:
                _clash({name: getattr(self, name)}, "it counts devices", "Pass 1 or more.")
        for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
            if (layers := getattr(self, name)) is not None and layers < 1:
                _clash({name: layers}, "each rank of a pipeline has layers", "Pass 1 or more.")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            _clash(
                {"sequence_parallel": True, "tensor_model_parallel_size": 1},
                "the sequence is split over the ranks of tensor parallelism",
                "Set tensor_model_parallel_size, or leave sequence_parallel out.",
            )
        self._check_experts()
        layers, ranks = self.num_layers_per_virtual_pipeline_stage, self.pipeline_model_parallel_size
        if layers is not None and (layers < 1 or ranks == 1):
            _clash(
                {"num_layers_per_virtual_pipeline_stage": layers, "pipeline_model_parallel_size": ranks},
                "virtual stages are those of a pipeline of two ranks or more, with one layer or more each",
                "Set pipeline_model_parallel_size, or leave num_layers_per_virtual_pipeline_stage out.",
            )
        self._check_schedule()

    @property
    def is_v_shaped(self) -> bool:
        """Whether a rank has two stages, of which the second ones go back from the last rank to the first."""
        return self.pipeline_parallel_schedule in _V_SHAPED

    @property
    def splits_backward(self) -> bool:
        """Whether stages find the gradients of their input first, and those of their parameters later."""
        return self.pipeline_parallel_schedule in _ZERO_BUBBLE

    def rank_of_stage(self, stage: int) -> int:
        """Return which rank of the pipeline runs a stage.

        Example:
            >>> v = DeviceLayout(pipeline_model_parallel_size=2, pipeline_parallel_schedule="ZBVZeroBubble")
            >>> [v.rank_of_stage(stage) for stage in range(4)]
            [0, 1, 1, 0]
        """
        ranks = self.pipeline_model_parallel_size
        return min(stage, 2 * ranks - 1 - stage) if self.is_v_shaped else stage % ranks

    @property
    def num_devices(self) -> int:
        """Devices of the whole layout."""
        return prod(getattr(self, name) for name in _AXES)

    def check_model(self, config: TransformerConfig, *, seq_length: int | None = None) -> None:
        """Check that a model can be spread like this.

        Every rank gets the same answer, since it depends on the numbers alone.

        Args:
            config: the model.
            seq_length: positions of a sequence; None: not known yet.

        Raises:
            ConfigError: heads, widths, vocabulary, layers or the sequence do not divide; names them.
            NotYetError: tensor parallelism for experts that have biases, or that ranks share.
        """
        ranks = self.tensor_model_parallel_size
        if ranks > 1:
            _check_parts(config, self)
            sizes = {
                "num_attention_heads": config.num_attention_heads,
                "num_query_groups": config.num_query_groups,
                "ffn_hidden_size": config.ffn_hidden_size,
                "vocab_size": config.vocab_size,
            }
            for name, size in sizes.items():
                _check_divides(name, size, "tensor_model_parallel_size", ranks)
        if self.expert_model_parallel_size > 1:
            if config.num_moe_experts is None:
                _clash(
                    {"num_moe_experts": None, "expert_model_parallel_size": self.expert_model_parallel_size},
                    "there are no experts to share",
                    "Leave expert_model_parallel_size out, or choose a model with experts.",
                )
            _check_divides(
                "num_moe_experts",
                config.num_moe_experts or 0,
                "expert_model_parallel_size",
                self.expert_model_parallel_size,
            )
        if seq_length is not None:
            self.check_sequence(seq_length)
        self.layers_of_stages(config.num_layers)

    def check_sequence(self, seq_length: int) -> None:
        """Check that sequences can be split like this.

        Raises:
            ConfigError: their positions do not divide.
        """
        ranks, parts = self.context_parallel_size, self.tensor_model_parallel_size if self.sequence_parallel else 1
        if ranks > 1:
            # Two chunks each, one from the front and one from the back.
            _check_divides("seq_length", seq_length, "2 x context_parallel_size", 2 * ranks)
        if parts > 1:
            by = "tensor_model_parallel_size"
            _check_divides(
                "seq_length", seq_length, by if ranks == 1 else f"context_parallel_size x {by}", ranks * parts
            )

    def layers_of_stages(self, num_layers: int) -> tuple[range, ...]:
        """Return the layers of each stage of the pipeline, in order; `rank_of_stage` says where each runs.

        Raises:
            ConfigError: the layers do not divide.

        Example:
            >>> DeviceLayout(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1).layers_of_stages(
            ...     4
            ... )
            (range(0, 1), range(1, 2), range(2, 3), range(3, 4))
        """
        ranks = self.pipeline_model_parallel_size
        if self.decoder_first_pipeline_num_layers is not None or self.decoder_last_pipeline_num_layers is not None:
            return self._uneven_layers(num_layers)
        _check_divides("num_layers", num_layers, "pipeline_model_parallel_size", ranks)
        each = self.num_layers_per_virtual_pipeline_stage or num_layers // ranks
        if self.is_v_shaped:
            each = self._layers_of_two(num_layers // ranks)
        if (num_layers // ranks) % each:
            _clash(
                {
                    "num_layers": num_layers,
                    "pipeline_model_parallel_size": ranks,
                    "num_layers_per_virtual_pipeline_stage": each,
                },
                f"{num_layers // ranks} layers a rank are no multiple of {each}",
                "Choose sizes that divide.",
            )
        self._check_stages(num_layers // ranks // each)
        return tuple(range(first, first + each) for first in range(0, num_layers, each))

    def _layers_of_two(self, num_layers: int) -> int:
        """Return the layers of each of a rank's two stages."""
        each = self.num_layers_per_virtual_pipeline_stage
        if num_layers % 2 or each not in (None, num_layers // 2):
            _clash(
                {
                    "pipeline_parallel_schedule": self.pipeline_parallel_schedule,
                    "num_layers_per_virtual_pipeline_stage": each,
                },
                f"each rank runs two stages alike, and has {num_layers} layers",
                "Choose sizes that leave an even number of layers a rank, and half of them a virtual stage (the default)."
                if num_layers % 2
                else f"Leave num_layers_per_virtual_pipeline_stage out, or pass {num_layers // 2}.",
            )
        return num_layers // 2

    def _check_schedule(self) -> None:
        """Check that the schedule is one, and has a pipeline."""
        schedule, ranks = self.pipeline_parallel_schedule, self.pipeline_model_parallel_size
        if schedule is None:
            return
        settings = {"pipeline_parallel_schedule": schedule, "pipeline_model_parallel_size": ranks}
        if schedule not in get_args(ScheduleName):
            _clash(settings, "there is no such schedule", f"Choose one of {', '.join(get_args(ScheduleName))}.")
        if ranks == 1:
            _clash(
                settings,
                "a schedule orders the stages of two ranks or more",
                "Set pipeline_model_parallel_size, or leave pipeline_parallel_schedule out.",
            )

    def _check_stages(self, count: int) -> None:
        """Check that the schedule takes as many stages on each rank."""
        schedule = self.pipeline_parallel_schedule
        if (count > 1 and schedule in _ONE_STAGE) or (count == 1 and schedule in _SEVERAL_STAGES):
            _clash(
                {
                    "pipeline_parallel_schedule": schedule,
                    "num_layers_per_virtual_pipeline_stage": self.num_layers_per_virtual_pipeline_stage,
                },
                f"it runs {'one stage' if count > 1 else 'several stages'} on each rank, and there {_are(count)}",
                "Leave num_layers_per_virtual_pipeline_stage out, or choose Interleaved1F1B."
                if count > 1
                else "Set num_layers_per_virtual_pipeline_stage to fewer layers than a rank has, or choose 1F1B.",
            )

    def _uneven_layers(self, num_layers: int) -> tuple[range, ...]:
        """Return the layers of each stage, where the first or the last has its own number of them."""
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        between = self.pipeline_model_parallel_size - (first is not None) - (last is not None)
        rest = num_layers - (first or 0) - (last or 0)
        has_several = self.num_layers_per_virtual_pipeline_stage is not None or self.is_v_shaped
        if between < 1 or rest < between or rest % between or has_several:
            _clash(
                {
                    "num_layers": num_layers,
                    "pipeline_model_parallel_size": self.pipeline_model_parallel_size,
                    "num_layers_per_virtual_pipeline_stage": self.num_layers_per_virtual_pipeline_stage,
                    "decoder_first_pipeline_num_layers": first,
                    "decoder_last_pipeline_num_layers": last,
                    **({"pipeline_parallel_schedule": self.pipeline_parallel_schedule} if self.is_v_shaped else {}),
                },
                f"{rest} layers are left for {between} ranks with one stage each, alike",
                "Choose sizes that leave a multiple.",
            )
        self._check_stages(1)
        sizes = [rest // between] * between
        sizes = [*([] if first is None else [first]), *sizes, *([] if last is None else [last])]
        ends = list(accumulate(sizes))
        return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))

    def check_devices(self, world_size: int) -> None:
        """Check that as many processes run as the layout has devices.

        Raises:
            ConfigError: they do not.
        """
        if world_size != self.num_devices:
            sizes = [f"{name.split('_')[0]} {getattr(self, name)}" for name in _AXES]
            _clash(
                {"world_size": world_size},
                f"the layout has {self.num_devices} devices: {' x '.join(sizes)}",
                f"Start {self.num_devices} processes (torchrun --nproc-per-node), or change the layout.",
            )

    def _check_experts(self) -> None:
        """Check that the ranks that share experts are some of those of context and data parallelism, in a row."""
        experts, context = self.expert_model_parallel_size, self.context_parallel_size
        ranks = self.data_parallel_size * context
        if ranks % experts or (experts % context and context % experts):
            _clash(
                {
                    "expert_model_parallel_size": experts,
                    "data_parallel_size": self.data_parallel_size,
                    "context_parallel_size": context,
                },
                f"experts are shared by some of the {ranks} ranks of data and context parallelism",
                "Choose a divisor of that number which is a multiple of context_parallel_size, or divides it.",
            )


def _check_parts(config: TransformerConfig, layout: DeviceLayout) -> None:
    """Check that experts, if there are any, can be split by channels."""
    ranks = layout.tensor_model_parallel_size
    if config.num_moe_experts is None:
        return
    unfit = {
        "add_bias_linear": config.add_bias_linear or None,
        "expert_model_parallel_size": layout.expert_model_parallel_size
        if layout.expert_model_parallel_size > 1
        else None,
    }
    if found := {name: value for name, value in unfit.items() if value is not None}:
        raise NotYetError(
            settings={**found, "tensor_model_parallel_size": ranks},
            needs="tensor parallelism of experts that have biases, or that ranks share",
            advice="Leave tensor parallelism out for this model.",
        )
    sizes = {
        "moe_ffn_hidden_size": config.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size or 0,
    }
    for name, size in sizes.items():
        _check_divides(name, size, "tensor_model_parallel_size", ranks)
    if config.moe_grouped_gemm:
        # Grouped products read 16 bytes at once.
        _check_divides("moe_ffn_hidden_size", config.moe_ffn_hidden_size, "8 x tensor_model_parallel_size", 8 * ranks)


def _are(count: int) -> str:
    return "is one" if count == 1 else f"are {count}"


def _check_divides(what: str, size: int, by: str, ranks: int) -> None:
    if size % ranks:
        larger = -(-size // ranks) * ranks
        _clash({what: size, by: ranks}, f"{size} is no multiple of {ranks}", f"The next multiple is {larger}.")


def _clash(settings: Mapping[str, object], reason: str, advice: str) -> None:
    raise ConfigError(settings=dict(settings), reason=reason, advice=advice)
