"""The planner: budgets hold, nothing is wasted where it is easy to see, errors say what is possible."""

import gc
import itertools
import re
from dataclasses import replace

import pytest

import recollect
from recollect.byte_format import format_bytes
from recollect.errors import BudgetTooSmallError
from recollect.planning.choose import advice, lasting_bytes
from recollect.planning.loss_chunks import plan_with_chunks
from recollect.planning.output_choices import dropped_outputs
from recollect.planning.planners import plan
from recollect.profile.events import WORK, StepLog
from recollect.profile.graph import UnitCall
from recollect.profile.profile import Profile
from recollect.simulation.decisions import decide
from small_llama import llama_step
from synthetic_step import random_step
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


# What the error of a budget that is too small says would help.


def refused(profile: Profile, budget_bytes: int) -> BudgetTooSmallError:
    with pytest.raises(BudgetTooSmallError) as error:
        plan(profile, budget_bytes)
    return error.value


def test_what_lives_through_the_step_is_named_with_its_bytes() -> None:
    profile = replace(stack(1), persistent={"parameters": 1000, "buffers": 0, "optimizer_state": 2048})
    (said,) = advice(profile, budget_bytes=3048, least_peak_bytes=9000, peak_call="layers.0")
    assert said == (
        "What lives through the whole step takes 3.0 KiB by itself (parameters 1000 B, optimizer state 2.0 KiB), which no "
        "recompute changes: shard it (FSDP), or use an optimizer with less state or bf16 parameters."
    )
    assert "by itself" not in advice(profile, budget_bytes=3049, least_peak_bytes=9000, peak_call="layers.0")[0]


def test_gradients_that_the_step_makes_live_to_its_end_too() -> None:
    model, batch = llama_step(4, 32)
    profile = recollect.record(model, batch, fake=True, holds_output=False, gradients="freed")
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert lasting_bytes(profile) == num_bytes
    error = refused(profile, 2 * num_bytes)
    assert f"gradients {format_bytes(num_bytes)}" in str(error) and "or bf16 parameters." in str(error)
    half = refused(recollect.record(model.bfloat16(), batch, fake=True), num_bytes // 4)
    assert "by itself" in str(half) and "bf16 parameters" not in str(half)


def test_optimizer_step() -> None:
    profile = stack(1)
    (said,) = advice(profile, budget_bytes=8000, least_peak_bytes=9000, peak_call="the optimizer step")
    assert said == (
        "The peak is the workspace of the optimizer's step, which no recompute changes: make the optimizer with foreach=False "
        "(one parameter at a time) or fused=True, or use one with less state."
    )


@pytest.mark.parametrize("where", ["head", "the loss and what surrounds the units"])
def test_loss_with_large_logits(where: str) -> None:
    profile = stack(1)
    said = advice(profile, budget_bytes=1500, least_peak_bytes=1000 + 800, peak_call=where)
    assert said[0] == (
        "The peak is in the loss and the head, whose output alone takes 80 B: compute the loss in chunks "
        '(recollect.fit(..., loss_chunks="auto")).'
    )
    assert said[1].startswith("Use a smaller micro-batch")


@pytest.mark.parametrize(("peak_bytes", "where"), [(1000 + 801, "head"), (1800, "layers.0"), (1800, "embed")])
def test_loss_is_not_blamed_for_what_it_does_not_take(peak_bytes: int, where: str) -> None:
    profile = stack(1)
    said = advice(profile, budget_bytes=1500, least_peak_bytes=peak_bytes, peak_call=where)
    assert "chunks" not in " ".join(said)


def test_a_layer_gets_the_part_of_the_batch_that_fits() -> None:
    profile = stack(1)
    said = advice(profile, budget_bytes=1300, least_peak_bytes=1000 + 900, peak_call="layers.0")
    assert said == (
        "Use shorter sequences: about 5 of the 16 positions of the recorded ones (2 x 16) fit.",
        'Or let part of what backward needs go to host memory (host_budget="64GiB", or as much as there is).',
    )


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ("12 x 128", "about 4 of the 12 samples of the recorded one (12 x 128) fit."),
        ("tokens int64[3, 9], labels int64[3, 9]", "about 1 of the 3 samples of the recorded one"),
        ("float32[2, 3, 8, 8]", "about 1 of the 3 positions"),
        ("1 x 2", "Or let part of what backward needs go to host memory"),
        ("list", "about 33 % of the recorded one (list) fits."),
    ],
)
def test_the_batch_that_is_advised_exists(batch: str, said: str) -> None:
    profile = replace(stack(1), batch=batch)
    assert said in advice(profile, budget_bytes=1301, least_peak_bytes=1900, peak_call="layers.0")[0]


def test_part_of_the_batch_that_is_said_to_fit_does() -> None:
    """On a real model, whose peak is in a layer: the micro-batch that the error names has a plan."""
    model, batch = llama_step(32, 128, vocab_size=8)
    profile = recollect.record(model, batch, fake=True)
    error = refused(profile, profile.persistent_bytes + lasting_bytes(profile) + 1)
    budget_bytes = (error.least_peak_bytes + profile.persistent_bytes + lasting_bytes(profile)) // 2
    error = refused(profile, budget_bytes)
    num_samples = int(str(error).partition("about ")[2].partition(" of the 32 samples")[0])
    assert 10 <= num_samples <= 16
    smaller = {name: tokens[:num_samples] for name, tokens in batch.items()}
    assert recollect.plan(recollect.record(model, smaller, fake=True), budget_bytes).predicted_peak_bytes


def test_planner_gives_the_advice_of_the_least_peak() -> None:
    profile = random_step(0, num_values=5)
    # Whatever is kept, the optimizer's step has the peak.
    events = tuple((WORK, 5000) if event == (WORK, 30) else event for event in profile.log.events)
    profile = replace(profile, log=StepLog(events))
    with pytest.raises(
        BudgetTooSmallError,
        match=r"which the optimizer step needs\. It is filled by working memory while .*\. Raise the budget to '.+' or '.+'\. "
        "The peak is the workspace",
    ):
        plan(profile, 4000)
