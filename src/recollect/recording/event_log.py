"""The events of a step that is recorded, with the deaths of objects at the moments at which they happen.

A weak reference is added to the list by C itself when its object dies. No code in Python runs then: a KeyboardInterrupt that
came in a destructor or a callback would be printed and forgotten, and the training would go on.
"""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from recollect.profile import events
from recollect.profile.events import Event


class Death(weakref.ref[Any]):
    """Refers weakly to an object; added to a list when that dies, if made with the list's `append`.

    `means`: an event, or what returns it from `end()` when the list is settled.
    """

    __slots__ = ("means",)

    means: Any


class Mark(NamedTuple):
    """A place in the record: the number of events, ops run outside units, and storages before it."""

    events: int
    runs: int
    storages: int


class Need:
    """Lives as long as backward needs a saved value.

    Autograd holds it until it releases saved tensors; so does the tensor given to backward, until that dies: a compiled
    backward goes on using tensors that autograd has released.
    """

    __slots__ = ("__weakref__", "index")

    def __init__(self, index: int) -> None:
        self.index = index


def settled(recorded: Iterable[Any]) -> list[Event]:
    """Return events in which deaths are replaced by their meaning; some have none."""
    found = (event.means if type(event) is Death else event for event in recorded)
    events_or_none = (event if isinstance(event, tuple) else event.end() for event in found)
    return [event for event in events_or_none if event is not None]


class EventLog:
    """Events, in order.

    Attributes:
        is_over: no more events are added.
        num_settled: how many of the first ones hold no deaths.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._events: list[Any] = []
        self.num_settled = 0
        self.append = self._events.append
        self._deaths: list[Death] = []
        self._needs: list[Death] = []

    def log(self, *event: int) -> None:
        if not self.is_over:
            self.append(event)

    def end(self) -> None:
        self.is_over = True
        self.replace(settled(self.settle()))

    def settle(self) -> list[Event]:
        fresh = self._events[self.num_settled :]
        found = settled(fresh)
        # Objects may have died meanwhile.
        self._events[self.num_settled : self.num_settled + len(fresh)] = found
        self.num_settled += len(found)
        return self._events

    def replace(self, events: list[Event]) -> None:
        self._events, self.num_settled = events, len(events)

    def replace_since(self, start: int, events: list[Event]) -> None:
        """Replace the settled events from one on; deaths that have been added since stay."""
        self._events[start : self.num_settled] = events
        self.num_settled = start + len(events)

    def death_of(self, thing: object, means: Any) -> Death:
        death = Death(thing, self.append)
        death.means = means
        self._deaths.append(death)
        return death

    def needed(self) -> Need:
        """Add the end of what this returns."""
        need = Need(len(self._needs))
        self._needs.append(self.death_of(need, (events.RELEASE, need.index)))
        return need

    @property
    def has_open_needs(self) -> bool:
        return any(death() is not None for death in self._needs)

    def close(self) -> list[Death]:
        """Forget the references that have added nothing; return those whose objects live."""
        alive = [death for death in self._deaths if death() is not None]
        self._deaths, self._needs = [], []
        return alive
