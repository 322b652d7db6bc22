"""What a step leaves behind is there when the next one begins: add it to the log.

`out = model(**batch)` binds the output of this step only when forward has run, so until then the output of the last step, its
logits and caches, is still in memory. The recorded step had no step before it. Here it gets what it left behind itself, as
it will be from the second step on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from recollect.profile import events
from recollect.profile.events import Event
from recollect.recording.recorded_call import RecordedCall

__all__ = ["Leftovers", "Phases", "leftovers", "with_last_step"]


@dataclass(frozen=True)
class Leftovers:
    """What is alive when the recording ends: bytes of values by (call, value), and of other storages by number.

    `made_at`: the positions of the events that made them.
    """

    values: Mapping[tuple[int, int], int] = field(default_factory=dict)
    storages: Mapping[int, int] = field(default_factory=dict)
    made_at: Mapping[int | tuple[int, int], int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(self.values.values()) + sum(self.storages.values())


def leftovers(recorded: Iterable[Event], calls: Sequence[RecordedCall]) -> Leftovers:
    """Return what the events leave alive, with what autograd still holds of graphs that no backward used up.

    Complexity: one pass over the events.
    """
    values: dict[tuple[int, int], None] = {}
    storages: dict[int, int] = {}
    saved: dict[int, tuple[int, int]] = {}
    made_at: dict[int | tuple[int, int], int] = {}
    for position, (code, *operands) in enumerate(recorded):
        if code in (events.ALLOC, events.SUM):
            storages[operands[0]] = operands[-1]
            made_at[operands[0]] = position
        elif code == events.FREE:
            storages.pop(operands[0], None)
        elif code == events.OP:
            call, index = operands
            op = calls[call].ops[index]
            if op.mutates:
                values.pop((call, op.inputs[0]), None)
            values.update(((call, value), None) for value in op.outputs)
            made_at.update(((call, value), position) for value in op.outputs)
        elif code == events.DIES:
            values.pop((operands[0], operands[1]), None)
        elif code == events.SAVE and calls[operands[0]].values[operands[1]].producer is not None:
            saved[operands[2]] = operands[0], operands[1]
        elif code == events.RELEASE:
            saved.pop(operands[0], None)
    alive = {**values, **dict.fromkeys(saved.values())}
    for key in dict.fromkeys(saved.values()):
        source = _largest_source(calls[key[0]], key[1])
        if source is not None:
            alive[key[0], source] = None
            made_at.setdefault((key[0], source), made_at[key])
    sizes = {key: calls[key[0]].values[key[1]].nbytes for key in alive}
    return Leftovers(sizes, storages, {key: at for key, at in made_at.items() if key in sizes or key in storages})


def _largest_source(call: RecordedCall, value: int) -> int | None:
    """Return the largest value that a saved value is computed from; None if the saved value is always kept.

    A plan that drops the saved value holds what it is computed from in its place: which of them depends on the plan, and a
    budget has to hold under any.
    """
    if call.values[value].must_keep:
        return None
    found: set[int] = set()
    pending = [value]
    while pending:
        producer = call.values[pending.pop()].producer
        sources = set() if producer is None else set(call.ops[producer].inputs) - found
        found |= sources
        pending += sources
    return max(found, key=lambda source: call.values[source].nbytes, default=None)


def with_last_step(recorded: Sequence[Event], last: Mapping[int, tuple[int, int]]) -> list[Event]:
    """Return the events, with storages of the step before: alive at the start, and until they are replaced.

    Args:
        recorded: the events of the step.
        last: for each storage, by a number that the events do not use: its bytes, and the position before which it dies.
    """
    ends: defaultdict[int, list[int]] = defaultdict(list)
    for number, (_, end) in last.items():
        ends[end].append(number)
    made: list[Event] = [(events.ALLOC, number, nbytes) for number, (nbytes, _) in last.items()]
    for position, event in enumerate(recorded):
        made += [(events.FREE, number) for number in ends.get(position, ())]
        made.append(event)
    return [*made, *((events.FREE, number) for number in ends.get(len(recorded), ()))]


class Phases:
    """The phases of a step, by position.

    Args:
        recorded: the events of the step.
    """

    def __init__(self, recorded: Sequence[Event]) -> None:
        begins = [(position, event[1]) for position, event in enumerate(recorded) if event[0] == events.PHASE]
        self._begins = [position for position, _ in begins]
        self._end = len(recorded)
        self.first_backward = next((position for position, phase in begins if phase == events.BACKWARD), self._end)

    def next_after(self, position: int) -> int:
        """Return the position of the first phase that begins after a position; else the end."""
        following = bisect_right(self._begins, position)
        return self._begins[following] if following < len(self._begins) else self._end
