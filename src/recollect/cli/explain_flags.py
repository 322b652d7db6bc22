"""The flags of `recollect explain`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import OmitArgPrefixes

from recollect.cli.commands import RecordedStep
from recollect.cli.recompute_flags import RecomputeFlags

__all__ = ["Explain"]


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Show what a Megatron configuration keeps and recomputes, layer by layer, and what a budget of the same peak would."""

    step: OmitArgPrefixes[RecordedStep] = field(default_factory=RecordedStep)
    """The training step."""
    recompute: OmitArgPrefixes[RecomputeFlags] = field(default_factory=RecomputeFlags)
    """What to recompute, as Megatron's flags."""
    yaml: Path | None = None
    """A YAML configuration with Megatron's names, also under `model` as in Megatron-Bridge; flags override it."""
    json: Path | None = None
    """Write all numbers to this file."""
    new_gradients: bool = False
    """Allocate gradients in backward, as PyTorch does with one micro-batch per step. By default they exist all the time, like
    Megatron's gradient buffer."""
    names: bool = False
    """Also list what is kept and recomputed by name."""
    debug: bool = False
    """Show the traceback of an error."""
