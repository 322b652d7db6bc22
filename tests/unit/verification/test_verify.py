"""`verify` on plans that are exact, on models that are not, on steps that do not fit; and its four lines of text."""

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recollect
from block_plans import ROWS, stack
from blocks import Computes, Stack, adds_in_place, mean_square
from policies import Random
from recollect.engine.content import has_same_bits
from recollect.errors import RecordError, UnknownNameError
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.profile.profile import Profile
from recollect.verification.compare import Findings, compare_units
from recorded_once import recorded_once
from tiers import long_but
from zoo import ZOO, Case


def full_plan(model: nn.Module, batch: Any, loss_fn: Callable[[Any], Tensor] | None = mean_square) -> Plan:
    return recollect.classic_plan(recorded_once(model, batch, loss_fn=loss_fn), "full")


def by_policy(profile: Profile, policy: Random) -> Plan:
    units = {}
    for call in profile.calls:
        if call.repeated:
            values = [value for value in profile.graph_of(call).values if value.producer is not None]
            units[call.path] = UnitPlan(
                {v.name: Action.KEEP if v.must_keep else policy.action(call.path, v.name) for v in values}
            )
    return Plan(units)


EQUAL = [(name, compare) for name in ("llama", "gpt2", "mixtral", "t5", "transformer") for compare in ("step", "units")]


@pytest.mark.parametrize(("name", "compare"), long_but([EQUAL[0], EQUAL[5], EQUAL[7]], EQUAL, are_rows=True))
def test_equal(name: str, compare: Any) -> None:
    case = ZOO[name]
    model, batch = case.model(), case.data()
    profile = recorded_once(model, batch, loss_fn=case.loss_fn)
    for plan in (recollect.classic_plan(profile, "full"), by_policy(profile, Random(1))):
        report = recollect.verify(model, batch, plan, loss_fn=case.loss_fn, compare=compare)
        assert (report.compared, report.gradients_equal, report.first_difference) == (compare, True, None)
        assert report.num_compared >= sum(1 for path in case.layers for _ in model.get_submodule(path).parameters())


def test_peaks_and_slowdown_of_a_step() -> None:
    model = stack()
    batch = ROWS.repeat(20, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = recollect.classic_plan(recollect.record(model, batch, loss_fn=mean_square, optimizer=optimizer), "full")
    report = recollect.verify(model, batch, plan, loss_fn=mean_square, optimizer=optimizer)
    assert report.num_compared == len(list(model.parameters()))
    assert report.plain_peak_bytes is not None and report.plan_peak_bytes < report.plain_peak_bytes
    assert report.plan_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.01)
    assert report.predicted_peak_bytes == plan.predicted_peak_bytes
    assert report.predicted_slowdown == plan.predicted_slowdown
    assert report.measured_slowdown is not None
    without_state = recollect.verify(model, batch, plan, loss_fn=mean_square)
    # Two moments as large as the parameters, and a count of steps for each of them.
    state_bytes = sum(2 * p.nbytes + 4 for p in model.parameters())
    assert report.plan_peak_bytes - without_state.plan_peak_bytes == state_bytes
    assert optimizer.state == {}


def of_linear(function: Callable[..., Tensor], **parts: Any) -> Computes:
    """A layer that computes a function of itself, which has a linear one, and of what it is given. [n, 16] -> [n, 16]."""
    return Computes(function, linear=nn.Linear(16, 16), **parts)


def growing(layer: Any, hidden: Tensor) -> Tensor:
    """Never the same twice."""
    layer.num_calls += 1
    output: Tensor = (layer.linear(hidden) * layer.num_calls).tanh()
    return output


def test_unequal_step_names_the_loss() -> None:
    """Its forward has a state that no seed resets: each call scales by another number."""
    model, numbers = stack(), itertools.count(1)
    model.register_forward_hook(lambda _, __, output: output * next(numbers))
    report = recollect.verify(model, ROWS, full_plan(model, ROWS), loss_fn=mean_square)
    assert not report.gradients_equal
    assert report.first_difference is not None
    name, difference = report.first_difference
    assert name == "the loss" and difference > 0
    assert re.search(r"^gradients +DIFFERENT, first at the loss, by up to \d", str(report), re.MULTILINE)


def test_unequal_step_names_the_parameter() -> None:
    """The same loss and another gradient: only backward has a hidden state."""
    torch.manual_seed(0)
    model = stack()
    calls: list[Tensor] = []

    def grows(gradient: Tensor) -> Tensor:
        calls.append(gradient)
        return gradient * len(calls)

    plan = full_plan(model, ROWS)
    model.blocks[1].up.weight.register_hook(grows)
    # Hooks of parameters run in a step of the user's own, and in no other.
    assert recollect.verify(model, ROWS, plan, loss_fn=mean_square).equal
    report = recollect.verify(model, None, plan, step=lambda: mean_square(model(ROWS)).backward())
    assert report.first_difference is not None
    assert report.first_difference[0] == "blocks.1.up.weight"


def test_units_that_write_to_what_they_get_are_compared() -> None:
    model = nn.Sequential(nn.Linear(16, 16), adds_in_place(16), adds_in_place(16))
    rows = torch.randn(4, 16)
    profile = recollect.record(model, rows, loss_fn=mean_square, units=["1", "2"])
    plan = recollect.classic_plan(profile, "full")
    report = recollect.verify(model, rows, plan, loss_fn=mean_square, compare="units", time=False)
    assert report.equal and report.num_compared == 2 * len(["weight", "bias", "input", "output"])


def test_units_without_gradients_are_compared_by_their_outputs() -> None:
    """As the frozen embedding of a model with adapters, whose output is dropped."""
    embed = nn.Embedding(10, 16).requires_grad_(False)
    model, tokens = nn.Sequential(embed, Stack(width=16, depth=2)), torch.randint(10, (8,))
    plan = Plan({"0": UnitPlan({"embedding": "recompute"}, output="recompute"), "1.blocks.0": UnitPlan({})})
    report = recollect.verify(model, tokens, plan, loss_fn=mean_square, compare="units", time=False)
    assert report.equal and report.num_compared == 1


def test_unequal_unit_names_unit_and_parameter() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(of_linear(growing, num_calls=0), of_linear(growing, num_calls=0))
    report = recollect.verify(model, ROWS, full_plan(model, ROWS), loss_fn=mean_square, compare="units")
    assert not report.gradients_equal
    assert report.first_difference is not None
    assert report.first_difference[0] == "0: linear.weight"


ORDERS = random.Random(0)


def unsteady(layer: Any, hidden: Tensor) -> Tensor:
    """As a kernel that adds in an order of its own: results that no known generator decides."""
    output: Tensor = layer.linear(hidden).tanh() * (1 + 1e-3 * ORDERS.random())
    return output


@pytest.mark.parametrize("compare", ["step", "units"])
def test_kernels_that_do_not_repeat_themselves_are_told_from_a_wrong_plan(compare: Any) -> None:
    model = nn.Sequential(*(of_linear(unsteady) for _ in range(3)))
    report = recollect.verify(model, ROWS, full_plan(model, ROWS), loss_fn=mean_square, compare=compare)
    assert not report.gradients_equal
    assert report.plain_difference is not None and report.plain_difference[1] > 0
    assert "two runs without the plan differ, too, first at " in str(report)
    assert recollect.verify(stack(), ROWS, full_plan(stack(), ROWS), loss_fn=mean_square).plain_difference is None


def test_only_units_that_recompute_are_compared() -> None:
    model = stack()
    plan = full_plan(model, ROWS)
    one = Plan({path: unit for path, unit in plan.units.items() if path == "blocks.1"})
    # Parameters, the input and the output.
    num_compared = len(list(model.blocks[1].parameters())) + 2
    assert compare_units(model, one, lambda: model(ROWS)) == Findings(num_compared=num_compared)
    assert compare_units(model, Plan({}), lambda: model(ROWS)) == Findings()


def averaging(layer: Any, hidden: Tensor) -> Tensor:
    """Has batch norm, and a mean that each forward replaces by a new tensor."""
    for _ in range(layer.rounds_with_plan if recollect.applied_to(layer) else 1):
        layer.mean = 0.5 * layer.mean + hidden.detach().mean(0)
    output: Tensor = layer.norm(layer.linear(hidden)).tanh()
    return output


@pytest.mark.filterwarnings("ignore:the plan does not fit this model")
@pytest.mark.parametrize("compare", ["step", "units"])
def test_statistics_updated_twice_are_found(compare: Any) -> None:
    """By a module that does so where a plan is applied, as an engine might that runs it again."""
    torch.manual_seed(0)
    parts = [{"norm": nn.BatchNorm1d(16), "mean": torch.zeros(16), "rounds_with_plan": 2} for _ in range(3)]
    model = nn.Sequential(*(of_linear(averaging, **its) for its in parts))
    plan = Plan({path: UnitPlan({"linear.addmm": "recompute"}) for path in ("1", "2")})
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    report = recollect.verify(model, ROWS, plan, loss_fn=mean_square, compare=compare)
    assert report.gradients_equal and not report.equal
    assert report.first_state_difference is not None
    name, difference = report.first_state_difference
    assert name == {"step": "buffer 1.mean", "units": "1: buffer mean"}[compare] and difference > 0
    assert f"left behind      DIFFERENT, first at {name}, by up to " in str(report)
    assert all(has_same_bits(buffer, before[name]) for name, buffer in model.named_buffers())
    for module in model:
        module.rounds_with_plan = 1
    once = full_plan(model, ROWS)
    assert all(unit.engine == "tape" for unit in once.units.values())
    assert recollect.verify(model, ROWS, once, loss_fn=mean_square, compare=compare).equal


@pytest.mark.filterwarnings("ignore:the plan does not fit this model")
@pytest.mark.parametrize("compare", ["step", "units"])
def test_random_numbers_that_only_one_step_draws_are_found(compare: Any) -> None:
    def draws(layer: Any, hidden: Tensor) -> Tensor:
        """Draws a number where a plan is applied, and does not use it."""
        if recollect.applied_to(layer):
            torch.rand(1)
        output: Tensor = layer.linear(hidden).tanh()
        return output

    model = nn.Sequential(*(of_linear(draws) for _ in range(3)))
    plan = Plan({"1": UnitPlan({"linear.addmm": "recompute"})})
    report = recollect.verify(model, ROWS, plan, loss_fn=mean_square, compare=compare)
    assert report.gradients_equal and not report.equal
    assert report.first_state_difference is not None
    assert report.first_state_difference[0].endswith("random generator")


@pytest.mark.parametrize("compare", ["step", "units"])
def test_numbers_that_forward_draws_from_python_and_numpy_are_the_same_in_all_runs(compare: Any) -> None:
    def scaled(layer: Any, hidden: Tensor) -> Tensor:
        output: Tensor = layer.linear(hidden).tanh() * random.random() * np.random.rand()
        return output

    model = nn.Sequential(*(of_linear(scaled) for _ in range(3)))
    assert recollect.verify(model, ROWS, full_plan(model, ROWS), loss_fn=mean_square, compare=compare).equal


def test_gradients_that_exist_before_the_step_count_where_they_did_in_the_profile() -> None:
    model = stack()
    profile = recollect.record(model, ROWS, loss_fn=mean_square, gradients="accumulated")
    plan = recollect.classic_plan(profile, "full")
    report = recollect.verify(model, ROWS, plan, loss_fn=mean_square, gradients="accumulated")
    # The gap between prediction and measurement is the KiB that a recording sets aside for what it cannot see.
    assert report.equal and 0 <= plan.predicted_peak_bytes - report.plan_peak_bytes <= 2048
    without = recollect.verify(model, ROWS, plan, loss_fn=mean_square)
    assert report.plan_peak_bytes > without.plan_peak_bytes
    assert all(parameter.grad is None for parameter in model.parameters())


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "modules": {path: sorted(vars(module)) for path, module in model.named_modules()},
        "hooks": [len(module._forward_pre_hooks) for module in model.modules()],
        "grads": [id(p.grad) if p.grad is not None else None for p in model.parameters()],
        "generator": torch.get_rng_state().tolist(),
    }


@pytest.mark.parametrize("compare", ["step", "units"])
@pytest.mark.parametrize("name", ["resnet_like", "gpt2"])
def test_everything_is_left_as_it_was(name: str, compare: Any) -> None:
    case = CASES[name]
    model, batch = case.model(), case.data()
    plan = full_plan(model, batch, case.loss_fn)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    values = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    before = snapshot(model)
    recollect.verify(model, batch, plan, loss_fn=case.loss_fn, compare=compare)
    assert snapshot(model) == before
    assert all(has_same_bits(tensor, values[key]) for key, tensor in model.state_dict().items())
    assert all(bool((p.grad == 1).all()) for p in model.parameters() if p.grad is not None)


def normed() -> Computes:
    """A layer with running statistics, in functional form."""
    return of_linear(
        lambda layer, x: F.batch_norm(layer.linear(x), layer.mean, layer.variance, training=True).relu(),
        mean=torch.zeros(16),
        variance=torch.ones(16),
    )


CASES = {
    "gpt2": ZOO["gpt2"],
    "resnet_like": Case(
        "resnet_like", lambda: nn.Sequential(normed(), normed()), lambda: torch.randn(6, 16), ("0", "1"), mean_square
    ),
}


@pytest.mark.parametrize("compare", ["step", "units"])
def test_plan_that_is_on_already_is_taken_off_and_put_back(compare: Any) -> None:
    model, batch = stack(), ROWS.repeat(20, 1)
    plan = recollect.fit(model, batch, "90%", loss_fn=mean_square)
    applied = recollect.applied_to(model)
    assert [handle.plan for handle in applied] == [plan]
    inside = snapshot(model)
    report = recollect.verify(model, batch, plan, loss_fn=mean_square, compare=compare)
    assert report.gradients_equal
    if compare == "step":
        assert report.plain_peak_bytes is not None and report.plan_peak_bytes < report.plain_peak_bytes
    assert recollect.applied_to(model) == applied
    assert snapshot(model) == inside
    applied[0].remove()
    assert recollect.applied_to(model) == []
    assert not any("forward" in vars(module) for module in model.modules())


def test_another_plan_than_the_one_that_is_on() -> None:
    model, batch = stack(), ROWS.repeat(20, 1)
    profile = recollect.record(model, batch, loss_fn=mean_square)
    with recollect.apply(model, recollect.classic_plan(profile, "full")) as applied:
        keep_all = recollect.verify(model, batch, recollect.classic_plan(profile, "keep_all"), loss_fn=mean_square)
        assert keep_all.plan_peak_bytes == keep_all.plain_peak_bytes
        assert recollect.applied_to(model) == [applied]


def test_plan_comes_back_after_an_exception() -> None:
    model = stack()
    plan = recollect.fit(model, ROWS, "100%", loss_fn=mean_square)
    full = full_plan(stack(), ROWS)
    with recollect.apply(model, full) as applied:
        with pytest.raises(RecordError, match="Stack rejected the batch"):
            recollect.verify(model, (ROWS, ROWS), plan, loss_fn=mean_square)
        with pytest.raises(UnknownNameError, match="Stack has no unit"):
            recollect.verify(model, ROWS, Plan({"block.1": UnitPlan({})}), loss_fn=mean_square)
        assert applied in recollect.applied_to(model)


def small(error: type[Exception]) -> tuple[Stack, Plan, list[str]]:
    """A model that runs out of memory in every step that is not told to recompute, as on a device that is too small."""
    model, seen = stack(), list[str]()
    plan = full_plan(model, ROWS)

    def fail(*_: Any) -> None:
        if torch.is_grad_enabled() and not recollect.applied_to(model):
            seen.append("plain")
            raise error("out of memory: tried to allocate 1.00 GiB")

    model.register_forward_pre_hook(fail)
    return model, plan, seen


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_plain_step_that_does_not_fit_is_compared_by_units(error: type[Exception]) -> None:
    model, plan, seen = small(error)
    report = recollect.verify(model, ROWS, plan, loss_fn=mean_square)
    assert seen == ["plain"]
    assert (report.compared, report.gradients_equal, report.plain_peak_bytes) == ("units", True, None)
    assert report.measured_slowdown is None
    assert report.plan_peak_bytes > 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert re.search(r"^peak without +did not fit$", str(report), re.MULTILINE)
    assert re.search(rf"equal bit for bit \({report.num_compared} compared, units? by units?\)", str(report))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_plain_step_that_does_not_fit_is_an_error_where_it_was_asked_for(error: type[Exception]) -> None:
    model, plan, _ = small(error)
    with pytest.raises(error, match="out of memory"):
        recollect.verify(model, ROWS, plan, loss_fn=mean_square, compare="step")


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    model, plan, _ = small(RuntimeError)
    with pytest.raises(RecordError, match="Stack rejected the batch .*out of memory"):
        recollect.verify(model, ROWS, plan, loss_fn=mean_square)
