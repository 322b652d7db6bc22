"""Compiled units: what the simulator and the planner make of their variants."""

import math
import random
from dataclasses import replace

import pytest

import recollect
from recollect.errors import PlanError
from recollect.planning.choose import Planner
from recollect.plans.action import EngineChoice
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.events import ALLOC, BACKWARD, DIES, FREE, OP, PHASE, RELEASE, RETURN, SAVE, USE, WORK, StepLog
from recollect.profile.graph import OpRecord, UnitCall, UnitGraph, ValueRecord
from recollect.profile.host_times import HostTimes
from recollect.profile.profile import Profile
from recollect.profile.variant import VariantRecord
from recollect.simulation.decisions import CallActions, compiled_unit, decide, decide_call, recompute_all_unit
from recollect.simulation.lifetimes import lifetimes
from recollect.simulation.peak_sums import PeakSums
from recollect.simulation.predicted import simulated_plan
from recollect.simulation.simulate import simulate
from small_llama import llama_step

_TWO_VARIANTS = (
    VariantRecord((1,), (0,), 120, 500, ((300, -50, 0), (40, -30, -1)), 4.0, is_default=True),
    VariantRecord((), (0,), 10, 500, ((900, -10, 0),), 6.0),
)


def _one_unit() -> Profile:
    """A unit that reads an input of 64 bytes made outside, saves 100, returns 32; its gradient of 16 bytes lives on."""
    values = (
        ValueRecord("input", 64, None),
        ValueRecord("h", 100, 0, saved=True),
        ValueRecord("y", 32, 1, is_output=True),
    )
    ops = OpRecord("h", (0,), (1,), 1.0), OpRecord("y", (1,), (2,), 1.0)
    graph = UnitGraph(values, ops, variants=_TWO_VARIANTS, eager_s=5.0)
    events = (
        *((ALLOC, 0, 64), (OP, 0, 0), (SAVE, 0, 1, 0, 0), (OP, 0, 1), (DIES, 0, 1), (FREE, 0), (RETURN, 0)),
        *((PHASE, BACKWARD), (ALLOC, 1, 32), (DIES, 0, 2), (USE, 0), (ALLOC, 2, 16), (WORK, 4000, 0), (RELEASE, 0)),
        (FREE, 1),
    )
    call = UnitCall("a", 0, repeated=True, outside=((0, 0),))
    return Profile((graph,), (call,), StepLog(events), 10.0, persistent={"parameters": 1000})


def test_what_was_recorded_of_a_variant_is_played_in_place_of_the_ops() -> None:
    profile = _one_unit()
    default, lean = (simulate(profile, [CallActions(engine=EngineChoice.COMPILE, variant=v)]) for v in (0, 1))
    assert default.forward_peak_bytes == 1000 + 64 + 500
    # What is kept and held when backward begins, and the output.
    assert default.kept_bytes == 120 + 64 + 32
    # The gradient of the output has come, and the output gone; the work of 4,000 bytes is not of the compiled unit.
    assert default.backward_peak_bytes == 1000 + 120 + 64 + 32 + 300
    assert lean.backward_peak_bytes == 1000 + 10 + 64 + 32 + 900
    assert (default.recompute_s, lean.recompute_s) == (0.0, 2.0)


def test_a_forward_that_lets_go_of_what_it_saved_first_may_save_more() -> None:
    profile = _one_unit()
    dead = (SAVE, 0, 1, 1, 0), (RELEASE, 1)
    log = StepLog((*profile.log.events[:2], *dead, *profile.log.events[2:]))
    played = [CallActions(engine=EngineChoice.COMPILE, variant=0)]
    assert simulate(replace(profile, log=log), played) == simulate(profile, played)


def test_eager_units_take_longer_than_compiled_ones() -> None:
    profile = _one_unit()
    assert simulate(profile, [CallActions()]).recompute_s == 1.0
    assert simulate(profile, [decide_call(profile.graphs[0], recompute_all_unit(profile.graphs[0]))]).recompute_s == 2.0


@pytest.mark.parametrize(
    ("eager_s", "slowdown"), [(math.nextafter(4.0, 0.0), 0.0), (0.0, -0.4)], ids=["by rounding", "measured"]
)
def test_eager_units_that_are_faster_than_compiled_ones(eager_s: float, slowdown: float) -> None:
    profile = _one_unit()
    profile = replace(profile, graphs=(replace(profile.graphs[0], eager_s=eager_s),))
    made = simulated_plan(profile, Plan({}), simulate(profile, [CallActions()]))
    assert made.predicted_slowdown == slowdown
    timed = simulated_plan(replace(profile, host=HostTimes()), Plan({}), simulate(profile, [CallActions()]))
    assert timed.slowdown_error is not None and timed.slowdown_error >= 0


def test_a_plan_finds_the_variant_that_keeps_what_it_keeps() -> None:
    profile = _one_unit()
    graph = profile.graphs[0]
    plans = [Plan({"a": compiled_unit(graph, variant)}) for variant in (0, 1)]
    assert plans[0].units["a"].actions == {}
    assert [decide(profile, plan)[0].variant for plan in plans] == [0, 1]
    assert decide(profile, Plan.from_json(plans[1].to_json())) == decide(profile, plans[1])


def test_a_plan_of_a_variant_that_was_not_recorded_is_refused() -> None:
    profile = _one_unit()
    graph = replace(profile.graphs[0], variants=_TWO_VARIANTS[:1])
    lean = Plan({"a": compiled_unit(profile.graphs[0], 1)})
    with pytest.raises(PlanError, match="keeps nothing, and these sets of values were recorded: h. Take one of them"):
        decide(replace(profile, graphs=(graph,)), lean)
    bare = replace(profile, graphs=(replace(graph, variants=(), eager_s=0.0),))
    with pytest.raises(PlanError, match="knows nothing of compiled units: record it with engine='compile'"):
        decide(bare, lean)


def test_a_compiled_unit_keeps_its_output_and_whole_values() -> None:
    with pytest.raises(PlanError, match="compiled and traced code keeps what a unit returns"):
        UnitPlan({"h": "recompute"}, output="recompute", engine="compile")


@pytest.fixture(scope="module")
def llama() -> Profile:
    """Four layers, whose variants are made up: the leaner they are, the more working memory in backward."""
    profile = recollect.record(*llama_step(length=32, num_layers=4), fake=True)
    graphs = list(profile.graphs)
    for number in {call.graph for call in profile.calls if call.repeated}:
        graph = graphs[number]
        saved = [index for index in graph.saved_values if not graph.values[index].is_output]
        kept = [tuple(saved), tuple(saved[::2]), tuple(saved[::4]), ()]
        variants = [
            VariantRecord(
                kept=one,
                held=(0,),
                own_bytes=sum(graph.values[v].nbytes for v in one) + 8,
                forward_bytes=graph.saved_bytes + 100 * number,
                backward=((graph.saved_bytes, -64, 0), (1000, -8, -1)),
                step_s=graph.forward_s * (2 + number),
                is_default=not number,
            )
            for number, one in enumerate(kept)
        ]
        graphs[number] = replace(graph, variants=tuple(variants), eager_s=2.2 * graph.forward_s)
    return replace(profile, graphs=tuple(graphs))


def test_sums_over_units_are_whole_simulations(llama: Profile) -> None:
    chooser = random.Random(3)
    sums = PeakSums.of(llama)
    for _ in range(20):
        decisions = []
        for call in llama.calls:
            graph = llama.graph_of(call)
            choices = [CallActions(), decide_call(graph, recompute_all_unit(graph))]
            choices += [CallActions(engine=EngineChoice.COMPILE, variant=v) for v in range(len(graph.variants))]
            decisions.append(chooser.choice(choices))
        whole, summed = simulate(llama, decisions), sums.peaks(decisions)
        assert (whole.peak_bytes, whole.recompute_s) == (summed.peak_bytes, summed.recompute_s)


@pytest.mark.parametrize("variant", [0, 1])
def test_the_picture_of_a_step_has_its_peak(variant: int, llama: Profile) -> None:
    """With what compiled code works in, and without what outside of it only passes."""
    choice = CallActions(engine=EngineChoice.COMPILE, variant=variant)
    decisions = [choice if llama.graph_of(call).variants else CallActions() for call in llama.calls]
    lives = lifetimes(llama, decisions)
    whole = simulate(llama, decisions)
    assert lives.simulation.peak_bytes == whole.peak_bytes
    assert set(lives.began) == {index for index, call in enumerate(llama.calls) if llama.graph_of(call).ops}
    plan = Plan({c.path: compiled_unit(llama.graph_of(c), variant) for c in llama.calls if llama.graph_of(c).variants})
    report = recollect.explain_peak(llama, plan)
    assert sum(item.nbytes for item in report.items) == report.peak_bytes == whole.peak_bytes
    assert any("compiled code runs" in item.name for item in report.items) == ("decoder" in report.where)


def test_the_picture_of_a_peak_inside_compiled_code_adds_up() -> None:
    profile = _one_unit()
    # In forward, above the input; and in backward, above what is kept, the input, and the gradient of the output.
    for variant, working_bytes, others_bytes in ((0, 500, 64), (1, 900, 10 + 64 + 32)):
        report = recollect.explain_peak(profile, Plan({"a": compiled_unit(profile.graphs[0], variant)}))
        assert {item.name: item.nbytes for item in report.items}["a while compiled code runs"] == working_bytes
        assert sum(item.nbytes for item in report.items) == report.peak_bytes == 1000 + others_bytes + working_bytes


def test_plans_choose_among_engines_within_their_budgets(llama: Profile) -> None:
    planner = Planner(llama)
    assert planner.plan("100%").predicted_slowdown == 0.0
    slowdowns = []
    for percent in (95, 85, 75):
        plan = planner.plan(f"{percent}%")
        assert plan.predicted_peak_bytes <= plan.budget_bytes
        assert plan.bound_slowdown is None
        slowdowns.append(plan.predicted_slowdown)
    assert slowdowns == sorted(slowdowns)
    assert any(unit.engine is EngineChoice.COMPILE for unit in planner.plan("95%").units.values())
