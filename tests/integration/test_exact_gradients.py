"""Gradients, loss and buffers of a planned step equal those of the plain step to the bit, whatever the plan.

Every model of the zoo, unmodified, and every reference model under every plan; then the ways in which people run a step. That
plans do recompute and save, `test_accounting.py` counts.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradients import Step, assert_same_gradients, call, clear, collect, loss_of, step_of
from policies import EVERY_PLAN, FEW_PLANS, Policy
from recollect.applying import apply_policy
from recollect.recording.find_units import find_units
from reference_cases import REFERENCE_CASES
from tiers import long_but
from zoo import ZOO, Case

every_case = pytest.mark.parametrize("case", ZOO.values(), ids=ZOO)
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


StepOf = Callable[[Case, nn.Module], Step]


def _autocast(case: Case, model: nn.Module) -> Step:
    batch = case.data()
    clear(model, batch)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(call(model, batch), case.loss_fn)
    loss.backward()
    return collect(model, batch, loss)


def _losses(case: Case, model: nn.Module, count: int) -> list[Tensor]:
    clear(model, case.data())
    batches = [case.data(seed) for seed in range(count)]
    torch.manual_seed(0)
    return [loss_of(call(model, batch), case.loss_fn) for batch in batches]


def _forwards_first_summed(case: Case, model: nn.Module) -> Step:
    loss = torch.stack(_losses(case, model, 2)).sum()
    loss.backward()
    return collect(model, case.data(), loss)


def _forward_that_is_never_differentiated(case: Case, model: nn.Module) -> Step:
    losses = _losses(case, model, 2)
    losses[1].backward()
    return collect(model, case.data(), losses[1])


def _frozen_but_a_few(case: Case, model: nn.Module) -> Step:
    """The base is frozen and a few small tensors train: nothing that enters the first layers requires a gradient."""
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 5 == 3)
    step = step_of(case, model)
    model.requires_grad_(True)
    return step


def _inference_between(case: Case, model: nn.Module) -> Step:
    torch.manual_seed(0)
    with torch.no_grad():
        call(model, case.data())
    with torch.inference_mode():
        call(model, case.data())
    return step_of(case, model)


def _inside_hooks_of_others(case: Case, model: nn.Module) -> Step:
    """Somebody else's saved-tensor hooks around the step, as activation offloading uses them."""
    with torch.autograd.graph.save_on_cpu():
        return step_of(case, model)


WAYS: dict[str, StepOf] = {
    "autocast": _autocast,
    "forwards-first-summed": _forwards_first_summed,
    "forward-abandoned": _forward_that_is_never_differentiated,
    "frozen": _frozen_but_a_few,
    "inference-between": _inference_between,
    "save-on-cpu-outside": _inside_hooks_of_others,
}


@pytest.mark.filterwarnings("ignore:recollect. hooks for saved tensors")
@every_case
def test_ways_to_run_a_step(case: Case) -> None:
    """Each model in two ways, and each way under every plan; the contracts run all units in others."""
    plans, first = list(FEW_PLANS.items()), list(ZOO).index(case.name)
    for number, (name, way) in list(enumerate(WAYS.items()))[first % 3 :: 3]:
        plan_name, policy = plans[(number + first // 3) % len(plans)]
        expected = way(case, case.model())
        model = case.model()
        with apply_policy(model, case.layers, policy):
            assert_same_gradients(expected, way(case, model), f"{name}, {plan_name}")


# Ops without a second derivative (fused attention) leave these to compare.
TWICE_DIFFERENTIABLE = ("bloom", "t5", "resnet", "mamba", "mixtral_eager")


def _squared_gradient_norm(case: Case, model: nn.Module) -> Step:
    (loss,) = _losses(case, model, 1)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    penalty = torch.stack([g.square().sum() for g in first if g is not None]).sum()
    penalty.backward()
    return collect(model, case.data(), penalty)


@pytest.mark.parametrize("name", TWICE_DIFFERENTIABLE)
@few_plans
def test_double_backward(name: str, policy: Policy) -> None:
    case = ZOO[name]
    expected = _squared_gradient_norm(case, case.model())
    model = case.model()
    with apply_policy(model, case.layers, policy):
        assert_same_gradients(expected, _squared_gradient_norm(case, model))
