"""The log of a step: how to walk over its events."""

from recollect.profile.events import ALLOC, FREE, PHASE, StepLog

LOG = StepLog(((PHASE, 0), (ALLOC, 0, 8), (FREE, 0), (ALLOC, 0, 8), (FREE, 0)))


def test_an_event_is_handled_before_it_is_yielded() -> None:
    alive: dict[int, int] = {}
    handlers = {ALLOC: alive.__setitem__, FREE: alive.pop}
    assert [(event, dict(alive)) for event in LOG.play(handlers)] == list(
        zip(LOG.events, ({}, {0: 8}, {}, {0: 8}, {}), strict=True)
    )
