"""Mixed precision: casts run again below autocast, and the scaler of losses sees the same gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from device_models import decoder
from device_steps import FULL_ONLY, RecordProperty, check_plans
from function_units import UNITS, Unit, two_units
from gradients import Step, assert_same_gradients, clear, collect, gradients
from policies import Random
from recollect.applying import apply_policy
from zoo import Batch

every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
PLANS = {**FULL_ONLY, "random-1": Random(1)}


def _step_under_autocast(model: nn.Module, batch: Batch, device: torch.device, dtype: torch.dtype) -> Step:
    clear(model, batch)
    torch.manual_seed(0)
    with torch.autocast(device.type, dtype):
        loss = model(**batch).loss
    loss.backward()
    return collect(model, batch, loss)


@every_dtype
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral_grouped"])
def test_around_the_model(name: str, dtype: torch.dtype, device: torch.device, record_property: RecordProperty) -> None:
    case = decoder(name, device)
    model, batch = case.model(), case.data()
    check_plans(model, case.layers, lambda: _step_under_autocast(model, batch, device, dtype), record_property, PLANS)


@every_dtype
def test_around_backward_too(dtype: torch.dtype, device: torch.device, record_property: RecordProperty) -> None:
    """Against the documentation, but in use: replay runs in the middle of autocast, and must not cast what was not cast."""

    def exact(unit: Unit, hidden: Tensor) -> Tensor:
        with torch.autocast(device.type, enabled=False):
            hidden = (hidden.float().sin() @ unit.weight).exp()
        return hidden @ unit.weight

    model, data = two_units(exact, device)

    def step() -> Step:
        with torch.autocast(device.type, dtype):
            return gradients(model, data)

    check_plans(model, UNITS, step, record_property, PLANS)


def _inside(dtype: torch.dtype, *, cache: bool) -> Callable[[Unit, Tensor], Tensor]:
    """A unit that casts by itself, uses a weight twice, and leaves autocast for its last product."""

    def mixed(unit: Unit, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, dtype, cache_enabled=cache):
            product = F.silu(hidden.sin() @ unit.weight)
            product = product @ unit.weight
            with torch.autocast(hidden.device.type, enabled=False):
                exact = product.float() @ unit.weight
        return exact.sigmoid() + F.dropout(hidden, 0.1)

    return mixed


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@every_dtype
def test_inside_of_the_unit(
    dtype: torch.dtype, cache: bool, device: torch.device, record_property: RecordProperty
) -> None:
    model, data = two_units(_inside(dtype, cache=cache), device)
    check_plans(model, UNITS, lambda: gradients(model, data), record_property)


_FIRST_SCALE = 2.0**40


def _train(model: nn.Module, batches: list[Batch], device: torch.device) -> list[Step]:
    """Train in fp16; the first scale is so large that gradients overflow, and the scaler skips steps and backs off."""
    scaler = torch.amp.GradScaler(device.type, init_scale=_FIRST_SCALE, backoff_factor=2.0**-12, growth_interval=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    history: list[Step] = []
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        history.append({**weights, "loss": loss.detach(), "scale": torch.tensor(scaler.get_scale())})
    return history


@pytest.mark.parametrize("policy", PLANS.values(), ids=PLANS)
def test_scaled_losses_over_several_steps(policy: Random, device: torch.device) -> None:
    case = decoder("gpt2", device)
    batches = [case.data(seed) for seed in range(6)]
    expected = _train(case.model(), batches, device)
    scales = [float(step["scale"]) for step in expected]
    assert scales[0] < _FIRST_SCALE, "the first gradients did not overflow"
    assert scales[-1] > min(scales), f"no two steps were taken in a row: {scales}"
    model = case.model()
    with apply_policy(model, case.layers, policy):
        for plain, planned in zip(expected, _train(model, batches, device), strict=True):
            assert_same_gradients(plain, planned)
