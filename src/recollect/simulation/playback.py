"""Plays back the memory events of a recorded step under a plan.

The `replay` code that computes dropped tensors in a real backward runs here on tokens that only count bytes, with the
same reference counts. Values are therefore computed, cached and released exactly when they will be in the real step.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from recollect.plans.trip import Timetable
from recollect.profile import events
from recollect.profile.events import BACKWARD, FORWARD, PHASE_NAMES, Key
from recollect.profile.graph import OpRecord
from recollect.replay import KeptPass, Node, Recipes, Value
from recollect.simulation.copies import Death, HostRoom, SimulatedCopy
from recollect.simulation.decisions import CallActions
from recollect.simulation.program import BULK, EDGE, REPLACED, WINDOW, Program, ProgramOp

Actions: TypeAlias = Mapping[int, Callable[..., None]]
"""A handler for each instruction code of a program, called with the operands."""

Owner: TypeAlias = tuple[int, int]
"""Who owns bytes: the `Key` of a value, or one of the following constants with the number of the storage or call."""
OUTSIDE = -1
GENERATOR = -2
COMPILED = -3


class Freed(Death):
    """The end of a token."""

    __slots__ = ("nbytes",)

    nbytes: int

    def end(self, room: Any) -> None:
        room.alive_bytes -= self.nbytes


class Token:
    """Bytes that stay alive as long as anything refers to this object."""

    __slots__ = ("__weakref__", "death", "nbytes")

    death: Death

    def __init__(self, playback: Playback, nbytes: int, owner: Owner) -> None:
        if playback.dead:
            playback.settle()
        self.nbytes = nbytes
        death = self.death = Freed(self, playback.died)
        death.nbytes = nbytes
        # Inlined, since it runs for every value of every simulation.
        playback.alive_bytes += nbytes
        if playback.alive_bytes > playback.window_peak_bytes:
            playback.note_peak()


class Playback(HostRoom):
    """Plays a step back, with a decision for each call.

    `simulation/lifetimes.py` subclasses it to see who owns which bytes when, `simulation/peak_sums.py` to play parts of a step.
    """

    token_type: Callable[[Any, int, Owner], Token] = Token

    def __init__(self, program: Program, decisions: Mapping[int, CallActions], on_tape: Collection[int]) -> None:
        super().__init__()
        self.program = program
        self.profile = profile = program.profile
        self.decisions = decisions
        self.on_tape = on_tape
        self.recomputed = {call: decision.values.recomputed for call, decision in decisions.items()}
        self.trips = {call: dict(decision.trips) for call, decision in decisions.items()}
        self.counted = {
            call: program.counted(call, d.values.dropped).difference(self.trips[call]) for call, d in decisions.items()
        }
        self.alive_bytes = profile.persistent_bytes
        # Never below the alive bytes at the window's start: an allocation then compares with only one number.
        self.window_peak_bytes = self.alive_bytes
        self.window_peaks: list[int] = []
        self.peaks_bytes = [self.alive_bytes] * len(PHASE_NAMES)
        self.peaks_at = [(-1, "")] * len(PHASE_NAMES)
        self.kept_bytes = 0
        # Peaks of phases and windows up to where recipes of the last step are forgotten, and its graphs replaced.
        self.early: list[tuple[list[int], list[int]]] = []
        # Seconds of each op that runs again, and the number of times that ops do.
        self.rerun_s: list[float] = []
        self.num_rerun = 0
        self.phase = FORWARD
        self.call = -1
        self.is_recomputing = ""
        # A plain number of bytes replaces the token where nothing else can hold it.
        self.tensors: dict[Key, Token | int] = {}
        self.dropped: dict[Key, Value] = {}
        # Values that hold a tensor which an op will write to: they then get a private copy.
        self.leaves: dict[Key, list[weakref.ref[Value]]] = {}
        # What autograd holds in place of a tensor, a value or a compiled call, and who saved it.
        self.handles: dict[int, tuple[Any, int]] = {}
        # Compiled calls that hold something, by their numbers.
        self.compiled: dict[int, Any] = {}
        # Of each call; and the backward that keeps its graph, one at a time, with the values its formulas hold.
        self.recipes: defaultdict[int, Recipes] = defaultdict(Recipes)
        self.kept_pass = KeptPass()
        self.peeked: dict[int, object] = {}
        self.copies: dict[Key, weakref.ref[SimulatedCopy]] = {}
        self._timetable = Timetable()

    def actions(self) -> dict[int, Callable[..., None]]:
        """Return the tape's handler for each code of the program."""
        return {
            BULK: self._bulk,
            WINDOW: self._end_window,
            EDGE: self._edge,
            REPLACED: self.note_early,
            events.ALLOC: self._alloc,
            events.FREE: self._dies,
            events.OP: self._op,
            events.DIES: self._dies,
            events.SAVE: self._save,
            events.USE: self._use,
            events.PEEK: self._peek,
            events.GIVE_BACK: self._gives_back,
            events.LET_GO: self._lets_go,
            events.RELEASE: self._release,
            events.REACH: _nothing,
            events.LEAVE: _nothing,
            events.WAIT: _nothing,
            events.RETURN: self._return,
            events.PHASE: self._begin_phase,
        }

    def note_peak(self) -> None:
        """Record a new peak: more bytes are alive than ever before in this window."""
        self.window_peak_bytes = self.alive_bytes
        if self.alive_bytes > self.peaks_bytes[self.phase]:
            self.peaks_bytes[self.phase] = self.alive_bytes
            self.peaks_at[self.phase] = (self.call, self.is_recomputing)

    def work(self, op: OpRecord) -> None:
        """Run an op in its workspace, results included: everything that is alive at once, if only for a moment."""
        if op.working_bytes:
            self._bulk(op.working_bytes, 0)

    def _bulk(self, most_bytes: int, change_bytes: int, _call: int = -1) -> None:
        if self.dead:
            self.settle()
        if self.alive_bytes + most_bytes > self.window_peak_bytes:
            self.alive_bytes += most_bytes
            self.note_peak()
            self.alive_bytes -= most_bytes
        self.alive_bytes += change_bytes

    def _end_window(self) -> None:
        self.settle()
        self.window_peaks.append(self.window_peak_bytes)
        self.window_peak_bytes = self.alive_bytes

    def note_early(self) -> None:
        self.settle()
        self.early.append((list(self.peaks_bytes), [*self.window_peaks, self.window_peak_bytes]))

    def forgets(self, *holders: dict[Any, Any]) -> int:
        """Forget what the step has left; return the bytes that nothing else held."""
        self.settle()
        before_bytes = self.alive_bytes
        for one in holders:
            one.clear()
        self.settle()
        return before_bytes - self.alive_bytes

    def _edge(self, phase: int, call: int) -> None:
        (self._timetable.forward if phase == FORWARD else self._timetable.backward)(call)

    def make(self, key: Key, nbytes: int) -> Token:
        return self.token_type(self, nbytes, key)

    def starts(self, call: int) -> None:
        self.call = call

    def spends(self, time_s: float) -> None:
        """Let time pass outside of ops; for subclasses that keep a clock."""

    def works_in(self, call: int, nbytes: int) -> None:
        """Note that a compiled call needs more bytes for a moment; for subclasses that see who has which."""

    def runs_again(self, call: int, op: OpRecord) -> None:
        self.settle()
        record = self.profile.calls[call]
        num_runs = record.num_runs
        self.num_rerun += num_runs
        self.rerun_s.append(num_runs * self.profile.graph_of(record).again_s(op))
        self.is_recomputing = op.name

    def _alloc(self, key: Key, nbytes: int) -> None:
        self.tensors[key] = self.token_type(self, nbytes, key)

    def _op(self, call: int, run: ProgramOp) -> None:
        op = run.op
        self.starts(call)
        drops = self.recomputed[call]
        self.work(op)
        if op.mutates:
            self._write(call, run, drops)
            return
        counted = self.counted[call]
        for key, nbytes in run.results:
            if key[1] in counted:
                self.tensors[key] = nbytes
                self._bulk(nbytes, nbytes)
            else:
                self.tensors[key] = self.token_type(self, nbytes, key)
        for value in self.decisions[call].values.sharded.intersection(op.outputs):
            gather = Node(*_gather_of_part(self, run, value), recipes=self.recipes[call])
            self._record(call, gather, (value,), drops=frozenset((value,)))
        if self.trips[call]:
            self._send_away(call, op)
        if not drops.isdisjoint(op.outputs):
            node = Node(_Rerun(self, run, run.sizes), self._values(run.inputs), recipes=self.recipes[call])
            self._record(call, node, op.outputs, drops=drops)

    def _send_away(self, call: int, op: OpRecord) -> None:
        """Begin to copy results of an op to host memory."""
        trips, values = self.trips[call], self.profile.graph_of(self.profile.calls[call]).values
        for value in op.outputs:
            token = self.tensors.get((call, value))
            if value in trips and isinstance(token, Token):
                again = partial(self.make, (call, value), token.nbytes)
                # Whole blocks are the device's.
                copy = SimulatedCopy(self, (call, value), values[value].nbytes, token, again)
                self.copies[call, value] = weakref.ref(copy)
                self.sent((call, value))
                self._timetable.add(copy, call, trips[value])
                node = Node(copy, (), recipes=self.recipes[call])
                self._record(call, node, (value,), drops=frozenset((value,)))

    def _write(self, call: int, run: ProgramOp, drops: frozenset[int]) -> None:
        op = run.op
        old, new = (call, op.inputs[0]), (call, op.outputs[0])
        token = self.tensors.pop(old, None)
        if not isinstance(token, Token):
            return
        if old in self.copies and (copy := self.copies[old]()) is not None:
            copy.leave()  # Host memory has the old content.
        for reference in self.leaves.pop(old, ()):
            leaf = reference()
            if leaf is not None:
                leaf.tensor = self.token_type(self, token.nbytes, old)
        node = None
        if new[1] in drops and old in self.dropped:
            again = _Rerun(self, run, (token.nbytes,))
            node = Node(again, self._values(run.inputs), mutates=True, recipes=self.recipes[call])
        self.dropped.pop(old, None)
        self.tensors[new] = token
        if node is not None:
            self._record(call, node, (new[1],), drops=drops)

    def _record(self, call: int, node: Node, results: Sequence[int], *, drops: frozenset[int]) -> None:
        """Note that a node makes these results of a call; nobody needs those that are not dropped."""
        for value in results:
            recorded = None
            if value in drops:
                recorded = self.dropped[call, value] = Value(node=node)
            node.add_output(recorded)

    def _values(self, keys: Sequence[Key]) -> list[Value]:
        """Return a value for each key: the recipe if it was dropped, else one that holds its bytes."""
        dropped = self.dropped
        return [dropped[key] if key in dropped else self._held(key) for key in keys]

    def bytes_of(self, key: Key) -> object:
        return self.tensors.get(key, _NOTHING)

    def _held(self, key: Key) -> Value:
        held = Value(tensor=self.bytes_of(key))
        held.is_viewed = True
        if key in self.program.written:
            self.leaves.setdefault(key, []).append(weakref.ref(held))
        return held

    def _dies(self, key: Key) -> None:
        token = self.tensors.pop(key, None)
        if type(token) is int:
            self.alive_bytes -= token
        self.dropped.pop(key, None)

    def _save(self, call: int, key: Key, handle: int, saver: int) -> None:
        # Off the tape, autograd itself saves the unit's inputs, so they stay whatever the plan says.
        is_seen = saver == call or saver in self.on_tape
        value = self.dropped.get(key) if is_seen else None
        if value is None:
            # A later write makes no private copy of it: it is to a different part of the storage, or autograd refuses.
            value = Value(tensor=self.bytes_of(key))
        value.is_saved()
        # Backward asks for it in the unit that saved it, no matter which unit made it.
        self.handles[handle] = (value, saver)

    def _use(self, handle: int) -> None:
        value, self.call = self.handles[handle]
        value.get()
        self.is_recomputing = ""

    def _peek(self, handle: int) -> None:
        value, self.call = self.handles[handle]
        found = self.kept_pass.get(value) if isinstance(value, Value) and value.tensor is None else value.get()
        self.peeked[handle] = found
        self.is_recomputing = ""

    def _gives_back(self, handle: int) -> None:
        self.peeked.pop(handle, None)

    def _lets_go(self, call: int) -> None:
        self.kept_pass.end(self.recipes[call])

    def _release(self, handle: int) -> None:
        del self.handles[handle]

    def _return(self, call: int) -> None:
        graph = self.profile.graphs[self.profile.calls[call].graph]
        if self.decisions[call].keeps_output:
            stays = {*self.decisions[call].values.sharded, *self.trips[call]}
            for index, value in enumerate(graph.values):
                recorded = self.dropped.pop((call, index), None) if value.is_output and index not in stays else None
                if recorded is not None:
                    recorded.tensor, recorded.node, recorded.is_viewed = self.bytes_of((call, index)), None, True
        self.settle()
        self.call = -1

    def _begin_phase(self, phase: int) -> None:
        self.settle()
        if phase != self.phase:
            # A new phase begins a new window.
            self.window_peak_bytes = self.alive_bytes
        self.phase = phase
        self.call = -1
        self.peaks_bytes[phase] = max(self.peaks_bytes[phase], self.alive_bytes)
        if phase == BACKWARD:
            self.kept_bytes = max(self.kept_bytes, self.alive_bytes - self.profile.persistent_bytes)


def _nothing(*_call: int) -> None:
    """Handle what only other engines have to know."""


_NOTHING: Final = object()
"""Bytes counted elsewhere: parameters, or storages made outside the units."""


class _Rerun:
    """Reruns an op as the tape does, on byte counts instead of tensors: allocates its results again and counts its time."""

    __slots__ = ("op", "results", "sizes", "state", "step")

    def __init__(self, step: Playback, run: ProgramOp, sizes: Sequence[int]) -> None:
        self.step = step
        self.op = run.op
        self.results = run.results
        self.sizes = sizes
        state_bytes = step.profile.block_bytes(run.op.state_bytes)
        self.state = step.token_type(step, state_bytes, (GENERATOR, run.results[0][0][0])) if state_bytes else None

    def __call__(self, tensors: list[Any], may_overwrite_first: bool) -> Sequence[Any]:
        """Run the op when `recollect.replay` asks for it."""
        step, op, results = self.step, self.op, self.results
        step.runs_again(results[0][0][0], op)
        step.work(op)
        if op.mutates and may_overwrite_first:
            return (tensors[0],)
        if len(results) == 1:
            return (step.make(results[0][0], self.sizes[0]),)
        return [step.make(key, nbytes) for (key, _), nbytes in zip(results, self.sizes, strict=True)]


def _gather_of_part(step: Playback, run: ProgramOp, value: int) -> tuple[_Rerun, list[Value]]:
    """Return the gather of a value that an op has just computed, and its arguments: the bytes of this rank's part.

    `recollect.engine.together` really holds and gathers it.
    """
    profile = step.profile
    key, nbytes = next(result for result in run.results if result[0][1] == value)
    part_bytes = -(-nbytes // profile.shard_ranks)
    whole_bytes = part_bytes * profile.shard_ranks
    time_s = profile.gather_latency_s + whole_bytes * profile.gather_s_per_byte
    op = OpRecord(f"{run.op.name}._c10d_functional:all_gather_into_tensor", (), (value,), time_s)
    size = profile.block_bytes(whole_bytes)
    part = Value(tensor=step.make(key, profile.block_bytes(part_bytes)))
    part.is_viewed = True
    return _Rerun(step, ProgramOp(op, (), ((key, size),), (size,)), (size,)), [part]
