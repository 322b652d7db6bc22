"""Memory runs out in the middle of a planned step; the model, its plan and the memory survive it.

On CUDA the allocator is not allowed to take any more from the device from some moment on. The CPU has no such limit: there
somebody asks for more than there is.
"""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from device_models import decoder
from device_steps import FULL_ONLY, sized
from function_units import UNITS, TwoUnits, Unit, two_units
from gradients import assert_same_gradients, clear, gradients, step_of
from policies import Policy, Random
from recollect.applying import apply_policy
from watch import Watch, live_tensors

PLANS = {**FULL_ONLY, "random-1": Random(1)}
every_plan = pytest.mark.parametrize("policy", PLANS.values(), ids=PLANS)


@pytest.fixture(autouse=True)
def restored_limit(device: torch.device) -> Iterator[None]:
    yield
    feed(device)


def starve(device: torch.device) -> None:
    """From here on nothing more is to be had than what lies free in blocks that are in use."""
    if device.type != "cuda":
        torch.empty(1 << 60, dtype=torch.uint8)
        return
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    share = torch.cuda.memory_reserved(device) / torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(share, device)


def feed(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _memory(device: torch.device) -> int:
    """Bytes of the allocator; on the CPU, which does not count them, tensors."""
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else live_tensors()


def _num_ops(model: TwoUnits, data: Tensor) -> int:
    with Watch() as watch:
        gradients(model, data)
    return watch.computing_ops().total()


def _wide(unit: Unit, hidden: Tensor) -> Tensor:
    """Values of 32 MiB on CUDA, which no rest of a block can hold."""
    wide = hidden.repeat_interleave(sized(hidden.device, 2, 64), 0).sin()
    if hasattr(unit, "in_the_middle"):
        unit.in_the_middle()
    wide = (wide @ unit.weight).exp().cos()
    return wide.unflatten(0, (hidden.shape[0], -1)).mean(1)


def _starve_in_forward(model: TwoUnits, device: torch.device) -> Callable[[], None]:
    unit = model.units[1]
    unit.in_the_middle = lambda: starve(device)
    return lambda: delattr(unit, "in_the_middle")


def _starve_in_backward(model: TwoUnits, device: torch.device) -> Callable[[], None]:
    """When the second unit's backward is about to begin, so that what it dropped cannot be computed again."""

    def starve_later(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: starve(device))

    return model.units[1].register_forward_hook(starve_later).remove


MOMENTS = {"forward": _starve_in_forward, "backward": _starve_in_backward}


@pytest.mark.parametrize("starve_in", MOMENTS.values(), ids=MOMENTS)
@every_plan
def test_in_the_middle_of_a_step(
    policy: Policy, starve_in: Callable[[TwoUnits, torch.device], Callable[[], None]], device: torch.device
) -> None:
    model, data = two_units(_wide, device)
    expected, expected_of_half = gradients(model, data), gradients(model, data[:1])
    with apply_policy(model, UNITS, policy):
        gradients(model, data)
        ops = _num_ops(model, data)
        before = _memory(device)
        for _ in range(2):
            stop = starve_in(model, device)
            with pytest.raises(RuntimeError, match=r"out of memory|can't allocate memory"):
                gradients(model, data)
            stop()
            feed(device)
            clear(model, data)
            assert _memory(device) == before
        assert_same_gradients(expected_of_half, gradients(model, data[:1]))
        assert_same_gradients(expected, gradients(model, data))
        assert _num_ops(model, data) == ops, "the plan drops less than before"
        assert _memory(device) == before
    assert_same_gradients(expected, gradients(model, data))


@every_plan
def test_while_one_backward_waits(policy: Policy, device: torch.device) -> None:
    """A second forward fails; the first one's backward still has all that it needs."""
    model, data = two_units(_wide, device)
    expected = gradients(model, data)
    with apply_policy(model, UNITS, policy):
        loss = model(data)
        stop = _starve_in_forward(model, device)
        with pytest.raises(RuntimeError, match=r"out of memory|can't allocate memory"):
            model(data)
        stop()
        feed(device)
        loss.backward()
        found = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
        assert_same_gradients(expected, {"loss": loss.detach(), **found})


def test_in_a_model_of_somebody_else(device: torch.device) -> None:
    case = decoder("mixtral_eager", device)
    model = case.model()
    expected = step_of(case, model)
    last = model.get_submodule(case.layers[-1])
    with apply_policy(model, case.layers, Random(1)):
        handle = last.register_forward_pre_hook(lambda *_: torch.empty(1 << 60, dtype=torch.uint8, device=device))
        with pytest.raises(RuntimeError, match=r"out of memory|can't allocate memory|too large"):
            step_of(case, model)
        handle.remove()
        assert_same_gradients(expected, step_of(case, model))
