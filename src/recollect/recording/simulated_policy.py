"""Simulate a recorded step under a policy, as the recording ran it, instead of a plan."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from recollect.engine.policy import Policy
from recollect.plans.unit_plan import UnitPlan
from recollect.profile import events
from recollect.profile.profile import Profile
from recollect.simulation.call_actions import CallActions
from recollect.simulation.decisions import decide_call, drop_all
from recollect.simulation.simulate import Simulation, simulate

__all__ = ["in_one_backward", "leanest_of", "under_policy"]


def leanest_of(profile: Profile, graphs: Container[int]) -> Simulation:
    """Simulate the step in which calls of some graphs drop all they can but their outputs, and the others nothing."""
    return simulate(
        profile,
        [drop_all(profile.graph_of(call)) if call.graph in graphs else CallActions() for call in profile.calls],
    )


def in_one_backward(profile: Profile) -> Profile:
    """Return the profile of the same step with a backward that uses its graph up, in which no op runs again twice.

    A unit is timed so; in the step, halves of a backward may each run an op again.
    """
    blocks = tuple(
        tuple(
            (events.USE, *event[1:]) if event[0] == events.PEEK else event
            for event in block
            if event[0] not in (events.GIVE_BACK, events.LET_GO)
        )
        for block in profile.log.blocks
    )
    return replace(profile, log=replace(profile.log, blocks=blocks))


def under_policy(profile: Profile, policy: Policy) -> Simulation:
    """Simulate the step with all its units on a tape that follows a policy."""
    known: dict[tuple[int, str], CallActions] = {}
    for call in profile.calls:
        if (call.graph, call.path) not in known:
            graph = profile.graph_of(call)
            names = (value.name for value in graph.values if value.producer is not None)
            unit = UnitPlan({name: policy.action(call.path, name) for name in names}, policy.output_action(call.path))
            known[call.graph, call.path] = decide_call(graph, unit)
    return simulate(profile, [known[call.graph, call.path] for call in profile.calls])
