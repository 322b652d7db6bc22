"""Defines `LargestBatch`: which batches fit a budget, without recompute and with it, and which of them is the fastest."""

from __future__ import annotations

from dataclasses import dataclass

from recollect.byte_format import format_bytes
from recollect.plans.plan import Plan

__all__ = ["LargestBatch", "TriedSize"]


@dataclass(frozen=True, kw_only=True)
class TriedSize:
    """The step of one size, as recorded.

    Attributes:
        size: what `make_batch` was asked for.
        num_tokens: tokens in the batch.
        step_s: predicted seconds of forward and backward without recompute.
        plain_peak_bytes: predicted peak without recompute.
        full_peak_bytes, full_slowdown: predictions for full recompute of every layer.
        least_peak_bytes: the lowest peak of any plan that the planner knows, where that is above the budget; else None.
        plan: the plan for the budget; None if no plan fits.
    """

    size: int
    num_tokens: int
    step_s: float
    plain_peak_bytes: int
    full_peak_bytes: int
    full_slowdown: float
    least_peak_bytes: int | None
    plan: Plan | None

    @property
    def peak_bytes(self) -> int | None:
        """Predicted peak under the plan."""
        return None if self.plan is None else self.plan.predicted_peak_bytes

    @property
    def slowdown(self) -> float | None:
        """Predicted slowdown under the plan."""
        return None if self.plan is None else self.plan.predicted_slowdown

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of forward and backward under the plan."""
        return None if self.slowdown is None else self.tokens_per_s_at(self.slowdown)

    def tokens_per_s_at(self, slowdown: float) -> float:
        """Return tokens per second of forward and backward at a slowdown; 0 if times are unknown."""
        seconds = self.step_s * (1 + slowdown)
        return self.num_tokens / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, repr=False)
class LargestBatch:
    """What `largest_batch` found.

    Attributes:
        along: what a size is, in a word, such as "micro-batch".
        budget_bytes: the bound on the peak of the whole step.
        tried: all sizes that were recorded, smallest first.
        without_recompute: the largest size that fits if everything is kept; None if none does.
        full_recompute: the largest size that fits with full recompute of every layer; None if none does.
        planned: the largest size that fits with a plan of recollect's.
        fastest: the size with most tokens per second, with the plan for the budget, of those recorded.
        limit: the largest size that was allowed. An answer of this size means "at least".
        device_name: what the times are for.
    """

    along: str
    budget_bytes: int
    tried: tuple[TriedSize, ...]
    without_recompute: TriedSize | None
    full_recompute: TriedSize | None
    planned: TriedSize
    fastest: TriedSize
    limit: int
    device_name: str = ""

    def size_text(self, found: TriedSize | None) -> str:
        """Describe an answer: "12", "none", or "at least 64" if larger sizes were not allowed."""
        if found is None:
            return "none"
        return f"at least {found.size:,}" if found.size == self.limit else f"{found.size:,}"

    def __repr__(self) -> str:
        lines = [f"largest {self.along} within {format_bytes(self.budget_bytes)}"]
        lines.append(f"  without recompute    {self.size_text(self.without_recompute)}")
        lines.append(f"  with full recompute  {self.size_text(self.full_recompute)}")
        lines.append(f"  with a plan          {self.size_text(self.planned)}")
        speed = f"{self.fastest.tokens_per_s or 0:,.0f} tokens/s of {self.device_name or 'an unknown device'}"
        lines.append(f"most tokens per second at {self.along} {self.fastest.size:,}: {speed}, modelled")
        return "\n".join(lines)
