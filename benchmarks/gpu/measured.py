"""What one part measured on a GPU: the rows of its file, read back."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Measured"]


@dataclass(frozen=True)
class Measured:
    """The rows of one file.

    Attributes:
        part: which part wrote them.
        machine, torch, commit, date: of the last row.
        versions: of what took part.
        command: that wrote them.
        sizes: of the step, in words; empty where it is not one.
        values: by metric and contestant, the last ones written.
    """

    part: str
    machine: str
    torch: str
    commit: str
    date: str
    versions: dict[str, str]
    command: str
    sizes: str = ""
    values: dict[str, dict[str, str]] = field(default_factory=dict)

    def of(self, metric: str) -> dict[str, str]:
        """Return the values of a metric, by contestant."""
        return self.values.get(metric, {})

    def number(self, metric: str, name: str) -> float | None:
        """Return one value; None where there is none."""
        text = self.of(metric).get(name)
        return None if text is None else float(text)
