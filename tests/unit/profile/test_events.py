"""The log of a step: its events in order, whichever blocks they stand in."""

import pytest

from recollect.profile.events import ALLOC, FREE, PHASE, StepLog

EVENTS = ((PHASE, 0), (ALLOC, 0, 8), (FREE, 0), (ALLOC, 0, 8), (FREE, 0))
LOG = StepLog(blocks=(((ALLOC, 0, 8), (FREE, 0)), ((PHASE, 0),)), sequence=((1, -1), (0, -1), (0, -1)))


def test_blocks_are_played_in_sequence() -> None:
    assert tuple(LOG.events()) == EVENTS
    assert LOG.num_events == len(EVENTS)
    assert list(LOG.operands(ALLOC)) == [(0, 8), (0, 8)]


def test_an_event_is_handled_before_it_is_yielded() -> None:
    alive: dict[int, int] = {}
    handlers = {ALLOC: alive.__setitem__, FREE: alive.pop}
    assert [(event, dict(alive)) for event in LOG.play(handlers)] == list(
        zip(EVENTS, ({}, {0: 8}, {}, {0: 8}, {}), strict=True)
    )


def test_every_event_has_a_place() -> None:
    for position, event in enumerate(EVENTS):
        block, index = LOG.place(position)
        assert LOG.blocks[block][index] == event
    assert LOG.place(4) == (0, 1)
    with pytest.raises(IndexError, match=r"^position: got 5 beyond the end of the log, which has 5 events$"):
        LOG.place(5)
