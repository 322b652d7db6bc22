"""Divides a step into groups of unit calls that can be played independently.

Playing one call depends on a different call only if it reads a value

- that the plan drops there: the other call's ops run again, or
- that an op writes to.

Such calls are played together (`Division.groups`). Groups then share only values that several calls hold, whose bytes
are freed when the last call releases them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from recollect.profile import events
from recollect.profile.events import Key
from recollect.simulation.decisions import CallActions, ValueActions
from recollect.simulation.program import BULK, EDGE, REPLACED, WINDOW, Program, ProgramOp

OUTSIDE: Final = -1
"""Stands in for a call: everything made between units."""

Group = tuple[int, ...]
"""Calls to play together, in order."""


@dataclass(slots=True)
class Part:
    """The instructions and values of one call."""

    positions: list[int] = field(default_factory=list)
    """Where its instructions are in the program."""
    reads: dict[Key, None] = field(default_factory=dict)
    """Values of other calls that it reads, in order of first read."""
    made: set[Key] = field(default_factory=set)
    """Its own values that other calls read."""


class Division:
    """A program divided into parts, one for each call.

    Attributes:
        parts: each part by its call, or by `OUTSIDE`.
        window_starts: for each window, a position before all its instructions and after those of earlier windows.
        present: for each value in some `made`, the positions where the model's own code starts and stops holding it;
            the second is None if it holds the value to the end.
        nbytes: the sizes of these values.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.parts = {call: Part() for call in range(OUTSIDE, len(program.profile.calls))}
        self.window_starts = [-1]
        self.present: dict[Key, tuple[int, int | None]] = {}
        self.nbytes: dict[Key, int] = {}
        self._alive: dict[Key, int] = {}
        self._homes: dict[int, int] = {}
        self._returned: set[int] = set()
        # For each call: (reader, value, whether the read comes before the call returns).
        self._readers: defaultdict[int, set[tuple[int, int, bool]]] = defaultdict(set)
        # Values that an op writes to, before and after the write.
        self._written = set(program.written)
        # Set if a name is used twice and so does not identify a value: everything is then one group.
        self._is_ambiguous = False
        for position, (code, operands) in enumerate(program.instructions):
            if code == WINDOW:
                self.window_starts.append(position)
            elif code not in (events.PHASE, EDGE, REPLACED):
                self.parts[self._home(position, code, operands)].positions.append(position)
        self.present.update((key, (born, None)) for key, born in self._alive.items())
        self._tied = self._share()
        self._links: dict[tuple[int, ValueActions, bool], tuple[int, ...]] = {}
        self._groups: dict[tuple[tuple[int, ...], ...], tuple[Group, ...]] = {}
        self._form_numbers: dict[Any, int] = {}
        self._forms: dict[int, int] = {}

    def groups(self, decisions: Sequence[CallActions]) -> tuple[Group, ...]:
        """Return the groups of calls that must be played together under a plan."""
        links = tuple([self._links_of(call, decision) for call, decision in enumerate(decisions)])
        if links not in self._groups:
            pairs = [(call, reader) for call, readers in enumerate(links) for reader in readers]
            self._groups[links] = _connected(self.parts, [*self._tied, *pairs])
        return self._groups[links]

    def form(self, call: int) -> int:
        """Return a number that is the same for calls which do the same, and differ only in names."""
        if call not in self._forms:
            self._forms[call] = self._form_numbers.setdefault(self._described(call), len(self._form_numbers))
        return self._forms[call]

    def _described(self, call: int) -> Any:
        part = self.parts[call]
        if call == OUTSIDE:
            return "outside"
        read = {key: -1 - number for number, key in enumerate(part.reads)}
        handles: dict[int, int] = {}
        steps = []
        for position in part.positions:
            code, operands = self.program.instructions[position]
            step: tuple[Any, ...] = operands
            if code == events.OP:
                # Calls of one graph share its ops.
                step = (id(operands[1].op), *[read.get(key, key[1]) for key in operands[1].inputs])
            elif code == events.SAVE:
                owner, key, handle, saver = operands
                step = (owner == saver, read.get(key, key[1]), handles.setdefault(handle, len(handles)))
            elif code == events.DIES:
                step = (operands[0][1],)
            elif code in events.OF_CALLS:
                step = operands[1:]
            elif code == BULK:
                step = operands[:2]
            else:
                step = (handles[operands[0]],)
            steps.append((code, *step))
        record = self.program.profile.calls[call]
        return record.graph, record.num_runs, tuple(steps), tuple(sorted(value for _, value in part.made))

    def _links_of(self, call: int, decision: CallActions) -> tuple[int, ...]:
        """Return the calls that read values this call dropped; a kept output can be read once the call has returned."""
        key = (call, decision.values, decision.keeps_output)
        if key not in self._links:
            dropped, sharded = decision.values.dropped, decision.values.sharded
            values = self.program.profile.graph_of(self.program.profile.calls[call]).values
            found = {
                reader
                for reader, value, is_early in self._readers[call]
                if value in dropped
                and (is_early or not (decision.keeps_output and values[value].is_output and value not in sharded))
            }
            self._links[key] = tuple(sorted(found))
        return self._links[key]

    def _home(self, position: int, code: int, operands: tuple[Any, ...]) -> int:
        """Return the call that an instruction belongs to; note the values that it makes, reads and ends."""
        home: int = operands[0]
        if code == BULK:
            # No plan changes these: put them with their surroundings. Runs of instructions are then few and long.
            home = operands[2]
        elif code == events.OP:
            self._op(position, *operands)
        elif code == events.SAVE:
            _, key, handle, home = operands
            self._is_ambiguous |= handle in self._homes
            self._homes[handle] = home
            self._read(home, key)
        elif code in (events.USE, events.PEEK, events.GIVE_BACK, events.RELEASE):
            home = self._homes[operands[0]]
        elif code == events.RETURN:
            self._returned.add(home)
        elif code not in events.OF_CALLS:
            key = operands[0]
            home = key[0]
            if code == events.ALLOC:
                self._is_made(position, key, operands[1])
            else:
                self._ends(position, key)
        return home

    def _op(self, position: int, call: int, run: ProgramOp) -> None:
        for key in run.inputs:
            self._read(call, key)
        if not run.op.mutates:
            for key, nbytes in run.results:
                self._is_made(position, key, nbytes)
            return
        old, (new, nbytes) = (call, run.op.inputs[0]), run.results[0]
        self._is_ambiguous |= old not in self.program.written
        self._written.add(new)
        if self._ends(position, old):
            self._is_made(position, new, nbytes)

    def _read(self, reader: int, key: Key) -> None:
        if key[0] != reader:
            self.parts[reader].reads[key] = None
            self._readers[key[0]].add((reader, key[1], key[0] not in self._returned))

    def _is_made(self, position: int, key: Key, nbytes: int) -> None:
        self._is_ambiguous |= key in self.nbytes
        self.nbytes[key] = nbytes
        self._alive[key] = position

    def _ends(self, position: int, key: Key) -> bool:
        if key not in self._alive:
            return False
        self.present[key] = self._alive.pop(key), position
        return True

    def _share(self) -> list[tuple[int, int]]:
        """Find the shared values; return the pairs of calls to play together under every plan."""
        if self._is_ambiguous:
            self.present = {}
            return [(OUTSIDE, call) for call in self.parts]
        tied = []
        shared = set()
        for call, part in self.parts.items():
            for key in part.reads:
                if key in self._written:
                    tied.append((key[0], call))
                elif key in self.present:
                    shared.add(key)
                    self.parts[key[0]].made.add(key)
        self.present = {key: span for key, span in self.present.items() if key in shared}
        return tied


def _connected(calls: Sequence[int] | dict[int, Part], pairs: Sequence[tuple[int, int]]) -> tuple[Group, ...]:
    group_of = {call: [call] for call in calls}
    for one, other in pairs:
        here, there = group_of[one], group_of[other]
        if here is not there:
            here += there
            group_of.update(dict.fromkeys(there, here))
    return tuple({id(group): tuple(sorted(group)) for group in group_of.values()}.values())
