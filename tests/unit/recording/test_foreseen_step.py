"""A step that is foreseen from a recorded one: with gradients alive, or larger."""

from recollect.profile.events import ALLOC, BACKWARD, FORWARD, FREE, OP, OPTIMIZER, PHASE, RETURN, StepLog
from recollect.profile.graph import OpRecord, UnitCall, UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from recollect.recording.next_step import foreseen

_GRAPH = UnitGraph((ValueRecord("h", 8, producer=0),), (OpRecord("h", (), (0,), 1.0, working_bytes=16),))
# Gradients of 100 and 7 bytes, and between them one of an activation, which dies.
_EVENTS = (
    *((PHASE, FORWARD), (OP, 0, 0), (RETURN, 0), (ALLOC, 0, 40)),
    *((PHASE, BACKWARD), (ALLOC, 1, 100), (ALLOC, 2, 40), (FREE, 2)),
    *((PHASE, FORWARD), (PHASE, BACKWARD), (ALLOC, 3, 7), (FREE, 0)),
    *((PHASE, OPTIMIZER), (ALLOC, 4, 9), (FREE, 4)),
)
_PROFILE = Profile((_GRAPH,), (UnitCall("layer", 0),), StepLog(_EVENTS), step_s=1.0)


def test_a_gradient_is_alive_until_the_backward_that_makes_it_anew() -> None:
    found = list(foreseen(_PROFILE, gradients_bytes=[1000, 7, 100]).log.events)
    alive, seen = {}, []
    for code, *operands in found:
        if code == ALLOC:
            alive[operands[0]] = operands[1]
        elif code == FREE:
            del alive[operands[0]]
        elif code == PHASE:
            seen.append(sorted(alive.values()))
    # At the start, before either backward, between them, and at the end; nothing makes one of 1000 bytes.
    assert seen == [[7, 100], [7, 40], [7, 40, 100], [40, 100], [7, 100]]


def test_a_larger_step_has_larger_values_and_the_same_gradients() -> None:
    found = foreseen(_PROFILE, growth=3.0)
    sizes = {event[1]: event[2] for event in found.log.events if event[0] == ALLOC}
    assert sizes == {0: 120, 1: 100, 2: 120, 3: 7, 4: 9}
    assert found.graphs[0].values[0].nbytes == 24
    assert found.graphs[0].ops[0].working_bytes == 48


def test_gradients_that_were_alive_at_the_start_do_not_grow() -> None:
    events = ((PHASE, FORWARD), (ALLOC, 8, 100), (ALLOC, 9, 40), *_EVENTS[1:])
    profile = Profile(_PROFILE.graphs, _PROFILE.calls, StepLog(events), step_s=1.0)
    sizes = {e[1]: e[2] for e in foreseen(profile, growth=2.0).log.events if e[0] == ALLOC}
    assert (sizes[8], sizes[9]) == (100, 80)
