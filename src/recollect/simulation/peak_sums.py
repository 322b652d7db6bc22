"""Computes a plan's peaks quickly: plays each part of the step once for each choice, and adds the parts up.

What runs when does not depend on how many bytes are alive, so the bytes of a step are the sum of what its parts
(`simulation/call_groups.py`) hold at each moment. The simulator's own code plays a part. A part's instructions come in
runs between those of other parts, and the trace records only what the sum needs: how far memory rises, by how much it
changes, and when the part releases what others may hold too. Identical layers under equal decisions are played once.

The sum equals what `simulation/simulate.py` finds for the whole step, to the byte; it does not say which values are where.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recollect.profile.events import OPTIMIZER, Key
from recollect.profile.profile import Profile
from recollect.simulation.call_groups import OUTSIDE, Division, Group
from recollect.simulation.copies import Death, Holes
from recollect.simulation.decisions import CallActions, calls_on_tape
from recollect.simulation.playback import Playback, Token
from recollect.simulation.program import Instruction, Program, ProgramOp
from recollect.simulation.simulate import Simulation, handlers, simulate
from recollect.simulation.windows import most_alive, windows

# Ends of what lives on when the step has ended: only recipes hold it, or graphs too.
_NEVER = 2**62
_LEFT = _NEVER + 1

_Played = tuple[CallActions, bool]
"""The decision for a call, and whether it is on the tape."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """The facts a search needs about a plan: the attributes of `Simulation` with these names."""

    peak_bytes: int
    recompute_s: float
    window_peaks: tuple[int, ...]


def checked(simulation: Simulation, peaks: Peaks) -> Simulation:
    """Return the simulation of a plan, which runs the engine's own code on the whole step, if the sum agrees with it."""
    if (simulation.peak_bytes, simulation.recompute_s) != (peaks.peak_bytes, peaks.recompute_s):
        raise RuntimeError(
            f"a plan has a peak of {simulation.peak_bytes} bytes, where the sum over its units says "
            f"{peaks.peak_bytes}: this is a bug in recollect, please report it"
        )
    return simulation


@dataclass(frozen=True, slots=True)
class _Trace:
    """A group, played by itself."""

    runs: NDArray[np.int64]
    """For each piece, the number of its run of instructions."""
    most_bytes: NDArray[np.int64]
    change_bytes: NDArray[np.int64]
    """How far memory rises in each piece, and by how much it changes."""
    ends: tuple[tuple[int, int], ...]
    """For each shared value by its number, the piece that releases its bytes; -1 if none does, -2 if a graph still holds it.
    Releases while the model's own code still holds the value do not matter."""
    rerun_s: tuple[float, ...]
    left_bytes: tuple[int, int]
    """What the group leaves to the next step, without shared values; as `Simulation.left_bytes`."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A trace placed in the step: the position of each piece, and (value, position, piece) where shared values end."""

    positions: NDArray[np.int64]
    trace: _Trace
    ends: tuple[tuple[Key, int, int], ...]


class PeakSums:
    """Simulates plans of one profile as sums.

    Complexity: a choice new to a call and its identical calls costs the call's share of a whole simulation; a plan
        whose calls are all known costs about a thirtieth of one.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.profile = program.profile
        self.windows = program.windows
        self._division = Division(program)
        self._layouts: dict[Group, _Layout] = {}
        self._traces: dict[tuple[Any, tuple[_Played, ...]], _Trace] = {}
        self._placed: dict[tuple[Group, tuple[_Played, ...]], _Placed] = {}
        starts = np.array(self._division.window_starts, dtype=np.int64)
        self._starts, self._nothing = starts, np.zeros(len(starts), dtype=np.int64)
        self._phases = np.array([window.phase for window in self.windows])
        calibration_bytes = self.profile.calibration_bytes
        self._calibration_bytes = np.where(self._phases == OPTIMIZER, 0, calibration_bytes)
        # The simulator gives a missing phase this peak too.
        self._least_peak_bytes = self.profile.persistent_bytes + calibration_bytes

    @classmethod
    def of(cls, profile: Profile) -> PeakSums:
        return cls(Program(profile, windows(profile)))

    @cached_property
    def most_alive(self) -> dict[str, int]:
        """For each path of a unit, how many of its calls keep their output at once."""
        return most_alive(self.profile, self.windows)

    @cached_property
    def holes(self) -> Holes:
        """Where offloaded values are away, in a program with edges."""
        return Holes(self._program)

    def peaks(self, decisions: Sequence[CallActions]) -> Peaks:
        """Return the same peaks as `simulate`, without where the peak is."""
        on_tape = calls_on_tape(decisions)
        offloads = any(decision.trips for decision in decisions)
        if offloads and not self._program.edges:
            whole = simulate(self.profile, decisions, windows=self.windows)
            return Peaks(whole.peak_bytes, whole.recompute_s, whole.window_peaks)
        # An offloaded value is kept, except while it is away.
        stored = [replace(decision, trips=()) if decision.trips else decision for decision in decisions]
        away, away_bytes = self.holes.changes(decisions) if offloads else (self._nothing[:0], self._nothing[:0])
        played: dict[int, _Played] = {call: (decision, call in on_tape) for call, decision in enumerate(stored)}
        played[OUTSIDE] = CallActions(), False
        placed = [
            self._placed_trace(group, tuple([played[call] for call in group]))
            for group in self._division.groups(stored)
        ]
        change_bytes = np.concatenate([self._nothing, *[p.trace.change_bytes for p in placed], away_bytes])
        recipes_bytes, graphs_bytes = self._subtract_ends(placed, change_bytes)
        most_bytes = np.concatenate([self._nothing, *[p.trace.most_bytes for p in placed], np.maximum(away_bytes, 0)])
        positions = np.concatenate([self._starts, *[p.positions for p in placed], away])
        # What the last step left goes before anything else at the same position.
        left_at = -1, self._program.forgets_at(on_tape), self._program.replaced
        positions = np.concatenate([left_at, positions])
        change_bytes = np.concatenate([(recipes_bytes + graphs_bytes, -recipes_bytes, -graphs_bytes), change_bytes])
        most_bytes = np.concatenate([(0, 0, 0), most_bytes])
        order = np.argsort(positions, kind="stable")
        change_bytes = change_bytes[order]
        tops = np.cumsum(change_bytes) - change_bytes + most_bytes[order] + self.profile.persistent_bytes
        firsts = np.searchsorted(positions[order], self._starts)
        window_peaks = np.maximum.reduceat(tops, firsts) + self._calibration_bytes
        return Peaks(
            peak_bytes=max(int(window_peaks.max()), self._least_peak_bytes),
            recompute_s=self._program.added_s(decisions, on_tape, chain.from_iterable(p.trace.rerun_s for p in placed)),
            window_peaks=tuple(window_peaks.tolist()),
        )

    def _subtract_ends(self, placed: Sequence[_Placed], change_bytes: NDArray[np.int64]) -> list[int]:
        """Free storages held by several parts where the last of them releases them; return `Simulation.left_bytes`."""
        last: dict[Key, tuple[int, int]] = {}
        first_piece = len(self._starts)
        for part in placed:
            for key, position, piece in part.ends:
                if key not in last or last[key][0] < position:
                    last[key] = position, first_piece + piece
            first_piece += len(part.positions)
        for key, (position, piece) in last.items():
            if position < _NEVER:
                change_bytes[piece] -= self._division.nbytes[key]
        # What the model's own code holds to the end is in the log.
        ended = {key: position for key, (position, _) in last.items() if self._division.present[key][1] is not None}
        return [
            sum(p.trace.left_bytes[number] for p in placed)
            + sum(self._division.nbytes[key] for key, position in ended.items() if position == end)
            for number, end in enumerate((_NEVER, _LEFT))
        ]

    def _placed_trace(self, group: Group, played: tuple[_Played, ...]) -> _Placed:
        placed = self._placed.get((group, played))
        if placed is None:
            if group not in self._layouts:
                self._layouts[group] = _Layout(self._division, group)
            layout = self._layouts[group]
            key = layout.shape, played
            if key not in self._traces:
                self._traces[key] = _PartPlayback(self._division, layout, played).trace()
            trace = self._traces[key]
            positions = layout.run_positions[trace.runs]
            ends = tuple(
                (layout.keys[number], _NEVER - 1 - piece if piece < 0 else int(positions[piece]), piece)
                for number, piece in trace.ends
            )
            placed = self._placed[group, played] = _Placed(positions, trace, ends)
        return placed


class _Layout:
    """Where a group is in the program.

    Attributes:
        shape: equal for groups with the same playback.
        keys: the values that both this group and others may hold, by their numbers in a `_Trace`.
        changes: (run, number, whether it arrives) for other groups' values that arrive or leave before a run.
        run_positions: the position of each run's first instruction.
    """

    def __init__(self, division: Division, group: Group) -> None:
        parts = [division.parts[call] for call in group]
        members = {call: number for number, call in enumerate(group)}
        outer = dict.fromkeys(key for part in parts for key in part.reads if key[0] not in members)
        self.num_outer = len(outer)
        self.keys: list[Key] = [*outer, *sorted(key for part in parts for key in part.made)]
        unsorted = np.concatenate([np.array(part.positions, dtype=np.int64) for part in parts])
        order = np.argsort(unsorted, kind="stable")
        positions = unsorted[order]
        is_first = np.diff(positions, prepend=-2) != 1
        firsts = np.flatnonzero(is_first)
        self.run_positions = positions[firsts]
        number_of = {key: number for number, key in enumerate(self.keys)}
        self.changes = self._changes(division, outer, number_of)
        self.shape = (
            tuple(division.form(call) for call in group),
            tuple(
                (members.get(key[0]), key[1] if key[0] in members else number_of[key]) for p in parts for key in p.reads
            ),
            order.tobytes() if len(group) > 1 else b"",
            firsts.tobytes(),
            tuple(self.changes),
        )
        self.group = group
        self._positions = positions
        self._firsts = firsts
        self._program = division.program

    def _changes(
        self, division: Division, outer: Collection[Key], number_of: Mapping[Key, int]
    ) -> list[tuple[int, int, bool]]:
        """Return (run, number, True) where a different group's value arrives before a run, and False where it leaves."""
        found = []
        for key in outer:
            if key in division.present:
                born, gone = division.present[key]
                found.append((born, number_of[key], True))
                if gone is not None:
                    found.append((gone, number_of[key], False))
        return [
            (int(np.searchsorted(self.run_positions, position)), number, comes)
            for position, number, comes in sorted(found)
        ]

    @cached_property
    def runs(self) -> list[list[Instruction]]:
        bounds = [*self._firsts.tolist(), len(self._positions)]
        program = self._program.instructions
        return [
            [program[position] for position in self._positions[first:end].tolist()]
            for first, end in zip(bounds, bounds[1:], strict=False)
        ]


class _LetGo(Death):
    __slots__ = ("number",)

    number: int

    def end(self, room: _PartPlayback) -> None:
        room.lets_go(self.number)


class _Shared(Token):
    """A value that other groups may hold too: its owner counts its bytes when it is made, and the sum frees them."""

    __slots__ = ()

    death: _LetGo

    def __init__(self, playback: _PartPlayback, number: int) -> None:
        playback.settle()
        self.nbytes = 0
        self.death = _LetGo(self, playback.died)
        self.death.number = number
        playback.held.add(number)


class _PartPlayback(Playback):
    """Plays one group and records its trace."""

    def __init__(self, division: Division, layout: _Layout, played: Sequence[_Played]) -> None:
        calls = {call: one for call, one in zip(layout.group, played, strict=True) if call != OUTSIDE}
        on_tape = {call for call, (_, is_on_tape) in calls.items() if is_on_tape}
        super().__init__(division.program, {call: decision for call, (decision, _) in calls.items()}, on_tape)
        self._layout = layout
        self._made = {key: number for number, key in enumerate(layout.keys) if number >= layout.num_outer}
        self.held: set[int] = set()
        self._ends: dict[int, int] = {}
        self._pieces: list[tuple[int, int, int]] = []
        self._start_bytes = self.alive_bytes
        self._run = 0
        # Releases while this is set are not recorded.
        self._is_between = False

    def trace(self) -> _Trace:
        play = handlers(self)
        changes = iter([*self._layout.changes, (_NEVER, 0, True)])
        change = next(changes)
        for run, instructions in enumerate(self._layout.runs):
            self._run = run
            while change[0] <= run:
                self._come_or_go(*change[1:])
                change = next(changes)
            for code, operands in instructions:
                play[code](*operands)
            self.settle()
            self._note_piece()
        while change[0] != _NEVER:
            self._come_or_go(*change[1:])
            change = next(changes)
        self._ends.update((number, -1) for number in self.held)
        self._is_between = True
        recipes_bytes = self.forgets(self.dropped)
        self._ends.update((number, -2) for number in self.held)
        columns = np.array(self._pieces, dtype=np.int64).reshape(-1, 3)
        return _Trace(
            runs=columns[:, 0].copy(),
            most_bytes=columns[:, 1].copy(),
            change_bytes=columns[:, 2].copy(),
            ends=tuple(self._ends.items()),
            rerun_s=tuple(self.rerun_s),
            left_bytes=(recipes_bytes, self.forgets(self.handles, self.compiled)),
        )

    def note_peak(self) -> None:
        self.window_peak_bytes = self.alive_bytes

    def lets_go(self, number: int) -> None:
        """Record that this group no longer holds a shared value."""
        self.held.discard(number)
        if not self._is_between:
            self._note_piece()
            self._ends[number] = len(self._pieces)
            self._pieces.append((self._run, 0, 0))

    def _come_or_go(self, number: int, comes: bool) -> None:
        key = self._layout.keys[number]
        if comes:
            self.tensors[key] = _Shared(self, number)
            return
        self.settle()
        self._is_between = True
        del self.tensors[key]
        self.settle()
        self._is_between = False

    def _note_piece(self) -> None:
        most_bytes, change_bytes = self.window_peak_bytes - self._start_bytes, self.alive_bytes - self._start_bytes
        if most_bytes or change_bytes:
            self._pieces.append((self._run, most_bytes, change_bytes))
        self.window_peak_bytes = self._start_bytes = self.alive_bytes

    def _op(self, call: int, run: ProgramOp) -> None:
        super()._op(call, run)
        for key, nbytes in run.results:
            if key in self._made:
                self._share(key, nbytes)

    def _alloc(self, key: Key, nbytes: int) -> None:
        super()._alloc(key, nbytes)
        if key in self._made:
            self._share(key, nbytes)

    def _share(self, key: Key, nbytes: int) -> None:
        """Let others hold a value that was just made; its bytes are already counted."""
        self.tensors[key] = _Shared(self, self._made[key])
        self.alive_bytes += nbytes
