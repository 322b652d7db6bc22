"""Times that processes measured for the same ops become one, for other ops they stay; and all run one plan."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rank_threads import error_of, run_on_threads
from recollect.planning.classic import classic_plan
from recollect.planning.planners import OffloadPlanner
from recollect.plans.plan import Plan
from recollect.profile.graph import PartRecord, UnitGraph
from recollect.profile.profile import Profile
from recollect.profile.variant import VariantRecord
from recollect.ranks.group import ALONE, Group, Place, Ranks
from recollect.ranks.members import check_same_plans, common_plan, with_common_times
from toy_profile import layer, stack

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs PyTorch with the gloo backend")


class Others(Ranks):
    """Processes that have answered already."""

    is_alone = False

    def __init__(self, profiles: Sequence[Profile]) -> None:
        self.answers: list[Any] = []
        for profile in profiles:
            with_common_times(profile, self)

    def gather(self, value: Any, place: Place) -> list[Any]:  # noqa: ARG002
        self.answers.append(value)
        return self.answers


def slower(profile: Profile, factor: float) -> Profile:
    def graph(its: UnitGraph) -> UnitGraph:
        parts = tuple(replace(part, gather_s=factor * part.gather_s) for part in its.parts)
        variants = tuple(replace(variant, step_s=factor * variant.step_s) for variant in its.variants)
        ops = tuple(replace(op, time_s=factor * op.time_s) for op in its.ops)
        return replace(its, ops=ops, parts=parts, variants=variants, eager_s=factor * its.eager_s)

    return replace(
        profile,
        step_s=factor * profile.step_s,
        gather_latency_s=factor * profile.gather_latency_s,
        gather_s_per_byte=factor * profile.gather_s_per_byte,
        graphs=tuple(map(graph, profile.graphs)),
    )


def with_parts(profile: Profile) -> Profile:
    """The same step, where the value that each unit computes last may be held as parts."""
    graphs = tuple(replace(g, parts=(PartRecord(len(g.values) - 1, 8, 1e-3),)) for g in profile.graphs)
    return replace(profile, graphs=graphs, shard_ranks=2, gather_latency_s=1e-4, gather_s_per_byte=1e-9)


def test_times_of_gathers_become_their_median() -> None:
    profile = with_parts(stack(3))
    others = [slower(profile, factor) for factor in (1.0, 9.0)]
    assert with_common_times(slower(profile, 16.0), Others(others)) == slower(profile, 9.0)


def with_variant(profile: Profile, own_bytes: int = 8) -> Profile:
    variant = VariantRecord((), (), own_bytes, 8, (), step_s=0.5, is_default=True)
    return replace(profile, graphs=tuple(replace(g, variants=(variant,), eager_s=1.0) for g in profile.graphs))


def test_times_of_compiled_units_become_their_median_where_they_take_the_same_bytes() -> None:
    profile = with_variant(stack(3))
    others = [slower(profile, factor) for factor in (1.0, 9.0)]
    assert with_common_times(slower(profile, 16.0), Others(others)) == slower(profile, 9.0)
    longer = [slower(with_variant(stack(3), own_bytes=9), 9.0)] * 2
    assert with_common_times(profile, Others(longer)) == profile


def test_times_of_the_same_ops_become_their_median() -> None:
    profiles = [slower(stack(3), factor) for factor in (1.0, 9.0)]
    common = with_common_times(slower(stack(3), 2.0), Others(profiles))
    assert common == slower(stack(3), 2.0)
    assert with_common_times(slower(stack(3), 16.0), Others(profiles)) == slower(stack(3), 9.0)


def with_link(profile: Profile, to_host: float, from_host: float, latency_s: float) -> Profile:
    return replace(profile, to_host_bytes_per_s=to_host, from_host_bytes_per_s=from_host, host_latency_s=latency_s)


def test_the_slowest_link_to_a_host_is_that_of_all() -> None:
    others = [with_link(stack(3), 2e9, 9e9, 1e-6), with_link(stack(3), 3e9, 4e9, 2e-6)]
    assert with_common_times(with_link(stack(3), 5e9, 5e9, 9e-6), Others(others)) == with_link(stack(3), 2e9, 4e9, 9e-6)
    assert with_common_times(with_link(stack(3), 5e9, 5e9, 9e-6), Others([stack(3)])) == with_link(stack(3), 0, 0, 9e-6)
    longer = with_link(stack(3, graph=layer(up_bytes=800)), 1e9, 1e9, 1.0)
    assert with_common_times(others[0], Others([longer])) == others[0]


def test_times_of_other_sizes_and_of_one_process_stay() -> None:
    longer = stack(3, graph=layer(up_bytes=800))
    assert with_common_times(stack(3), Others([slower(longer, 9.0), slower(longer, 9.0)])) == stack(3)
    assert with_common_times(slower(stack(3), 5.0), ALONE) == slower(stack(3), 5.0)


@needs_gloo
def test_the_common_plan_fits_the_process_with_the_least_room() -> None:
    profile = stack(3)
    plain, lean = classic_plan(profile, "keep_all"), classic_plan(profile, "full")
    assert plain.predicted_peak_bytes is not None and lean.predicted_peak_bytes is not None
    roomy_bytes, tight_bytes = plain.predicted_peak_bytes, lean.predicted_peak_bytes

    def chosen(ranks: Group) -> tuple[Plan, float]:
        own, budget_bytes = (plain, roomy_bytes) if ranks.is_first else (lean, tight_bytes)
        return common_plan(profile, own, plain_bytes=roomy_bytes, budget_bytes=budget_bytes, ranks=ranks)

    for (plan, slowdown), budget_bytes in zip(run_on_threads(chosen), (roomy_bytes, tight_bytes), strict=True):
        assert plan.units == lean.units and slowdown == lean.predicted_slowdown
        assert plan.predicted_peak_bytes == tight_bytes and plan.budget_bytes == budget_bytes


@needs_gloo
def test_a_common_plan_that_offloads_names_units_that_ran_in_another_process() -> None:
    """As where layers are skipped by chance: in that process it could not be predicted, and the others would wait."""
    short, long = (with_link(stack(number), 1e5, 1e5, 0.0) for number in (3, 4))

    def chosen(ranks: Group) -> Plan:
        profile = short if ranks.is_first else long
        planner = OffloadPlanner(profile, 10**9)
        own = planner.plan("90%")
        bytes_of = {"plain_bytes": 10**6 * ranks.is_first, "budget_bytes": planner.plain_peak_bytes}
        return common_plan(profile, own, **bytes_of, ranks=ranks)[0]

    one, other = run_on_threads(chosen)
    assert one.offloads and one.units == other.units
    assert {call.path for call in long.calls} <= one.units.keys()


@needs_gloo
def test_processes_with_other_plans_all_raise_and_those_with_the_same_go_on() -> None:
    plain, lean = (classic_plan(stack(3), name) for name in ("keep_all", "full"))
    others = run_on_threads(
        lambda ranks: error_of(lambda: check_same_plans([lean if ranks.is_first else plain], ranks))
    )
    assert others[0].startswith("PlanError: cannot run the plan: the processes of its group have different ones (")
    assert " in rank 0, " in others[0] and others[0] == others[1]
    assert run_on_threads(lambda ranks: error_of(lambda: check_same_plans([lean], ranks))) == ["", ""]
