"""Describe the course of a call: which units ran in it, how often and on how much.

Two calls of equal shapes may do different work: a layer is skipped by chance, an argument adds an iteration, a head is used in
some steps only. A plan holds for a course if each unit runs at most as often, and on at most as much, as when it was recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Runs(NamedTuple):
    """How often a unit ran with gradients on, and how many elements its first argument had at most."""

    number: int
    numel: int


@dataclass(frozen=True, slots=True)
class Course:
    """What happened in a call of the model.

    Attributes:
        units: the runs of each unit, by its path.
        num_backwards: how often backward reached what the call returned; once also if it never did, as after an error.
        builds_graph: such a backward built a graph of its own.
    """

    units: Mapping[str, Runs] = field(default_factory=dict)
    num_backwards: int = 1
    builds_graph: bool = False

    def is_at_least(self, other: Course) -> bool:
        """Whether the other one does nothing that this one does not do.

        Example:
            >>> long, short = Course({"0": Runs(2, 64), "1": Runs(1, 64)}), Course({"0": Runs(1, 64)})
            >>> long.is_at_least(short), short.is_at_least(long)
            (True, False)
        """
        return (
            not self.lacks(other)
            and self.num_backwards >= other.num_backwards
            and (self.builds_graph or not other.builds_graph)
        )

    def lacks(self, other: Course) -> dict[str, int]:
        """Return how many more runs of which units the other one has; one more where they are as many, but larger.

        Example:
            >>> Course({"0": Runs(1, 64)}).lacks(Course({"0": Runs(3, 64), "1": Runs(1, 64)}))
            {'0': 2, '1': 1}
        """
        found = {}
        for path, runs in other.units.items():
            number, numel = self.units.get(path, Runs(0, 0))
            if runs.number > number:
                found[path] = runs.number - number
            elif runs.numel > numel:
                found[path] = 1
        return found

    @property
    def num_runs(self) -> int:
        """Runs of all units."""
        return sum(runs.number for runs in self.units.values())


def largest(courses: Iterable[Course]) -> Course:
    """Return the course in which each unit runs as often, and on as much, as in any.

    Example:
        >>> largest([Course({"0": Runs(2, 8)}), Course({"0": Runs(1, 64), "1": Runs(1, 8)})]).units
        {'0': Runs(number=2, numel=64), '1': Runs(number=1, numel=8)}
    """
    found = list(courses)
    units: dict[str, Runs] = {}
    for course in found:
        for path, runs in course.units.items():
            known = units.get(path, Runs(0, 0))
            units[path] = Runs(max(known.number, runs.number), max(known.numel, runs.numel))
    return Course(
        units,
        max((course.num_backwards for course in found), default=1),
        any(course.builds_graph for course in found),
    )
