"""What a unit stores of its values until backward, and in which way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Stored(NamedTuple):
    """The stored values of a unit, as one set of values for each way to store one; values in no set are not stored.

    Attributes:
        whole: values that are kept in memory.
        parts: values of which this rank keeps its part only.

    Example:
        >>> stored = Stored.whole_values([1, 2]).toggled_part(3)
        >>> sorted(stored.values), stored.toggled(2) == Stored(frozenset([1]), frozenset([3]))
        ([1, 2, 3], True)
    """

    whole: frozenset[int] = frozenset()
    parts: frozenset[int] = frozenset()

    @classmethod
    def whole_values(cls, values: Iterable[int]) -> Stored:
        """Return these values, each as a whole."""
        return cls(frozenset(values))

    @property
    def values(self) -> frozenset[int]:
        """The values that are stored in any way."""
        return self.whole | self.parts if self.parts else self.whole

    def toggled(self, value: int) -> Stored:
        """Return the same with one value kept as a whole, or not if it is."""
        return Stored(self.whole ^ {value}, self.parts)

    def toggled_part(self, value: int) -> Stored:
        """Return the same with one value kept as a part, or not if it is."""
        return Stored(self.whole, self.parts ^ {value})

    def with_whole(self, values: Iterable[int]) -> Stored:
        """Return the same with these values kept as a whole, too."""
        return Stored(self.whole.union(values), self.parts)

    def without(self, values: Iterable[int]) -> Stored:
        """Return the same without these values."""
        return Stored(self.whole.difference(values), self.parts.difference(values))

    def has_more_than(self, other: Stored) -> bool:
        """Return whether all that another one stores is stored here in the same way, and more."""
        return self != other and self.whole >= other.whole and self.parts >= other.parts

    @property
    def order(self) -> tuple[list[int], list[int]]:
        """A key to sort by that is the same in every run."""
        return sorted(self.whole), sorted(self.parts)
