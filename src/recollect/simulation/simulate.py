"""Predicts a plan's peak by playing back the recorded step's memory events under the plan.

The events miss bytes that the allocator hands out behind PyTorch's ops; `Profile.calibration_bytes`, measured on the
recorded step, is added for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from recollect.plans.engines import EngineChoice, Region
from recollect.plans.plan import Plan
from recollect.profile.events import BACKWARD, FORWARD, PHASE_NAMES
from recollect.profile.profile import Profile
from recollect.simulation.decisions import CallActions, calls_on_tape, decide
from recollect.simulation.edges import edges_for
from recollect.simulation.playback import Actions, Playback
from recollect.simulation.program import WINDOW, Program
from recollect.simulation.region_schedule import RegionSchedule
from recollect.simulation.windows import Window

SCHEDULES: Final[Mapping[type[EngineChoice], type[RegionSchedule]]] = {Region: RegionSchedule}
"""The one place to register a new engine's schedule; the tape has no entry: the playback itself plays it."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """The predicted step.

    Attributes:
        peak_bytes: most bytes alive at any moment, including persistent bytes and calibration.
        forward_peak_bytes, backward_peak_bytes: the same for each phase, without calibration.
        recompute_s: seconds that recomputation adds: ops that run again, plus the tape's overhead in forward.
        recomputed_ops: number of ops that run again.
        peak_call: path of the unit at the peak, or what else runs then ("the loss", "the optimizer step").
        peak_note: where the peak is, in words.
        kept_bytes: bytes alive when backward begins, without persistent bytes; if it begins several times, the most of them.
        window_peaks: the peak of each requested window, counted like `peak_bytes`.
        host_bytes: host memory that offloaded values need.
        num_missed: offloaded values that backward asks for before they are to leave, or to come back.
    """

    peak_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    recompute_s: float
    recomputed_ops: int
    peak_call: str
    peak_note: str
    kept_bytes: int
    window_peaks: tuple[int, ...] = ()
    host_bytes: int = 0
    num_missed: int = 0


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
        program = Program(profile, windows, edges)
    return run(Playback(program, dict(enumerate(decisions)), on_tape))


def predicted_plan(profile: Profile, plan: Plan) -> Plan:
    """Return the plan with the predictions of a simulation filled in.

    Raises:
        PlanError: as `decide`.
    """
    return simulated_plan(profile, plan, simulate(profile, decide(profile, plan)))


def simulated_plan(profile: Profile, plan: Plan, simulation: Simulation) -> Plan:
    """Return the plan with the simulation's predictions filled in."""
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
    )


def run(playback: Playback) -> Simulation:
    """Play back the whole step."""
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
        host_bytes=playback.host.slots.end_bytes,
        num_missed=playback.host.num_missed,
    )


def handlers(playback: Playback) -> Actions:
    """Return the handler for each code of the program, with each call played as its engine would."""
    play: Actions = playback.actions()
    for engine, schedule in SCHEDULES.items():
        calls = [call for call, decision in playback.decisions.items() if type(decision.engine) is engine]
        if calls:
            play = schedule(playback, calls).actions(play)
    return play


def _describe_peak(playback: Playback, phase: int) -> tuple[str, str]:
    """Return what runs at the peak of a phase, and where that is, in words."""
    call, op = playback.peaks_at[phase]
    during = PHASE_NAMES[phase]
    if call < 0:
        where = "the loss and what surrounds the units" if phase in (FORWARD, BACKWARD) else "the optimizer step"
        return where, f"{during}, outside of the units"
    path = playback.profile.calls[call].path
    return path, f"{during} of {path}" + (f", while {op} runs again" if op else "")
