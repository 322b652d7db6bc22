"""Fill in a simulation's predictions for a plan: its peak, its slowdown, and how sure that is."""

import weakref
from dataclasses import replace
from typing import Final

from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from recollect.simulation.clocks import added_s, has_two_clocks, plain_step_times
from recollect.simulation.copy_clock import Link, waits_of
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import Simulation, simulate

# Nine of ten measured slowdowns differ from the predicted one by no more than this part of the step, and of the slowdown
# (`benchmarks/step_times.py`, one thread).
_LEAST_ERROR: Final = 0.05
_ERROR: Final = 0.15


def predicted_plan(profile: Profile, plan: Plan) -> Plan:
    """Return the plan with a simulation's predictions filled in, with its waiting for copies if it says how fast they are."""
    decisions = decide(profile, plan)
    made = simulated_plan(profile, plan, simulate(profile, decisions))
    out, back = plan.to_host_bytes_per_s, plan.from_host_bytes_per_s
    if not (plan.offloads and out and back and profile.step_s > 0):
        return made
    waits = waits_of(profile, decisions, Link(out, back, profile.host_latency_s)) / profile.step_s
    return replace(made, predicted_slowdown=(made.predicted_slowdown or 0.0) + waits, host_wait_slowdown=waits)


def simulated_plan(profile: Profile, plan: Plan, simulation: Simulation) -> Plan:
    step_s, more_s = profile.step_s, simulation.recompute_s
    if has_two_clocks(profile):
        # Not the recorded seconds: those of a group are medians, each of its own.
        step_s, more_s = plain_step_times(profile).step_s, added_s(profile, decide(profile, plan))
    slowdown = more_s / step_s if step_s > 0 else 0.0
    return replace(
        plan,
        predicted_peak_bytes=simulation.peak_bytes,
        predicted_slowdown=slowdown,
        predicted_host_bytes=simulation.host_bytes or None,
        torch_version=profile.torch_version,
        # A fake profile belongs to no device: its times are modelled.
        device_name="" if profile.fake else profile.device_name,
        loss_chunks=profile.loss_chunks,
        slowdown_error=None
        if profile.host is None or profile.fake or plan.is_compiled
        else _LEAST_ERROR + _ERROR * abs(slowdown),
        class_names=profile.class_names,
        source=weakref.ref(profile),
    )
