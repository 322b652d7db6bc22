"""Plays regions: forward keeps only a unit's inputs, and backward runs the whole unit again.

Non-reentrant `torch.utils.checkpoint` holds the module's inputs; the engine adds copies of its small buffers, and a state of
the random generator for each random op. The first time
that backward asks for something the module saved, its forward runs again, op by op, and values die as they do in
forward; only what autograd saved stays, each value until backward has used it. The run stops at the last saved value.
Once backward needs nothing more of the module, the inputs and the states are released too.

Limitations: autograd also saves parameters, which a profile does not record. If the last thing saved is a parameter
alone (a frozen matrix), the real run goes on for a few ops more than this one. What a custom autograd Function makes as
the first op of a unit counts as an input. States that the engine holds for code that no dispatch mode sees, and copies of large
buffers that forward writes to, are not known to a profile.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from recollect.profile.events import ALLOC, DIES, FREE, OP, RETURN, SAVE
from recollect.simulation.playback import Actions, Playback
from recollect.simulation.program import BULK, Instruction, Key, ProgramOp


class RegionSchedule:
    """Plays the calls that are re-run as a whole.

    Args:
        step: the step being played.
        calls: the calls to play as regions.
    """

    def __init__(self, step: Playback, calls: Collection[int]) -> None:
        self._step = step
        self._calls = frozenset(calls)
        # The calls that are running.
        self._regions: dict[int, _Region] = {}

    def actions(self, play: Actions) -> Actions:
        """Return the actions with those for regions replaced."""
        self._play = play
        return {**play, OP: self._op, SAVE: self._save, RETURN: self._return}

    def _op(self, call: int, run: ProgramOp) -> None:
        if call in self._calls:
            self._region(call).hold(run.inputs)
        self._play[OP](call, run)

    def _save(self, call: int, key: Key, handle: int, saver: int) -> None:
        if saver not in self._calls:
            self._play[SAVE](call, key, handle, saver)
            return
        region = self._region(saver)
        region.hold([key])
        self._step.handles[handle] = region.saves(handle), saver

    def _return(self, call: int) -> None:
        self._play[RETURN](call)
        self._regions.pop(call, None)

    def _region(self, call: int) -> _Region:
        if call not in self._regions:
            self._regions[call] = _Region(self._step, call, self._play)
        return self._regions[call]


class _SavedByRegion:
    """Stands for a value that a region saved: holds the region and, once it has run again, the value's bytes."""

    __slots__ = ("__weakref__", "bytes", "region")

    def __init__(self, region: _Region) -> None:
        self.region = region
        self.bytes: Any = None

    def get(self) -> Any:
        """Return the value's bytes, running the region again first if it has not."""
        self.region.run_again()
        return self.bytes


class _Region:
    """One call: exists while it runs and while backward may ask for something it saved."""

    def __init__(self, step: Playback, call: int, play: Actions) -> None:
        self._step = step
        self._call = call
        self._play = play
        self._forward = _until_last_save(step.program.forwards[call])
        self._makes = {operands[0] for code, operands in step.program.forwards[call] if code == ALLOC}
        self._inputs: dict[Key, Any] = {}
        self._state = self._held_state()
        self._saved: weakref.WeakValueDictionary[int, _SavedByRegion] = weakref.WeakValueDictionary()
        self._ran_again = False

    def hold(self, keys: Iterable[Key]) -> None:
        """Hold those of these values that others made: they are the region's inputs."""
        for key in keys:
            if key[0] != self._call and key not in self._makes:
                self._inputs.setdefault(key, self._step.tensors.get(key))

    def saves(self, handle: int) -> _SavedByRegion:
        """Return what autograd holds in place of something the region saves."""
        saved = self._saved[handle] = _SavedByRegion(self)
        return saved

    def run_again(self) -> None:
        """Run forward once more and store what it saved; do nothing the second time."""
        if self._ran_again:
            return
        self._ran_again = True
        present: dict[Key, Any] = {}
        change_bytes = 0
        for code, operands in self._forward:
            if code == OP:
                self._op_again(operands[1], present)
            elif code == ALLOC:
                present[operands[0]] = self._step.make(*operands)
            elif code in (FREE, DIES):
                present.pop(operands[0], None)
            elif code == SAVE:
                self._store(operands[2], present.get(operands[1]))
            else:
                self._play[code](*operands)
                change_bytes += operands[1] if code == BULK else 0
        # Bytes left over from these are freed when the run ends.
        self._play[BULK](0, -change_bytes)

    def _op_again(self, run: ProgramOp, present: dict[Key, Any]) -> None:
        self._step.runs_again(self._call, run.op)
        self._step.work(run.op)
        if not run.op.mutates:
            present.update({key: self._step.make(key, nbytes) for key, nbytes in run.results})
        elif (written := present.pop((self._call, run.op.inputs[0]), None)) is not None:
            present[run.results[0][0]] = written

    def _store(self, handle: int, found: Any) -> None:
        saved = self._saved.get(handle)
        if saved is not None:
            saved.bytes = found

    def _held_state(self) -> Any:
        graph = self._step.profile.graph_of(self._step.profile.calls[self._call])
        states = [nbytes for nbytes in (*(op.state_bytes for op in graph.ops), graph.buffer_bytes) if nbytes]
        return [self._step.generator_state(self._call, nbytes) for nbytes in states]


def _until_last_save(forward: Sequence[Instruction]) -> tuple[Instruction, ...]:
    last = max((position for position, (code, _) in enumerate(forward) if code == SAVE), default=-1)
    return tuple(forward[: last + 1])
