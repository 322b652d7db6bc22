"""Flags for optimizer, batch size and learning rate, and checks of the range of any flag. Imports no torch."""

from dataclasses import InitVar, dataclass, replace
from typing import Annotated, Literal

from tyro.conf import arg

DecayStyle = Literal["cosine", "linear", "constant", "inverse-square-root"]


def at_least(flags: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(flags, name)
        if value is not None and not value >= least:  # which nan is not
            raise ValueError(f"{name}: got {value}, expected at least {least}.")


def within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}: got {value}, expected {low:g} to {high:g}.")


@dataclass(frozen=True, kw_only=True)
class OptimFlags:
    """How long and how fast to train."""

    steps: Annotated[int, arg(aliases=("--train-iters",))] = 200
    """Optimizer steps."""
    batch_size: Annotated[int, arg(aliases=("--micro-batch-size",))] = 8
    """Sequences per micro-batch."""
    accumulation: int | None = None
    """Micro-batches per optimizer step, of all ranks of data parallelism together; default: one on each of them."""
    global_batch_size: InitVar[int | None] = None
    """Sequences per optimizer step, instead of --accumulation."""
    train_samples: InitVar[int | None] = None
    """Sequences in the whole run, instead of --steps; rounded down to whole steps."""
    learning_rate: Annotated[float, arg(aliases=("--lr",))] = 1e-3
    """Highest learning rate."""
    min_lr_fraction: float = 0.1
    """Lowest learning rate, as a fraction of the highest."""
    min_lr: InitVar[float | None] = None
    """Lowest learning rate, instead of --min-lr-fraction."""
    warmup_steps: Annotated[int, arg(aliases=("--lr-warmup-iters",))] = 20
    """Steps over which the learning rate rises from near zero."""
    lr_warmup_fraction: InitVar[float | None] = None
    """Warm-up as a fraction of --lr-decay-iters, instead of --warmup-steps."""
    lr_decay_style: DecayStyle = "cosine"
    """How the learning rate decays from the highest to the lowest."""
    lr_decay_iters: int | None = None
    """Step at which the learning rate reaches the lowest; default: the last."""
    weight_decay: float = 0.1
    """Decay of matrices; biases and norm weights do not decay."""
    beta1: Annotated[float, arg(aliases=("--adam-beta1",))] = 0.9
    """AdamW's decay of the mean of gradients."""
    beta2: Annotated[float, arg(aliases=("--adam-beta2",))] = 0.95
    """AdamW's decay of the mean of squared gradients."""
    adam_eps: float = 1e-8
    """Added to the root of the mean of squared gradients (AdamW's epsilon)."""
    clip_norm: Annotated[float, arg(aliases=("--clip-grad",))] = 1.0
    """Largest norm of the gradient; 0 turns clipping off."""

    def __post_init__(
        self,
        global_batch_size: int | None,
        train_samples: int | None,
        min_lr: float | None,
        lr_warmup_fraction: float | None,
    ) -> None:
        at_least(self, 1, "batch_size")
        at_least(self, 0, "warmup_steps", "learning_rate", "weight_decay", "clip_norm", "adam_eps")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected 0 or more, and less than 1.")
        if global_batch_size is not None:
            if global_batch_size < 1 or global_batch_size % self.batch_size:
                raise ValueError(
                    f"global_batch_size: got {global_batch_size}, expected a multiple of the micro-batch's {self.batch_size} "
                    f"sequences. Change --global-batch-size or --micro-batch-size."
                )
            self._set("accumulation", global_batch_size // self.batch_size)
        if train_samples is not None:
            self._set("accumulation", self.num_micro_batches)  # the number of steps follows from it
            self._set("steps", train_samples // (self.batch_size * self.num_micro_batches))
        at_least(self, 1, "steps", "accumulation", "lr_decay_iters")
        if min_lr is not None:
            if not 0 <= min_lr <= self.learning_rate:
                raise ValueError(
                    f"min_lr: got {min_lr}, expected 0 to the highest learning rate, {self.learning_rate}."
                )
            self._set("min_lr_fraction", min_lr / self.learning_rate if self.learning_rate else 0.0)
        if lr_warmup_fraction is not None:
            within("lr_warmup_fraction", lr_warmup_fraction, 0.0, 1.0)
            self._set("warmup_steps", round(lr_warmup_fraction * (self.lr_decay_iters or self.steps)))
        within("min_lr_fraction", self.min_lr_fraction, 0.0, 1.0)

    @property
    def num_micro_batches(self) -> int:
        return 1 if self.accumulation is None else self.accumulation

    def on_ranks(self, data_parallel_size: int) -> "OptimFlags":
        """Return the flags with the default number of micro-batches for this many data-parallel ranks."""
        return self if self.accumulation is not None else replace(self, accumulation=data_parallel_size)

    def _set(self, name: str, value: float) -> None:
        object.__setattr__(self, name, value)
