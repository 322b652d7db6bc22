"""One value for each unit whose being kept or computed again divides all plans into two kinds, each bounded by itself.

To compute a dropped value again, its op's arguments must be in memory, and those that backward asks for later stay there:
the tape lets go of nothing that it computed and still has to give. So if backward has asked for value v:

- either v was in memory all the time, from forward on,
- or its op ran again, and all its arguments that backward has still to ask for are in memory as well.

A bound that allows both at once (v gone before, its arguments gone after) is too low where they are large.
"""

from __future__ import annotations

from dataclasses import dataclass

from recollect.profile.graph import UnitGraph, ValueRecord
from recollect.profile.profile import Profile

__all__ = ["Pivot", "pivots"]


@dataclass(frozen=True, slots=True)
class Pivot:
    """A value, and the arguments of its op that autograd saved too, by index in the unit's graph."""

    value: int
    arguments: frozenset[int]


def pivots(profile: Profile) -> dict[int, Pivot]:
    """Return the pivot of each graph of a repeated unit that has one: the value whose op's saved arguments are largest.

    Example:
        >>> from recollect.profile.events import StepLog
        >>> from recollect.profile.graph import OpRecord, UnitCall
        >>> x = ValueRecord("x", 8, producer=None)
        >>> a, b = (ValueRecord(name, 64, producer=op, saved=True) for op, name in enumerate("ab"))
        >>> graph = UnitGraph((x, a, b), (OpRecord("a", (0,), (1,), 0.5), OpRecord("b", (1,), (2,), 0.5)))
        >>> pivots(Profile((graph,), (UnitCall("layers.0", 0, repeated=True),), StepLog(), step_s=1.0))
        {0: Pivot(value=2, arguments=frozenset({1}))}
    """
    repeated = {call.graph for call in profile.calls if call.repeated}
    found = {number: _pivot(profile.graphs[number]) for number in sorted(repeated)}
    return {number: pivot for number, pivot in found.items() if pivot is not None}


def _pivot(graph: UnitGraph) -> Pivot | None:
    best: tuple[int, Pivot] | None = None
    for index, value in enumerate(graph.values):
        # An output can be kept by the unit that reads it; what is written in place is not one value.
        if value.producer is None or not _is_plain(value) or value.is_output or graph.ops[value.producer].mutates:
            continue
        arguments = frozenset(
            v
            for v in graph.ops[value.producer].inputs
            if graph.values[v].producer is not None and _is_plain(graph.values[v])
        )
        nbytes = sum(graph.values[v].nbytes for v in arguments)
        if nbytes and (best is None or nbytes > best[0]):
            best = nbytes, Pivot(index, arguments)
    return best and best[1]


def _is_plain(value: ValueRecord) -> bool:
    return value.saved and not value.must_keep and not value.mutated_later
