"""Predicts a plan's peak by playing back the recorded step's memory events under the plan.

The events miss bytes that the allocator hands out outside PyTorch's ops; `Profile.calibration_bytes`, measured on the
recorded step, is added for them.

Calls that run inside `torch.compile` or from traces are played as what is known of their variant, in place of their ops.
Storages that no op of the unit makes, such as gradients of parameters that outlive backward, are in the recorded events, not in
the variant; so these still change memory, but no longer raise the peak while the compiled code runs:

    first op    the variant's forward, then its outputs and what it keeps
    return      the recorded events of forward are left out up to here; the bytes by which they changed memory come in backward
    first use   (or where backward reaches the call, if the log says so) the variant's backward, undone at its end; then the
                kept bytes are freed
    last use    recorded events up to here change memory only
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from recollect.plans.action import EngineChoice
from recollect.profile import events
from recollect.profile.events import Key
from recollect.profile.profile import Profile
from recollect.programs.unit import returned_values
from recollect.simulation.decisions import CallActions, calls_on_tape
from recollect.simulation.playback import COMPILED, Actions, Playback, Token
from recollect.simulation.program import BULK, WINDOW, Program, ProgramOp
from recollect.simulation.windows import Window, edges_for
from recollect.simulation.windows import windows as all_windows

# Forward's approximate part of the time of both: each product has two in backward.
_FORWARD_PART: Final = 1 / 3


class CompiledSchedule:
    """Plays calls that run inside `torch.compile`."""

    def __init__(self, step: Playback, calls: Collection[int], play: Actions) -> None:
        self._step = step
        self._calls = frozenset(calls)
        self._play = play
        # Those that have begun and whose backward may still come; the one whose forward runs.
        self._open: dict[int, _CompiledCall] = step.compiled
        self._running: _CompiledCall | None = None
        # Where the program does not add up events in advance: the storages that they make in the backward of a compiled call,
        # until an event that a plan may change.
        self._adds_up = not step.program.bulk_codes
        self._made: dict[Key, int] = {}
        # Where the log says which formulas run: the call that backward has reached, -1 outside; and those that it has.
        self._reached: int | None = None
        self._has_reached: set[int] = set()

    def actions(self) -> Actions:
        own: Actions = {
            events.OP: self._op,
            events.SAVE: self._save,
            events.RETURN: self._return,
            events.RELEASE: self._release,
            events.LET_GO: self._let_go,
        }
        own = {**own, events.PHASE: self._begin_phase, events.REACH: self._reach, events.LEAVE: self._leave}
        found: Actions = {**self._play, **own, BULK: self._bulk}
        if self._adds_up:
            found = {code: self._after_made(handler) for code, handler in found.items()}
        return {**found, events.FREE: self._free, events.ALLOC: self._alloc, events.WORK: self._work}

    def _after_made(self, handler: Callable[..., None]) -> Callable[..., None]:
        """Return a handler of an event before which come the storages that were made since the last one and are still there."""

        def handle(*operands: Any) -> None:
            for key, nbytes in self._made.items():
                self._play[events.ALLOC](key, nbytes)
            self._made.clear()
            handler(*operands)

        return handle

    def _op(self, call: int, run: ProgramOp) -> None:
        if call not in self._calls:
            self._play[events.OP](call, run)
        elif self._running is None or self._running.call != call:
            self._step.starts(call)
            self._running = self._open[call] = _CompiledCall(self._step, call, self._play)

    def _save(self, call: int, key: Key, handle: int, saver: int) -> None:
        if saver in self._calls and saver in self._open:
            self._step.handles[handle] = self._open[saver].saves(), saver
        else:
            self._play[events.SAVE](call, key, handle, saver)

    def _return(self, call: int) -> None:
        if call in self._calls:
            self._running = None
            self._step.call = -1
            self._close(call)
        else:
            self._play[events.RETURN](call)

    def _release(self, handle: int) -> None:
        saver = self._step.handles[handle][1]
        self._play[events.RELEASE](handle)
        if saver in self._open:
            self._open[saver].releases()
            self._close(saver)

    def _close(self, call: int) -> None:
        """Forget a call that holds nothing any more. While forward runs, it may save more than what it has let go of."""
        is_running = self._running is not None and self._running.call == call
        if not is_running and call in self._open and self._open[call].is_over():
            del self._open[call]

    def _bulk(self, most_bytes: int, change_bytes: int, call: int = -1) -> None:
        if self._running is not None:
            self._running.change_bytes += change_bytes
        elif self._is_in_backward_of(call):
            self._play[BULK](max(0, change_bytes), change_bytes, call)
        else:
            self._play[BULK](most_bytes, change_bytes, call)

    def _alloc(self, key: Key, nbytes: int) -> None:
        # What compiled code makes in forward is in its variant; what lives on and dies in backward cancels out there.
        if self._running is not None:
            return
        if self._adds_up and self._is_in_backward():
            self._made[key] = nbytes
        else:
            self._play[events.ALLOC](key, nbytes)

    def _free(self, key: Key) -> None:
        if self._made.pop(key, None) is None:
            self._play[events.FREE](key)

    def _work(self, *operands: Any) -> None:
        if self._running is None and not self._is_in_backward():
            self._play[events.WORK](*operands)

    def _reach(self, call: int, is_retained: bool) -> None:
        self._reached = call
        if call in self._open:
            self._has_reached.add(call)
            self._open[call].get(is_retained=is_retained)

    def _let_go(self, call: int) -> None:
        self._play[events.LET_GO](call)
        if call in self._open:
            # The next backward runs all of it again.
            self._open[call].is_in_backward = False
            self._has_reached.discard(call)

    def _leave(self, _: int) -> None:
        self._reached = -1

    def _begin_phase(self, phase: int) -> None:
        self._play[events.PHASE](phase)
        self._reached = None if self._reached is None else -1

    def _is_in_backward_of(self, call: int) -> bool:
        """Whether a formula of a call runs whose code has run; of this call, unless the log says of which one."""
        if self._reached is not None:
            return self._reached in self._has_reached
        return call in self._open and self._open[call].is_in_backward

    def _is_in_backward(self) -> bool:
        return any(map(self._is_in_backward_of, self._open))


class _CompiledCall:
    """One call, from its first op until backward has used all that it saved.

    Attributes:
        change_bytes: by which recorded events of forward would have changed memory.
        is_in_backward: its backward has run.
    """

    def __init__(self, step: Playback, call: int, play: Actions) -> None:
        self.call = call
        self.change_bytes = 0
        self.is_in_backward = False
        self._step = step
        self._play = play
        self._num_saved = 0
        self._num_released = 0
        graph = step.profile.graph_of(step.profile.calls[call])
        self._variant = variant = step.program.variant(call, step.decisions[call])
        step.works_in(call, step.profile.block_bytes(variant.forward_bytes))
        play[BULK](step.profile.block_bytes(variant.forward_bytes), 0)
        step.spends(_FORWARD_PART * variant.step_s)
        returned = returned_values(graph)
        for index, value in graph.made:
            if value.is_output or (call, index) in step.program.read_by_others or index in returned:
                play[events.ALLOC]((call, index), step.profile.block_bytes(value.nbytes))
        self._own = list(self._kept())
        self._held = {value: step.bytes_of(step.program.key(call, value)) for value in variant.held}

    def _kept(self) -> Iterator[Token]:
        """Yield tokens for what the call keeps by itself: one for each value, and one for the rest."""
        step, variant = self._step, self._variant
        values = step.profile.graph_of(step.profile.calls[self.call]).values
        sizes = {value: step.profile.block_bytes(values[value].nbytes) for value in variant.kept}
        rest_bytes = variant.own_bytes - sum(sizes.values())
        if rest_bytes >= 0:
            yield from (step.make((self.call, value), nbytes) for value, nbytes in sizes.items())
        if rest_bytes:
            yield step.token_type(step, rest_bytes if rest_bytes > 0 else variant.own_bytes, (COMPILED, self.call))

    def saves(self) -> _CompiledCall:
        self._num_saved += 1
        return self

    def get(self, *, is_retained: bool = False) -> None:
        """Run backward, the first time that something saved is asked for; if it keeps its graph, all that is held stays."""
        if self.is_in_backward:
            return
        self.is_in_backward = True
        step, variant, change_bytes = self._step, self._variant, 0
        if is_retained:
            variant = step.program.variant(self.call, step.decisions[self.call], is_retained=True)
        step.call = self.call
        step.spends((1 - _FORWARD_PART) * variant.step_s)
        for most_bytes, change, let_go in variant.backward:
            step.works_in(self.call, change_bytes + most_bytes)
            self._play[BULK](most_bytes, change, self.call)
            change_bytes += change
            if not is_retained:
                self._held.pop(let_go, None)
        self._play[BULK](0, -change_bytes, self.call)
        if is_retained:
            return
        self._held.clear()
        self._own.clear()
        self._play[BULK](0, self.change_bytes, self.call)
        step.is_recomputing = ""

    def releases(self) -> None:
        self._num_released += 1

    def is_over(self) -> bool:
        """Return whether all that was saved has been released."""
        return 0 < self._num_saved == self._num_released


# Engines that run a unit as two pieces of code, which are played as what is known of these.
_BY_VARIANT: Final = (EngineChoice.COMPILE, EngineChoice.GRAPH)


@dataclass(frozen=True, slots=True)
class Simulation:
    """The predicted step."""

    peak_bytes: int
    """Most bytes alive at any moment, including persistent bytes and calibration."""
    forward_peak_bytes: int
    backward_peak_bytes: int
    """The same for each phase, without calibration."""
    recompute_s: float
    """Seconds that recomputation adds: ops that run again, plus the tape's overhead in forward."""
    rerun_s: float
    """Seconds of it in which the tape runs ops again."""
    recomputed_ops: int
    peak_call: str
    """Path of the unit at the peak, or what else runs then ("the loss", "the optimizer step")."""
    peak_note: str
    """Where the peak is, in words."""
    kept_bytes: int
    """Bytes alive when backward begins, without persistent bytes; if it begins several times, the most of them."""
    window_peaks: tuple[int, ...] = ()
    """The peak of each requested window, counted like `peak_bytes`."""
    host_bytes: int = 0
    """Host memory that offloaded values need."""
    left_bytes: tuple[int, int] = (0, 0)
    """What recipes still hold when the next step begins, and graphs that no backward used up: more than the log lists."""
    num_missed: int = 0
    """Offloaded values that backward asks for before they are to leave, or to come back."""


def simulate(
    profile: Profile,
    decisions: Sequence[CallActions],
    *,
    windows: Sequence[Window] = (),
    program: Program | None = None,
) -> Simulation:
    """Predict the peak and the recompute time of a step under a plan.

    `windows` asks for the peak of each; they are all of `recollect.simulation.windows.windows(profile)`. `program` is one of
    this profile and these windows, to reuse from an earlier simulation; with edges, if the decisions offload anything.

    Complexity: linear in the number of events.
    """
    if len(decisions) != len(profile.calls):
        raise ValueError(f"got {len(decisions)} decisions for {len(profile.calls)} unit calls, expected one for each")
    on_tape = calls_on_tape(decisions)
    edges = edges_for(profile, decisions)
    if program is None or (edges and not program.edges):
        # The memory of other code replaces the recorded memory in the windows of its calls.
        needs_windows = any(decision.engine in _BY_VARIANT for decision in decisions)
        program = Program(profile, windows or (all_windows(profile) if needs_windows else ()), edges)
    return run(Playback(program, dict(enumerate(decisions)), on_tape))


def run(playback: Playback) -> Simulation:
    play = handlers(playback)
    instructions, forgets_at = playback.program.instructions, playback.program.forgets_at(playback.on_tape)
    for code, operands in instructions[:forgets_at]:
        play[code](*operands)
    playback.note_early()
    for code, operands in instructions[forgets_at:]:
        play[code](*operands)
    play[WINDOW]()
    profile, peaks_bytes = playback.profile, playback.peaks_bytes
    left_bytes = playback.forgets(playback.dropped), playback.forgets(playback.handles, playback.compiled)
    # The last step left as much as this one does.
    for early, more_bytes in zip(playback.early, (sum(left_bytes), left_bytes[1]), strict=False):
        for peaks, before in zip((peaks_bytes, playback.window_peaks), early, strict=True):
            peaks[: len(before)] = [max(peak, one + more_bytes) for peak, one in zip(peaks, before, strict=False)]
    # Calibration was measured on forward and backward; it does not apply to the optimizer step.
    calibration_bytes = (profile.calibration_bytes, profile.calibration_bytes, 0)
    totals = [peak + extra for peak, extra in zip(peaks_bytes, calibration_bytes, strict=True)]
    peak_call, peak_note = _describe_peak(playback, totals.index(max(totals)))
    windows = zip(playback.window_peaks, playback.program.windows, strict=False)
    return Simulation(
        peak_bytes=max(totals),
        forward_peak_bytes=peaks_bytes[events.FORWARD],
        backward_peak_bytes=peaks_bytes[events.BACKWARD],
        recompute_s=playback.program.added_s(playback.decisions, playback.on_tape, playback.rerun_s),
        rerun_s=math.fsum(playback.rerun_s),
        recomputed_ops=playback.num_rerun,
        peak_call=peak_call,
        peak_note=peak_note,
        kept_bytes=playback.kept_bytes,
        window_peaks=tuple(peak + calibration_bytes[window.phase] for peak, window in windows),
        host_bytes=playback.slots.end_bytes,
        left_bytes=left_bytes,
        num_missed=playback.num_missed,
    )


def handlers(playback: Playback) -> Actions:
    """Return the handler for each code of the program, with each call played as its engine would."""
    compiled = [call for call, decision in playback.decisions.items() if decision.engine in _BY_VARIANT]
    play = playback.actions()
    return CompiledSchedule(playback, compiled, play).actions() if compiled else play


def _describe_peak(playback: Playback, phase: int) -> tuple[str, str]:
    call, op = playback.peaks_at[phase]
    during = events.PHASE_NAMES[phase]
    if call < 0:
        where = (
            "the loss and what surrounds the units"
            if phase in (events.FORWARD, events.BACKWARD)
            else "the optimizer step"
        )
        return where, f"{during}, outside of the units"
    path = playback.profile.calls[call].path
    return path, f"{during} of {path or 'the model'}" + (f", while {op} runs again" if op else "")
