"""Plans by micro-batch: each forward takes the next, backward finds its own, in any order."""

import copy

import pytest
import torch
from torch import Tensor, nn

import recollect
from block_plans import ROWS, block_plan, ops, stack
from recollect.errors import AlreadyAppliedError, ArgumentError, ConfigError, PlanError
from recollect.plans.plan import Plan

NOTHING, GELU = Plan({}), block_plan("gelu")


def gelus(model: nn.Module, num_forwards: int) -> list[int]:
    return [ops(model, ROWS)["gelu"] for _ in range(num_forwards)]


def test_forwards_take_the_plans_in_order_and_begin_again() -> None:
    model = stack()
    plain = gelus(model, 1)[0]
    with recollect.apply(model, [GELU, NOTHING, GELU]) as applied:
        assert gelus(model, 4) == [2 * plain, plain, 2 * plain, 2 * plain]
        with torch.no_grad():
            model(ROWS)
        assert gelus(model, 1) == [plain], "a forward without gradients took a plan"
        applied.begin()
        assert gelus(model, 2) == [2 * plain, plain]
        with applied.suspended():
            assert gelus(model, 2) == [plain, plain]
        assert gelus(model, 1) == [2 * plain]
    assert gelus(model, 1) == [plain]
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_backwards_in_any_order_find_their_own_plan(order: tuple[int, ...]) -> None:
    def gradients(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        losses = [model(ROWS + number).square().mean() for number in range(3)]
        for number in order:
            losses[number].backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain, planned = stack(), stack()
    planned.load_state_dict(copy.deepcopy(plain.state_dict()))
    expected = gradients(plain)
    recollect.apply(planned, [GELU, NOTHING, block_plan("up.mm", "gelu")])
    found = gradients(planned)
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_bad_plans_by_micro_batch_say_what_was_expected() -> None:
    model = stack()
    with pytest.raises(ArgumentError, match="got no plans, expected a recollect.Plan, or one for each micro-batch"):
        recollect.apply(model, [])
    with pytest.raises(ArgumentError, match="got the text 'full' as plan"):
        recollect.apply(model, [GELU, "full"])  # type: ignore[list-item]
    with pytest.raises(PlanError, match="loss in 1 and 2 chunks, expected the same loss_chunks"):
        recollect.apply(model, [GELU, Plan({}, loss_chunks=2)])
    assert recollect.applied_to(model) == []
    with recollect.apply(model, [GELU, NOTHING]) as applied:
        with pytest.raises(ConfigError, match="micro_batch=2.*there are 2 plans, one for each micro-batch"):
            applied.begin(2)
        with pytest.raises(ArgumentError, match="got an object of class Stack as stage"):
            applied.follow(model)  # type: ignore[arg-type]
        with pytest.raises(AlreadyAppliedError):
            recollect.apply(model, GELU)
