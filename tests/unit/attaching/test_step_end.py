"""A loop in which no training step ends, or none trains, is told instead of going on unplanned."""

import contextlib
import io
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import recollect
from recollect._torch_private import profiler_is_active
from recollect.attaching.attached import Attached
from recollect.errors import BudgetWarning, MeterError, RecordError
from residual_model import Model, Residual, attached_loop


def attached_to(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Attached:
    return recollect.attach(model, list(optimizers), "100%", log=lambda _: None)


def test_an_optimizer_that_never_steps_is_named() -> None:
    model = Model()
    stepping = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached_to(model, torch.optim.AdamW(model.parameters())) as attached:
        for _ in range(3):
            model(torch.randn(16, 32)).backward()
            stepping.step()
            stepping.zero_grad()
        with pytest.raises(
            RecordError, match=r"updated 3 times, and the optimizer that was passed \(AdamW\) never stepped"
        ):
            model(torch.randn(16, 32))
        assert attached.planned == []


def test_one_of_two_optimizers_that_never_steps_is_named() -> None:
    model = Model()
    often = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    with attached_to(model, often, torch.optim.AdamW(model.layers[1].parameters())):
        model(torch.randn(16, 32)).backward()
        for _ in range(64):
            often.step()
        with pytest.raises(RecordError, match=r"SGD stepped 65 times, and AdamW \(number 1\) never did"):
            often.step()


def test_an_optimizer_that_goes_on_alone_later_ends_steps_by_itself() -> None:
    """A discriminator is trained further, and then both of them again: the loop goes on, step by step."""
    model = Model()
    often, seldom = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.layers[:2])
    with attached_to(model, often, seldom) as attached:
        for both, number in ((True, 2), (False, 65 + 3), (True, 2)):
            for _ in range(number):
                model(torch.randn(16, 32)).backward()
                often.step()
                if both:
                    seldom.step()
        assert attached.num_steps == 2 + (1 + 3) + 2  # All 65 that it took to tell are one.


def test_weights_that_forward_scales_are_no_update() -> None:
    model = nn.Sequential(nn.Embedding(8, 32, max_norm=1.0), *Model().layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached_to(model, optimizer) as attached:
        for _ in range(5):
            model(torch.arange(8)).sum().backward()
        optimizer.step()
        assert attached.recorded_steps == [0]


def test_many_micro_batches_and_loaded_weights_are_no_error() -> None:
    with attached_loop() as (model, optimizer, attached):
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        for _ in range(2):
            model.load_state_dict(weights)
            model(torch.randn(16, 32)).backward()
        for _ in range(6):
            model(torch.randn(16, 32)).backward()
        optimizer.step()
        assert attached.recorded_steps == [0]


def test_an_optimizer_that_steps_before_the_first_call_ends_no_step() -> None:
    with attached_loop() as (model, optimizer, attached):
        optimizer.step()  # Before a scheduler is made, which warns otherwise.
        for _ in range(3):
            model(torch.randn(16, 32)).backward()
        optimizer.step()
        assert [len(planned.calls) for planned in attached.planned] == [3] and attached.num_steps == 1


def test_a_distributed_checkpoint_that_makes_the_state_takes_no_step() -> None:
    with attached_loop() as (model, optimizer, attached):
        get_state_dict(model, optimizer)
        model(torch.randn(16, 32)).backward()
        optimizer.step()
        assert attached.recorded_steps == [0]


def test_an_output_can_be_saved_without_a_warning() -> None:
    """PyTorch warns of hooks that it does not save."""
    with attached_loop() as (model, _, _):
        torch.save(model(torch.randn(16, 32)), io.BytesIO())


def test_a_loop_that_never_calls_the_model_is_told() -> None:
    with attached_loop() as (model, optimizer, _):
        model.layers[0](torch.randn(16, 32)).sum().backward()
        with pytest.warns(BudgetWarning, match="was not called with gradients on"):
            optimizer.step()


def test_a_model_that_gets_a_new_forward_is_told() -> None:
    with attached_loop() as (model, optimizer, _):
        model.forward = lambda x: model.layers[0](x).sum()
        model(torch.randn(16, 32)).backward()
        said = "Model was given a new forward after attach, test_a_model.*<lambda>, so nothing was planned. Call"
        with pytest.warns(BudgetWarning, match=said):
            optimizer.step()


def test_a_step_whose_call_raised_counts_when_the_optimizer_steps() -> None:
    """The other processes of a group count it, and they ask each other by the numbers of steps."""
    with attached_loop() as (model, optimizer, attached):
        for width in (32, 32, 31, 32):
            with contextlib.suppress(RuntimeError):
                model(torch.randn(16, width)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert attached.num_steps == 4 and attached.recorded_steps == [0]


def test_after_optimizers_that_step_in_backward_the_recording_has_ended() -> None:
    model = Model()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    with recollect.attach(model, [*optimizers.values()], "1GiB", log=lambda _: None) as attached:
        for rows in (16, 16, 64, 64):
            model(torch.randn(rows, 32)).backward()
        assert attached.recorded_steps == [0, 2]
        assert not profiler_is_active()


@pytest.mark.filterwarnings("ignore:recollect. torch.utils.checkpoint.CheckpointFunction runs layers again")
def test_a_model_that_is_called_within_backward_only_is_not_recorded() -> None:
    with attached_loop() as (model, optimizer, attached):
        with pytest.warns(BudgetWarning, match="the model is called within backward, as by torch.utils.checkpoint"):
            for _ in range(2):
                checkpoint(model, torch.randn(16, 32, requires_grad=True), use_reentrant=True).backward()
                optimizer.step()
        assert (attached.num_steps, attached.recorded_steps) == (2, [])
        assert not profiler_is_active()


def test_a_tensors_hook_may_call_the_model() -> None:
    """As GradCache of sentence-transformers does: the first call has no gradients, the second gives them to the loss's hook."""

    def step(model: nn.Module) -> None:
        rows = torch.ones(16, 32)

        def again(gradient: torch.Tensor) -> None:
            with torch.enable_grad():
                (model(rows) * gradient).sum().backward()

        with torch.no_grad():
            found = model(rows)
        loss = found.mean().requires_grad_()
        loss.register_hook(again)
        loss.backward()

    with attached_loop() as (model, optimizer, attached):
        plain = Model()
        plain.load_state_dict(model.state_dict())
        step(plain)
        with pytest.warns(
            BudgetWarning, match=r"use_reentrant=True or a hook of a tensor \(GradCache\), where no step"
        ):
            step(model)
        for expected, got in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(expected.grad, got.grad)
        optimizer.step()
        assert (attached.num_steps, attached.recorded_steps) == (1, [])


@pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="the profiler of an older PyTorch fails when it ends, and stays on"
)
def test_a_profiler_that_begins_in_a_recorded_step_is_named() -> None:
    with attached_loop() as (model, optimizer, _):
        loss = model(torch.randn(16, 32))
        with profile(), pytest.raises(MeterError, match="^a profiler was started while memory on the CPU was measured"):
            loss.backward()
            optimizer.step()
    assert not profiler_is_active()


def test_a_loop_that_never_runs_backward_is_an_error() -> None:
    with attached_loop() as (model, optimizer, attached):
        with pytest.warns(
            BudgetWarning, match=r"AdamW.step\(\) ended a step with a call of Model in which no backward ran; "
        ):
            for _ in range(2):
                model(torch.randn(16, 32))
                optimizer.step()
        model(torch.randn(16, 32))
        with pytest.raises(
            RecordError, match=r"in which no backward ran, as in 2 before it, expected loss.backward\(\) in"
        ):
            optimizer.step()
        # The loop mends it, and goes on.
        model(torch.randn(16, 32)).backward()
        optimizer.step()
        assert [str(step.calls[0]) for step in attached.planned] == ["16 x 32"]
        # What is planned stays, though the same happens later.
        model(torch.randn(32, 32))
        optimizer.step()


def test_a_later_step_without_backward_is_a_warning() -> None:
    with attached_loop() as (model, optimizer, attached):
        model(torch.randn(16, 32)).backward()
        optimizer.step()
        model(torch.randn(32, 32))
        with pytest.warns(BudgetWarning, match=r"no backward ran; nothing was planned for it"):
            optimizer.step()
        assert len(attached.planned) == 1


def test_an_error_of_an_op_in_the_recorded_step_is_raised_as_it_is() -> None:
    with attached_loop() as (model, optimizer, attached):
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            model(torch.randn(16, 8))
        model(torch.randn(16, 32)).backward()
        optimizer.step()
        assert attached.recorded_steps == [0]


def test_a_new_loop_is_recorded_after_one_whose_step_an_error_has_ended() -> None:
    """As in a notebook, where a cell fails and runs again."""
    kept = []
    for _ in range(2):
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        kept.append(attached_to(model, optimizer))
        loss = model(torch.randn(16, 32))
    with pytest.raises(MeterError, match=r"or that of a step that attach records\. .* call attached\.remove\(\)\.$"):
        recollect.record(Model(), torch.randn(16, 32))
    loss.backward()
    optimizer.step()
    assert [one.recorded_steps for one in kept] == [[], [0]]
    for one in kept:
        one.remove()


# What it cannot see, or cannot hold.


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


class Chain(nn.ModuleDict):
    """Dicts of modules have no forward, but this one, like the containers of SpeechBrain."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self.values():
            x = part(x)
        return x


def test_a_dict_of_modules_with_a_forward_is_recorded_from_its_call_on() -> None:
    model = Chain({"stem": nn.Linear(8, 32), "layers": nn.Sequential(*Residual().layers)})
    with attached_loop("100%", model) as (_, optimizer, attached):
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        assert str(attached.planned[0].calls[0]) == "16 x 8"


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
