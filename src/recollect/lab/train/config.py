"""Everything a training run is told, as frozen dataclasses. Imports no torch: `--help` reads the flags from here."""

from __future__ import annotations

import dataclasses
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Suppress, arg

from recollect.integrations.megatron.config import RecomputeConfig
from recollect.lab.train.checks import at_least, within
from recollect.lab.train.model_flags import ModelFlags, SizeName
from recollect.lab.train.optim_flags import OptimFlags

__all__ = [
    "DataFlags",
    "ModelFlags",
    "OptimFlags",
    "ProfileFlags",
    "RunFlags",
    "SizeName",
    "StepFlags",
    "TrainConfig",
    "demo_config",
    "pretrain_gpt_config",
]


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """What to train on."""

    data: tuple[Path, ...] = ()
    """Text files, JSONL files or folders of them; none: the Python standard library's source on this machine."""
    data_path: tuple[str, ...] = ()
    """Megatron's indexed datasets, as paths without .bin and .idx, each with a weight before it or none of them."""
    train_data_path: tuple[str, ...] = ()
    """The same, of datasets that are for training alone."""
    valid_data_path: tuple[str, ...] = ()
    """The same, of datasets that are for validation alone; none: no validation."""
    split: str = "969,30,1"
    """Parts of each dataset of --data-path for training, validation and test; its documents in their order."""
    text_field: str = "text"
    """Field of a JSONL record that holds its text."""
    tokenizer: Annotated[Path | None, arg(aliases=("--tokenizer-model",))] = None
    """A `tokenizer.json` of the `tokenizers` library; none: one token per byte."""
    seq_length: int = 256
    """Tokens the model sees at once."""
    validation_fraction: float = 0.05
    """Part of the text documents held out, chosen by a hash of each document; 0 turns validation off."""

    def __post_init__(self) -> None:
        at_least(self, 1, "seq_length")
        within(self, "validation_fraction", 0.0, 0.5)
        given = [name for name in ("data", "data_path", "train_data_path") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: got it beside {given[0]}, expected one of them. Leave one out.")
        if self.valid_data_path and not self.train_data_path:
            raise ValueError(
                "valid_data_path: got it without train_data_path, expected both. Give train_data_path too."
            )

    @property
    def is_indexed(self) -> bool:
        """Whether the data are Megatron's indexed datasets."""
        return bool(self.data_path or self.train_data_path)


@dataclass(frozen=True, kw_only=True)
class StepFlags:
    """How a step is computed."""

    memory_budget: str | None = None
    """Bound on the peak of the whole step, such as 16GiB, 900MB or 60%; none: no recompute."""
    loss_chunks: Literal["auto"] | int = 1
    """Parts in which output matrix and loss are computed, so that the logits of one part only are alive; auto: as many as the
    fastest plan within the budget needs."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Dtype of activations and matrix products; weights, gradients and optimizer state are fp32 in both."""
    bf16: InitVar[FlagCreatePairsOff[bool]] = False
    """The same as --precision bf16."""
    device: str = "auto"
    """A torch device; auto is cuda where there is one, else cpu."""
    seed: int = 0
    """Seed of weights and of the order of the data."""
    deterministic: bool = True
    """On CUDA, use kernels that give the same bits each run; a CPU does so anyway."""
    recompute: Suppress[RecomputeConfig | None] = None
    """Megatron's settings for recompute, instead of a budget."""

    def __post_init__(self, bf16: bool) -> None:
        if bf16:
            object.__setattr__(self, "precision", "bf16")
        if self.loss_chunks != "auto":
            at_least(self, 1, "loss_chunks")
        elif self.recompute is not None:
            raise ValueError(
                "loss_chunks: got auto beside settings that say what to recompute, expected a number: auto looks for "
                "the one whose plan fits a budget best."
            )
        if self.recompute is not None and self.memory_budget is not None:
            raise ValueError(
                f"memory_budget: got {self.memory_budget} beside settings that say what to recompute "
                f"({', '.join(self.recompute.changed())}), expected one of them: a budget chooses. Leave one out."
            )


@dataclass(frozen=True, kw_only=True)
class ProfileFlags:
    """A trace of some steps by torch.profiler, written into the run folder."""

    profile: FlagCreatePairsOff[bool] = False
    """Trace steps; profile/*.json in the run folder opens in Perfetto and chrome://tracing."""
    profile_step_start: int = 10
    """First step that is traced, from 1."""
    profile_step_end: int = 12
    """The step before which the trace ends."""

    def __post_init__(self) -> None:
        at_least(self, 1, "profile_step_start")
        if self.profile_step_end <= self.profile_step_start:
            raise ValueError(
                f"profile_step_end: got {self.profile_step_end}, expected more than profile_step_start = "
                f"{self.profile_step_start}: the trace ends before that step."
            )


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Where results go and how often."""

    run_dir: Annotated[Path | None, arg(aliases=("--save",))] = None
    """Folder for checkpoints, plan and metrics; none: a new folder under runs/, named by date and time."""
    resume: bool = False
    """Go on from the newest checkpoint in the run folder."""
    load: Path | None = None
    """As --resume, if this is the run folder; unlike it, start anew where there is no run yet."""
    checkpoint_every: Annotated[int, arg(aliases=("--save-interval",))] = 100
    """Steps between checkpoints; there is always one at the end. 0: only that one."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    validate_every: Annotated[int, arg(aliases=("--eval-interval",))] = 50
    """Steps between validation losses; there is always one at the end. 0: only that one."""
    validation_batches: int = 8
    """Micro-batches in one validation."""
    eval_iters: int | None = None
    """Validation in batches as large as a step's, instead of --validation-batches; 0: no validation."""
    log_interval: int | None = None
    """Steps between lines of output; default: about twenty lines in all. metrics.jsonl has every step."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run folder."""
    tensorboard_dir: Path | None = None
    """Write TensorBoard events there."""
    log_memory_to_tensorboard: FlagCreatePairsOff[bool] = False
    """Measure the peak of every step, write it to TensorBoard and to metrics.jsonl; slows steps down on a CPU."""
    measure_plain: bool = False
    """First measure seven steps without recompute, to show beside the plan; needs the memory that they need."""

    def __post_init__(self) -> None:
        at_least(self, 0, "checkpoint_every", "validate_every")
        at_least(self, 1, "keep_checkpoints", "validation_batches")
        if self.eval_iters is not None:
            at_least(self, 0, "eval_iters")
        if self.log_interval is not None:
            at_least(self, 1, "log_interval")
        if self.load is not None and (self.run_dir is None or self.load.resolve() != self.run_dir.resolve()):
            raise ValueError(
                f"load: got {self.load} with the run folder {self.run_dir}, expected the same folder: a run goes on where its "
                f"plan, metrics and checkpoints are. Give --save {self.load} too, or copy the folder and give the copy to both."
            )

    @property
    def writes_tensorboard(self) -> bool:
        """Whether events are asked for, by any of the three flags."""
        return self.tensorboard or self.tensorboard_dir is not None or self.log_memory_to_tensorboard


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole training run."""

    model: ModelFlags = field(default_factory=ModelFlags)
    data: DataFlags = field(default_factory=DataFlags)
    optim: OptimFlags = field(default_factory=OptimFlags)
    step: StepFlags = field(default_factory=StepFlags)
    run: RunFlags = field(default_factory=RunFlags)
    profile: ProfileFlags = field(default_factory=ProfileFlags)

    @property
    def num_validation_batches(self) -> int:
        """Micro-batches in one validation."""
        if self.run.eval_iters is None:
            return self.run.validation_batches
        return self.run.eval_iters * self.optim.accumulation

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the numbers of a run, by dotted name; a resumed run must have the same.

        Paths of data are left out: the tokens themselves are compared, by their fingerprint.
        """
        recompute = self.step.recompute
        parts = {
            "model": dataclasses.asdict(self.model.dimensions(seq_length=self.data.seq_length)),
            "data": {name: value for name, value in vars(self.data).items() if name not in _PATHS},
            "optim": vars(self.optim),
            "step": {**vars(self.step), "recompute": None if recompute is None else recompute.changed()},
        }
        return {
            f"{part}.{name}": value
            for part, values in parts.items()
            for name, value in values.items()
            if name[0] != "_"
        }


_PATHS = ("data", "data_path", "train_data_path", "valid_data_path", "tokenizer")


def demo_config() -> TrainConfig:
    """Return the settings of `recollect train --demo`: three minutes on two CPU cores, budget below the plain peak."""
    return TrainConfig(
        model=ModelFlags(size="demo"),
        data=DataFlags(seq_length=256),
        optim=OptimFlags(steps=150, batch_size=8, warmup_steps=20, learning_rate=2e-3),
        # The plain step needs 404 MiB, of which weights, gradients and optimizer state are 92 MiB. The device is fixed so
        # that these numbers are the same everywhere.
        step=StepFlags(memory_budget="200MiB", device="cpu"),
        run=RunFlags(validate_every=25, validation_batches=4, measure_plain=True),
    )


def pretrain_gpt_config() -> TrainConfig:
    """Return what `recollect train` starts from where a command line describes its model as for Megatron's `pretrain_gpt`.

    What decides the numbers of a run is as there (megatron/training/arguments.py at d98e8a64); how long to train, how often to
    validate and where to save are recollect's. Megatron has no default for the learning rate and the micro-batch.
    """
    return TrainConfig(
        optim=OptimFlags(lr_decay_style="linear", min_lr_fraction=0.0, warmup_steps=0, weight_decay=0.01, beta2=0.999),
        step=StepFlags(seed=1234),
    )
