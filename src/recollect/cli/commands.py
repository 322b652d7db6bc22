"""The flags of the commands, as dataclasses for tyro. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, arg

from recollect.cli.cluster_flags import ClusterFlags
from recollect.cli.recompute_flags import RecomputeFlags
from recollect.lab.train.checks import at_least
from recollect.lab.train.config import ModelFlags, OptimFlags, TrainConfig

# The names are headings of --help.
_Recompute = Annotated[OmitArgPrefixes[RecomputeFlags], arg(name="recompute", prefix_name=False)]
_Model = Annotated[OmitArgPrefixes[ModelFlags], arg(name="model", prefix_name=False)]


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a language model within a memory budget; Megatron's pretrain_gpt flags work (docs/megatron_flags.md)."""

    demo: bool = False
    """Use the settings of the demo (about three minutes on two CPU cores); other flags override them."""
    config: OmitArgPrefixes[TrainConfig] = field(default_factory=TrainConfig)
    """Model, data, optimizer and run."""
    recompute: _Recompute = field(default_factory=RecomputeFlags)
    """What to recompute, as Megatron's flags, instead of --memory-budget."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class ModelStep:
    """A training step: AdamW on one micro-batch of a language model."""

    model: _Model = field(default_factory=ModelFlags)
    """One of recollect's own models."""
    hf_config: Path | None = None
    """Use the causal language model of a Hugging Face config.json instead; needs transformers."""
    batch_size: Annotated[int | None, arg(aliases=("--micro-batch-size",))] = None
    """Sequences in the micro-batch; default: 1, but for the default model 8, as in recollect train."""
    seq_length: int = 256
    """Tokens in a sequence."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of weights and activations."""
    device: str = "auto"
    """A torch device; auto is cuda if available, else cpu."""

    def __post_init__(self) -> None:
        at_least(self, 1, "seq_length", *(() if self.batch_size is None else ("batch_size",)))

    @property
    def num_sequences(self) -> int:
        """Sequences in the micro-batch."""
        if self.batch_size is not None:
            return self.batch_size
        # One sequence of the default model is so small that recompute can save little beside weights and optimizer.
        is_default = self.model == ModelFlags() and self.hf_config is None
        return OptimFlags().batch_size if is_default else 1


@dataclass(frozen=True, kw_only=True)
class RecordedStep(ModelStep):
    """The training step to record, on real or fake tensors."""

    fake: bool = False
    """Record on fake tensors: any model in seconds, without its memory; times come from a cost model."""
    hardware: str | None = None
    """With --fake: the hardware to model, such as H100, B200, RTX 4090, or a file written by recollect calibrate; default: this
    machine's GPU if it is known, else H100."""


@dataclass(frozen=True, kw_only=True)
class MakePlan:
    """Record a training step, choose what to keep and recompute, print the plan and write it to a file."""

    step: OmitArgPrefixes[RecordedStep] = field(default_factory=RecordedStep)
    """The training step."""
    cluster: OmitArgPrefixes[ClusterFlags] = field(default_factory=ClusterFlags)
    """With --fake: plan for many devices."""
    memory_budget: str
    """Bound on the peak of the whole step, such as 16GiB, 900MB or 60% of the peak without recompute; of each device."""
    loss_chunks: Literal["auto"] | int = 1
    """Chunks in which LM head and loss are computed; 1: as in the model, auto: as many as the fastest plan needs."""
    out: Path | None = None
    """File for the plan; default: plan.json, or none if --png or --html asks for a picture."""
    write: Literal["megatron", "bridge", "torchtitan"] | None = None
    """Print the settings of another tool that come nearest to the plan, too: flags of Megatron, lines of a recipe of
    Megatron-Bridge, or a word of torchtitan."""
    png: Path | None = None
    """Draw the memory of the step under the plan to this file; needs matplotlib."""
    html: Path | None = None
    """Likewise, as an interactive page for a browser; needs plotly."""
    largest: Literal["micro-batch", "seq-length"] | None = None
    """Find the largest and the fastest micro-batch, or sequence length, within the budget, and write the plan of the largest;
    records a few sizes, as with --fake."""
    multiple_of: int | None = None
    """With --largest: try only multiples of this; default: 1 for micro-batches, 64 for lengths."""
    max_size: int | None = None
    """With --largest: try no larger size; default: 1048576, and what the --hf-config has positions for."""
    debug: bool = False
    """Show the traceback of an error."""

    @property
    def plan_file(self) -> Path | None:
        """File for the plan, if there is to be one."""
        if self.out is None and (self.png is not None or self.html is not None):
            return None
        return Path("plan.json") if self.out is None else self.out

    def __post_init__(self) -> None:
        if self.largest is None:
            for name in ("multiple_of", "max_size"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: got {getattr(self, name)} without --largest, expected both or neither.")
            return
        for name, advice in (("png", "draw"), ("html", "draw"), ("write", "plan")):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}: got {getattr(self, name)} with --largest, expected none: {advice} the size that it finds."
                )
        if self.loss_chunks == "auto":
            raise ValueError("loss_chunks: got auto with --largest, expected a number.")


@dataclass(frozen=True, kw_only=True)
class DrawFrontier:
    """Record a training step and show predicted peak against slowdown for every budget, as a table, a PNG or a page."""

    step: OmitArgPrefixes[RecordedStep] = field(default_factory=RecordedStep)
    """The training step."""
    loss_chunks: int = 1
    """Chunks in which LM head and loss are computed; 1: as in the model."""
    png: Path | None = None
    """Draw the frontier to this file; needs matplotlib."""
    html: Path | None = None
    """Write an interactive page for a browser, with the memory of each plan over time; needs plotly."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Measure this device in about a minute and write a file for --hardware, to model times on it."""

    device: str = "auto"
    """A torch device; auto is cuda if available, else cpu, with as many threads as PyTorch uses."""
    out: Path = Path("hardware.json")
    """File for the measurements."""
    quick: bool = False
    """Use small tensors and three runs each: takes seconds and gives a rough answer."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class Tokenize:
    """Tokenize documents into Megatron's indexed dataset (.bin and .idx), for --data-path here and in Megatron."""

    data: tuple[Path, ...] = ()
    """Text files, JSONL files or folders of them; none: the Python standard library's source on this machine."""
    text_field: str = "text"
    """JSONL field with the text."""
    tokenizer: Path | None = None
    """A `tokenizer.json` of the `tokenizers` library; none: one token per byte."""
    output_prefix: Path
    """Path of the dataset, without .bin and .idx."""
    debug: bool = False
    """Show the traceback of an error."""
