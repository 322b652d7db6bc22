"""Check that the events of a profile can be played back, since people edit profile files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recollect.profile.events import (
    ALLOC,
    DIES,
    FREE,
    GIVE_BACK,
    LET_GO,
    OP,
    PEEK,
    PHASE,
    PHASE_NAMES,
    RELEASE,
    RETURN,
    SAVE,
    USE,
    WORK,
    Event,
    StepLog,
)
from recollect.profile.graph import UnitGraph

__all__ = ["check_log"]

# Name, and the numbers of operands that the event may have. Old profiles have no times of what runs outside the units.
_EVENTS = {
    ALLOC: ("ALLOC", (2,)),
    FREE: ("FREE", (1,)),
    OP: ("OP", (2,)),
    DIES: ("DIES", (2,)),
    SAVE: ("SAVE", (4,)),
    USE: ("USE", (1,)),
    RELEASE: ("RELEASE", (1,)),
    RETURN: ("RETURN", (1,)),
    PHASE: ("PHASE", (1,)),
    WORK: ("WORK", (1, 2)),
    PEEK: ("PEEK", (1,)),
    LET_GO: ("LET_GO", (1,)),
    GIVE_BACK: ("GIVE_BACK", (1,)),
}


def check_log(log: StepLog, graphs: Sequence[UnitGraph]) -> None:
    """Check that every event is known, has no negative bytes, and refers to what exists.

    Args:
        log: the events.
        graphs: the graph of each unit call.

    Raises:
        ValueError: names the block, the event in it, and what is wrong.
    """
    checker = _Checker(graphs)
    for number, event in enumerate(log.events()):
        if problem := checker.problem_of(event):
            block, position = log.place(number)
            raise ValueError(f"log.blocks[{block}][{position}]: {problem}")


class _Checker:
    """Follows storages and handles through the step."""

    def __init__(self, graphs: Sequence[UnitGraph]) -> None:
        self._graphs = graphs
        self._storages: set[int] = set()
        self._handles: set[int] = set()
        self._check: dict[int, Callable[..., str]] = {
            ALLOC: self._alloc, FREE: self._free, OP: self._op, DIES: self._value, SAVE: self._save, USE: self._handle,
            RELEASE: self._release, RETURN: self._call, PHASE: self._phase, WORK: self._work,
            PEEK: self._handle, LET_GO: self._call, GIVE_BACK: self._handle,
        }  # fmt: skip

    def problem_of(self, event: Event) -> str:
        """Return what is wrong with the next event; "" if nothing is."""
        code, *operands = event
        if code not in _EVENTS:
            return f"got event {code}, expected one of {', '.join(map(str, _EVENTS))}"
        name, counts = _EVENTS[code]
        if len(operands) not in counts:
            return f"{name} with {len(operands)} operands, expected {' or '.join(map(str, counts))}"
        problem = self._check[code](*operands)
        return problem and f"{name} {problem}"

    def _alloc(self, storage: int, nbytes: int) -> str:
        self._storages.add(storage)
        return f"of {nbytes} bytes, expected 0 or more" if nbytes < 0 else ""

    def _free(self, storage: int) -> str:
        if storage not in self._storages:
            return f"of storage {storage}, which is not alive"
        self._storages.remove(storage)
        return ""

    def _work(self, nbytes: int, _time_ns: int = 0) -> str:
        return f"in {nbytes} bytes, expected 0 or more" if nbytes < 0 else ""

    def _call(self, call: int) -> str:
        return _expect_index(call, len(self._graphs), f"of call {call}")

    def _op(self, call: int, op: int) -> str:
        return self._call(call) or _expect_index(op, len(self._graphs[call].ops), f"{op} of call {call}")

    def _value(self, call: int, value: int) -> str:
        return self._call(call) or _expect_index(value, len(self._graphs[call].values), f"{value} of call {call}")

    def _save(self, call: int, value: int, handle: int, saver: int) -> str:
        self._handles.add(handle)
        return self._value(call, value) or self._call(saver)

    def _handle(self, handle: int) -> str:
        return "" if handle in self._handles else f"of handle {handle}, which is not saved"

    def _release(self, handle: int) -> str:
        problem = self._handle(handle)
        self._handles.discard(handle)
        return problem

    def _phase(self, phase: int) -> str:
        return _expect_index(phase, len(PHASE_NAMES), f"{phase}")


def _expect_index(index: int, count: int, found: str) -> str:
    return "" if 0 <= index < count else f"{found}, expected 0 to {count - 1}"
