"""A plan under `torch.func`, forward-mode differentiation, `torch.compile` of the model, and classes that are changed."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

import recollect
from blocks import Computes
from gradients import assert_same_gradients
from recollect.engine.own_checkpoints import tell_once
from recollect.errors import ConfigWarning
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from watch import Watch

ACTIONS = {name: "recompute" for name in ("linear.addmm", "linear.mm", "tanh", "sin", "add")}
PLAN = Plan({f"units.{index}": UnitPlan(ACTIONS) for index in range(3)})
ROWS = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
TANGENTS = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))


def built() -> Any:
    """A stem and three units. [n, 8] -> scalar."""

    def run(self: Any, rows: Tensor) -> Tensor:
        hidden = self.stem(rows)
        for unit in self.units:
            hidden = unit(hidden)
        return hidden.square().mean()

    torch.manual_seed(0)
    linears = [nn.Linear(8, 8) for _ in range(4)]
    units = [Computes(lambda self, x: self.linear(x).tanh().sin() + x, linear=linear) for linear in linears[1:]]
    return Computes(run, stem=linears[0], units=nn.ModuleList(units))


def dual_tensors(model: nn.Module) -> Tensor:
    """The gradient of a tangent: forward over reverse."""
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(ROWS, TANGENTS))).tangent
        tangent.backward()
    found = next(model.parameters()).grad
    assert found is not None
    return found


def forward_mode(model: nn.Module) -> Tensor:
    result: Tensor = jvp(model, (ROWS,), (TANGENTS,))[1]
    return result


def mapped(model: nn.Module) -> Tensor:
    vmap(model)(ROWS[:, None]).sum().backward()
    found = next(model.parameters()).grad
    assert found is not None
    return found


def per_sample_gradients(model: nn.Module) -> Tensor:
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(model, parameters, (row[None],))

    result: Tensor = vmap(grad(loss), in_dims=(None, 0))(parameters, ROWS)["stem.weight"]
    return result


# PyTorch's own decompositions for forward mode are scripted when they are first used.
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("transform", [dual_tensors, forward_mode, mapped, per_sample_gradients])
def test_transforms_see_the_plain_model(transform: Callable[[nn.Module], Tensor]) -> None:
    expected = transform(built())
    model = built()
    with recollect.apply(model, PLAN):
        assert torch.equal(transform(model), expected)


def whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def each_layer(model: Any) -> Any:
    for unit in model.units:
        unit.compile(backend="eager")
    return model


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled_first", [False, True])
@pytest.mark.parametrize("compile_model", [whole, each_layer])
def test_compiled_models_follow_the_plan(compile_model: Callable[[nn.Module], Any], compiled_first: bool) -> None:
    model = built()
    model(ROWS).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model = built()
    compiled = compile_model(model) if compiled_first else None
    with recollect.apply(model, PLAN):
        if compiled is None:
            compiled = compile_model(model)
        with pytest.warns(ConfigWarning, match=r"^recollect: torch\.compile has no effect on"):
            compiled(ROWS).backward()
        model.zero_grad()
        with Watch() as watch:
            compiled(ROWS).backward()
        assert watch.ops["tanh"] == 6
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert_same_gradients(expected, found)


def test_hooks_for_saved_tensors_around_layers() -> None:
    tell_once.cache_clear()
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    plan = Plan({"1": UnitPlan({"gelu": Action.RECOMPUTE})})
    with (
        recollect.apply(model, plan),
        torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 2, lambda packed: packed),
        pytest.warns(ConfigWarning, match=r"active around layers that run by a plan.*without these layers\.$") as told,
    ):
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
    assert len(told) == 1


class Doubled(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + hidden


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings(r"ignore:.*`torch\.jit\.\w+` is deprecated")
@pytest.mark.parametrize(
    ("engine", "change"),
    [
        ("tape", lambda _, patch: patch.setattr(Computes, "forward", Doubled.forward)),
        ("compile", lambda _, patch: patch.setattr(Computes, "forward", Doubled.forward)),
        ("tape", lambda _, patch: patch.setattr(Computes, "forward", staticmethod(torch.sin))),
        ("tape", lambda _, patch: patch.setattr(Computes, "forward", torch.sin)),
        ("tape", lambda model, _: setattr(model.units[1], "__class__", Doubled)),
    ],
    ids=["method", "compiled method", "static method", "built-in function", "class"],
)
def test_forwards_of_classes_that_are_replaced(engine: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of kernels replace methods of models' classes."""
    model, plainly = built(), built()
    for one in (model, plainly):  # It is not what is replaced.
        one.forward = functools.partial(type(one).forward, one)
    plan = Plan({path: UnitPlan({} if engine == "compile" else ACTIONS, engine=engine) for path in PLAN.units})
    with recollect.apply(model, plan), monkeypatch.context() as patch:
        model(ROWS.clone()).backward()
        model.zero_grad()
        for one in (plainly, model):
            change(one, patch)
            one(ROWS.clone()).backward()
    expected = {name: one.grad for name, one in plainly.named_parameters() if one.grad is not None}
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert_same_gradients(expected, found)


@pytest.mark.filterwarnings(r"ignore:.*`torch\.jit\.\w+` is deprecated")
@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_layers_that_were_scripted_are_planned(engine: Any) -> None:
    def train(budget: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3))
        model = nn.Sequential(*map(torch.jit.script, layers))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        attached = budget and recollect.attach(model, optimizer, budget, engine=engine)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(512, 8)).square().mean().backward()
            optimizer.step()
        if attached:
            assert attached.plan is not None and attached.plan.predicted_slowdown
            attached.remove()
        return [parameter.detach() for parameter in model.parameters()]

    train(None)  # From the second time on, TorchScript differentiates them by itself, to other bits.
    assert all(map(torch.equal, train("80%"), train(None)))
