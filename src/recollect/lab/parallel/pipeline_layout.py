"""The sizes of a pipeline: which layers are on which stage, and which stages on which rank. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal, get_args

from recollect.errors import ConfigError

ScheduleName = Literal[
    "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
"""Schedules of `torch.distributed.pipelining`, as torchtitan's `pipeline_parallel_schedule` names them."""
_ONE_STAGE: Final = ("1F1B", "GPipe")
_SEVERAL_STAGES: Final = ("Interleaved1F1B", "LoopedBFS")
# Second stages are in reverse order: the first rank has the first stage and the last.
_V_SHAPED: Final = ("ZBVZeroBubble", "DualPipeV")
_ZERO_BUBBLE: Final = ("InterleavedZeroBubble", *_V_SHAPED)

# Fields below, in messages.
_RANKS: Final = "pipeline_model_parallel_size"
_EACH: Final = "num_layers_per_virtual_pipeline_stage"
_SCHEDULE: Final = "pipeline_parallel_schedule"


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """The part of a layout that describes its pipeline."""

    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers; in order."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers per stage where each rank of the pipeline runs several stages in turn; None: each rank has one stage."""
    pipeline_split: tuple[int, ...] | None = None
    """Layers of each stage, in order; None: determined by the two above."""
    pipeline_parallel_schedule: ScheduleName | None = None
    """The order in which ranks run their stages; None: 1F1B, interleaved where a rank has several."""

    def check_pipeline(self) -> None:
        layers, ranks = self.num_layers_per_virtual_pipeline_stage, self.pipeline_model_parallel_size
        if layers is not None and (layers < 1 or ranks == 1):
            clash(
                {_EACH: layers, _RANKS: ranks},
                "virtual stages are those of a pipeline of two ranks or more, with one layer or more each",
                "Set pipeline_model_parallel_size, or leave num_layers_per_virtual_pipeline_stage out.",
            )
        self._check_schedule()
        self._check_split()

    @property
    def is_v_shaped(self) -> bool:
        """Whether a rank has two stages, with the second ones ordered from the last rank back to the first."""
        return self.pipeline_parallel_schedule in _V_SHAPED

    @property
    def splits_backward(self) -> bool:
        """Whether stages compute the gradients of their input first, and of their parameters later."""
        return self.pipeline_parallel_schedule in _ZERO_BUBBLE

    def rank_of_stage(self, stage: int) -> int:
        """Return which rank of the pipeline runs a stage.

        Example:
            >>> v = PipelineLayout(pipeline_model_parallel_size=2, pipeline_parallel_schedule="ZBVZeroBubble")
            >>> [v.rank_of_stage(stage) for stage in range(4)]
            [0, 1, 1, 0]
        """
        ranks = self.pipeline_model_parallel_size
        return min(stage, 2 * ranks - 1 - stage) if self.is_v_shaped else stage % ranks

    def num_stages(self, num_layers: int) -> int:
        """Return the stages of all ranks, where layers need not divide: virtual ones have the requested size on average."""
        if self.pipeline_split is not None:
            return len(self.pipeline_split)
        ranks, each = self.pipeline_model_parallel_size, self.num_layers_per_virtual_pipeline_stage
        several = 1 if each is None else max(1, num_layers // (ranks * each))
        return ranks * (2 if self.is_v_shaped else several)

    def layers_of_stages(self, num_layers: int) -> tuple[range, ...]:
        """Return the layers of each stage of the pipeline, in order; `rank_of_stage` says where each runs."""
        ranks = self.pipeline_model_parallel_size
        if self.pipeline_split is not None:
            return self._split_layers(self.pipeline_split, num_layers)
        check_divides("num_layers", num_layers, _RANKS, ranks)
        each = self.num_layers_per_virtual_pipeline_stage or num_layers // ranks
        if self.is_v_shaped:
            each = self._layers_of_two(num_layers // ranks)
        if (num_layers // ranks) % each:
            clash(
                {"num_layers": num_layers, _RANKS: ranks, _EACH: each},
                f"{num_layers // ranks} layers a rank are not a multiple of {each}",
                "Choose sizes that divide.",
            )
        self._check_stages(num_layers // ranks // each)
        return tuple(range(first, first + each) for first in range(0, num_layers, each))

    def _split_layers(self, sizes: tuple[int, ...], num_layers: int) -> tuple[range, ...]:
        if sum(sizes) != num_layers:
            clash(
                {"pipeline_split": sizes, "num_layers": num_layers},
                f"the stages have {sum(sizes)} layers together",
                "Choose numbers that add up.",
            )
        self._check_stages(len(sizes) // self.pipeline_model_parallel_size)
        ends = accumulate(sizes)
        return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))

    def _check_split(self) -> None:
        """Check that a given split is one for these ranks, and the only one."""
        sizes, ranks = self.pipeline_split, self.pipeline_model_parallel_size
        if sizes is None:
            return
        self.check_only_split(sizes, others=(_EACH,))
        is_fit = len(sizes) == 2 * ranks if self.is_v_shaped else bool(sizes) and len(sizes) % ranks == 0
        if ranks == 1 or not is_fit or min(sizes) < 0:
            each = "two stages" if self.is_v_shaped else "as many stages"
            clash(
                {"pipeline_split": sizes, _RANKS: ranks},
                f"each of two ranks or more runs {each}",
                "Give the layers of each stage, in the order of the model.",
            )

    def check_only_split(self, split: object, others: Sequence[str]) -> None:
        """Check that no other field than a split sets the layers of stages."""
        if given := {name: getattr(self, name) for name in others if getattr(self, name) is not None}:
            clash({"pipeline_split": split, **given}, "both say how many layers stages have", "Leave one of them out.")

    def _layers_of_two(self, num_layers: int) -> int:
        each = self.num_layers_per_virtual_pipeline_stage
        if num_layers % 2 or each not in (None, num_layers // 2):
            clash(
                {_SCHEDULE: self.pipeline_parallel_schedule, _EACH: each},
                f"each rank runs two stages alike, and has {num_layers} layers",
                "Choose sizes that leave an even number of layers a rank, and half of them a virtual stage (the default)."
                if num_layers % 2
                else f"Leave num_layers_per_virtual_pipeline_stage out, or pass {num_layers // 2}.",
            )
        return num_layers // 2

    def _check_schedule(self) -> None:
        schedule, ranks = self.pipeline_parallel_schedule, self.pipeline_model_parallel_size
        if schedule is None:
            return
        settings = {_SCHEDULE: schedule, _RANKS: ranks}
        if schedule not in get_args(ScheduleName):
            clash(settings, "there is no such schedule", f"Choose one of {', '.join(get_args(ScheduleName))}.")
        if ranks == 1:
            clash(
                settings,
                "a schedule orders the stages of two ranks or more",
                "Set pipeline_model_parallel_size, or leave pipeline_parallel_schedule out.",
            )

    def _check_stages(self, count: int) -> None:
        schedule = self.pipeline_parallel_schedule
        if (count > 1 and schedule in _ONE_STAGE) or (count == 1 and schedule in _SEVERAL_STAGES):
            clash(
                {_SCHEDULE: schedule, _EACH: self.num_layers_per_virtual_pipeline_stage},
                f"it runs one stage on each rank, and there are {count}"
                if count > 1
                else "it runs several stages on each rank, and there is one",
                "Leave num_layers_per_virtual_pipeline_stage out, or choose Interleaved1F1B."
                if count > 1
                else "Set num_layers_per_virtual_pipeline_stage to fewer layers than a rank has, or choose 1F1B.",
            )


def check_divides(what: str, size: int, by: str, ranks: int) -> None:
    if size % ranks:
        larger = -(-size // ranks) * ranks
        clash({what: size, by: ranks}, f"{size} is not a multiple of {ranks}", f"The next multiple is {larger}.")


def clash(settings: Mapping[str, object], reason: str, advice: str) -> None:
    raise ConfigError(settings=settings, reason=reason, advice=advice)
