"""A step in parts that can be played by themselves: the instructions of a program by unit call, and what ties calls together.

What a playback does for one call depends on another call only where

- it reads a value that the plan drops there, and so runs ops of the other one, or
- it reads a value that an op writes to.

Such calls are played together (`Division.groups`). All that is left between groups are values that several calls hold:
their bytes are free when the last one has let go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from recollect.plans.action import Action
from recollect.plans.value_actions import ValueActions
from recollect.profile.events import ALLOC, OP, PHASE, RELEASE, RETURN, SAVE, USE
from recollect.simulation.call_actions import CallActions
from recollect.simulation.program import BULK, WINDOW, Key, Program, ProgramOp

__all__ = ["OUTSIDE", "Division", "Group", "Part"]

OUTSIDE: Final = -1
"""In place of a call: what is made between units."""

Group = tuple[int, ...]
"""Calls that are played together, in order."""


@dataclass(slots=True)
class Part:
    """What belongs to one call.

    Attributes:
        positions: those of its instructions in the program.
        reads: values that others made and it reads, in the order in which it first does.
        made: its values that others read.
    """

    positions: list[int] = field(default_factory=list)
    reads: dict[Key, None] = field(default_factory=dict)
    made: set[Key] = field(default_factory=set)


class Division:
    """The parts of a program.

    Args:
        program: of a profile with its windows.

    Attributes:
        parts: by call, or `OUTSIDE`.
        window_starts: for each window, a position before all of its instructions and after those of earlier ones.
        present: for each value in some `made`, the positions between which the model's own code holds it; the second one is
            None if it does to the end.
        nbytes: what these values take.

    Complexity: one walk over the instructions.
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
        # For each call: who reads which of its values, and whether before it returned.
        self._readers: defaultdict[int, set[tuple[int, int, bool]]] = defaultdict(set)
        # Values that an op writes to, and what they are afterwards.
        self._written = set(program.written)
        # Something is made twice, so that its name is not enough to tell what it is: all is one part.
        self._is_ambiguous = False
        self._walk()
        self._tied = self._share()
        self._links: dict[tuple[int, ValueActions, Action], tuple[int, ...]] = {}
        self._groups: dict[tuple[tuple[int, ...], ...], tuple[Group, ...]] = {}

    def groups(self, decisions: Sequence[CallActions]) -> tuple[Group, ...]:
        """Return the calls that have to be played together under a plan."""
        links = tuple([self._links_of(call, decision) for call, decision in enumerate(decisions)])
        if links not in self._groups:
            pairs = [(call, reader) for call, readers in enumerate(links) for reader in readers]
            self._groups[links] = _connected(self.parts, [*self._tied, *pairs])
        return self._groups[links]

    def _links_of(self, call: int, decision: CallActions) -> tuple[int, ...]:
        """Return who reads a value that a call drops and does not have any more: its output is there once it returned."""
        key = (call, decision.values, decision.output)
        if key not in self._links:
            dropped = decision.values.recomputed
            keeps_output = decision.output is Action.KEEP
            values = self.program.profile.graph_of(self.program.profile.calls[call]).values
            self._links[key] = tuple(
                sorted(
                    {
                        reader
                        for reader, value, is_early in self._readers[call]
                        if value in dropped and (is_early or not (keeps_output and values[value].is_output))
                    }
                )
            )
        return self._links[key]

    def _walk(self) -> None:
        for position, (code, operands) in enumerate(self.program.instructions):
            if code == WINDOW:
                self.window_starts.append(position)
            elif code != PHASE:
                self.parts[self._home(position, code, operands)].positions.append(position)
        self.present.update((key, (born, None)) for key, born in self._alive.items())

    def _home(self, position: int, code: int, operands: tuple[Any, ...]) -> int:
        """Return whose an instruction is; note what it makes, reads and ends."""
        home: int = operands[0]
        if code == BULK:
            # What no plan changes goes with what surrounds it, so that there are few and long runs of instructions.
            home = self.program.windows[len(self.window_starts) - 1].call
        elif code == OP:
            self._op(position, *operands)
        elif code == SAVE:
            _, key, handle, home = operands
            self._is_ambiguous |= handle in self._homes
            self._homes[handle] = home
            self._read(home, key)
        elif code in (USE, RELEASE):
            home = self._homes[operands[0]]
        elif code == RETURN:
            self._returned.add(home)
        else:
            key = operands[0]
            home = key[0]
            if code == ALLOC:
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
        """Note which values are shared; return the pairs that are played together under every plan."""
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
    """Return the calls in groups, in which each pair is together."""
    group_of = {call: [call] for call in calls}
    for one, other in pairs:
        here, there = group_of[one], group_of[other]
        if here is not there:
            here += there
            group_of.update(dict.fromkeys(there, here))
    return tuple({id(group): tuple(sorted(group)) for group in group_of.values()}.values())
