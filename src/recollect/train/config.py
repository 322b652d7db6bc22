"""Everything a training run is told, as frozen dataclasses. Imports no torch: `--help` reads the flags from here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from recollect.models.config import TransformerConfig
from recollect.models.sizes import NAMED_CONFIGS

SizeName = Literal[
    "demo",
    "tiny",
    "gpt-tiny",
    "llama-tiny",
    "mixtral-tiny",
    "deepseek-v3-tiny",
    "160m",
    "1b",
    "7b",
    "7b-32k",
    "8b",
    "13b",
    "70b",
    "gpt2",
    "gpt3-175b",
    "mixtral-8x7b",
    "deepseek-v3-671b",
]


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """A named model, and what to change in it; the names are Megatron's."""

    size: SizeName = "demo"
    """Named model to start from; the flags below replace single fields."""
    vocab_size: int | None = None
    """Rows of the embedding; the default is the tokenizer's vocabulary."""
    hidden_size: int | None = None
    """Width of the residual stream."""
    ffn_hidden_size: int | None = None
    """Width inside the MLP."""
    num_layers: int | None = None
    """Number of transformer layers."""
    num_attention_heads: int | None = None
    """Query heads."""
    num_query_groups: int | None = None
    """Key and value heads."""
    share_embeddings_and_output_weights: bool | None = None
    """Use the embedding matrix as the output matrix."""

    def __post_init__(self) -> None:
        self.dimensions()

    def dimensions(self, vocab_size: int | None = None) -> TransformerConfig:
        """Put the named model and its changes together.

        Args:
            vocab_size: rows of the embedding where no flag sets them.

        Returns:
            The configuration.

        Raises:
            ValueError: fields that do not fit together.
        """
        changes = {name: value for name, value in vars(self).items() if name != "size" and value is not None}
        if vocab_size is not None:
            changes.setdefault("vocab_size", vocab_size)
        return NAMED_CONFIGS[self.size].changed(**changes)


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
    tokenizer: Path | None = None
    """A `tokenizer.json` of the `tokenizers` library; none: one token per byte."""
    seq_length: int = 256
    """Tokens the model sees at once."""
    validation_fraction: float = 0.05
    """Part of the text documents held out, chosen by a hash of each document; 0 turns validation off."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "seq_length")
        _within(self, "validation_fraction", 0.0, 0.5)
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
class OptimFlags:
    """How long and how fast to train."""

    steps: int = 200
    """Optimizer steps."""
    batch_size: int = 8
    """Sequences in one micro-batch."""
    accumulation: int = 1
    """Micro-batches in one optimizer step."""
    learning_rate: float = 1e-3
    """Highest learning rate."""
    min_lr_fraction: float = 0.1
    """Learning rate at the last step, as a part of the highest."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises from near zero."""
    weight_decay: float = 0.1
    """Decay of matrices; norm weights do not decay."""
    beta1: float = 0.9
    """AdamW's decay of the mean of gradients."""
    beta2: float = 0.95
    """AdamW's decay of the mean of squared gradients."""
    clip_norm: float = 1.0
    """Largest norm of the gradient; 0 turns clipping off."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "steps", "batch_size", "accumulation")
        _at_least(self, 0, "warmup_steps", "learning_rate", "weight_decay", "clip_norm")
        _within(self, "min_lr_fraction", 0.0, 1.0)


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
    device: str = "auto"
    """A torch device; auto is cuda where there is one, else cpu."""
    seed: int = 0
    """Seed of weights and of the order of the data."""
    deterministic: bool = True
    """On CUDA, use kernels that give the same bits each run; a CPU does so anyway."""

    def __post_init__(self) -> None:
        if self.loss_chunks != "auto":
            _at_least(self, 1, "loss_chunks")


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Where results go and how often."""

    run_dir: Path | None = None
    """Folder for checkpoints, plan and metrics; none: a new folder under runs/, named by date and time."""
    resume: bool = False
    """Go on from the newest checkpoint in the run folder."""
    checkpoint_every: int = 100
    """Steps between checkpoints; there is always one at the end. 0: only that one."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    validate_every: int = 50
    """Steps between validation losses; there is always one at the end. 0: only that one."""
    validation_batches: int = 8
    """Micro-batches in one validation."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run folder."""
    measure_plain: bool = False
    """First measure seven steps without recompute, to show beside the plan; needs the memory that they need."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "checkpoint_every", "validate_every")
        _at_least(self, 1, "keep_checkpoints", "validation_batches")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole training run."""

    model: ModelFlags = field(default_factory=ModelFlags)
    data: DataFlags = field(default_factory=DataFlags)
    optim: OptimFlags = field(default_factory=OptimFlags)
    step: StepFlags = field(default_factory=StepFlags)
    run: RunFlags = field(default_factory=RunFlags)

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the numbers of a run, by dotted name; a resumed run must have the same.

        Paths of data are left out: the tokens themselves are compared, by their fingerprint.
        """
        return {
            f"{part}.{name}": value
            for part in ("model", "data", "optim", "step")
            for name, value in vars(getattr(self, part)).items()
            if name not in ("data", "data_path", "train_data_path", "valid_data_path", "tokenizer")
        }


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


def _at_least(flags: object, least: int, *names: str) -> None:
    for name in names:
        if getattr(flags, name) < least:
            raise ValueError(f"{name}: got {getattr(flags, name)}, expected at least {least}.")


def _within(flags: object, name: str, low: float, high: float) -> None:
    if not low <= getattr(flags, name) <= high:
        raise ValueError(f"{name}: got {getattr(flags, name)}, expected {low:g} to {high:g}.")
