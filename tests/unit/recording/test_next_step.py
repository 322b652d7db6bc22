"""What a step leaves behind, and when the next step replaces it."""

import copy
import itertools
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from blocks import Computes
from recollect.byte_format import format_bytes
from recollect.measuring.meter import measure_peak, storage_bytes
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import simulate
from residual_model import Residual


def test_a_loop_that_holds_two_outputs_and_a_gradient_of_its_input_is_predicted() -> None:
    torch.manual_seed(0)
    model = Residual()
    x = torch.randn(256, 32, requires_grad=True)
    held: dict[str, Tensor] = {}

    def step() -> None:
        held["one"] = model(x)
        (held["gradient"],) = torch.autograd.grad(held["one"].sum(), x, create_graph=True)
        held["other"] = model(x)
        held["loss"] = held["other"].square().mean() + held["gradient"].square().mean()
        model.zero_grad()
        held["loss"].backward()

    profile = recollect.record(model, step=step)
    start_bytes = storage_bytes([*model.parameters(), x])
    for kind in ("keep_all", "full"):
        plan = recollect.classic_plan(profile, kind)  # type: ignore[arg-type]
        held.clear()
        model.zero_grad()
        x.grad = None
        with recollect.apply(model, plan):

            def two_steps() -> None:
                step()
                model.zero_grad()
                x.grad = None
                step()

            measured = measure_peak(two_steps, device="cpu", baseline_bytes=start_bytes).peak_bytes
        assert plan.predicted_peak_bytes is not None
        # The gradient that backward makes of the input is not the model's.
        assert 0 <= plan.predicted_peak_bytes - measured <= 2048 + x.nbytes, kind


def test_a_list_of_gradients_of_several_losses_lives_until_all_have_their_successors() -> None:
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(64, 32)
    weights = list(model.parameters())
    held: dict[str, Any] = {}

    def step() -> None:
        held["lists"] = [torch.autograd.grad(model(x).square().mean(), weights) for _ in range(3)]

    plan = recollect.classic_plan(recollect.record(model, step=step), "keep_all")
    held.clear()
    with recollect.apply(model, plan):
        step()
        start_bytes = storage_bytes([*weights, x, *itertools.chain.from_iterable(held["lists"])])
        measured = measure_peak(step, device="cpu", baseline_bytes=start_bytes).peak_bytes
    assert plan.predicted_peak_bytes is not None
    assert 0 <= plan.predicted_peak_bytes - measured <= 2048


def test_a_step_that_trains_a_copy_of_the_model_is_predicted() -> None:
    """Nothing of the recording is in the copy: that would be copied without end."""
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(64, 32)

    def step() -> None:
        model.zero_grad()
        twin = copy.deepcopy(model)
        pickle.dumps(twin)
        twin(x).square().mean().backward()
        model(x).square().mean().backward()

    plan = recollect.classic_plan(recollect.record(model, step=step), "keep_all")
    with recollect.apply(model, plan):
        step()
        start_bytes = storage_bytes(
            [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), x]
        )
        measured = measure_peak(step, device="cpu", baseline_bytes=start_bytes).peak_bytes
    assert plan.predicted_peak_bytes is not None
    assert 0 <= plan.predicted_peak_bytes - measured <= 2048


@dataclass
class Answer:
    """What many models return: not a container that PyTorch knows, but an object that holds tensors."""

    scores: Tensor


def wide() -> Computes:
    """Its output is so large that one of the last step would make the peak. [n, 32] -> an answer of [n, 4096]."""
    return Computes(lambda self, x: Answer(self.leave(self.stack(x))), stack=Residual(), leave=nn.Linear(32, 4096))


@pytest.mark.parametrize("recorded_by", ["record", "attach"])
@pytest.mark.parametrize("teaches", ["another model", "itself"])
def test_what_a_model_or_its_teacher_returned_in_the_last_step_lives_until_it_returns_again(
    teaches: str, recorded_by: str
) -> None:
    torch.manual_seed(0)
    # Models in a list are called one by one; nobody calls the list.
    models = [wide() for _ in range(2 if teaches == "another model" else 1)]
    student, teacher = models[0], models[-1]
    x = torch.randn(256, 32)
    held: dict[str, Any] = {}

    def step() -> None:
        held["out"] = student(x)
        with torch.no_grad():
            held["wanted"] = teacher(x)
        (held["out"].scores * held["wanted"].scores).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizer = torch.optim.SGD(student.parameters())
    if recorded_by == "record":
        profile = recollect.record(nn.ModuleList(models), step=step, optimizer=optimizer, gradients="freed")
    else:
        with recollect.attach(models, optimizer, "100%", log=lambda _: None) as attached:
            step()
        profile = attached.planned[0].profile
    plan = recollect.classic_plan(profile, "keep_all")
    held.clear()
    weights = [parameter for model in models for parameter in model.parameters()]

    def two_steps() -> None:
        step()
        step()

    measured = measure_peak(two_steps, device="cpu", baseline_bytes=storage_bytes([*weights, x])).peak_bytes
    assert plan.predicted_peak_bytes is not None
    assert 0 <= plan.predicted_peak_bytes - measured <= 2048


class Rows(dict[str, Tensor]):
    """Iterates over its rows, and tells its keys by `keys`, as a TensorDict does."""

    def __iter__(self) -> Any:
        return ({name: tensor[row] for name, tensor in self.items()} for row in range(2))


class Layer(nn.Sequential):
    """Tells its parameters without duplicates only, as the losses of torchrl do."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
        return super().named_parameters(prefix, recurse)


class Policy(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return Rows(loss=super().forward(x).square().mean(1))


@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_layers_and_outputs_as_in_torchrl(engine: Any) -> None:
    torch.manual_seed(0)
    model = Policy(*(Layer(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters())
    with recollect.attach(model, optimizer, "100%", engine=engine, log=lambda _: None) as attached:
        for _ in range(2):
            model(torch.randn(64, 32))["loss"].mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert attached.recorded_steps == [0]


def test_gradients_of_each_sample_are_freed_with_those_of_the_parameters() -> None:
    """As Opacus holds them."""
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(64, 32)
    optimizer = torch.optim.SGD(model.parameters())
    parameters: list[Any] = list(model.parameters())

    def step() -> None:
        model(x).square().mean().backward()
        for p in parameters:
            p.grad_sample = [p.grad.expand(8, *p.shape).clone()]
            p.summed_grad = p.grad_sample[0].sum(0)
        optimizer.step()
        for p in parameters:
            p.grad_sample = p.summed_grad = None
        optimizer.zero_grad()

    with recollect.attach(model, optimizer, "100%", log=lambda _: None) as attached:
        step()
    step()
    measured = measure_peak(step, device="cpu", baseline_bytes=storage_bytes([*parameters, x])).peak_bytes
    assert 0 <= attached.planned[0].plain_peak_bytes - measured <= 2048


def test_gradients_of_the_last_step_that_backward_adds_to_before_they_are_freed() -> None:
    """A critic's: those from the generator's loss are thrown away, after they were added to what its own step left."""
    torch.manual_seed(0)
    generator, critic, x = Residual(), Residual(512), torch.randn(64, 32)
    optimizers = [torch.optim.SGD(model.parameters()) for model in (generator, critic)]

    def step() -> None:
        fake = generator(x)
        torch.autograd.grad(fake.sum(), generator.layers[2][2].weight, retain_graph=True)
        for optimizer, loss in zip(optimizers, (lambda: critic(fake), lambda: critic(fake.detach()) ** 2), strict=True):
            optimizer.zero_grad()
            loss().mean().backward()
            optimizer.step()

    lines: list[str] = []
    with recollect.attach([generator, critic], optimizers, "100%", log=lines.append) as attached:
        for _ in range(3):
            step()
    assert attached.recorded_steps == [0]
    freed = sum(parameter.nbytes for parameter in generator.parameters())
    assert lines[0].endswith(f"not after it, would free {format_bytes(freed)}"), "of the critic's, sums would change"
    baseline_bytes = storage_bytes([*generator.parameters(), *critic.parameters(), x])
    for parameter in [*generator.parameters(), *critic.parameters()]:
        parameter.grad = None

    def two_steps() -> None:
        step()
        step()

    measured = measure_peak(two_steps, device="cpu", baseline_bytes=baseline_bytes).peak_bytes
    assert 0 <= attached.planned[0].plain_peak_bytes - measured <= 2048


def stateful() -> Computes:
    """A layer that also returns a state, through which no backward runs. [n, 32] -> [n, 32] and [64, 64]."""

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = self.up(x).tanh()
        keys = wide[:, :64].neg()
        return x + self.down(wide), keys.mT @ keys

    return Computes(forward, up=nn.Linear(32, 256), down=nn.Linear(256, 32))


def with_states(self: Any, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    states = []
    for layer in self.layers:
        x, state = layer(x)
        states.append(state)
    return x, states


def test_a_graph_that_no_backward_uses_up_holds_what_its_values_are_recomputed_from() -> None:
    torch.manual_seed(0)
    model = Computes(with_states, layers=nn.ModuleList(stateful() for _ in range(3)))
    batch = torch.randn(256, 32)

    def loss_of(output: tuple[Tensor, list[Tensor]]) -> Tensor:
        return output[0].square().mean()

    profile = recollect.record(model, batch, loss_fn=loss_of)
    # What `neg` is computed from is four times as large, and of no use to the rest of backward.
    actions = {op.name: Action.KEEP for op in profile.graphs[0].ops} | {"neg": Action.RECOMPUTE}
    plan = Plan({f"layers.{i}": UnitPlan(actions) for i in range(3)})

    def two_steps() -> None:
        for _ in range(2):
            out = model(batch)
            model.zero_grad()
            loss_of(out).backward()

    with recollect.apply(model, plan):
        two_steps()
        model.zero_grad()
        measured = measure_peak(two_steps, device="cpu")
    assert profile.persistent_bytes + measured.peak_growth_bytes <= simulate(profile, decide(profile, plan)).peak_bytes
