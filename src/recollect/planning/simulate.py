"""The peak of a plan, by playing the recorded step's memory events back under it.

The same `replay` code that computes dropped tensors in a real backward runs here on tokens that only count bytes, with the
same reference counts, so that what is computed when, what is cached and what is let go happens here as it will there.

What the events do not tell: bytes that the allocator hands out behind PyTorch's ops. `Profile.calibration_bytes`, measured
on the recorded step, is added for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recollect.planning.windows import Window
from recollect.profile.events import (
    ALLOC,
    BACKWARD,
    DIES,
    FORWARD,
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
from recollect.profile.graph import OpRecord, Profile
from recollect.replay import Node, Value

# The CUDA caching allocator hands out multiples of this (PYTORCH_NO_CUDA_MEMORY_CACHING unset).
_CUDA_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class CallDecision:
    """What a plan does with one unit call: which values (by index in its graph) are dropped, and the fate of its output.

    `is_planned`: the plan names the unit, if only to keep everything.
    """

    recompute: frozenset[int]
    keep_output: bool = True
    is_planned: bool = True


@dataclass(frozen=True, slots=True)
class Simulation:
    """The predicted step.

    Attributes:
        peak_bytes: most bytes alive at any moment, persistent ones and calibration included.
        forward_peak_bytes, backward_peak_bytes: the same for these phases, without the calibration.
        recompute_s: seconds spent on ops that run a second time.
        recomputed_ops: number of these.
        peak_call: path of the unit at the peak, or what else runs then ("the loss", "the optimizer step").
        peak_note: where the peak is, in words.
        kept_bytes: bytes alive when forward has ended and backward begins, persistent ones not counted.
        timeline: (seconds are not known) bytes alive after each event, if asked for.
        window_peaks: the peak of each window that was asked for, as in `peak_bytes`.
    """

    peak_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    recompute_s: float
    recomputed_ops: int
    peak_call: str
    peak_note: str
    kept_bytes: int
    timeline: tuple[int, ...] = ()
    window_peaks: tuple[int, ...] = ()


def simulate(
    profile: Profile,
    decisions: Sequence[CallDecision],
    *,
    with_timeline: bool = False,
    windows: Sequence[Window] = (),
) -> Simulation:
    """Predict the peak and the recompute time of a step under a plan.

    Args:
        profile: the recorded step.
        decisions: one for each of `profile.calls`, in order.
        with_timeline: also return the bytes alive after each event.
        windows: also return the peak of each of these stretches; all of `recollect.planning.windows.windows(profile)`.

    Raises:
        ValueError: not one decision for each call.

    Complexity: linear in the number of events; 32 layers of 70 ops take about 0.1 s.
    """
    if len(decisions) != len(profile.calls):
        raise ValueError(f"got {len(decisions)} decisions for {len(profile.calls)} unit calls, expected one for each")
    return _Playback(profile, decisions).run(with_timeline=with_timeline, windows=windows)


def rounded_bytes(profile: Profile, nbytes: int) -> int:
    """Return what a storage of so many bytes takes on the profile's device."""
    block_bytes = _CUDA_BLOCK_BYTES if profile.device.startswith("cuda") else 1
    return -(-nbytes // block_bytes) * block_bytes


class _Token:
    """Bytes that are alive as long as somebody refers to this object."""

    __slots__ = ("nbytes", "playback")

    def __init__(self, playback: _Playback, nbytes: int) -> None:
        self.playback = playback
        self.nbytes = nbytes
        playback.allocate(nbytes)

    def __del__(self) -> None:
        self.playback.alive_bytes -= self.nbytes


class _Playback:
    def __init__(self, profile: Profile, decisions: Sequence[CallDecision]) -> None:
        self.profile = profile
        self.decisions = decisions
        self.block_bytes = _CUDA_BLOCK_BYTES if profile.device.startswith("cuda") else 1
        self.alive_bytes = profile.persistent_bytes
        # At least the peak of the phase, so that the next allocation compares with one number.
        self.window_peak_bytes = self.alive_bytes
        self.peaks_bytes = [self.alive_bytes] * len(PHASE_NAMES)
        self.peaks_at = [(-1, "")] * len(PHASE_NAMES)
        self.kept_bytes = 0
        self.recompute_s = 0.0
        self.recomputed_ops = 0
        self.phase = FORWARD
        self.call = -1
        self.is_recomputing = ""
        self.storages: dict[int, _Token] = {}
        self.tensors: dict[tuple[int, int], _Token] = {}
        self.dropped: dict[tuple[int, int], Value] = {}
        # Values that hold a tensor which an op will write to: they get a private copy then.
        self.leaves: dict[tuple[int, int], list[weakref.ref[Value]]] = {}
        self.handles: dict[int, tuple[Value, int]] = {}
        self.origins = [{value: (c, v) for value, c, v in call.origins} for call in profile.calls]

    def run(self, *, with_timeline: bool, windows: Sequence[Window]) -> Simulation:
        timeline: list[int] = []
        ends = [window.start for window in windows[1:]]
        ends.append(-1)
        window_peaks: list[int] = []
        position, next_end = 0, ends[0]
        play: dict[int, Callable[..., None]] = {
            ALLOC: self._alloc,
            FREE: self._free,
            OP: self._op,
            DIES: self._dies,
            SAVE: self._save,
            USE: self._use,
            RELEASE: self._release,
            RETURN: self._return,
            PHASE: self._begin_phase,
            WORK: self._work,
        }
        for block, _ in self.profile.log.sequence:
            for event in self.profile.log.blocks[block]:
                if position == next_end:
                    window_peaks.append(self.window_peak_bytes)
                    self.window_peak_bytes = self.alive_bytes
                    next_end = ends[len(window_peaks)]
                position += 1
                # Most ops outside of the units work in no bytes of their own.
                if event[0] != WORK or event[1]:
                    play[event[0]](*event[1:])
                if with_timeline:
                    timeline.append(self.alive_bytes)
        window_peaks.append(self.window_peak_bytes)
        # The calibration was measured on forward and backward; the optimizer step has no part in it.
        calibration_bytes = (self.profile.calibration_bytes, self.profile.calibration_bytes, 0)
        totals = [peak + extra for peak, extra in zip(self.peaks_bytes, calibration_bytes, strict=True)]
        peak_call, peak_note = self._describe_peak(totals.index(max(totals)))
        return Simulation(
            peak_bytes=max(totals),
            forward_peak_bytes=self.peaks_bytes[FORWARD],
            backward_peak_bytes=self.peaks_bytes[BACKWARD],
            recompute_s=self.recompute_s,
            recomputed_ops=self.recomputed_ops,
            peak_call=peak_call,
            peak_note=peak_note,
            kept_bytes=self.kept_bytes,
            timeline=tuple(timeline),
            window_peaks=tuple(
                peak + calibration_bytes[window.phase] for peak, window in zip(window_peaks, windows, strict=False)
            ),
        )

    def allocate(self, nbytes: int) -> None:
        self.alive_bytes += nbytes
        if self.alive_bytes > self.window_peak_bytes:
            self.window_peak_bytes = self.alive_bytes
            if self.alive_bytes > self.peaks_bytes[self.phase]:
                self.peaks_bytes[self.phase] = self.alive_bytes
                self.peaks_at[self.phase] = (self.call, self.is_recomputing)

    def _work(self, nbytes: int) -> None:
        """An op runs in so many bytes, results included: they are alive together, if only for a moment."""
        self.allocate(nbytes)
        self.alive_bytes -= nbytes

    def _token(self, nbytes: int) -> _Token:
        return _Token(self, -(-nbytes // self.block_bytes) * self.block_bytes)

    def _alloc(self, storage: int, nbytes: int) -> None:
        self.storages[storage] = self._token(nbytes)

    def _free(self, storage: int) -> None:
        del self.storages[storage]

    def _op(self, call: int, op_index: int) -> None:
        graph = self.profile.graphs[self.profile.calls[call].graph]
        op = graph.ops[op_index]
        self.call = call
        drops = self.decisions[call].recompute
        self._work(op.working_bytes)
        if op.mutates:
            self._write(call, op, drops)
            return
        sizes = [graph.values[value].nbytes for value in op.outputs]
        for value, nbytes in zip(op.outputs, sizes, strict=True):
            self.tensors[call, value] = self._token(nbytes)
        if drops.isdisjoint(op.outputs):
            return
        node = Node(_Rerun(self, op, sizes), [self._value(call, value) for value in op.inputs])
        for value in op.outputs:
            self._record(call, value, node if value in drops else None, node)

    def _write(self, call: int, op: OpRecord, drops: frozenset[int]) -> None:
        old, new = (call, op.inputs[0]), (call, op.outputs[0])
        token = self.tensors.pop(old, None)
        if token is None:
            return
        for reference in self.leaves.pop(old, ()):
            leaf = reference()
            if leaf is not None:
                leaf.tensor = self._token(token.nbytes)
        node = None
        if new[1] in drops and old in self.dropped:
            call_again = _Rerun(self, op, [token.nbytes])
            node = Node(call_again, [self._value(call, value) for value in op.inputs], mutates=True)
        self.dropped.pop(old, None)
        self.tensors[new] = token
        if node is not None:
            self._record(call, new[1], node, node)

    def _record(self, call: int, value: int, maker: Node | None, node: Node) -> None:
        recorded = None if maker is None else Value(node=maker)
        node.add_output(recorded)
        if recorded is not None:
            self.dropped[call, value] = recorded

    def _value(self, call: int, value: int) -> Value:
        """Return what stands for a value: its recipe if it was dropped, else a value that holds its bytes."""
        key = self.origins[call].get(value, (call, value))
        dropped = self.dropped.get(key)
        if dropped is not None:
            return dropped
        held = Value(tensor=self.tensors.get(key, _NOTHING))
        held.is_viewed = True
        if self.profile.graphs[self.profile.calls[key[0]].graph].values[key[1]].mutated_later:
            self.leaves.setdefault(key, []).append(weakref.ref(held))
        return held

    def _dies(self, call: int, value: int) -> None:
        self.tensors.pop((call, value), None)
        self.dropped.pop((call, value), None)

    def _save(self, call: int, value: int, handle: int, saver: int) -> None:
        if saver == call or self._is_on_tape(saver):
            self.handles[handle] = (self._value(call, value), call)
        else:
            # Autograd itself saves what a unit off the tape gets, so that it stays whatever the plan says.
            self.handles[handle] = (Value(tensor=self.tensors.get((call, value), _NOTHING)), call)

    def _is_on_tape(self, call: int) -> bool:
        """Whether `apply` wraps a unit: where outputs are dropped, any that the plan names; planners name all layers."""
        decision = self.decisions[call]
        is_named = self.profile.calls[call].repeated or bool(decision.recompute) or not decision.keep_output
        return decision.is_planned and is_named

    def _use(self, handle: int) -> None:
        value, self.call = self.handles[handle]
        value.get()
        self.is_recomputing = ""

    def _release(self, handle: int) -> None:
        del self.handles[handle]

    def _return(self, call: int) -> None:
        graph = self.profile.graphs[self.profile.calls[call].graph]
        if self.decisions[call].keep_output:
            for index, value in enumerate(graph.values):
                recorded = self.dropped.pop((call, index), None) if value.is_output else None
                if recorded is not None:
                    recorded.tensor, recorded.node, recorded.is_viewed = self.tensors[call, index], None, True
        self.call = -1

    def _begin_phase(self, phase: int) -> None:
        self.phase = phase
        self.call = -1
        # A phase begins a window.
        self.peaks_bytes[phase] = self.window_peak_bytes = self.alive_bytes
        if phase == BACKWARD:
            self.kept_bytes = self.alive_bytes - self.profile.persistent_bytes

    def _describe_peak(self, phase: int) -> tuple[str, str]:
        call, op = self.peaks_at[phase]
        during = PHASE_NAMES[phase]
        if call < 0:
            where = (
                "the optimizer step" if phase not in (FORWARD, BACKWARD) else "the loss and what surrounds the units"
            )
            return where, f"{during}, outside of the units"
        path = self.profile.calls[call].path
        return path, f"{during} of {path}" + (f", while {op} runs again" if op else "")


class _Nothing:
    """Bytes that are counted elsewhere: parameters, or what was made outside of the units."""


_NOTHING = _Nothing()


class _Rerun:
    """Runs an op again: makes its results' bytes anew and counts its time."""

    __slots__ = ("op", "playback", "sizes", "state")

    def __init__(self, playback: _Playback, op: OpRecord, sizes: list[int]) -> None:
        self.playback = playback
        self.op = op
        self.sizes = sizes
        self.state = playback._token(op.state_bytes) if op.state_bytes else None

    def __call__(self, tensors: list[Any], may_overwrite_first: bool) -> Sequence[Any]:
        playback = self.playback
        playback.recompute_s += self.op.time_s
        playback.recomputed_ops += 1
        playback.is_recomputing = self.op.name
        # The generator's present state is put aside while the op runs from the old one.
        present_state = playback._token(self.op.state_bytes) if self.state is not None else None
        results = self._results(tensors, may_overwrite_first)
        del present_state
        return results

    def _results(self, tensors: list[Any], may_overwrite_first: bool) -> Sequence[Any]:
        playback = self.playback
        playback._work(self.op.working_bytes)
        if self.op.mutates and may_overwrite_first:
            return (tensors[0],)
        return tuple([playback._token(nbytes) for nbytes in self.sizes])
