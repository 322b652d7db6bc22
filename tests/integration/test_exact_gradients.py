"""Gradients, loss and buffers of a planned step equal those of the plain step to the bit, whatever the plan.

Every model of the zoo, unmodified, and every reference model under every plan; then their second derivatives. Ways to run a
step are in `contracts/test_exact.py`; that plans do recompute and save, `test_accounting.py` counts.
"""

import pytest
import torch
from torch import nn

from gradients import Step, assert_same_gradients, call, clear, collect, loss_of, step_of
from policies import EVERY_PLAN, FEW_PLANS, Policy
from recollect.applying import apply_policy
from recollect.recording.find_units import find_units
from reference_cases import REFERENCE_CASES
from tiers import long_but
from zoo import ZOO, Case

few_plans = pytest.mark.parametrize("policy", FEW_PLANS.values(), ids=FEW_PLANS)


# The same ops in the same order as in models that are quick.
FURTHER = [name for name in REFERENCE_CASES if name.endswith((" fused", " bf16"))]
FURTHER += ["llama_padded", "mixtral_eager", "gemma", "phi3", "deepseek-v3-tiny two depths", "mixtral-tiny unfused"]
MODELS = {**ZOO, **REFERENCE_CASES}
# Of random plans the first three: each bias of the coin once.
PLANS = {"few": [*EVERY_PLAN][:6], "more": [*EVERY_PLAN][6:]}


@pytest.mark.parametrize("plans", long_but(["few"], PLANS))
@pytest.mark.parametrize("name", long_but(MODELS.keys() - FURTHER, MODELS))
def test_one_step(name: str, plans: str) -> None:
    """Of the reference models every unit is planned: embedding, final norm and output layer, too."""
    case = MODELS[name]
    model = case.model()
    units = case.layers if case.name in ZOO else [unit.path for unit in find_units(model)]
    expected = step_of(case, model)
    for name in PLANS[plans]:
        with apply_policy(model, units, EVERY_PLAN[name]):
            for number in range(3):  # From the third step on, modules of which nothing is dropped run out of sight.
                assert_same_gradients(expected, step_of(case, model), f"{name}, step {number}")
    assert_same_gradients(expected, step_of(case, model), "without a plan again")


# Ops without a second derivative (fused attention) leave these to compare.
TWICE_DIFFERENTIABLE = ("bloom", "t5", "resnet", "mamba", "mixtral_eager")


def _squared_gradient_norm(case: Case, model: nn.Module) -> Step:
    batch = case.data()
    clear(model, batch)
    torch.manual_seed(0)
    loss = loss_of(call(model, batch), case.loss_fn)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    penalty = torch.stack([g.square().sum() for g in first if g is not None]).sum()
    penalty.backward()
    return collect(model, batch, penalty)


@pytest.mark.parametrize("name", TWICE_DIFFERENTIABLE)
@few_plans
def test_double_backward(name: str, policy: Policy) -> None:
    case = ZOO[name]
    expected = _squared_gradient_norm(case, case.model())
    model = case.model()
    with apply_policy(model, case.layers, policy):
        assert_same_gradients(expected, _squared_gradient_norm(case, model))
