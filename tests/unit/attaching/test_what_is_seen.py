"""What `attach` cannot see, or cannot hold, it says."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.multiprocessing.reductions import StorageWeakRef

import recollect
from recollect.errors import BudgetWarning
from residual_model import Residual, attached_loop


class Holder(nn.Module):
    """Has layers, and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Residual().layers


def through(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = x + layer(x)
    return x.square().mean()


def test_a_loop_that_calls_the_layers_one_by_one_is_told() -> None:
    with attached_loop(model=Holder()) as (model, optimizer, attached):
        through(model, torch.randn(16, 32)).backward()
        with pytest.warns(BudgetWarning, match=r"stepped, but Holder was not called .* attached.call\(\.\.\.\)"):
            optimizer.step()
        assert attached.planned == []
        optimizer.zero_grad()
        attached.call(through, model, torch.randn(16, 32)).backward()
        optimizer.step()
        assert attached.recorded_steps == [0]
        assert str(attached.planned[0].calls[0]) == "16 x 32"


def test_a_loop_that_calls_the_model_inside_a_transform_is_told() -> None:
    with attached_loop() as (model, optimizer, attached):
        x, weights = torch.randn(16, 32), dict(model.named_parameters())
        gradients = torch.func.grad(lambda its: torch.func.functional_call(model, its, (x,)))(weights)
        for name, parameter in weights.items():
            parameter.grad = gradients[name].detach()
        with pytest.warns(
            BudgetWarning, match=r"or calls it inside torch\.func\.grad or vmap, where nothing can be planned"
        ):
            optimizer.step()
        assert attached.planned == []


def test_a_model_that_is_one_unit_is_recorded_from_its_first_call_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Sigmoid(), nn.Linear(256, 32))
    with attached_loop("95%", model, units=[""]) as (_, optimizer, attached):
        model(torch.randn(64, 32)).square().mean().backward()
        optimizer.step()
        assert [call.path for call in attached.planned[0].profile.calls] == [""]
        assert attached.plan is not None and "" in attached.plan.units


def test_times_that_nobody_measured_are_named() -> None:
    lines: list[str] = []
    with torch.device("meta"):
        model, x = nn.Sequential(*Residual().layers), torch.randn(64, 32)
    optimizer = torch.optim.SGD(model.parameters())
    with recollect.attach(model, optimizer, "90%", log=lines.append) as attached:
        model(x).sum().backward()
        optimizer.step()
        said = " by times of the meta device, which computes nothing"
        assert said in lines[0] and said in attached.report()
    profile = recollect.record(model, x, loss_fn=torch.sum, fake=True, hardware="H100")
    assert str(recollect.plan(profile, "90%")).endswith("\ntimes modelled for NVIDIA H100 SXM")


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_pipelines_stage_that_learns_shapes_is_lean_and_in_no_step() -> None:
    model, x = Residual(), torch.randn(64, 32)
    between = [StorageWeakRef(x.untyped_storage())]
    lean: list[bool] = []
    model.layers[0][1].register_forward_hook(lambda _m, _x, y: between.append(StorageWeakRef(y.untyped_storage())))
    model.register_forward_hook(lambda *_: lean.append(between[-1].expired()))
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    with attached_loop(model=model) as (_, optimizer, attached):
        schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
        for _ in range(2):
            schedule.step(x, target=x)
            optimizer.step()
            optimizer.zero_grad()
            # After this the next step learns shapes again.
            with torch.no_grad():
                schedule.eval(x, target=x)
        assert attached.recorded_steps == [0]
        assert [str(planned) for planned in attached.planned] == ["2 calls of 32 x 32"]
        assert lean[0]
