"""Function transforms, forward-mode differentiation and inner steps anywhere in a step: bit for bit as without recollect."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn
from torch.autograd import forward_ad

import recollect
from blocks import Computes
from tiers import long_but

Function = Callable[[Tensor], Tensor]


def dual(function: Function, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, x.detach().cos()))).tangent


TRANSFORMS: dict[str, Callable[[Function, Tensor], Any]] = {
    "jvp": lambda f, x: func.jvp(f, (x,), (x.detach().cos(),))[1],
    "vjp": lambda f, x: func.vjp(f, x)[1](x.detach().cos())[0],
    "linearize": lambda f, x: func.linearize(f, x)[1](x.detach().cos()),
    "vmap": lambda f, x: func.vmap(f)(x),
    "grads of rows": lambda f, x: func.vmap(func.grad(lambda row: f(row).square().sum()))(x),
    "jacrev": lambda f, x: func.jacrev(f)(x).sum((0, 1)),
    "jacfwd": lambda f, x: func.jacfwd(f)(x).sum((0, 1)),
    "hessian": lambda f, x: func.hessian(lambda v: f(v).square().mean())(x).sum((0, 1)),
    "dual numbers": dual,
}


class Block(nn.Module):
    def __init__(self, transform: Callable[[Function, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down, self.transform = nn.Linear(8, 32), nn.Linear(32, 8), transform

    def inner(self, hidden: Tensor) -> Any:
        return self.down(nn.functional.gelu(self.up(hidden)))

    def forward(self, hidden: Tensor) -> Any:
        return hidden + self.transform(self.inner, hidden.sin())


class Net(nn.Sequential):
    def forward(self, batch: Tensor, extra: Any = None) -> Any:
        return super().forward(batch) if extra is None else super().forward(batch) + extra(self, batch)


def steps(extra: Any, where: str, handles: Callable[..., Any] | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net(*(Block(extra if where == "inside layers" else lambda f, x: f(x)) for _ in range(2)))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), torch.randn(4, 8)
    handle = None if handles is None else handles(model, optimizer)
    found: list[Tensor] = []
    for step in range(2):
        loss = model(batch, extra if where == "in its forward" else None).square().mean()
        if where == "in each step" or (where == "in a later step" and step):
            loss = loss + extra(model, batch).square().mean()
            with torch.no_grad():
                extra(model, batch)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    return found


def attached(model: nn.Module, optimizer: Any) -> Any:
    return recollect.attach(model, optimizer, "1MiB", log=lambda _: None)


def planned(model: nn.Module, _: Any) -> Any:
    profile = recollect.record(model, torch.randn(4, 8), loss_fn=torch.sum)
    return recollect.apply(model, recollect.classic_plan(profile, "full"))


PLACES = ["in each step", "in a later step", "in its forward", "inside layers"]
CASES = [(name, where, handles) for name in TRANSFORMS for where in PLACES for handles in (attached, planned)]
# Each transform in one place under a plan, and in another one in a loop that is attached to.
QUICK = [
    case
    for number, case in enumerate(CASES)
    if number % 8 in (2 * ((number // 8 + 3) % 4), 2 * ((number // 8 + 1) % 4) + 1)
]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated", "ignore:Attempted to insert a get_attr")
@pytest.mark.parametrize(("name", "where", "handles"), long_but(QUICK, CASES, are_rows=True))
def test_a_step_with_transforms_is_the_same(name: str, where: str, handles: Callable[..., Any]) -> None:
    if (name, where, handles) == ("linearize", "inside layers", attached):
        pytest.skip("traced again whenever a layer is timed, which takes ten seconds")
    expected = steps(TRANSFORMS[name], where)
    assert all(tensor.isfinite().all() for tensor in expected)
    assert all(map(torch.equal, steps(TRANSFORMS[name], where, handles), expected))


def inner_step(function: Any, x: Tensor) -> Tensor:
    up = function.__self__.up
    weights = dict(up.named_parameters())
    slopes = func.grad(lambda weights: func.functional_call(up, weights, (x,)).square().mean())(weights)
    return function(x) * func.functional_call(up, {name: weights[name] - slopes[name] for name in weights}, (x,)).mean()


@pytest.mark.parametrize("handles", [attached, planned])
def test_layers_that_take_inner_steps_are_recorded(handles: Callable[..., Any]) -> None:
    assert all(map(torch.equal, steps(inner_step, "inside layers", handles), steps(inner_step, "inside layers")))


def test_what_follows_a_transform_is_dropped_in_later_steps() -> None:
    """Modules step aside from their third run on, and could not have their hooks back within the transform."""

    def force_field(self: Any, x: Tensor) -> Tensor:
        return x + func.grad(lambda x: self.energy(x).square().sum())(x).sin().cos().sin().cos()

    torch.manual_seed(0)
    model = nn.Sequential(*(Computes(force_field, energy=nn.Linear(8, 8)) for _ in range(2)))
    batch = torch.randn(4096, 8)
    peaks = []
    with recollect.apply(model, recollect.classic_plan(recollect.record(model, batch, loss_fn=torch.sum), "full")):
        for _ in range(5):
            model.zero_grad()
            peaks.append(recollect.measure_peak(lambda: model(batch).sum().backward()).peak_bytes)
    assert max(peaks[2:]) <= peaks[1]


def graphs(model: nn.Module, batch: Tensor) -> tuple[str, list[str]]:
    traced: Any = torch.jit.trace(model, batch, check_trace=False)
    return str(torch.export.export(model, (batch,)).graph), [node.kind() for node in traced.inlined_graph.nodes()]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize("handles", [attached, planned])
def test_a_model_is_exported_and_traced_as_without_a_plan(handles: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Net(*(Block(lambda f, x: f(x)) for _ in range(2)))
    optimizer, batch = torch.optim.SGD(model.parameters()), torch.randn(4, 8)
    expected = graphs(model, batch)
    with handles(model, optimizer) as handle:
        for _ in range(3):
            loss = model(batch).square().mean()
            assert graphs(model, batch) == expected
            loss.backward()
            optimizer.step()
            assert graphs(model, batch) == expected
        assert getattr(handle, "num_steps", 3) == 3


def copied_one_by_one(module: nn.Module) -> nn.Module:
    made = type(module).__new__(type(module))
    vars(made).update({name: copy.copy(one) for name, one in vars(module).items()})
    return made


def stepped_copy(module: nn.Module, gradients: Iterator[Tensor], copied: Any) -> nn.Module:
    """Copy attributes, with weights of its own, as learn2learn and higher do."""
    made: nn.Module = copied(module)
    weights = {name: weight - 0.1 * next(gradients) for name, weight in module.named_parameters(recurse=False)}
    children = {name: stepped_copy(child, gradients, copied) for name, child in module.named_children()}
    vars(made).update(_parameters=weights, _modules=children)
    return made


@pytest.mark.parametrize("how", [copy.copy, copied_one_by_one])
@pytest.mark.parametrize("is_of_a_layer", [False, True])
@pytest.mark.parametrize("handle", ["attach", "apply"])
@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_a_copy_that_takes_inner_steps_has_its_own_weights(
    handle: str, engine: Any, is_of_a_layer: bool, how: Callable[[nn.Module], nn.Module]
) -> None:
    def trained(handle: str) -> list[Tensor]:
        torch.manual_seed(0)
        model, batch = Net(*(Block(lambda f, x: f(x)) for _ in range(2))), torch.randn(4, 8)
        model[0].down.forward = model[0].down.forward  # The user's own, which copies share.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if handle == "attach":
            recollect.attach(model, optimizer, "1MiB", engine=engine, log=lambda _: None)
        elif handle:
            profile = recollect.record(model, batch, engine=engine, fake=engine == "tape", loss_fn=torch.sum)
            recollect.apply(model, recollect.classic_plan(profile, "full").with_engine(engine))
        for _ in range(3):
            loss = model(batch).square().mean()
            inner = iter(torch.autograd.grad(loss, list(model.parameters())))
            copied = stepped_copy(model[0] if is_of_a_layer else model, inner, how)
            (copied(batch) + copied(batch)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(map(torch.equal, trained(handle), trained("")))


class Adapted(nn.Module):
    """Runs without its prompt within a block, as PEFT's models do, and in a wrapper that takes over its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.prompt = Net(*(Block(lambda f, x: f(x)) for _ in range(2))), nn.Parameter(torch.ones(8))

    def forward(self, batch: Tensor) -> Any:
        return self.base(batch + self.prompt)

    def without_prompt(self, batch: Tensor) -> Any:
        own, self.forward = self.forward, self.base.forward
        try:
            return self(batch)
        finally:
            self.forward = own


@pytest.mark.parametrize(("handle", "also_of_a_planned_one"), [("attach", False), ("apply", False), ("apply", True)])
def test_a_module_that_takes_the_forward_of_a_different_one_runs_that(handle: str, also_of_a_planned_one: bool) -> None:
    def trained(handle: str) -> list[Tensor]:
        torch.manual_seed(0)
        model, wrapper, batch = Adapted(), nn.Module(), torch.randn(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if handle == "attach":
            recollect.attach(model, optimizer, "1MiB", log=lambda _: None)
        elif handle:
            recollect.apply(model, recollect.classic_plan(recollect.record(model, batch, loss_fn=torch.sum), "full"))
        wrapper.forward = model.forward
        if also_of_a_planned_one:
            model.base[1].forward = model.base[0].forward
        for _ in range(3):
            (wrapper(batch) - model.without_prompt(batch)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(map(torch.equal, trained(handle), trained("")))
