"""The configuration of a training run, as frozen dataclasses. Imports no torch: `--help` reads the flags from here."""

import dataclasses
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Suppress, arg

from recollect.integrations.megatron.rules import RecomputeConfig
from recollect.integrations.megatron.settings import TrainingSetting
from recollect.lab.models.config import TransformerConfig
from recollect.lab.parallel.layout import ParallelFlags
from recollect.lab.train.model_flags import ModelFlags
from recollect.lab.train.optim_flags import OptimFlags, at_least, within
from recollect.quantities import parse_bytes


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """What to train on."""

    data: tuple[Path, ...] = ()
    """Text files, JSONL files or folders of them; none: the Python standard library's source on this machine."""
    data_path: tuple[str, ...] = ()
    """Megatron's indexed datasets, as paths without .bin and .idx; a weight may precede each of them."""
    train_data_path: tuple[str, ...] = ()
    """Likewise, datasets for training only."""
    valid_data_path: tuple[str, ...] = ()
    """Likewise, datasets for validation only; none: no validation."""
    split: str = "969,30,1"
    """Proportions of each --data-path dataset for training, validation and test, in the order of its documents."""
    text_field: str = "text"
    """JSONL field with the text."""
    tokenizer: Annotated[Path | None, arg(aliases=("--tokenizer-model",))] = None
    """A `tokenizer.json` of the `tokenizers` library; none: one token per byte."""
    seq_length: int = 256
    """Tokens per sequence."""
    validation_fraction: float = 0.05
    """Fraction of the text documents held out, chosen by a hash of each document; 0 turns validation off."""

    def __post_init__(self) -> None:
        at_least(self, 1, "seq_length")
        within("validation_fraction", self.validation_fraction, 0.0, 0.5)
        given = [name for name in ("data", "data_path", "train_data_path") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(
                f"{given[1]}: given with --{given[0].replace('_', '-')}, expected one of them. Remove one."
            )
        if self.valid_data_path and not self.train_data_path:
            raise ValueError("valid_data_path: given without train_data_path, expected both. Give train_data_path too.")


@dataclass(frozen=True, kw_only=True)
class StepFlags:
    """How a step is computed."""

    memory_budget: str | None = None
    """Bound on the peak of the whole step, such as 16GiB, 900MB or 60%; none: no recompute."""
    host_budget: str = "0"
    """With a budget: host memory that values may be copied to in forward and back in backward, such as 64GiB."""
    loss_chunks: Literal["auto"] | int = 1
    """Chunks in which LM head and loss are computed, one chunk's logits at a time; auto: as many as the fastest
    plan within the budget needs."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Dtype of activations and matrix products; weights, gradients and optimizer state are fp32 in both."""
    bf16: InitVar[FlagCreatePairsOff[bool]] = False
    """The same as --precision bf16."""
    device: str = "auto"
    """A torch device; auto is cuda if available, else cpu."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    deterministic: bool = True
    """On CUDA, use kernels that give the same bits in each run; a CPU always does."""
    cuda_graph_impl: Literal["none", "full_iteration"] = "none"
    """full_iteration: forward and backward of micro-batches run as a CUDA graph, whose memory pool is within the budget;
    on CUDA, in one process."""
    recompute: Suppress[RecomputeConfig | None] = None
    """Megatron's settings for recompute, instead of a budget."""
    distribute_saved_activations: Suppress[bool] = False
    """With a budget: a plan may hold parts of values on the ranks of tensor parallelism."""

    def __post_init__(self, bf16: bool) -> None:
        if bf16:
            object.__setattr__(self, "precision", "bf16")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: got {self.seed}, expected 0 to {2**32 - 1}.")
        if self.loss_chunks != "auto":
            at_least(self, 1, "loss_chunks")
        elif self.recompute is not None:
            raise ValueError(
                "loss_chunks: got auto with settings that say what to recompute, expected a number: auto chooses the number "
                "for a budget."
            )
        if self.recompute is not None and self.memory_budget is not None:
            raise ValueError(
                f"memory_budget: got {self.memory_budget} with settings that say what to recompute "
                f"({', '.join(self.recompute.changed())}), expected one of them: a budget already decides. Remove one."
            )
        if parse_bytes(self.host_budget) and self.memory_budget is None:
            raise ValueError(
                f"host_budget: got {self.host_budget} without memory_budget, expected both: it is for plans within a budget."
            )
        given = self.recompute
        offloads = given is not None and (given.cpu_offloading or given.fine_grained_activation_offloading)
        offloads = offloads or parse_bytes(self.host_budget) > 0
        if self.captures and (offloads or self.loss_chunks != 1):
            raise ValueError(
                "cuda_graph_impl: got full_iteration with loss_chunks or with values that are offloaded, expected neither: a "
                "captured step computes the loss whole, and copies nothing to the host. Leave them out."
            )
        if self.distribute_saved_activations and self.memory_budget is None:
            raise ValueError(
                "distribute_saved_activations: given without memory_budget, expected both: it is for plans within a budget. "
                "Give memory_budget; or a RecomputeConfig with full recompute and distribute_saved_activations."
            )

    @property
    def captures(self) -> bool:
        """Whether micro-batches run as a CUDA graph."""
        return self.cuda_graph_impl != "none"


@dataclass(frozen=True, kw_only=True)
class ProcessFlags(ParallelFlags):
    """How to use the processes that torchrun started; the ranks left by these sizes are data parallel."""

    distributed_timeout_minutes: int = 10
    """How long processes wait for each other before they give up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "distributed_timeout_minutes")


@dataclass(frozen=True, kw_only=True)
class ProfileFlags:
    """A trace of some steps by torch.profiler, written into the run folder."""

    profile: FlagCreatePairsOff[bool] = False
    """Trace steps; profile/*.json in the run folder opens in Perfetto and chrome://tracing."""
    profile_step_start: int = 10
    """First step to trace, from 1."""
    profile_step_end: int = 12
    """Step before which the trace ends."""

    def __post_init__(self) -> None:
        at_least(self, 1, "profile_step_start")
        if self.profile_step_end <= self.profile_step_start:
            raise ValueError(
                f"profile_step_end: got {self.profile_step_end}, expected more than profile_step_start = "
                f"{self.profile_step_start}: the trace ends before that step."
            )

    def covers(self, step: int) -> bool:
        """Return whether `step` (from 1) is traced, in one of the processes."""
        return self.profile and self.profile_step_start <= step < self.profile_step_end


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Where results go and how often."""

    run_dir: Annotated[Path | None, arg(aliases=("--save",))] = None
    """Folder for checkpoints, plan and metrics; none: a new folder under runs/, named by date and time."""
    resume: bool = False
    """Resume from the newest checkpoint in the run folder; budget, recompute flags and steps may change."""
    load: Path | None = None
    """Resume from this run folder, which must be --run-dir; if it holds no run yet, start one."""
    checkpoint_every: Annotated[int, arg(aliases=("--save-interval",))] = 100
    """Steps between checkpoints; there is always one at the end. 0: only that one."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep."""
    validate_every: Annotated[int, arg(aliases=("--eval-interval",))] = 50
    """Steps between validations; there is always one at the end. 0: only that one."""
    validation_batches: int = 8
    """Micro-batches per validation."""
    eval_iters: int | None = None
    """Batches per validation, each as large as a step's, instead of --validation-batches; 0: no validation."""
    log_interval: int | None = None
    """Steps between lines of output; default: about twenty lines per run. metrics.jsonl has every step."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run folder."""
    tensorboard_dir: Path | None = None
    """Folder for TensorBoard events."""
    log_memory_to_tensorboard: FlagCreatePairsOff[bool] = False
    """Measure the peak of every step, for TensorBoard and metrics.jsonl; slows steps down on a CPU."""
    measure_plain: bool = False
    """First measure seven steps without recompute, to compare with the plan; needs enough memory for them."""

    def __post_init__(self) -> None:
        at_least(self, 0, "checkpoint_every", "validate_every", "eval_iters")
        at_least(self, 1, "keep_checkpoints", "validation_batches", "log_interval")
        if self.resume and self.run_dir is None:
            raise ValueError("resume: got it without --run-dir, expected the folder of the run to go on with.")
        if self.load is not None and (self.run_dir is None or self.load.resolve() != self.run_dir.resolve()):
            raise ValueError(
                f"load: got {self.load} with the run folder {self.run_dir}, expected the same folder: a run resumes where its "
                f"plan, metrics and checkpoints are. Add --save {self.load}, or copy the folder and pass the copy to both."
            )


# The names of its fields are headings of --help.
@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole training run."""

    model: Annotated[ModelFlags, arg(name="model", prefix_name=False)] = field(default_factory=ModelFlags)
    data: Annotated[DataFlags, arg(name="data", prefix_name=False)] = field(default_factory=DataFlags)
    optim: Annotated[OptimFlags, arg(name="optimizer", prefix_name=False)] = field(default_factory=OptimFlags)
    step: Annotated[StepFlags, arg(name="step", prefix_name=False)] = field(default_factory=StepFlags)
    run: Annotated[RunFlags, arg(name="run", prefix_name=False)] = field(default_factory=RunFlags)
    parallel: Annotated[ProcessFlags, arg(name="processes", prefix_name=False)] = field(default_factory=ProcessFlags)
    profile: Annotated[ProfileFlags, arg(name="profiler", prefix_name=False)] = field(default_factory=ProfileFlags)

    def __post_init__(self) -> None:
        first, steps = self.profile.profile_step_start, self.optim.steps
        if self.profile.profile and first > steps:
            raise ValueError(
                f"profile_step_start: got {first}, expected at most {steps}, the last step: no step is traced."
            )

    @property
    def holds_parts(self) -> bool:
        """Whether ranks of tensor parallelism may hold parts of values."""
        recompute = self.step.recompute
        return self.step.distribute_saved_activations or (
            recompute is not None and recompute.distribute_saved_activations
        )

    @property
    def num_validation_batches(self) -> int:
        if self.run.eval_iters is None:
            return self.run.validation_batches
        return self.run.eval_iters * self.optim.num_micro_batches

    def training_setting(self, dimensions: TransformerConfig) -> TrainingSetting:
        flags, layout = self.parallel, self.parallel.layout_of_one()
        ranks, each = layout.pipeline_model_parallel_size, layout.num_layers_per_virtual_pipeline_stage
        return TrainingSetting.of(
            dimensions,
            pipeline_model_parallel_size=ranks,
            virtual_pipeline_model_parallel_size=None if each is None else dimensions.num_layers // ranks // each,
            tensor_model_parallel_size=flags.tensor_model_parallel_size,
            sequence_parallel=layout.sequence_parallel,
            expert_model_parallel_size=flags.expert_model_parallel_size,
        )

    def identity(self) -> dict[str, Any]:
        """Return the settings that determine the numbers of a run, by dotted name; a resumed run must have the same.

        Paths of data are excluded: the tokens themselves are compared by fingerprint. So is the layout, which changes only
        the order of sums, and where values are held.
        """
        recompute = self.step.recompute
        parts = {
            "model": dataclasses.asdict(self.model.dimensions(seq_length=self.data.seq_length)),
            "data": {name: value for name, value in vars(self.data).items() if name not in _PATHS},
            "optim": {**vars(self.optim), "accumulation": self.optim.num_micro_batches},
            "step": {**vars(self.step), "recompute": None if recompute is None else recompute.changed()},
        }
        return {
            f"{part}.{name}": value
            for part, values in parts.items()
            for name, value in values.items()
            if name[0] != "_" and name != "distribute_saved_activations"
        }


_PATHS = ("data", "data_path", "train_data_path", "valid_data_path", "tokenizer")


def demo_config() -> TrainConfig:
    """Return the settings of `recollect train --demo`: three minutes on two CPU cores, in half of the memory."""
    return TrainConfig(
        model=ModelFlags(size="demo"),
        data=DataFlags(seq_length=256),
        optim=OptimFlags(steps=150, batch_size=8, warmup_steps=20, learning_rate=2e-3),
        # Without recompute the step needs 404 MiB; weights, gradients and optimizer state take 92 MiB of that. The
        # device is fixed so that these numbers are the same everywhere.
        step=StepFlags(memory_budget="200MiB", device="cpu"),
        run=RunFlags(validate_every=25, validation_batches=4, measure_plain=True),
    )


def pretrain_gpt_config() -> TrainConfig:
    """Return the defaults of `recollect train` for command lines that describe a model as for Megatron's `pretrain_gpt`.

    Settings that determine the numbers of a run have Megatron's defaults (megatron/training/arguments.py at d98e8a64); how long
    to train, how often to validate and where to save have recollect's. Megatron has no default for learning rate and
    micro-batch.
    """
    return TrainConfig(
        optim=OptimFlags(lr_decay_style="linear", min_lr_fraction=0.0, warmup_steps=0, weight_decay=0.01, beta2=0.999),
        step=StepFlags(seed=1234),
    )
