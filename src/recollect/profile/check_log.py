"""Check that the events of a profile can be played back, since people edit profile files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recollect.profile import events
from recollect.profile.events import PHASE_NAMES, Event, StepLog
from recollect.profile.graph import UnitGraph

__all__ = ["check_log"]


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
        # Name, the numbers of operands that the event may have, and what checks them. Old profiles have no times of what runs
        # outside the units.
        self._rules: dict[int, tuple[str, tuple[int, ...], Callable[..., str]]] = {
            events.ALLOC: ("ALLOC", (2,), self._alloc),
            events.FREE: ("FREE", (1,), self._free),
            events.OP: ("OP", (2,), self._op),
            events.DIES: ("DIES", (2,), self._value),
            events.SAVE: ("SAVE", (4,), self._save),
            events.USE: ("USE", (1,), self._handle),
            events.RELEASE: ("RELEASE", (1,), self._release),
            events.RETURN: ("RETURN", (1,), self._call),
            events.PHASE: ("PHASE", (1,), self._phase),
            events.WORK: ("WORK", (1, 2), self._work),
            events.PEEK: ("PEEK", (1,), self._handle),
            events.LET_GO: ("LET_GO", (1,), self._call),
            events.GIVE_BACK: ("GIVE_BACK", (1,), self._handle),
        }

    def problem_of(self, event: Event) -> str:
        """Return what is wrong with the next event; "" if nothing is."""
        code, *operands = event
        if code not in self._rules:
            return f"got event {code}, expected one of {', '.join(map(str, self._rules))}"
        name, counts, check = self._rules[code]
        if len(operands) not in counts:
            return f"{name} with {len(operands)} operands, expected {' or '.join(map(str, counts))}"
        problem = check(*operands)
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
