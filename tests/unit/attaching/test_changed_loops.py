"""What a loop changes between two steps is noticed: its optimizer, autocast, the size of a batch, or that it is let go of."""

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from blocks import Block, Computes
from recollect.engine.graph.graph_engine import GraphForward
from recollect.errors import BudgetTooSmallError, BudgetWarning
from recollect.measuring.meter import measure_peak, storage_bytes
from recollect.profile.events import ALLOC
from recollect.recording.optimizers import state_tensors
from residual_model import Model, attached_loop, step
from small_llama import llama_step


@pytest.mark.parametrize("is_held", [True, False], ids=["the old one is held", "the old one is gone"])
def test_steps_end_with_an_optimizer_that_takes_the_place_of_the_one_that_was_passed(is_held: bool) -> None:
    with attached_loop("1GiB") as (model, optimizer, attached):
        step(model, optimizer)
        held = optimizer if is_held else None
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            step(model, optimizer)
        assert attached.num_steps == 4
        assert held is not optimizer


def test_a_model_compiled_after_attach_is_recorded_to_the_end_of_the_step() -> None:
    """Leaving the compiler's wrapper switches off what was entered inside of it, such as the recording."""
    made = []
    for is_compiled in (False, True):
        torch.compiler.reset()
        with attached_loop("1GiB") as (model, optimizer, attached), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "recollect: torch.compile has no effect")
            called = torch.compile(model, backend="eager") if is_compiled else model
            for _ in range(3):
                called(torch.randn(16, 32)).backward()
                optimizer.step()
                optimizer.zero_grad()
            (planned,) = attached.planned
            made.append((planned.held_before, list(planned.profile.log.operands(ALLOC))))
    assert made[1] == made[0]


@pytest.mark.filterwarnings("ignore")  # the compiler's, of the loop
@pytest.mark.parametrize("is_whole", [False, True], ids=["the optimizer's step", "the whole step"])
def test_what_is_compiled_and_ends_a_recorded_step_leaves_no_mode_behind(is_whole: bool) -> None:
    """Leaving the compiler's wrapper switches on again what was switched off inside of it."""
    torch.compiler.reset()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())

    def whole_step(x: torch.Tensor) -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled_whole, compiled_end = (torch.compile(f, backend="eager") for f in (whole_step, optimizer.step))
    with recollect.attach(model, optimizer, "1GiB", log=lambda _: None) as attached:
        for rows in (16, 16, 32, 32):
            if is_whole:
                compiled_whole(torch.randn(rows, 32))
            else:
                model(torch.randn(rows, 32)).backward()
                compiled_end()
                optimizer.zero_grad()
        assert (attached.recorded_steps, attached.num_steps) == ([0, 2], 4)


@pytest.mark.filterwarnings("ignore")  # the compiler's, of the loop
def test_no_plan_for_a_compiled_step_is_an_error_of_that_step() -> None:
    torch.compiler.reset()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())

    @torch.compile(backend="eager")
    def whole_step(x: torch.Tensor) -> None:
        model(x).backward()
        optimizer.step()

    with recollect.attach(model, optimizer, "1KiB", log=lambda _: None):
        with pytest.raises(BudgetTooSmallError):
            whole_step(torch.randn(16, 32))
        torch.ones(2).sum()


def adapted(layer: nn.Linear) -> Computes:
    """Adds a product of two small matrices to a layer's result, as LoRA does."""
    down, up = nn.Linear(layer.in_features, 2), nn.Linear(2, layer.out_features)
    return Computes(lambda self, x: self.layer(x) + self.up(self.down(x)), layer=layer, down=down, up=up)


@pytest.mark.parametrize("num_before", [0, 1], ids=["before the first step", "later"])
def test_adapters_that_are_put_in_later_are_planned_with_their_optimizer(num_before: int) -> None:
    with attached_loop("1GiB") as (model, optimizer, attached):
        for _ in range(num_before):
            step(model, optimizer)
        model.requires_grad_(False)
        linears = [(m, n, c) for m in model.modules() for n, c in m.named_children() if isinstance(c, nn.Linear)]
        for module, name, child in linears:
            setattr(module, name, adapted(child))
        adapters = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
        for _ in range(3):
            step(model, adapters)
        assert attached.num_steps == num_before + 3
        assert attached.recorded_steps[0] == 0 and attached.recorded_steps[-1] >= num_before


class Averaging(torch.optim.SGD):
    """Copies the weights from its third step on, which no step that is tried out shows."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.num_steps += 1
        for parameter in self.param_groups[0]["params"] if self.num_steps > 2 else ():
            self.state[parameter].setdefault("average", parameter.detach().clone())


def test_state_that_an_optimizer_makes_later_is_in_all_plans_that_follow() -> None:
    with attached_loop("95%", Model(inner=1024), Averaging) as (model, optimizer, attached):
        for rows in (256, 256, 256, 264):
            step(model, optimizer, rows)
        assert attached.recorded_steps == [0, 3]
        measured = measure_peak(lambda: step(model, optimizer, rows=256), device="cpu")
        assert measured.peak_bytes <= (attached.budget_bytes or 0)


def test_the_state_of_an_optimizer_whose_place_was_taken_in_a_recorded_step_is_not_counted() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    with recollect.attach(model, optimizer, "1GiB", log=lambda _: None) as attached:
        for rows in (16, 32):
            optimizer = torch.optim.AdamW(model.parameters()) if attached.num_steps else optimizer
            step(model, optimizer, rows)
        persistent = attached.planned[-1].profile.persistent
        assert attached.recorded_steps == [0, 1]
        assert persistent["optimizer_state"] == storage_bytes(state_tensors(optimizer))
        assert "other_allocations" not in persistent


def test_a_layer_that_gets_a_forward_of_its_own_is_named_once() -> None:
    with attached_loop("1GiB") as (model, optimizer, _):
        step(model, optimizer)
        wrapped, layer = model.layers[0].forward, model.layers[1]
        model.layers[0].forward = lambda x: 2 * wrapped(x)  # which still runs the plan
        layer.forward = partial(nn.Sequential.forward, layer)
        with pytest.warns(
            BudgetWarning,
            match=r"^recollect: unit 'layers.1' was given a new forward after attach, partial: it runs without a plan, and "
            r"steps may exceed the budget\. Call attached\.remove\(\), and attach again\.$",
        ):
            step(model, optimizer)
        step(model, optimizer)


def test_an_optimizer_that_attach_does_not_know_is_named() -> None:
    model = Model()
    first, *others = model.parameters()
    with attached_loop("1GiB", model, lambda _: torch.optim.SGD([first], 0.1)) as (_, _, attached):
        unknown = torch.optim.Adam(others)
        with pytest.warns(
            BudgetWarning, match="Adam, which attach .* Model 4 times in a row without a step of SGD: no"
        ):
            for _ in range(4):
                step(model, unknown)
        assert attached.num_steps == 0


def test_a_step_under_autocast_has_a_plan_of_its_own() -> None:
    with attached_loop("1GiB") as (model, optimizer, attached):
        for is_on in (False, True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                loss = model(torch.randn(16, 32))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert attached.recorded_steps == [0, 1]


def test_a_handle_that_was_removed_watches_no_optimizer() -> None:
    with attached_loop("1GiB") as (model, optimizer, attached):
        attached.remove()
        # Else there would be a warning that the optimizer stepped and the model was not called.
        step(model, optimizer)
        assert attached.num_steps == 0


class Probed(Model):
    """Hooks itself in its first forward, as transformers does to return router logits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.layers[1]._forward_hooks:
            self.layers[1].register_forward_hook(lambda *_: None)
        return super().forward(x)


def test_hooks_that_the_recorded_call_makes_are_part_of_it_and_later_ones_are_not() -> None:
    with attached_loop("1GiB", Probed()) as (model, optimizer, attached):
        for _ in range(3):
            step(model, optimizer)
        assert attached.recorded_steps == [0]
        model.layers[2].register_forward_hook(lambda *_: None)
        for _ in range(2):
            step(model, optimizer)
        assert attached.recorded_steps == [0, 3]


# Loops that run inside the optimizer's step.


def test_optimizer_state_counts_where_the_step_runs_in_a_closure() -> None:
    model, batch = llama_step()
    optimizer = torch.optim.AdamW(model.parameters())

    def closure() -> torch.Tensor:
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        return loss

    with recollect.attach(model, optimizer, "100%", log=lambda _: None) as attached:
        for _ in range(2):
            optimizer.step(closure)
        state_bytes = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
        # In the first step the counts of steps, four bytes each, are made out of sight.
        for step in attached.planned:
            assert step.profile.persistent["optimizer_state"] == pytest.approx(state_bytes, rel=1e-3)


class TwoPasses(torch.optim.Optimizer):
    """Runs the closure and then an optimizer of its own, as sharpness-aware minimization does."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> None:
        closure()
        self.base.step()


def test_an_optimizer_that_steps_after_the_closure_of_a_known_one_ends_no_step() -> None:
    model = Model()
    optimizer = TwoPasses(model.parameters())
    with recollect.attach(model, optimizer, "100%", log=lambda _: None) as attached:
        for _ in range(4):
            optimizer.step(lambda: model(torch.randn(16, 32)).backward())
            optimizer.zero_grad()
        assert (attached.num_steps, attached.recorded_steps) == (4, [0])


HISTORY = 5


def losses(search: str | None, budget: str | None) -> tuple[list[Tensor], list[int], int]:
    """Train. -> the losses, the peaks of steps with a full history, and what was predicted for them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32) for _ in range(3)))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=HISTORY, line_search_fn=search)
    attached = None if budget is None else recollect.attach(model, optimizer, budget, log=lambda _: None)
    x, found, peaks = torch.randn(512, 32), [], []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        found.append(loss.detach())
        return loss

    for number in range(2 * HISTORY):
        if attached is None or number < HISTORY:
            optimizer.step(closure)
        else:
            peaks.append(measure_peak(lambda: optimizer.step(closure), device="cpu").peak_bytes)
    predicted_bytes = 0 if attached is None else attached.planned[-1].peak_bytes
    if attached is not None:
        attached.remove()
    return found, peaks, predicted_bytes


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_its_history_counts_from_the_first_plan_on(search: str | None) -> None:
    expected, _, _ = losses(search, None)
    found, peaks, predicted_bytes = losses(search, "90%")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert max(peaks) <= predicted_bytes


def test_steps_that_alternate_keep_their_traces() -> None:
    """A trace takes half a second: steps of two sizes with plans of their own must not make it again at each change."""
    traces = []
    with attached_loop("60%", Model(256), engine="graph") as (model, optimizer, attached):
        for _ in range(4):
            for rows in (512, 512, 96, 96):
                step(model, optimizer, rows)
            traces.append(GraphForward.num_traces)
        assert len(attached.planned) == 2
    assert traces[1:] == traces[1:2] * 3
