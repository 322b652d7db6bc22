"""The flags of `recollect bench`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import OmitArgPrefixes, UseAppendAction

from recollect.cli.commands import ModelStep
from recollect.cli.recompute_flags import RecomputeFlags

__all__ = ["Bench"]

_SUFFIXES = (".csv", ".json", ".md")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure recompute settings side by side: TFLOP/s, step time, tokens/s and peak memory; compare with stored results.

    The exit status is 1 if a setting is slower or larger than its golden result allows, or no longer fits.
    """

    step: OmitArgPrefixes[ModelStep] = field(default_factory=ModelStep)
    """The training step."""
    recompute: OmitArgPrefixes[RecomputeFlags] = field(default_factory=RecomputeFlags)
    """One setting, as Megatron's flags."""
    setting: UseAppendAction[tuple[str, ...]] = ()
    """A setting in a few words, such as "selective core_attn,layernorm", "full uniform 4", "memory_budget 60%"; may be
    repeated."""
    settings: Path | None = None
    """A YAML file with a list of settings, each in a few words or as a mapping of Megatron's names."""
    num_microbatches: int = 1
    """Micro-batches per step, with accumulated gradients."""
    rounds: int = 8
    """Rounds in which all settings take turns."""
    memory_limit: str | None = None
    """A peak above this, such as 16GiB, counts as out of memory; settings predicted to exceed it do not run."""
    threads: int | None = None
    """Threads of PyTorch on a CPU; default: PyTorch's choice."""
    golden: Path | None = None
    """Stored results to compare with."""
    threshold: float = 0.05
    """Relative loss of TFLOP/s, or growth of a peak, that counts as a regression."""
    save_golden: Path | None = None
    """Store the results in this file, for --golden."""
    out: tuple[Path, ...] = ()
    """Files for the results, by suffix: .md (the table), .csv and .json (all numbers)."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        for name in ("num_microbatches", "rounds", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}, expected at least 1.")
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold: got {self.threshold:g}, expected a fraction between 0 and 1.")
        for path in self.out:
            if path.suffix not in _SUFFIXES:
                raise ValueError(f"out: got {path}, expected a name that ends in {', '.join(_SUFFIXES)}.")
