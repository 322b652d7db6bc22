"""The commands' flags, as dataclasses that tyro reads. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, arg

from recollect.cli.recompute_flags import RecomputeFlags
from recollect.lab.train.config import ModelFlags, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a language model within a memory budget; Megatron's pretrain_gpt flags work (docs/megatron_flags.md)."""

    demo: bool = False
    """Use the settings of the demonstration (about three minutes on two CPU cores); other flags change them."""
    config: OmitArgPrefixes[TrainConfig] = field(default_factory=TrainConfig)
    """What to train, on what, and how."""
    recompute: OmitArgPrefixes[RecomputeFlags] = field(default_factory=RecomputeFlags)
    """What to recompute, in Megatron's words, instead of --memory-budget."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class ModelStep:
    """A training step: AdamW on one micro-batch of a language model."""

    model: OmitArgPrefixes[ModelFlags] = field(default_factory=ModelFlags)
    """A model of recollect's own."""
    hf_config: Path | None = None
    """A Hugging Face config.json of a causal language model, used instead; needs transformers."""
    batch_size: Annotated[int, arg(aliases=("--micro-batch-size",))] = 1
    """Sequences in the micro-batch."""
    seq_length: int = 256
    """Tokens in a sequence."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of weights and activations."""
    device: str = "auto"
    """A torch device; auto is cuda where there is one, else cpu."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1.")


@dataclass(frozen=True, kw_only=True)
class RecordedStep(ModelStep):
    """The training step that is looked at, on tensors or without them."""

    fake: bool = False
    """Record on fake tensors: any size in seconds and without its memory; times come from a cost model."""
    hardware: str | None = None
    """With --fake: what the times are for, such as H100, B200, RTX 4090, or a file that recollect calibrate wrote; default:
    this machine's GPU if it is known, else H100."""


@dataclass(frozen=True, kw_only=True)
class MakePlan:
    """Record a training step, choose what to keep and recompute, print the plan and write it to a file."""

    step: OmitArgPrefixes[RecordedStep] = field(default_factory=RecordedStep)
    """The training step."""
    memory_budget: str
    """Bound on the peak of the whole step, such as 16GiB, 900MB or 60% of the peak without recompute."""
    loss_chunks: Literal["auto"] | int = 1
    """Parts in which output matrix and loss are computed; 1 is as the model does, auto as many as the fastest plan needs."""
    out: Path = Path("plan.json")
    """Where to write the plan."""
    png: Path | None = None
    """Draw the memory of the step under the plan to this file; needs matplotlib."""
    html: Path | None = None
    """The same as a page for a browser, in which one can hover and read; needs plotly."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class DrawFrontier:
    """Record a training step and show predicted peak against slowdown for every budget, as a table, a PNG or a page."""

    step: OmitArgPrefixes[RecordedStep] = field(default_factory=RecordedStep)
    """The training step."""
    loss_chunks: int = 1
    """Parts in which output matrix and loss are computed; 1 is as the model does."""
    png: Path | None = None
    """Draw it to this file; needs matplotlib."""
    html: Path | None = None
    """Write a page for a browser, with the memory of each plan over time; needs plotly."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Measure this device in about a minute and write a file for --hardware, which models times on it."""

    device: str = "auto"
    """A torch device; auto is cuda where there is one, else cpu, with as many threads as PyTorch uses."""
    out: Path = Path("hardware.json")
    """Where to write what was measured."""
    quick: bool = False
    """Small tensors and three runs of each: seconds, and a rough answer."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class Tokenize:
    """Tokenize documents into Megatron's indexed dataset (.bin and .idx), for --data-path here and in Megatron."""

    data: tuple[Path, ...] = ()
    """Text files, JSONL files or folders of them; none: the Python standard library's source on this machine."""
    text_field: str = "text"
    """Field of a JSONL record that holds its text."""
    tokenizer: Path | None = None
    """A `tokenizer.json` of the `tokenizers` library; none: one token per byte."""
    output_prefix: Path
    """Where to write, without .bin and .idx."""
    debug: bool = False
    """Show the traceback of an error."""
