"""Give processes that recorded a step together the same times, and choose one plan for them of those that each made."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from recollect.errors import PlanError
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import digest_of
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile
from recollect.ranks.group import Place, Ranks
from recollect.simulation.simulate import predicted_plan

# Of how many processes the plans are tried by all the others, those that need the most memory.
_MOST_TRIED: Final = 4


def common_plan(
    profile: Profile, own: Plan, *, plain_bytes: int, budget_bytes: int, ranks: Ranks, place: Place = Place.START
) -> tuple[Plan, float]:
    """Return the plan that all processes run, with the predictions for this one; and the slowdown in the slowest.

    Of the plans that keep all of them within their budgets, the one under which the slowest is fastest; if none does, the one
    that exceeds one least.

    Args:
        profile: as this process recorded it.
        own: the plan that this process made.
        plain_bytes: the peak of this process without recompute.
        budget_bytes: of this process.
        ranks: the processes.
        place: where they are.
    """
    if ranks.is_alone:
        return own, own.predicted_slowdown or 0.0
    offered = ranks.gather((plain_bytes, own), place)
    hungriest = sorted(range(len(offered)), key=lambda process: (-offered[process][0], process))
    # Of the same profile all have made the same plan.
    plans = (offered[process][1] for process in hungriest)
    tried = list({digest_of(plan.units, plan.loss_chunks): plan for plan in plans}.values())[:_MOST_TRIED]
    mine = [predicted_plan(profile, plan) for plan in tried]
    results = ranks.gather(
        [(max(0, (p.predicted_peak_bytes or 0) - budget_bytes), p.predicted_slowdown or 0.0) for p in mine], place
    )

    def cost(index: int) -> tuple[int, float, int]:
        excesses, slowdowns = zip(*(result[index] for result in results), strict=True)
        return max(excesses), max(slowdowns), index

    best = min(range(len(tried)), key=cost)
    chosen = replace(mine[best], budget_bytes=budget_bytes, bound_slowdown=own.bound_slowdown)
    return chosen, cost(best)[1]


def check_same_plans(plans: Sequence[Plan], ranks: Ranks) -> None:
    """Check that all processes are about to run the same plan, or the same plans of micro-batches.

    Raises:
        PlanError: they are not.
    """
    if ranks.is_alone:
        return
    found = ranks.gather([digest_of(plan.units, plan.loss_chunks)[:8] for plan in plans], Place.START)
    if any(digests != found[0] for digests in found):
        shown = ", ".join(f"{'+'.join(own)} in rank {rank}" for rank, own in zip(ranks.ranks, found, strict=True))
        raise PlanError(
            f"cannot run the plan: the processes of its group have different ones ({shown}), expected one plan. Let one "
            "process save it and all load it, or record in all with the same group; without group= each runs its own."
        )


def with_common_times(profile: Profile, ranks: Ranks, place: Place = Place.START) -> Profile:
    """Return a profile with the median of the times of all processes, where their units run the same ops on as many bytes.

    So they make the same plan of them. The median, since each time was measured once in each process, and one that was
    disturbed meanwhile says nothing about the step. The slowest process sets the pace, but of equal devices none is slower than
    the others in every step. Links to the hosts' memory are not equal, so there the slowest counts.

    Args:
        profile: as this process recorded it.
        ranks: those that recorded it together.
        place: where they are.
    """
    if ranks.is_alone or profile.fake:
        return profile
    own = list(_times(profile))
    found = ranks.gather((_fingerprint(profile), own, _host_link(profile)), place)
    fingerprints, times_of_all, links = zip(*found, strict=True)
    if len(set(fingerprints)) > 1:
        return profile
    common = _with_times(profile, (statistics.median(times) for times in zip(*times_of_all, strict=True)))
    to_host, from_host, latencies_s = zip(*links, strict=True)
    return replace(
        common, to_host_bytes_per_s=min(to_host), from_host_bytes_per_s=min(from_host), host_latency_s=max(latencies_s)
    )


def _host_link(profile: Profile) -> tuple[float, float, float]:
    return profile.to_host_bytes_per_s, profile.from_host_bytes_per_s, profile.host_latency_s


def _times(profile: Profile) -> Iterator[float]:
    yield from (profile.step_s, profile.gather_latency_s, profile.gather_s_per_byte)
    for graph in profile.graphs:
        yield graph.tape_s
        yield from (seconds for _, seconds in graph.module_tape_s)
        yield from (op.time_s for op in graph.ops)
        yield from (part.gather_s for part in graph.parts)


def _with_times(profile: Profile, times: Iterator[float]) -> Profile:
    """Return a profile with other times, in the order of `_times`."""
    step_s, gather_latency_s, gather_s_per_byte = (next(times) for _ in range(3))
    graphs = tuple(
        replace(
            graph,
            tape_s=next(times),
            module_tape_s=tuple((module, next(times)) for module, _ in graph.module_tape_s),
            ops=tuple(replace(op, time_s=next(times)) for op in graph.ops),
            parts=tuple(replace(part, gather_s=next(times)) for part in graph.parts),
        )
        for graph in profile.graphs
    )
    return replace(
        profile, graphs=graphs, step_s=step_s, gather_latency_s=gather_latency_s, gather_s_per_byte=gather_s_per_byte
    )


def _fingerprint(profile: Profile) -> str:
    """Return a digest of what the times belong to."""
    words = [repr([(call.path, call.graph, call.num_runs) for call in profile.calls])]
    words += [_words(graph) for graph in profile.graphs]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def _words(graph: UnitGraph) -> str:
    ops = [(op.name, op.inputs, op.outputs) for op in graph.ops]
    parts = [(part.value, part.nbytes) for part in graph.parts]
    return repr(([module for module, _ in graph.module_tape_s], [value.nbytes for value in graph.values], ops, parts))
