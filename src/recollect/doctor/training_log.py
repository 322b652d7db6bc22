"""What a training log says in its numbers: memory that is reserved and not used, and losses that are not numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from recollect.byte_format import format_bytes
from recollect.doctor.finding import Finding, Rule

__all__ = ["LOG_RULES", "LogNumbers"]

RESERVED = Rule(
    name="reserved-over-allocated",
    sees="Megatron's line `memory (MB) | allocated: ... | max reserved: ...` with a quarter more reserved than allocated",
    problem="PyTorch holds {reserved} of the device at its highest, and tensors fill only {allocated} of it.",
    cause="{gap} are in gaps between tensors, or were needed for a moment: memory is fragmented.",
    fix=(
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts (PYTORCH_ALLOC_CONF from PyTorch "
        "2.9 on).",
        "Do that before recomputing more: it costs nothing.",
    ),
    source="Megatron Bridge, activation recompute guide; torchtune#1185 (16.39 to 10.83 GiB)",
    certainty="possible",
)
LOG_RULES = (RESERVED,)

_GAP_MATTERS = 1.25  # reserved / allocated: the caching allocator's rounding stays well below
_MEMORY = re.compile(
    r"memory \(MB\) \| allocated: [\d.]+ \| max allocated: ([\d.]+) \| reserved: [\d.]+ \| max reserved: ([\d.]+)"
)
_NAN = re.compile(
    r"found NaN in local|number of nan iterations:\s+[1-9]|lm loss: nan|'(?:loss|grad_norm)': '?nan"
    r"|\b(?:loss|grad norm)[=:]\s*nan\b",
    re.IGNORECASE,
)
_EXPANDABLE = re.compile(r"ALLOC_CONF['\"\]]*\s*[=:,]\s*\S*expandable_segments:True")


class LogNumbers:
    """Collects them line by line.

    Attributes:
        expandable: the first line that sets expandable segments, after its place; "" if there is none.
        nan: the first line with a loss or gradient that is not a number, after its place; "" if there is none.
    """

    def __init__(self) -> None:
        self.expandable = ""
        self.nan = ""
        self._highest: tuple[float, float, str] = (0.0, 0.0, "")

    def look(self, line: str, place: str) -> None:
        """Take the numbers of a line."""
        if "memory (MB)" in line and (found := _MEMORY.search(line)):
            allocated, reserved = float(found[1]), float(found[2])
            if reserved > self._highest[1]:
                self._highest = allocated, reserved, f"{place}: {found[0]}"
        elif not self.nan and ("nan" in line or "NaN" in line) and _NAN.search(line):
            self.nan = f"{place}: {line.strip()[:200]}"

        elif not self.expandable and "expandable_segments" in line and _EXPANDABLE.search(line):
            self.expandable = f"{place}: {line.strip()[:200]}"

    def findings(self) -> Iterator[Finding]:
        """Yield what they show."""
        allocated, reserved, line = self._highest
        if reserved > _GAP_MATTERS * allocated > 0:
            mib = 2**20
            yield RESERVED.finding(
                line,
                reserved=format_bytes(round(reserved * mib)),
                allocated=format_bytes(round(allocated * mib)),
                gap=format_bytes(round((reserved - allocated) * mib)),
            )
