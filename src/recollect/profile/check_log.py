"""Whether the events of a profile can be played back: what an edited file has to be checked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from recollect.profile.events import (
    ALLOC,
    DIES,
    FREE,
    OP,
    PHASE,
    PHASE_NAMES,
    RELEASE,
    RETURN,
    SAVE,
    USE,
    WORK,
)
from recollect.profile.graph import Profile

__all__ = ["check_log"]

# Name, and the least number of operands.
_EVENTS = {
    ALLOC: ("ALLOC", 2),
    FREE: ("FREE", 1),
    OP: ("OP", 2),
    DIES: ("DIES", 2),
    SAVE: ("SAVE", 4),
    USE: ("USE", 1),
    RELEASE: ("RELEASE", 1),
    RETURN: ("RETURN", 1),
    PHASE: ("PHASE", 1),
    WORK: ("WORK", 1),
}


def check_log(profile: Profile) -> None:
    """Check that each event is one, that its bytes are not negative, and that what it refers to is there.

    Raises:
        ValueError: names the block, the event in it, and what is wrong.
    """
    checker = _Checker(profile)
    for block, position, event in _events(profile):
        where = f"log.blocks[{block}][{position}]"
        if event[0] not in _EVENTS:
            raise ValueError(f"{where}: got event {event[0]}, expected one of {', '.join(map(str, _EVENTS))}")
        name, num_operands = _EVENTS[event[0]]
        if len(event) - 1 < num_operands:
            raise ValueError(f"{where}: {name} with {len(event) - 1} operands, expected {num_operands}")
        problem = checker.problem_of(event)
        if problem:
            raise ValueError(f"{where}: {name} {problem}")


def _events(profile: Profile) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    for block, _ in profile.log.sequence:
        for position, event in enumerate(profile.log.blocks[block]):
            yield block, position, event


class _Checker:
    """Follows storages and handles through the step."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._storages: set[int] = set()
        self._handles: set[int] = set()
        self._check: dict[int, Callable[[tuple[int, ...]], str]] = {
            ALLOC: self._alloc, FREE: self._free, OP: self._op, DIES: self._value, SAVE: self._save, USE: self._handle,
            RELEASE: self._release, RETURN: self._call, PHASE: self._phase, WORK: self._work,
        }  # fmt: skip

    def problem_of(self, event: tuple[int, ...]) -> str:
        """Return what is wrong with the next event, or nothing."""
        return self._check[event[0]](event)

    def _alloc(self, event: tuple[int, ...]) -> str:
        self._storages.add(event[1])
        return f"of {event[2]} bytes, expected 0 or more" if event[2] < 0 else ""

    def _free(self, event: tuple[int, ...]) -> str:
        if event[1] not in self._storages:
            return f"of storage {event[1]}, which is not alive"
        self._storages.remove(event[1])
        return ""

    def _work(self, event: tuple[int, ...]) -> str:
        return f"in {event[1]} bytes, expected 0 or more" if event[1] < 0 else ""

    def _call(self, event: tuple[int, ...]) -> str:
        num_calls = len(self._profile.calls)
        return "" if 0 <= event[1] < num_calls else f"of call {event[1]}, expected 0 to {num_calls - 1}"

    def _op(self, event: tuple[int, ...]) -> str:
        return self._call(event) or self._index(event, len(self._profile.graph_of(self._profile.calls[event[1]]).ops))

    def _value(self, event: tuple[int, ...]) -> str:
        return self._call(event) or self._index(
            event, len(self._profile.graph_of(self._profile.calls[event[1]]).values)
        )

    def _index(self, event: tuple[int, ...], count: int) -> str:
        return "" if 0 <= event[2] < count else f"{event[2]} of call {event[1]}, expected 0 to {count - 1}"

    def _save(self, event: tuple[int, ...]) -> str:
        self._handles.add(event[3])
        return self._value(event) or self._call((SAVE, event[4]))

    def _handle(self, event: tuple[int, ...]) -> str:
        return "" if event[1] in self._handles else f"of handle {event[1]}, which is not saved"

    def _release(self, event: tuple[int, ...]) -> str:
        problem = self._handle(event)
        self._handles.discard(event[1])
        return problem

    def _phase(self, event: tuple[int, ...]) -> str:
        return "" if 0 <= event[1] < len(PHASE_NAMES) else f"{event[1]}, expected 0 to {len(PHASE_NAMES) - 1}"
