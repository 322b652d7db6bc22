"""The planner: budgets hold, nothing is wasted where it is easy to see, errors say what is possible."""

import gc
import itertools
import re
from dataclasses import replace

import pytest

from recollect.errors import BudgetTooSmallError
from recollect.planning.loss_chunks import plan_with_chunks
from recollect.planning.output_choices import dropped_outputs
from recollect.planning.planners import plan
from recollect.profile.graph import UnitCall
from recollect.simulation.decisions import decide
from toy_profile import layer, peak_range, random_stack, stack


def test_percentage_is_of_the_peak_without_recompute() -> None:
    profile = stack(4)
    assert plan(profile, "80%").budget_bytes == peak_range(profile)[1] * 80 // 100


@pytest.mark.parametrize("budget", ["70%", 1])
def test_garbage_is_collected_before_and_afterwards_not_meanwhile(budget: int | str) -> None:
    profile, collections = stack(24), []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(gc.isenabled())

    gc.callbacks.append(note)
    try:
        plan(profile, budget)
    except BudgetTooSmallError:
        assert budget == 1
    finally:
        gc.callbacks.remove(note)
    # As a planner is made, as it plans, and what was left over each time.
    assert len(collections) <= 4 and gc.isenabled()


def test_who_collects_no_garbage_is_left_so() -> None:
    gc.disable()
    try:
        plan(stack(2), "90%")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_identical_layers_recompute_first_and_keep_last() -> None:
    made = plan(stack(8), "70%")
    kept = [[action == "keep" for action in made.units[f"layers.{i}"].actions.values()] for i in range(8)]
    assert all(sum(earlier) <= sum(later) for earlier, later in itertools.pairwise(kept))
    assert sum(kept[0]) < sum(kept[-1])


def test_last_layer_keeps_everything_when_that_costs_almost_no_peak() -> None:
    profile = stack(4)
    least, _ = peak_range(profile)
    # The last layer's values (950 bytes) are there at the peak anyway; only the head's 80 bytes come on top.
    made = plan(profile, least + 80)
    assert made.units["layers.3"].recomputes_anything is False
    assert made.units["layers.2"].recomputes_anything is True


def test_outputs_are_dropped_where_the_leanest_plan_does_not_fit() -> None:
    profile = stack(12, graph=layer(norm_bytes=10, up_bytes=10, act_bytes=10, out_bytes=500))
    least, _ = peak_range(profile)
    made = plan(profile, least - 1000)
    assert (made.predicted_peak_bytes or 0) <= least - 1000
    dropped = [path for path, unit in made.units.items() if unit.output == "recompute"]
    assert dropped
    assert "layers.11" not in dropped


def test_outputs_of_layers_that_do_not_feed_the_next_one_are_kept() -> None:
    profile = stack(12, graph=layer(norm_bytes=10, up_bytes=10, act_bytes=10, out_bytes=500), chained=False)
    with pytest.raises(BudgetTooSmallError):
        plan(profile, peak_range(profile)[0] - 1000)


def test_output_that_a_skip_connection_reads_is_kept() -> None:
    profile = stack(12, graph=layer(norm_bytes=10, up_bytes=10, act_bytes=10, out_bytes=500))
    # The head reads the output of layer 4 (call 5).
    calls = (*profile.calls[:-1], replace(profile.calls[-1], origins=((0, 5, 4),)))
    for stride in (2, 3, 4):
        assert "layers.4" not in dropped_outputs(replace(profile, calls=calls), stride=stride)
    assert "layers.4" in dropped_outputs(profile, stride=2)


def test_budget_too_small_names_the_least_peak_and_its_unit() -> None:
    profile = stack(1)
    least, _ = peak_range(profile)
    with pytest.raises(
        BudgetTooSmallError, match=r"100 B \(100 bytes\) is below the least possible peak .*layers\.0"
    ) as e:
        plan(profile, 100)
    assert (e.value.budget_bytes, e.value.unit) == (100, "layers.0")
    assert plan(profile, e.value.least_peak_bytes).predicted_peak_bytes == e.value.least_peak_bytes <= least


def test_least_budgets_of_the_error_work() -> None:
    for profile in (stack(4), *(random_stack(seed) for seed in range(5))):
        with pytest.raises(BudgetTooSmallError) as e:
            plan(profile, 100)
        amount, percentage = e.value.least_budgets
        for budget in (amount, percentage, *re.findall(r"(?:to|or) '(.+?)'", str(e.value))):
            made = plan(profile, budget)
            assert (made.predicted_peak_bytes or 0) <= (made.budget_bytes or 0)


def test_least_percentage_is_of_the_step_recorded_first() -> None:
    profiles = {1: stack(6), 4: stack(3)}
    with pytest.raises(BudgetTooSmallError) as e:
        plan_with_chunks(lambda count: profiles.get(count, profiles[4]), 100, "auto")
    assert plan_with_chunks(lambda count: profiles.get(count, profiles[4]), e.value.least_budgets[1], "auto")
    assert e.value.plain_peak_bytes == peak_range(profiles[1])[1]
    assert e.value.least_peak_bytes < peak_range(profiles[1])[0]


def test_shared_module_has_one_decision_for_all_its_calls() -> None:
    profile = stack(3)
    calls = [replace(call, path="shared") if call.repeated else call for call in profile.calls]
    profile = replace(profile, calls=tuple(calls))
    made = plan(profile, "75%")
    assert list(made.units) == ["shared"]
    assert len({decision.values for decision in decide(profile, made)[1:4]}) == 1
    assert (made.predicted_peak_bytes or 0) <= (made.budget_bytes or 0)


def test_shared_module_in_two_shapes_names_the_values_of_both() -> None:
    profile = stack(1)
    other = layer(up_bytes=800)
    renamed = replace(other, values=(*other.values[:4], replace(other.values[4], name="mlp.other.mm")))
    profile = replace(
        profile,
        graphs=(*profile.graphs, renamed),
        calls=(*profile.calls, UnitCall("layers.0", 3, repeated=True)),
    )
    least, _ = peak_range(profile)
    actions = plan(profile, least).units["layers.0"].actions
    assert {"mlp.down.mm", "mlp.other.mm"} <= set(actions)
