"""The classic schedules: what each one keeps, and what it says when it cannot be made."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from blocks import Computes
from recollect.errors import PlanError
from recollect.planning.classic import classic_plan
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile
from toy_profile import layer, stack


def classic(profile: Profile, name: Any, n: Any = None) -> Plan:
    return classic_plan(profile, name, n)


def outputs(plan: Plan) -> list[str]:
    return [unit.output for unit in plan.units.values()]


def test_keep_all_recomputes_nothing() -> None:
    plan = classic(stack(4), "keep_all")
    assert plan.predicted_slowdown == 0
    assert set(plan.units) == {f"layers.{i}" for i in range(4)}
    assert not any(unit.recomputes_anything for unit in plan.units.values())


def test_full_drops_every_value_of_the_layers_and_keeps_their_outputs() -> None:
    profile = stack(4)
    plan = classic(profile, "full")
    assert all(set(unit.actions.values()) == {"recompute"} for unit in plan.units.values())
    assert outputs(plan) == ["keep"] * 4
    # norm, up and act run again in each layer: 0.23 s each; the last product's result is nobody's input in backward.
    assert plan.predicted_slowdown == pytest.approx(4 * 0.23 / profile.step_s)


def test_what_layers_are_given_keeps_all_under_its_own_name() -> None:
    """Its values would count as those of the layers that call it, with a warning that the plan does not fit."""

    def run(self: Any, x: Tensor) -> Tensor:
        for one in self.layers:
            x = one(x, self.scores)
        return x.square().mean()

    layers = nn.ModuleList(
        Computes(lambda self, x, scores: self.linear(x + scores(x)), linear=nn.Linear(8, 8)) for _ in "12"
    )
    scores = Computes(lambda self, x: self.table(torch.arange(len(x))).exp(), table=nn.Embedding(4, 8))
    model = Computes(run, layers=layers, scores=scores)
    plan = classic(recollect.record(model, torch.ones(4, 8)), "full")
    assert not plan.units["scores"].recomputes_anything
    with recollect.apply(model, plan):
        model(torch.ones(4, 8)).backward()


def test_every_third_keeps_the_input_of_every_third_layer() -> None:
    plan = classic(stack(8), "every_nth", 3)
    drop, keep = "recompute", "keep"
    # Inputs of layers 0, 3 and 6 are the embedding's output and the outputs of layers 2 and 5.
    assert outputs(plan) == [drop, drop, keep, drop, drop, keep, drop, keep]
    assert plan.note == "every 3"


def test_every_first_is_full() -> None:
    assert classic(stack(4), "every_nth", 1).units == classic(stack(4), "full").units


def test_sqrt_of_nine_layers_is_every_third() -> None:
    plan = classic(stack(9), "sqrt")
    assert plan.units == classic(stack(9), "every_nth", 3).units
    assert plan.note == "sqrt, every 3"


def test_peaks_are_in_the_known_order() -> None:
    profile = stack(16, graph=layer(out_bytes=2000))
    keep_all, full, sqrt = (classic(profile, name).predicted_peak_bytes or 0 for name in ("keep_all", "full", "sqrt"))
    assert sqrt < full < keep_all


@pytest.mark.parametrize(
    ("name", "n", "message"),
    [
        ("ful", None, r"got 'ful', expected one of keep_all, full, every_nth, sqrt\. Did you mean 'full'\?"),
        ("every_nth", None, "n: got None with 'every_nth', expected a whole number of layers, 1 or more"),
        ("every_nth", 0, "n: got 0 with 'every_nth'"),
        ("every_nth", 2.0, r"n: got 2\.0 with 'every_nth'"),
        ("full", 2, "n: got 2 with 'full', expected none; only 'every_nth' takes n"),
    ],
)
def test_messages(name: str, n: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        classic(stack(4), name, n)


def test_layers_that_do_not_feed_each_other_have_no_every_nth() -> None:
    with pytest.raises(PlanError, match=r"n: got 2, but no repeated layer .* use 'full'"):
        classic(stack(4, chained=False), "every_nth", 2)
