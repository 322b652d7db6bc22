"""The log of a recorded step: its memory events, as small tuples of ints, how to walk over them, and the rules of a log.

A value of a unit call is `(call, value)`; any other storage (embeddings, logits, gradients, optimizer temporaries) has its own
number. A storage "dies" when only the tape still refers to it.

| event | means |
|---|---|
| `(ALLOC, storage, nbytes)` | a storage was allocated outside the units' forward |
| `(FREE, storage)` | it died |
| `(WORK, run)` | an op outside the units' forward runs; in a profile `(WORK, nbytes, time_ns)`: its workspace and time |
| `(SUM, storage, addend, nbytes)` | while recording: autograd added a gradient to an earlier one, in a new storage |
| `(OP, call, op)` | an op of a unit's forward computed its results |
| `(DIES, call, value)` | the storage of a value died |
| `(SAVE, call, value, handle, saver)` | autograd saved a value while call `saver` ran |
| `(USE, handle)` | backward asked for a saved value |
| `(PEEK, handle)` | the same, in a backward that keeps its graph: a later one will ask again |
| `(GIVE_BACK, handle)` | the formula that got it by `PEEK` has run, and no longer holds it |
| `(LET_GO, call)` | that backward has ended, and no longer holds values that it computed for a call |
| `(RELEASE, handle)` | backward, or a discarded graph, released it |
| `(REACH, call)` | the first formula of a call's backward runs next; only in profiles for units that run from traces |
| `(LEAVE, call)` | the next formula does not belong to the reached call |
| `(WAIT, call)` | a unit's forward reads a number that the device computes (`.item()`), for which the host waits |
| `(RETURN, call)` | a unit's forward returned |
| `(PHASE, phase)` | forward, backward or the optimizer step begins |
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from recollect.profile.graph import UnitGraph

Event: TypeAlias = tuple[int, ...]
"""A code and its operands."""
Key: TypeAlias = tuple[int, int]
"""A value: the call that computed it and its index there, or (-1, storage number) if no unit made it."""

ALLOC: Final = 0
FREE: Final = 1
OP: Final = 2
DIES: Final = 3
SAVE: Final = 4
USE: Final = 5
RELEASE: Final = 6
RETURN: Final = 7
PHASE: Final = 8
WORK: Final = 9
SUM: Final = 10
PEEK: Final = 11
LET_GO: Final = 12
GIVE_BACK: Final = 13
REACH: Final = 14
LEAVE: Final = 15
WAIT: Final = 16

OF_CALLS: Final = (LEAVE, LET_GO, REACH, RETURN, WAIT)
"""Events whose only operand is a call."""

FORWARD: Final = 0
BACKWARD: Final = 1
OPTIMIZER: Final = 2

PHASE_NAMES: Final = ("forward", "backward", "optimizer step")


@dataclass(frozen=True, slots=True)
class StepLog:
    """The memory events of a step."""

    events: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        for position, event in enumerate(self.events):
            if not event or any(type(item) is not int for item in event):
                raise ValueError(f"event {position}: got {event!r}, expected one or more ints")

    def operands(self, code: int) -> Iterator[tuple[int, ...]]:
        return (event[1:] for event in self.events if event[0] == code)

    def play(self, handlers: Mapping[int, Callable[..., object]]) -> Iterator[Event]:
        """Call the handler of each event with its operands, then yield the event; codes without one are only yielded."""
        for event in self.events:
            handler = handlers.get(event[0])
            if handler is not None:
                handler(*event[1:])
            yield event


def check_log(log: StepLog, graphs: Sequence[UnitGraph]) -> None:
    """Check that every event is known, has no negative bytes, and refers to existing items."""
    checker = _Checker(graphs)
    for position, event in enumerate(log.events):
        if problem := checker.problem_of(event):
            raise ValueError(f"log.events[{position}]: {problem}")


class _Checker:
    """Follows storages and handles through the step."""

    def __init__(self, graphs: Sequence[UnitGraph]) -> None:
        self._graphs = graphs
        self._storages: set[int] = set()
        self._handles: set[int] = set()
        # Name, the numbers of operands that the event may have, and their check.
        self._rules: dict[int, tuple[str, tuple[int, ...], Callable[..., str]]] = {
            ALLOC: ("ALLOC", (2,), self._alloc),
            FREE: ("FREE", (1,), self._free),
            OP: ("OP", (2,), self._op),
            DIES: ("DIES", (2,), self._value),
            SAVE: ("SAVE", (4,), self._save),
            USE: ("USE", (1,), self._handle),
            RELEASE: ("RELEASE", (1,), self._release),
            RETURN: ("RETURN", (1,), self._call),
            PHASE: ("PHASE", (1,), self._phase),
            WORK: ("WORK", (1, 2), self._work),
            PEEK: ("PEEK", (1,), self._handle),
            LET_GO: ("LET_GO", (1,), self._call),
            GIVE_BACK: ("GIVE_BACK", (1,), self._handle),
            REACH: ("REACH", (1,), self._call),
            LEAVE: ("LEAVE", (1,), self._call),
            WAIT: ("WAIT", (1,), self._call),
        }

    def problem_of(self, event: Event) -> str:
        """Return the problem with the next event; "" if there is none."""
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
