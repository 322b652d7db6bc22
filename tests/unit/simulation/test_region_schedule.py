"""A unit that is re-run as a whole, played back: what is held, what runs again, up to where, and what dies when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recollect.planning.explain import layer_usage
from recollect.plans.action import EngineChoice
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.events import (
    ALLOC,
    BACKWARD,
    DIES,
    FORWARD,
    FREE,
    OP,
    PHASE,
    RELEASE,
    RETURN,
    SAVE,
    USE,
    WORK,
    StepLog,
)
from recollect.profile.graph import OpRecord, UnitCall, UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from recollect.simulation.decisions import decide
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.simulate import Simulation, simulate
from recollect.simulation.timeline import explain_peak

INPUT, A, B, C, OUT, GRADIENT = 64, 100, 50, 10, 20, 7
BUFFERS, GENERATOR = 24, 5056
STATES = BUFFERS + GENERATOR
PLAN = Plan({"layer": UnitPlan({}, engine=EngineChoice.REGION)})
Events = tuple[tuple[int, ...], ...]

GRAPH = UnitGraph(
    (
        ValueRecord("input 0", INPUT, producer=None),
        ValueRecord("a", A, producer=0, saved=True),
        ValueRecord("b", B, producer=1, must_keep=True),
        ValueRecord("c", C, producer=2, saved=True),
        ValueRecord("out", OUT, producer=3, is_output=True),
    ),
    (
        OpRecord("a", (0,), (1,), 1.0),
        OpRecord("b", (1,), (2,), 2.0, state_bytes=GENERATOR),
        OpRecord("c", (2,), (3,), 4.0),
        OpRecord("out", (3,), (4,), 8.0),
    ),
    buffer_bytes=BUFFERS,
)
SAVED_A, SAVED_C = (SAVE, 0, 1, 0, 0), (SAVE, 0, 3, 1, 0)
UP_TO_C: Events = ((OP, 0, 0), SAVED_A, (OP, 0, 1), (DIES, 0, 1), (OP, 0, 2), (DIES, 0, 2), SAVED_C)
AFTER_C: Events = ((OP, 0, 3), (DIES, 0, 3), (RETURN, 0), (FREE, 0))
USED: Events = ((DIES, 0, 4), (USE, 1), (RELEASE, 1), (USE, 0), (RELEASE, 0))


def profile_of(forward: Events = UP_TO_C, backward: Events = USED, device: str = "cpu") -> Profile:
    events = (
        (PHASE, FORWARD),
        (ALLOC, 0, INPUT),
        *forward,
        *AFTER_C,
        (PHASE, BACKWARD),
        (ALLOC, 1, GRADIENT),
        *backward,
    )
    call = UnitCall("layer", 0, outside=((0, 0),))
    return Profile((GRAPH,), (call,), StepLog((events,), ((0, -1),)), step_s=20.0, device=device)


def played(profile: Profile) -> Simulation:
    decisions = decide(profile, PLAN)
    simulation = simulate(profile, decisions)
    peaks = PeakSums.of(profile).peaks(decisions)
    assert (peaks.peak_bytes, peaks.recompute_s) == (simulation.peak_bytes, simulation.recompute_s)
    return simulation


def test_forward_leaves_input_output_and_states() -> None:
    assert played(profile_of()).kept_bytes == INPUT + OUT + STATES


def test_runs_again_up_to_the_last_saved_value() -> None:
    simulation = played(profile_of())
    assert simulation.recomputed_ops == 3
    assert simulation.recompute_s == 1.0 + 2.0 + 4.0
    assert layer_usage(profile_of(), PLAN)[0].recomputed == ("a", "b", "c")


def test_seconds_of_a_measured_second_run_count_instead_of_those_of_its_ops() -> None:
    profile = profile_of()
    measured = replace(profile, graphs=(replace(GRAPH, rerun_s=5.0),))
    simulation = played(measured)
    assert (simulation.recomputed_ops, simulation.recompute_s) == (3, 5.0)
    assert layer_usage(measured, PLAN)[0].recompute_s == 5.0


def test_values_die_as_in_forward_but_for_what_is_saved() -> None:
    """`a` is saved, so that it is there when `c` is made; `b` dies after that."""
    peak = INPUT + GRADIENT + STATES + A + B + C
    assert played(profile_of()).backward_peak_bytes == peak
    report = explain_peak(profile_of(), PLAN)
    assert report.peak_bytes == sum(item.nbytes for item in report.items) == peak
    without_a: Events = tuple(event for event in UP_TO_C if event != SAVED_A)
    used_c: Events = ((DIES, 0, 4), (USE, 1), (RELEASE, 1))
    assert played(profile_of(without_a, used_c)).backward_peak_bytes == peak - C


LARGE = 20_000


@pytest.mark.parametrize(
    ("num_used", "held"),
    [
        (1, INPUT + OUT + STATES),
        (2, INPUT + STATES + OUT + A + C),
        (3, INPUT + STATES + OUT + A),
        (4, INPUT + STATES + OUT + A),
        (5, OUT),
    ],
)
def test_what_is_held_meanwhile(num_used: int, held: int) -> None:
    """Something large is made after some of the events of backward; the output lives on."""
    used = ((ALLOC, 9, 0), *USED[1:])[:num_used]
    after = USED[num_used:] if num_used > 1 else USED[1:]
    made = played(profile_of(backward=(*used, (ALLOC, 2, LARGE), (FREE, 2), *after)))
    assert made.backward_peak_bytes == GRADIENT + LARGE + held


def test_values_that_are_let_go_of_before_are_not_stored() -> None:
    used: Events = ((DIES, 0, 4), (RELEASE, 0), (USE, 1), (ALLOC, 2, LARGE))
    assert played(profile_of(backward=used)).backward_peak_bytes == (INPUT + GRADIENT + STATES + C + LARGE)


def test_region_that_backward_does_not_ask_never_runs_again() -> None:
    used: Events = ((DIES, 0, 4), (RELEASE, 0), (RELEASE, 1), (ALLOC, 2, LARGE))
    simulation = played(profile_of(backward=used))
    assert simulation.recomputed_ops == 0
    assert simulation.backward_peak_bytes == GRADIENT + LARGE


def test_what_runs_inside_without_an_op_of_the_unit_runs_again() -> None:
    """A custom autograd Function: what it works in, and what it makes, which is no input."""
    inside: Events = ((WORK, 300, 0), (ALLOC, 5, 30), (ALLOC, 6, 900), (FREE, 6), (FREE, 5))
    profile = profile_of((*UP_TO_C[:1], *inside, *UP_TO_C[1:]))
    simulation = played(profile)
    assert simulation.kept_bytes == INPUT + OUT + STATES
    again = INPUT + GRADIENT + STATES
    assert simulation.backward_peak_bytes == again + A + 30 + 900


def test_what_is_left_when_the_run_stops_goes_with_it() -> None:
    """Of an allocation without an op, which forward frees after the last saved value."""
    profile = profile_of((*UP_TO_C[:1], (ALLOC, 5, 30), *UP_TO_C[1:], (FREE, 5)))
    report = explain_peak(profile, PLAN)
    assert report.peak_bytes == played(profile).peak_bytes == INPUT + GRADIENT + STATES + A + B + C + 30
    later = profile_of((*UP_TO_C[:1], (ALLOC, 5, 30), *UP_TO_C[1:], (FREE, 5)), (*USED, (ALLOC, 2, LARGE)))
    assert played(later).backward_peak_bytes == GRADIENT + LARGE
