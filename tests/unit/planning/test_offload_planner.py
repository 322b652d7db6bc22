"""Plans with host memory, on small steps made by hand and on a modelled device: within all limits, and worth having."""

from dataclasses import replace

import pytest
import torch

import recollect
from recollect.errors import BudgetTooSmallError, PlanError
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.planning.choose import Planner
from recollect.planning.frontier import prices
from recollect.planning.planners import ClockedOffloadPlanner, OffloadPlanner, planner_for
from recollect.planning.trips import scheduled
from recollect.plans.plan import Plan
from recollect.plans.trip import Trip
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.events import ALLOC, BACKWARD, FREE, PHASE, StepLog
from recollect.profile.host_times import HostTimes
from recollect.profile.profile import Profile
from recollect.simulation.copy_clock import Course, Journey, Link, waits
from recollect.simulation.decisions import decide
from recollect.simulation.predicted import predicted_plan
from recollect.simulation.simulate import simulate
from recollect.simulation.windows import edges
from toy_profile import layer, stack
from two_clocks import on_host

MANY_BYTES = 10**12


def linked(profile: Profile, bytes_per_s: float) -> Profile:
    return replace(profile, to_host_bytes_per_s=bytes_per_s, from_host_bytes_per_s=bytes_per_s)


@pytest.fixture(scope="module")
def llama() -> Profile:
    """A step whose times are those of a modelled H100."""
    config = llama_config(num_layers=6, hidden_size=512, num_attention_heads=8, vocab_size=1024)
    with torch.device("meta"):
        model, tokens = GPTModel(config), torch.zeros(4, 512, dtype=torch.int64)
    batch = {"tokens": tokens, "labels": tokens}
    return recollect.record(model, batch, fake=True, hardware="H100", holds_output=False, gradients="freed")


@pytest.fixture(scope="module")
def halved(llama: Profile) -> Plan:
    """For half of the memory, with as much on the host as it takes."""
    return recollect.plan(llama, "50%", MANY_BYTES)


def test_a_profile_of_a_known_device_knows_its_link(llama: Profile) -> None:
    assert (llama.to_host_bytes_per_s, llama.from_host_bytes_per_s) == (55e9, 55e9)


@pytest.mark.parametrize(("bytes_per_s", "fraction"), [(5e9, 0.45), (55e9, 0.8), (1e13, 0.45)])
def test_plans_are_within_all_limits_and_no_slower_than_without_host_memory(
    llama: Profile, bytes_per_s: float, fraction: float
) -> None:
    profile = linked(llama, bytes_per_s)
    plain, planner = Planner(profile), OffloadPlanner(profile, MANY_BYTES)
    budget_bytes = int(fraction * plain.plain_peak_bytes)
    plan, without = planner.plan(budget_bytes), plain.plan(budget_bytes)
    simulation = simulate(profile, decide(profile, plan))
    assert simulation.peak_bytes == plan.predicted_peak_bytes <= budget_bytes
    assert simulation.host_bytes == (plan.predicted_host_bytes or 0)
    assert simulation.num_missed == 0
    slowdown, bound = plan.predicted_slowdown or 0.0, plan.bound_slowdown or 0.0
    assert bound <= slowdown <= (without.predicted_slowdown or 0.0)
    assert bound <= (without.bound_slowdown or 0.0)
    if bytes_per_s == 1e13:
        assert plan.offloads and slowdown < 0.5 * (without.predicted_slowdown or 0.0)


def test_host_memory_is_not_exceeded(llama: Profile, halved: Plan) -> None:
    plans = [halved, *(OffloadPlanner(llama, host).plan(halved.budget_bytes or 0) for host in (2**27, 2**25))]
    for plan, host_bytes in zip(plans, (MANY_BYTES, 2**27, 2**25), strict=True):
        assert (plan.predicted_host_bytes or 0) <= host_bytes == plan.host_budget_bytes
    slowdowns = [plan.predicted_slowdown for plan in plans]
    assert slowdowns == sorted(slowdowns, key=lambda slowdown: slowdown or 0.0)


def test_a_plan_that_is_predicted_once_more_waits_as_long() -> None:
    """As in each process of a group, which tries the plans of others."""
    profile = linked(stack(12, graph=layer(norm_bytes=10, up_bytes=40, act_bytes=40, out_bytes=200)), 100.0)
    with pytest.raises(BudgetTooSmallError) as refused:
        Planner(profile).plan(0)
    plan = OffloadPlanner(profile, MANY_BYTES).plan(refused.value.least_peak_bytes - 10)
    again = predicted_plan(profile, plan)
    assert again.predicted_slowdown == pytest.approx(plan.predicted_slowdown)
    assert again.host_wait_slowdown == pytest.approx(plan.host_wait_slowdown) and again.host_wait_slowdown


def test_slots_in_host_memory_are_within_its_budget() -> None:
    """A value of 100 bytes has a slot of 128, also where it takes 512 on its device."""
    profile = linked(stack(6), 1e5)
    for host_bytes in (150, 1000):
        for device in ("cpu", "cuda"):
            plan = OffloadPlanner(replace(profile, device=device), host_bytes).plan("60%")
            assert (plan.predicted_host_bytes or 0) <= host_bytes
            assert plan.offloads or host_bytes < 1000


def test_a_slower_link_than_planned_for_costs_time_only(llama: Profile, halved: Plan) -> None:
    """The peak is the same on any link: the bytes of the plan do not depend on it."""
    plans = [halved, OffloadPlanner(llama, MANY_BYTES, link_share=0.375).plan(halved.budget_bytes or 0)]
    assert plans[0].to_host_bytes_per_s == 2 * (plans[1].to_host_bytes_per_s or 0.0) == 0.75 * 55e9
    assert (plans[0].predicted_slowdown or 0.0) <= (plans[1].predicted_slowdown or 0.0)
    at_half = simulate(linked(llama, 55e9 / 2), decide(llama, plans[0]))
    assert at_half.peak_bytes == plans[0].predicted_peak_bytes


def test_text_says_what_is_planned_for(halved: Plan) -> None:
    lines = str(halved).splitlines()
    assert lines[-3].startswith("predicted host memory ") and lines[-3].endswith(", host budget 931.3 GiB")
    assert lines[-1].startswith("times modelled for ")
    assert any("offload    " in line for line in lines)


@pytest.mark.long
def test_a_budget_below_the_least_peak_says_how_much_host_memory_would_do() -> None:
    profile = linked(stack(12, graph=layer(norm_bytes=10, up_bytes=40, act_bytes=40, out_bytes=200)), 1e5)
    with pytest.raises(BudgetTooSmallError) as refused:
        Planner(profile).plan(0)
    least_bytes = refused.value.least_peak_bytes
    budget_bytes = least_bytes - 10
    plan = OffloadPlanner(profile, MANY_BYTES).plan(budget_bytes)
    assert (plan.predicted_peak_bytes or 0) <= budget_bytes and plan.offloads
    with pytest.raises(
        BudgetTooSmallError, match=r"With more host memory it can be met: host_budget='.*', at a slowdown of"
    ):
        OffloadPlanner(profile, 5).plan(budget_bytes)
    with pytest.raises(BudgetTooSmallError, match="No amount of host memory would do") as none_fits:
        OffloadPlanner(profile, MANY_BYTES).plan(1)
    assert "Or let part" not in str(none_fits.value)


@pytest.mark.parametrize(("op_s", "budget"), [(0.5, "60%"), (0.05, "70%"), (1e-3, "90%")])
def test_plans_by_the_limiting_clock_where_a_device_runs_behind_its_host(op_s: float, budget: str) -> None:
    """Its slowdown is that of both clocks, of which no bound is known."""
    profile = linked(on_host(stack(4), HostTimes(op_s, op_s, unit_s=op_s / 5, again_op_s=op_s)), 1e4)
    planner = planner_for(profile, MANY_BYTES)
    plan = planner.plan(budget)
    assert plan.offloads and (plan.predicted_peak_bytes or 0) <= (plan.budget_bytes or 0)
    assert plan.predicted_slowdown == predicted_plan(profile, plan).predicted_slowdown
    assert plan.predicted_slowdown < (recollect.plan(profile, budget).predicted_slowdown or 0.0)
    assert plan.bound_slowdown is None and planner.bound_slowdown(1) is None


def test_no_bound_is_known_for_both_clocks() -> None:
    profile = linked(on_host(stack(2), HostTimes(0.5, 0.5, unit_s=0.1, again_op_s=0.5)), 1e4)
    assert recollect.frontier(profile, MANY_BYTES).bound == ()


def test_the_plan_on_the_other_clock_may_wait_less_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostTimes(0.5, 0.5, unit_s=0.1, again_op_s=0.5)
    profile = linked(on_host(stack(4), host), 1e4)
    of_both = planner_for(profile, MANY_BYTES).plan("60%").predicted_slowdown
    monkeypatch.setattr(ClockedOffloadPlanner, "tries_both", False)
    of_the_limiting = planner_for(profile, MANY_BYTES).plan("60%").predicted_slowdown
    assert of_both is not None and of_the_limiting is not None and of_both < 0.8 * of_the_limiting


@pytest.mark.long
def test_host_memory_is_worth_something_while_it_is_short(llama: Profile, halved: Plan) -> None:
    short, enough = (prices(llama, plan) for plan in (recollect.plan(llama, "50%", "24MiB"), halved))
    assert short.host_gib > 0 and enough.host_gib == 0
    assert short.device_gib > 0 and "one more GiB on the device would save" in str(short)


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_is_a_part(llama: Profile, share: float) -> None:
    with pytest.raises(PlanError, match=r"link_share: got .*, expected a part of the link's rate"):
        OffloadPlanner(llama, 1, link_share=share)


def test_a_profile_without_a_link_is_refused() -> None:
    with pytest.raises(PlanError, match=r"lacks the speed of copies .* Record it with host_link=True"):
        recollect.plan(stack(2), "50%", "1GiB")


def test_hand_made_trips_are_scheduled_anew(llama: Profile) -> None:
    graph = llama.graph_of(llama.calls[2])
    name = max((v for v in graph.values if v.saved and v.producer is not None), key=lambda v: v.nbytes).name
    path = llama.calls[2].path
    plan = Plan({path: UnitPlan({name: "offload"}, trips={name: Trip(1, 0)})})
    fast, slow = (scheduled(llama, plan, Link(rate, rate)).units[path].trips for rate in (1e13, 55e9))
    assert fast[name].leaves < slow[name].leaves and fast[name].returns <= slow[name].returns
    # On a link on which it cannot come back in time it goes all the same, and the step waits.
    assert scheduled(llama, plan, Link(1e6, 1e6)).offloads


def test_what_a_step_waits_for() -> None:
    """Two values of 10 and 20 bytes over a link of 10 bytes a second, worked out by hand."""
    course = Course(
        edges=edges(stack(1)),
        edge_s=(0.0, 1.0, 2.0, 5.0, 6.0),
        made_s={(0, 1): 0.5, (1, 1): 1.0},
        asked={(0, 1): (4, 6.5), (1, 1): (3, 5.5)},
        end_s=8.0,
    )
    journeys = {(0, 1): Journey(2, 4, 10), (1, 1): Journey(2, 3, 20)}
    # Out: 0.5 to 1.5 and 1.5 to 3.5, which is 1.5 s after the edge at 2. Then all is that much later. Back: the second from
    # 6.5 to 8.5, asked for at 7: 1.5 s more; the first from 9 to 10, asked for at 9.5: 0.5 s.
    assert waits(course, journeys, Link(10.0, 10.0)) == pytest.approx(1.5 + 2.0)
    assert waits(course, journeys, Link(10.0, 1e9)) == pytest.approx(1.5)
    assert waits(course, journeys, Link(1e9, 1e9)) == pytest.approx(0.0, abs=1e-6)
    # Made at the edge where it leaves: where the ops in between take no time.
    assert waits(course, {(1, 1): Journey(1, 3, 20)}, Link(10.0, 1e9)) == pytest.approx(2.0)


def test_a_step_without_units_has_nothing_to_offload() -> None:
    log = StepLog(((ALLOC, 0, 100), (PHASE, BACKWARD), (FREE, 0)))
    with pytest.raises(BudgetTooSmallError, match="No amount of host memory would do"):
        OffloadPlanner(linked(Profile((), (), log, step_s=1.0), 1e5), MANY_BYTES).plan(10)
