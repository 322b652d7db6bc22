"""Turn the profile of a recorded step into one of a step that differs from it: gradients are alive, or it is larger.

It is near enough to choose what the other step drops while it is recorded itself; its own profile then takes the place of
this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from recollect.profile import events
from recollect.profile.events import Event, StepLog
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.recording.next_step import with_last_step

__all__ = ["foreseen"]


def foreseen(profile: Profile, *, gradients_bytes: Sequence[int] = (), growth: float = 1.0) -> Profile:
    """Return the profile of a step like a recorded one, but larger, or with gradients alive when it begins.

    What backward makes and nobody frees are gradients. One that is alive when the step begins lives until the backward in which
    its successor is made.

    Args:
        profile: the recorded step.
        gradients_bytes: bytes of each gradient that is alive when the other step begins, but was not in the recorded one.
        growth: how many times the elements that the recorded step got the other one gets; gradients and what the optimizer
            makes do not grow.
    """
    recorded = list(profile.log.events())
    made = _gradients_made(recorded)
    remaining = list(made.values())
    last: dict[int, tuple[int, int]] = {}
    first_number = 1 + max((event[1] for event in recorded if event[0] in (events.ALLOC, events.FREE)), default=-1)
    for nbytes in gradients_bytes:
        # Of gradients that are equally large, those that are made last live longest.
        successor = next((gradient for gradient in reversed(remaining) if gradient[0] == nbytes), None)
        if successor is not None:
            remaining.remove(successor)
            last[first_number + len(last)] = successor
    if growth != 1.0:
        recorded = _grown(recorded, growth, made)
    log = StepLog((tuple(with_last_step(recorded, last)),), ((0, -1),))
    return replace(profile, graphs=tuple(_grown_graph(graph, growth) for graph in profile.graphs), log=log)


def _gradients_made(recorded: Sequence[Event]) -> Mapping[int, tuple[int, int]]:
    """Return what backward makes and nobody frees, by number: its bytes, and the position where that backward begins."""
    made: dict[int, tuple[int, int]] = {}
    begin, phase = 0, events.FORWARD
    for position, (code, *operands) in enumerate(recorded):
        if code == events.PHASE:
            begin, phase = position, operands[0]
        elif code == events.ALLOC and phase == events.BACKWARD:
            made[operands[0]] = operands[1], begin
        elif code == events.FREE:
            made.pop(operands[0], None)
    return made


def _grown(recorded: Sequence[Event], growth: float, gradients: Mapping[int, tuple[int, int]]) -> list[Event]:
    """Return the events with larger storages, but for gradients, those of the last step among them, and the optimizer's."""
    gradient_sizes = {nbytes for nbytes, _ in gradients.values()}
    grown: list[Event] = []
    is_before, phase = True, events.FORWARD
    for event in recorded:
        is_before &= event[0] in (events.ALLOC, events.PHASE)
        if event[0] == events.PHASE:
            phase = event[1]
        elif event[0] == events.ALLOC and not (
            event[1] in gradients or phase == events.OPTIMIZER or (is_before and event[2] in gradient_sizes)
        ):
            event = (events.ALLOC, event[1], int(event[2] * growth))  # noqa: PLW2901
        grown.append(event)
    return grown


def _grown_graph(graph: UnitGraph, growth: float) -> UnitGraph:
    if growth == 1.0:
        return graph
    return replace(
        graph,
        values=tuple(replace(value, nbytes=int(value.nbytes * growth)) for value in graph.values),
        ops=tuple(replace(op, working_bytes=int(op.working_bytes * growth)) for op in graph.ops),
    )
