"""What a call of a unit is while it is being recorded: its values and ops, which `assemble` makes a graph of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from recollect.costs.op_costs import OpRun


@dataclass
class RecordedValue:
    """A value while it is being recorded; see `ValueRecord` for the fields."""

    name: str
    nbytes: int
    producer: int | None
    must_keep: bool = False
    saved: bool = False
    is_output: bool = False
    mutated_later: bool = False
    saved_elements: int = 0
    stays: bool = False


@dataclass
class RecordedOp:
    """An op while it is being recorded; see `OpRecord` for the fields."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    run: OpRun | None
    mutates: bool = False
    state_bytes: int = 0


@dataclass
class RecordedCall:
    """One run of a unit while it is being recorded."""

    path: str
    values: list[RecordedValue] = field(default_factory=list)
    ops: list[RecordedOp] = field(default_factory=list)
    origins: dict[tuple[int, int], int] = field(default_factory=dict)
    outside: dict[int, int] = field(default_factory=dict)
    # Number of ops that the tape sees, by module; and modules that it always watches, since they write in place.
    seen_ops: Counter[str] = field(default_factory=Counter)
    watched_modules: set[str] = field(default_factory=set)
    buffer_bytes: int = 0
    # Of values that may be the same on all ranks of a group: a number for their content.
    contents: dict[int, int] = field(default_factory=dict)
    # No plan may drop what it returns.
    output_stays: bool = False

    def add_input(self, nbytes: int) -> int:
        """Add a value that was computed outside the unit; return its index."""
        name = f"input {len(self.origins) + len(self.outside)}"
        self.values.append(RecordedValue(name, nbytes, producer=None))
        return len(self.values) - 1
