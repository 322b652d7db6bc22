"""Predicts a plan's peak by playing back the recorded step's memory events under the plan.

The events miss bytes that the allocator hands out outside PyTorch's ops; `Profile.calibration_bytes`, measured on the
recorded step, is added for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from recollect.plans.action import EngineChoice
from recollect.profile.events import BACKWARD, FORWARD, PHASE_NAMES
from recollect.profile.profile import Profile
from recollect.simulation.compiled_calls import CompiledSchedule
from recollect.simulation.decisions import CallActions, calls_on_tape
from recollect.simulation.playback import Actions, Playback
from recollect.simulation.program import WINDOW, Program
from recollect.simulation.windows import Window, edges_for
from recollect.simulation.windows import windows as all_windows

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
        # The memory of other code replaces the recorded memory in the windows of its calls.
        needs_windows = any(decision.engine in _BY_VARIANT for decision in decisions)
        program = Program(profile, windows or (all_windows(profile) if needs_windows else ()), edges)
    return run(Playback(program, dict(enumerate(decisions)), on_tape))


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
        rerun_s=math.fsum(playback.rerun_s),
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
    compiled = [call for call, decision in playback.decisions.items() if decision.engine in _BY_VARIANT]
    play = playback.actions()
    return CompiledSchedule(playback, compiled, play).actions() if compiled else play


def _describe_peak(playback: Playback, phase: int) -> tuple[str, str]:
    call, op = playback.peaks_at[phase]
    during = PHASE_NAMES[phase]
    if call < 0:
        where = "the loss and what surrounds the units" if phase in (FORWARD, BACKWARD) else "the optimizer step"
        return where, f"{during}, outside of the units"
    path = playback.profile.calls[call].path
    return path, f"{during} of {path}" + (f", while {op} runs again" if op else "")
