"""What a plan meets that it was not made for: ops that it does not name, and values that are not what they were."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recollect
from block_plans import BLOCK_VALUES, ROWS, full, mean_square, ops, stack
from blocks import Computes
from gradients import assert_same_gradients, gradients, step_of
from recollect.errors import FreedValueError, MutatedValueError, PlanMismatchWarning
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from zoo import ZOO

# Ops that the plan does not name


def test_value_that_the_plan_does_not_name_warns_once() -> None:
    """It is kept: what the plan names is all that runs again."""
    model = stack()
    plain = ops(model, ROWS)
    expected = gradients(model, ROWS, mean_square)
    plan = Plan(dict.fromkeys(model.layers, UnitPlan({"up.addmm": "recompute", "gelu": "recompute"})))
    message = (
        r"^the plan does not fit this model: unit 'blocks\.0' computes 'norm\.native_layer_norm\.0', which the plan does not "
        r"name\. That value and all others that the plan does not name are kept, so the step is exact but may need more "
        r"memory than predicted\. Record the model again and make a new plan\.$"
    )
    with recollect.apply(model, plan), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert_same_gradients(expected, gradients(model, ROWS, mean_square))
    assert [warning.category for warning in caught] == [PlanMismatchWarning]
    with recollect.apply(model, plan), pytest.warns(PlanMismatchWarning, match=message):
        assert ops(model, ROWS) - plain == {"addmm": 3, "gelu": 3}


def test_op_without_a_result_needs_no_name() -> None:
    def checked(_: Any, x: Tensor) -> Tensor:
        torch._assert_async((x == x).all(), "a number")
        return torch.tanh(x.sin())

    model = nn.ModuleDict({"layers": nn.ModuleList([Computes(checked)])})
    plan = Plan({"layers.0": UnitPlan({"eq": "keep", "all": "keep", "sin": "recompute", "tanh": "recompute"})})
    x = torch.randn(3, requires_grad=True)
    expected = torch.autograd.grad(model["layers"][0](x).sum(), x)
    with recollect.apply(model, plan):
        assert torch.equal(torch.autograd.grad(model["layers"][0](x).sum(), x)[0], expected[0])


def test_plan_for_another_version_of_the_model() -> None:
    """The same modules run other ops: exact all the same."""
    is_new = False

    def changing(self: Any, hidden: Tensor) -> Any:
        hidden = self.linear(hidden)
        return hidden.sigmoid().sin() if is_new else hidden.tanh()

    torch.manual_seed(0)
    model = nn.Sequential(*(Computes(changing, linear=nn.Linear(16, 16)) for _ in "ab"))
    plan = recollect.classic_plan(recollect.record(model, ROWS, loss_fn=mean_square, units=["0", "1"]), "full")
    is_new = True
    expected = gradients(model, ROWS, mean_square)
    with recollect.apply(model, plan):
        with pytest.warns(PlanMismatchWarning, match="unit '0' computes 'sigmoid'"):
            got = gradients(model, ROWS, mean_square)
        assert_same_gradients(expected, got)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "resnet", "mixtral", "transformer"])
def test_plan_of_a_recording_fits_without_a_warning(name: str) -> None:
    case = ZOO[name]
    model = case.model()
    plan = full(model, case.data(), case.loss_fn)
    expected = step_of(case, model)
    with recollect.apply(model, plan):
        assert_same_gradients(expected, step_of(case, model))


def repeats(times: int) -> nn.Module:
    """Runs its ops as often as it is told to: experts that got tokens. [n, 16] -> [n, 16]."""

    def run(self: Any, hidden: Tensor) -> Tensor:
        for _ in range(times):
            hidden = self.linear(hidden).sin()
        return hidden

    torch.manual_seed(0)
    return nn.Sequential(Computes(run, linear=nn.Linear(16, 16)))


REPEATS_DROPPED = {"linear.addmm": "recompute", "linear.addmm#1": "recompute", "sin": "keep", "sin#1": "keep"}


@pytest.mark.parametrize("times", [1, 2, 3, 6])
def test_further_calls_of_an_op_follow_the_planned_ones(times: int) -> None:
    """Products are dropped and sines kept, however many there are, and nobody is warned."""
    model = repeats(times)
    expected = gradients(model, ROWS, mean_square)
    plain = ops(model, ROWS)
    with recollect.apply(model, Plan({"0": UnitPlan(REPEATS_DROPPED)})):  # type: ignore[arg-type]
        assert ops(model, ROWS) - plain == {"addmm": times}
        assert_same_gradients(expected, gradients(model, ROWS, mean_square))


def test_further_calls_of_ops_that_the_plan_treats_differently_are_kept() -> None:
    model = repeats(4)
    plain = ops(model, ROWS)
    mixed = {**REPEATS_DROPPED, "linear.addmm#1": "keep"}
    with (
        recollect.apply(model, Plan({"0": UnitPlan(mixed)})),  # type: ignore[arg-type]
        pytest.warns(PlanMismatchWarning, match=r"unit '0' computes 'linear\.addmm#2'"),
    ):
        assert ops(model, ROWS) - plain == {"addmm": 1}


def test_further_calls_of_ops_with_several_results() -> None:
    times = 1

    def norms(_: Any, hidden: Tensor) -> Tensor:
        for _ in range(times):
            hidden = F.layer_norm(hidden, (16,))
        return hidden

    model = nn.Sequential(nn.Linear(16, 16), Computes(norms))
    plan = recollect.classic_plan(recollect.record(model, ROWS, loss_fn=mean_square, units=["1"]), "full")
    times = 3
    plain = ops(model, ROWS)
    with recollect.apply(model, plan):
        again = ops(model, ROWS) - plain
    # The last result is the unit's output, which is kept; its statistics were dropped with it.
    assert again == {"native_layer_norm": 3}


# Values that are not what they were


def noted(module: nn.Module) -> list[Tensor]:
    """What a module gives back from now on: for somebody who does something to it."""
    seen: list[Tensor] = []
    module.register_forward_hook(lambda _, __, output: seen.append(output))
    return seen


EVERYTHING = {name: "recompute" for name in (*BLOCK_VALUES, "norm.native_layer_norm.1", "norm.native_layer_norm.2")}


@pytest.mark.parametrize("times", [1, 3])
def test_unit_input_that_is_written_before_backward(times: int) -> None:
    model = stack()
    seen = noted(model.stem)
    with recollect.apply(model, Plan({"blocks.0": UnitPlan(EVERYTHING)})):  # type: ignore[arg-type]
        loss = mean_square(model(ROWS))
        with torch.no_grad():
            for _ in range(times):
                seen[0].mul_(2)
        message = (
            rf"^a tensor of shape \[12, 16\], used by native_layer_norm in blocks\.0\.norm, was changed in place "
            rf"{times} times? before backward used it\. Write to a copy of it, or run backward before the write\.$"
        )
        with pytest.raises(MutatedValueError, match=message) as caught:
            loss.backward()
    error = caught.value
    assert (error.unit, error.module, error.op) == ("blocks.0", "norm", "native_layer_norm")
    assert (error.shape, error.changes) == ((12, 16), times)


def test_kept_value_that_is_written_before_backward() -> None:
    """An activation that a hook of the user's scales in place, after the unit is done with it."""
    model = stack()
    seen = noted(model.blocks[0].up)
    with recollect.apply(model, Plan({"blocks.0": UnitPlan({**EVERYTHING, "up.addmm": "keep"})})):  # type: ignore[dict-item]
        loss = mean_square(model(ROWS))
        with torch.no_grad():
            seen[0].zero_()
        with pytest.raises(MutatedValueError, match=r"\[12, 64\], used by gelu in blocks\.0, was changed in place 1 "):
            loss.backward()


def test_weight_whose_memory_was_freed() -> None:
    """What FSDP does when it reshards, without anybody to gather again."""
    model = stack()
    weight = model.blocks[0].up.weight
    with recollect.apply(model, Plan({"blocks.0": UnitPlan(EVERYTHING)})):  # type: ignore[arg-type]
        loss = mean_square(model(ROWS))
        content = weight.detach().clone()
        weight.untyped_storage().resize_(0)
        message = (
            r"^a tensor of shape \[\d+, \d+\], used by \w+ in blocks\.0\.up, has no memory now: its storage was freed "
            r"after forward, as FSDP does when it reshards, and not filled again before backward needed it\. Keep the output "
            r"of the unit after it \(output: keep\): each unit is then recomputed in its own backward; and leave out "
            r"set_unshard_in_backward\(False\)\.$"
        )
        with pytest.raises(FreedValueError, match=message) as caught:
            loss.backward()
        assert (caught.value.unit, caught.value.module) == ("blocks.0", "up")
        weight.untyped_storage().resize_(content.nbytes)
        with torch.no_grad():
            weight.copy_(content)
