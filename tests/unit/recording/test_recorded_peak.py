"""The memory of a step while it is recorded: its peak, which stays within a budget that a plan keeps, and what it leaves alive.

On CUDA whatever else the allocator has grown by counts as workspaces of libraries, for good.
"""

import gc
from collections.abc import Callable
from shutil import which

import pytest
import torch
from torch import Tensor, nn

import recollect
from blocks import Computes
from compiled_blocks import IGNORED
from recollect.attaching.attached import Attached
from recollect.costs.op_costs import MeasuredCosts
from recollect.errors import BudgetTooSmallError
from recollect.measuring.deaths import Deaths, allocated_storages
from recollect.measuring.meter import measure_peak, storage_bytes
from recollect.recording.find_units import find_units
from recollect.recording.optimizers import state_tensors
from recollect.recording.step_recording import StepRecording
from residual_model import Model, Residual
from small_llama import batch_of, llama

CPU = torch.device("cpu")
Zero = Callable[[nn.Module, torch.optim.Optimizer], object]


def test_the_peak_of_a_step_is_measured_as_by_the_meter() -> None:
    held = [torch.zeros(1000), torch.zeros(500)]

    def step() -> Tensor:
        made = torch.zeros(3000).exp()
        held.clear()
        return torch.zeros(2000) + made.sum()

    expected = measure_peak(step, device=CPU).peak_bytes
    held += [torch.zeros(1000), torch.zeros(500)]
    costs = MeasuredCosts(CPU)
    with costs.recording(Deaths(allocated_storages())):
        step()
    assert costs.step_bytes == expected
    plain = MeasuredCosts(CPU)
    with plain.recording():
        step()
    assert plain.step_bytes == 0


def test_weights_that_numpy_sees_count_in_the_peak_of_a_recorded_step() -> None:
    def peak_bytes(*, shared: bool) -> int:
        net = nn.Linear(64, 64)
        if shared:
            net.weight.detach().numpy()
        recording = StepRecording(net, find_units(net, [""]), MeasuredCosts(CPU), CPU, in_loop=True)
        recording.start({"parameters": net.parameters()})
        net(torch.ones(8, 64)).sum().backward()
        recording.stop()
        return recording.peak_bytes

    assert peak_bytes(shared=True) == peak_bytes(shared=False)


def free(net: nn.Module, _: torch.optim.Optimizer) -> None:
    """Free the gradients by hand, which nothing sees in the first step, so that the second one is recorded, too."""
    for parameter in net.parameters():
        parameter.grad = None


def train(budget: int | str, num_steps: int, zero: Zero = free) -> Attached:
    net = Model(inner=128)  # values that are larger than what units get and return
    optimizer = torch.optim.AdamW(net.parameters())
    attached = recollect.attach(net, optimizer, budget, log=lambda _: None)
    for _ in range(num_steps):
        loss = net(torch.randn(100, 32))
        zero(net, optimizer)
        loss.backward()
        optimizer.step()
    attached.remove()
    return attached


@pytest.mark.parametrize("zero", [lambda _, optimizer: optimizer.zero_grad(), lambda net, _: net.zero_grad()])
def test_the_first_step_tells_when_zero_grad_frees_the_gradients_of_those_that_repeat(zero: Zero) -> None:
    seen, by_hand = train("100%", 2, zero), train("100%", 2)
    assert (seen.recorded_steps, by_hand.recorded_steps) == ([0], [0, 1])
    # Beyond what the other model takes, which is counted too.
    first, second = by_hand.planned
    assert seen.planned[0].work_bytes == second.work_bytes > first.work_bytes
    assert by_hand.budget_bytes == second.budget_bytes > first.budget_bytes, "a percentage is of what repeats"


def test_gradients_that_are_set_to_zero_are_recorded_once_they_are_there() -> None:
    assert train("100%", 2, lambda _, optimizer: optimizer.zero_grad(set_to_none=False)).recorded_steps == [0, 1]


def least_bytes() -> int:
    """The least peak of any plan for the second step."""
    profile = train("100%", 3).planned[-1].profile
    try:
        return recollect.plan(profile, 1).predicted_peak_bytes or 0
    except BudgetTooSmallError as error:
        return error.least_peak_bytes


def test_a_later_recorded_step_needs_no_more_than_a_plan() -> None:
    budget_bytes = int(1.04 * least_bytes())
    attached = train(budget_bytes, 3)
    assert attached.recorded_steps == [0, 1]


def live_bytes() -> int:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return storage_bytes([*tensors, *gradients])


def recorded(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> tuple[int, int]:
    recording = StepRecording(model, find_units(model), MeasuredCosts(CPU), CPU)
    known = {"parameters": list(model.parameters()), "optimizer_state": state_tensors(optimizer)}
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    before_bytes = live_bytes() - storage_bytes(gradients)
    recording.start(known, gradients=gradients)
    del known, gradients
    held = step()
    recording.stop(optimizer)
    left_bytes = live_bytes() - before_bytes
    del held
    return recording.left_bytes, left_bytes


@pytest.mark.parametrize("frees", [False, True], ids=["adds to gradients", "frees gradients"])
def test_all_that_a_step_leaves_alive_is_known(frees: bool) -> None:
    """Optimizer state that is made, gradients that come and go, an output that is held, and what the recording copies."""
    model, batch = llama(), batch_of()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> object:
        output = model(**batch)
        if frees:
            optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        return output

    num_parameters = len(list(model.parameters()))
    for has_state in (False, True):
        said_bytes, left_bytes = recorded(model, optimizer, step)
        # Counts of steps, four bytes each, are made out of sight.
        assert 0 <= left_bytes - said_bytes <= (0 if has_state else 4 * num_parameters), has_state
        assert left_bytes > (1 if has_state else 3) * storage_bytes(model.parameters())


def _gated(x: Tensor) -> Tensor:
    return (x.tanh() * x.sigmoid()).relu()


def _swiglu(x: Tensor) -> Tensor:
    """Its gradient is larger than what it gives back, and than what is alive in the backwards around it."""
    gate, up = x.chunk(2, -1)
    return nn.functional.silu(gate) * up


@IGNORED
@pytest.mark.parametrize("kind", ["keep_all", "full"])
@pytest.mark.parametrize(
    ("code", "backend"),
    [
        (_gated, "aot_eager"),
        pytest.param(_swiglu, "inductor", marks=pytest.mark.skipif(which("g++") is None, reason="compiles C++")),
    ],
)
def test_what_compiled_code_in_a_layer_is_given_and_makes_in_backward_is_alive_as_long_as_it_holds_it(
    code: Callable[[Tensor], Tensor], backend: str, kind: str
) -> None:
    torch.manual_seed(0)
    net, batch, compiled = Residual(inner=256), torch.randn(256, 32), torch.compile(code, backend=backend)
    for layer in net.layers:
        layer[1] = Computes(lambda _, x: compiled(x))
        layer[2] = nn.Linear(compiled(torch.ones(1, 256)).size(1), 32)

    def step() -> None:
        net.zero_grad()
        net(batch).square().mean().backward()

    profile = recollect.record(net, step=step)
    plan = recollect.classic_plan(profile, kind)  # type: ignore[arg-type]
    with recollect.apply(net, plan):
        step()
        net.zero_grad()
        measured = profile.persistent_bytes + measure_peak(step, device=CPU).peak_growth_bytes
    assert measured <= (plan.predicted_peak_bytes or 0) <= measured + 2048
