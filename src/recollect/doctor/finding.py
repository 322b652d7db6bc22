"""`Finding`: one problem, why it is there, what shows it, and what to do."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["CERTAINTIES", "Certainty", "Finding"]

Certainty = Literal["certain", "likely", "possible"]
"""The text or the numbers say so; they fit no other common cause; they allow it."""

CERTAINTIES: tuple[Certainty, ...] = ("certain", "likely", "possible")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem that `recollect.diagnose` recognised.

    Attributes:
        rule: its name in docs/doctor.md.
        certainty: "certain", "likely" or "possible".
        problem: what goes wrong.
        cause: why.
        evidence: the lines, settings or numbers that show it, each after the place where it was seen.
        fix: what to do, the best first.
        source: where the problem was reported or documented.

    Example:
        >>> finding = Finding(
        ...     rule="r", certainty="likely", problem="p", cause="c", evidence=("log:3: x",), fix=("f",), source="s"
        ... )
        >>> finding.to_data()["evidence"]
        ['log:3: x']
    """

    rule: str
    certainty: Certainty
    problem: str
    cause: str
    evidence: tuple[str, ...]
    fix: tuple[str, ...]
    source: str

    def to_data(self) -> dict[str, Any]:
        """Return the finding as plain data, for JSON."""
        return {**dataclasses.asdict(self), "evidence": list(self.evidence), "fix": list(self.fix)}
