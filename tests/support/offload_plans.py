"""Random plans that keep, recompute and offload values."""

import random

from recollect.plans.plan import Plan
from recollect.plans.trip import Trip
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.profile import Profile
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import simulate
from recollect.simulation.windows import returning_values

__all__ = ["random_offload_plan"]


def random_offload_plan(profile: Profile, seed: int, *, drops_outputs: bool = True) -> Plan:
    """One of three actions for each value of each unit that something needs, and a random trip of which no edge is missed."""
    rng = random.Random(seed)
    graphs = {call.path: profile.graph_of(call) for call in profile.calls}
    returning = returning_values(profile)
    may_leave = {
        path: {
            v for v in range(len(graph.values)) if all((call, v) in returning for call in profile.calls_by_path[path])
        }
        for path, graph in graphs.items()
    }
    chained = {
        call.path
        for call, following in zip(profile.calls, profile.calls[1:], strict=False)
        if call.chained and following.repeated
    }
    actions = {
        path: {
            value.name: rng.choice(["keep", "recompute", *(["offload"] * (index in may_leave[path]))])
            for index, value in enumerate(graph.values)
            if value.producer is not None
        }
        for path, graph in graphs.items()
    }
    outputs = {
        path: "recompute" if drops_outputs and path in chained and rng.random() < 0.3 else "keep" for path in graphs
    }
    trips = {
        path: {name: random_trip(rng) for name, action in named.items() if action == "offload"}
        for path, named in actions.items()
    }
    for ahead in range(len(profile.calls) + 1):
        plan = Plan(
            {
                path: UnitPlan(
                    actions[path],
                    output=outputs[path],
                    trips={name: _earlier(trip, ahead) for name, trip in trips[path].items()},
                )
                for path in graphs
            }
        )
        if not simulate(profile, decide(profile, plan)).num_missed:
            return plan
    raise AssertionError(f"seed {seed}: values are asked for more than all units before they are due")


def random_trip(rng: random.Random) -> Trip:
    returns = rng.randint(0, 2)
    if rng.random() < 0.2:
        return Trip(returns + rng.randint(1, 2), returns, leaves_in_backward=True)
    return Trip(rng.randint(1, 3), returns)


def _earlier(trip: Trip, ahead: int) -> Trip:
    leaves = trip.leaves + ahead if trip.leaves_in_backward else trip.leaves
    return trip._replace(leaves=leaves, returns=trip.returns + ahead)
