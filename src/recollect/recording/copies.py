"""Count what recording holds twice: the tape's copies of values that the model itself holds on to, such as a cache of keys.

A plan that keeps such a value shares it with the model, at no cost. The recording tape has a copy, so that it sees when the
model lets go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from recollect.profile import events
from recollect.profile.events import Event, StepLog
from recollect.profile.profile import Profile

__all__ = ["with_copies"]


def with_copies(profile: Profile) -> Profile:
    """Return a profile in which the tape shares nothing with the model that lives into backward: to keep it costs its bytes.

    It is for choosing a plan. Where the plan drops such a value, what backward computes again stays as long as the model holds
    the value, which this leaves out.

    Args:
        profile: of any step.
    """
    recorded = list(profile.log.events())
    added: defaultdict[int, list[Event]] = defaultdict(list)
    replaced: dict[int, Event] = {}
    number = 1 + max((event[1] for event in recorded if event[0] in (events.ALLOC, events.FREE)), default=-1)
    for (call, value), begin, end in _held(profile, recorded):
        nbytes = profile.graph_of(profile.calls[call]).values[value].nbytes
        added[begin] += [(events.DIES, call, value), (events.ALLOC, number, nbytes)]
        if end is not None:
            replaced[end] = events.FREE, number
        number += 1
    written: list[Event] = []
    for position, event in enumerate(recorded):
        written += [replaced.get(position, event), *added.get(position, ())]
    return replace(profile, log=StepLog((tuple(written),), ((0, -1),)))


def _held(profile: Profile, recorded: Sequence[Event]) -> Iterator[tuple[tuple[int, int], int, int | None]]:
    """Yield what the model holds into backward: from where no unit's forward reads it, and where it dies, if it does."""
    returns: dict[int, int] = {}
    ends: dict[tuple[int, int], int] = {}
    read: dict[tuple[int, int], int] = {}
    made: dict[tuple[int, int], None] = {}
    begins = [position for position, event in enumerate(recorded) if event[:2] == (events.PHASE, events.BACKWARD)]
    for position, (code, *operands) in enumerate(recorded):
        if code == events.OP:
            graph = profile.graph_of(profile.calls[operands[0]])
            made.update(((operands[0], value), None) for value in graph.ops[operands[1]].outputs)
        elif code == events.RETURN:
            returns[operands[0]] = position
            read.update(((source, value), position) for _, source, value in profile.calls[operands[0]].origins)
        elif code == events.SAVE:
            read[operands[0], operands[1]] = position
        elif code == events.DIES:
            ends[operands[0], operands[1]] = position
    for key in made:
        if profile.graph_of(profile.calls[key[0]]).values[key[1]].mutated_later or key[0] not in returns:
            continue
        begin, end = max(returns[key[0]], read.get(key, -1)), ends.get(key)
        if any(position > begin and (end is None or position < end) for position in begins):
            yield key, begin, end
