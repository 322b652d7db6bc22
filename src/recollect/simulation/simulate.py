"""Predicts a plan's peak by playing back the recorded step's memory events under the plan.

The events miss bytes that the allocator hands out outside PyTorch's ops; `Profile.calibration_bytes`, measured on the
recorded step, is added for them.

The playback itself plays the tape. It plays regions by a schedule: forward keeps only a unit's inputs, and backward runs the
whole unit again. Non-reentrant `torch.utils.checkpoint` holds the module's inputs; the engine adds copies of its small buffers,
and a state of the random generator for each random op. The first time that backward asks for something the module saved, its
forward runs again, op by op, and values die as they do in forward; only what autograd saved stays, each value until backward
has used it. The run stops at the last saved value. Once backward needs nothing more of the module, the inputs and the states
are released too.

Limitations: autograd also saves parameters, which a profile does not record. If the last thing saved of a region is a parameter
alone (a frozen matrix), the real run goes on for a few ops more than this one. Results of a custom autograd Function
that is a unit's first op count as inputs. States that the engine holds for code that no dispatch mode sees, and copies
of large buffers that forward writes to, are not known to a profile.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recollect.plans.action import EngineChoice
from recollect.plans.plan import Plan
from recollect.profile.events import ALLOC, BACKWARD, DIES, FORWARD, FREE, OP, PHASE_NAMES, RETURN, SAVE
from recollect.profile.profile import Profile
from recollect.simulation.compiled_calls import CompiledSchedule
from recollect.simulation.decisions import CallActions, calls_on_tape, decide
from recollect.simulation.playback import Actions, Playback
from recollect.simulation.program import BULK, WINDOW, Key, Program, ProgramOp
from recollect.simulation.windows import Window, edges_for
from recollect.simulation.windows import windows as all_windows


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
    recomputed_ops: int
    """Number of ops that run again."""
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

    Args:
        profile: the recorded step.
        decisions: one for each of `profile.calls`, in order.
        windows: if given, also return the peak of each; must be all of `recollect.simulation.windows.windows(profile)`.
        program: the program of this profile and these windows, to reuse from an earlier simulation; with edges, if the
            decisions offload anything.

    Raises:
        ValueError: the number of decisions is not the number of calls.
        PlanError: the decisions offload values, and a backward of the step keeps its graph.

    Complexity: linear in the number of events.
    """
    if len(decisions) != len(profile.calls):
        raise ValueError(f"got {len(decisions)} decisions for {len(profile.calls)} unit calls, expected one for each")
    on_tape = calls_on_tape(decisions)
    edges = edges_for(profile, decisions)
    if program is None or (edges and not program.edges):
        # Compiled code's memory replaces the recorded memory in the windows of its calls.
        needs_windows = any(decision.engine is EngineChoice.COMPILE for decision in decisions)
        program = Program(profile, windows or (all_windows(profile) if needs_windows else ()), edges)
    return run(Playback(program, dict(enumerate(decisions)), on_tape))


def predicted_plan(profile: Profile, plan: Plan) -> Plan:
    """Return the plan with the predictions of a simulation filled in.

    Raises:
        PlanError: as `decide`.
    """
    return simulated_plan(profile, plan, simulate(profile, decide(profile, plan)))


def simulated_plan(profile: Profile, plan: Plan, simulation: Simulation) -> Plan:
    slowdown = simulation.recompute_s / profile.step_s if profile.step_s > 0 else 0.0
    return replace(
        plan,
        predicted_peak_bytes=simulation.peak_bytes,
        predicted_slowdown=slowdown,
        predicted_host_bytes=simulation.host_bytes or None,
        torch_version=profile.torch_version,
        # A fake profile belongs to no device: its times are modelled.
        device_name="" if profile.fake else profile.device_name,
        loss_chunks=profile.loss_chunks,
        # The uncertainty of times of compiled units is unknown.
        low_factor=None if plan.is_compiled else profile.low_factor or None,
        high_factor=None if plan.is_compiled else profile.high_factor or None,
        class_names=profile.class_names,
        source=weakref.ref(profile),
    )


def run(playback: Playback) -> Simulation:
    play = handlers(playback)
    for code, operands in playback.program.instructions:
        play[code](*operands)
    play[WINDOW]()
    profile, peaks_bytes = playback.profile, playback.peaks_bytes
    # Calibration was measured on forward and backward; it does not apply to the optimizer step.
    calibration_bytes = (profile.calibration_bytes, profile.calibration_bytes, 0)
    totals = [peak + extra for peak, extra in zip(peaks_bytes, calibration_bytes, strict=True)]
    peak_call, peak_note = _describe_peak(playback, totals.index(max(totals)))
    windows = zip(playback.window_peaks, playback.program.windows, strict=False)
    return Simulation(
        peak_bytes=max(totals),
        forward_peak_bytes=peaks_bytes[FORWARD],
        backward_peak_bytes=peaks_bytes[BACKWARD],
        recompute_s=playback.program.added_s(playback.decisions, playback.on_tape, playback.rerun_s),
        recomputed_ops=playback.num_rerun,
        peak_call=peak_call,
        peak_note=peak_note,
        kept_bytes=playback.kept_bytes,
        window_peaks=tuple(peak + calibration_bytes[window.phase] for peak, window in windows),
        host_bytes=playback.slots.end_bytes,
        num_missed=playback.num_missed,
    )


def handlers(playback: Playback) -> Actions:
    """Return the handler for each code of the program, with each call played as its engine would."""
    regions, compiled = (
        [call for call, decision in playback.decisions.items() if decision.engine is engine]
        for engine in (EngineChoice.REGION, EngineChoice.COMPILE)
    )
    play = RegionSchedule(playback, regions).actions() if regions else playback.actions()
    return CompiledSchedule(playback, compiled, play).actions() if compiled else play


def _describe_peak(playback: Playback, phase: int) -> tuple[str, str]:
    call, op = playback.peaks_at[phase]
    during = PHASE_NAMES[phase]
    if call < 0:
        where = "the loss and what surrounds the units" if phase in (FORWARD, BACKWARD) else "the optimizer step"
        return where, f"{during}, outside of the units"
    path = playback.profile.calls[call].path
    return path, f"{during} of {path}" + (f", while {op} runs again" if op else "")


class RegionSchedule:
    """Plays the calls that are re-run as a whole."""

    def __init__(self, step: Playback, calls: Collection[int]) -> None:
        self._step = step
        self._calls = frozenset(calls)
        self._play: Actions = step.actions()
        # The calls that are running.
        self._regions: dict[int, _Region] = {}

    def actions(self) -> Actions:
        return {**self._play, OP: self._op, SAVE: self._save, RETURN: self._return}

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
        forward = step.program.forwards[call]
        last_save = max((position for position, (code, _) in enumerate(forward) if code == SAVE), default=-1)
        self._forward = forward[: last_save + 1]
        self._makes = {operands[0] for code, operands in forward if code == ALLOC}
        self._inputs: dict[Key, Any] = {}
        graph = step.profile.graph_of(step.profile.calls[call])
        states = [nbytes for nbytes in (*(op.state_bytes for op in graph.ops), graph.buffer_bytes) if nbytes]
        self._state = [step.generator_state(call, nbytes) for nbytes in states]
        self._saved: dict[int, weakref.ref[_SavedByRegion]] = {}
        self._ran_again = False

    def hold(self, keys: Iterable[Key]) -> None:
        """Hold the values that others made: they are the region's inputs."""
        for key in keys:
            if key[0] != self._call and key not in self._makes:
                self._inputs.setdefault(key, self._step.tensors.get(key))

    def saves(self, handle: int) -> _SavedByRegion:
        saved = _SavedByRegion(self)
        self._saved[handle] = weakref.ref(saved)
        return saved

    def run_again(self) -> None:
        """Run forward again and store the tensors it saved; do nothing the second time."""
        if self._ran_again:
            return
        self._ran_again = True
        num_earlier = len(self._step.rerun_s)
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
                reference = self._saved.get(operands[2])
                if reference is not None and (saved := reference()) is not None:
                    saved.bytes = present.get(operands[1])
            else:
                self._play[code](*operands)
                change_bytes += operands[1] if code == BULK else 0
        # Bytes left over from these are freed when the run ends.
        self._play[BULK](0, -change_bytes)
        record = self._step.profile.calls[self._call]
        if rerun_s := self._step.profile.graph_of(record).rerun_s:
            # Measured for the run as a whole, in place of its ops.
            self._step.rerun_s[num_earlier:] = [record.num_runs * rerun_s]

    def _op_again(self, run: ProgramOp, present: dict[Key, Any]) -> None:
        self._step.runs_again(self._call, run.op)
        self._step.work(run.op)
        if not run.op.mutates:
            present.update({key: self._step.make(key, nbytes) for key, nbytes in run.results})
        elif (written := present.pop((self._call, run.op.inputs[0]), None)) is not None:
            present[run.results[0][0]] = written
