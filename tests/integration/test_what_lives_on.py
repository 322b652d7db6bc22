"""After success or an error, and `remove()`, nothing of recollect holds a model, an optimizer or a handle."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import recollect
from recollect.engine.graph.graph_engine import GraphForward
from recollect.engine.graph.node import TracedUnit

X = torch.randn(2048, 16)


def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum()


# PyTorch holds what it compiles in a step for good, and with it methods of classes as they were then.
compiled_total: Callable[[torch.Tensor], torch.Tensor] = torch.compile(total, backend="aot_eager")


class Untraceable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


class Loop:
    """A model with an optimizer; `arguments` are those of `record`."""

    def __init__(self) -> None:
        layers = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.arguments: dict[str, Any] = {"optimizer": self.optimizer, "loss_fn": torch.sum}
        self.seen: list[weakref.ref[Any]] = [weakref.ref(self.model), weakref.ref(self.optimizer)]
        self.seen += map(weakref.ref, layers)

    def attach(
        self, budget: str = "90%", steps: int = 2, x: torch.Tensor = X, loss_fn: Any = torch.sum, **keywords: Any
    ) -> None:
        attached = recollect.attach(self.model, self.optimizer, budget, log=str, **keywords)
        self.seen.append(weakref.ref(attached))
        try:
            for number in range(steps):
                loss_fn(self.model(X if number == 0 else x)).backward()
                self.optimizer.step()
            self.model(x[:, :8] if not steps else x)
        finally:
            attached.remove()

    def outgrow(self, **keywords: Any) -> None:
        with pytest.warns(recollect.errors.BudgetWarning, match="no plan fits"):
            self.attach("20MiB", x=X.repeat(64, 1), **keywords)

    def untraceable(self) -> None:
        for layer in self.model:
            layer.append(Untraceable())
        self.attach("80%", engine="graph")

    def plan(self, budget: str = "90%") -> recollect.Plan:
        return recollect.plan(recollect.record(self.model, X, **self.arguments), budget=budget)

    def fit(self, budget: str = "90%") -> None:
        recollect.fit(self.model, X, budget, **self.arguments)
        recollect.applied_to(self.model)[0].remove()

    def apply(self) -> None:
        with recollect.apply(self.model, self.plan()):
            self.model(X).sum().backward()


def fail(_: object) -> None:
    raise ZeroDivisionError


ENDS: dict[str, tuple[Callable[[Loop], object], str]] = {
    "attach": (Loop.attach, ""),
    "attach, compiled in the step": (lambda loop: loop.attach(loss_fn=compiled_total), ""),
    "attach, measured": (lambda loop: loop.attach(measure=True), ""),
    "attach, not traced": (Loop.untraceable, ""),
    "attach, no room": (lambda loop: loop.attach("1KiB"), "BudgetTooSmallError"),
    "attach, no room later": (Loop.outgrow, ""),
    "attach, no room later, host memory": (lambda loop: loop.outgrow(host_budget="1GiB"), ""),
    "attach, no budget": (lambda loop: loop.attach("many"), "QuantityError"),
    "attach, no such unit": (lambda loop: loop.attach(units=["nope"]), "UnknownNameError"),
    "attach, a wrong batch": (lambda loop: loop.attach(steps=0), "RuntimeError"),
    "attach, larger": (lambda loop: loop.attach(x=torch.cat([X, X]), on_larger="raise"), "LargerStepError"),
    "record": (lambda loop: recollect.record(loop.model, X, **loop.arguments), ""),
    "record, no loss": (lambda loop: recollect.record(loop.model, X), "RecordError"),
    "record, a wrong loss": (lambda loop: recollect.record(loop.model, X, loss_fn=fail), "ZeroDivisionError"),
    "plan, no room": (lambda loop: loop.plan("1KiB"), "BudgetTooSmallError"),
    "fit": (Loop.fit, ""),
    "fit, no room": (lambda loop: loop.fit("1KiB"), "BudgetTooSmallError"),
    "apply": (Loop.apply, ""),
    "apply, no plan": (lambda loop: recollect.apply(loop.model, 5), "ArgumentError"),  # type: ignore[arg-type]
    "verify": (lambda loop: recollect.verify(loop.model, X, loop.plan(), **loop.arguments), ""),
    "verify, a wrong batch": (lambda loop: recollect.verify(loop.model, X[:, :8], recollect.Plan({})), "RecordError"),
    "largest_batch": (
        lambda loop: recollect.largest_batch(loop.model, lambda n: X[:n], "1GiB", max_size=2, **loop.arguments),
        "",
    ),
    "largest_batch, no function": (lambda loop: recollect.largest_batch(loop.model, X, "1GiB"), "ArgumentError"),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def outcome(how: Callable[[Loop], object]) -> tuple[list[weakref.ref[Any]], BaseException | None]:
    loop = Loop()
    try:
        how(loop)
    except Exception as error:
        return loop.seen, error
    return loop.seen, None


def forget_frames_of_others(error: BaseException | None) -> None:
    """What the test's own functions and PyTorch's hold is theirs; a running frame is not forgotten."""
    while error is not None:
        step = error.__traceback__
        while step is not None:
            if "/src/recollect/" not in step.tb_frame.f_code.co_filename:
                step.tb_frame.clear()
            step = step.tb_next
        error = error.__cause__ or error.__context__


@pytest.mark.usefixtures("uncollected")
# Dynamo's own.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", r"ignore:The \.grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how, expected", ENDS.values(), ids=ENDS)
def test_nothing_lives_on_even_if_the_error_is_kept(how: Callable[[Loop], object], expected: str) -> None:
    seen, error = outcome(how)
    assert type(error).__name__ == (expected or "NoneType")
    forget_frames_of_others(error)
    assert [type(found()).__name__ for found in seen if found() is not None] == []


def test_traces_hold_no_module_that_its_class_holds() -> None:
    layers = [nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), nn.GELU()) for _ in range(3)]
    seen = [weakref.ref(part) for layer in layers for part in layer.modules()]
    recollect.record(nn.Sequential(*layers), X, loss_fn=torch.sum, engine="graph")
    layers.clear()
    gc.collect()
    assert [type(found()).__name__ for found in seen if found() is not None] == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning", r"ignore:The \.grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("engine", ["tape", "graph", pytest.param("compile", marks=pytest.mark.long)])
def test_a_loss_that_is_kept_holds_no_model(engine: Any) -> None:
    """As in a loop over models, where the last loss is alive while the next one is made; autograd holds parameters only."""
    loop = Loop()
    attached = recollect.attach(loop.model, loop.optimizer, "90%", log=str, engine=engine)
    for _ in range(2):
        loss = loop.model(X).sum()
        loss.backward()
        loop.optimizer.step()
    seen = [*loop.seen, weakref.ref(attached)]
    del loop, attached
    gc.collect()
    assert [type(found()).__name__ for found in seen if found() is not None] == []
    del loss


def test_layers_that_their_hooks_hold_are_let_go_of() -> None:
    """Dynamo would keep the defaults of a hook's arguments, and with them the hook."""

    def hooked(loop: Loop) -> None:
        for layer in loop.model:
            layer[0].register_forward_hook(lambda _, given, made, layer=layer: made * len(layer))
        loop.attach("80%", engine="graph")

    seen, _ = outcome(hooked)
    gc.collect()
    assert [type(found()).__name__ for found in seen if found() is not None] == []


def of_traces() -> list[Any]:
    """Traced units, and the functions that Dynamo gave traces of recorded ones to."""
    gc.collect()
    alive = gc.get_objects()
    return [one for one in alive if type(one) is TracedUnit or getattr(one, "__qualname__", "") == RECORDERS]


RECORDERS = "_traced.<locals>.backend"


def test_traces_are_let_go_of() -> None:
    """Dynamo would keep both for good, as it does with the first function of a process."""

    def traced_loop() -> None:
        outcome(lambda loop: loop.attach("80%", steps=4, engine="graph"))

    traced_loop()
    before, number = of_traces(), GraphForward.num_traces
    traced_loop()
    assert GraphForward.num_traces > number
    assert [one for one in of_traces() if not any(one is old for old in before)] == []
