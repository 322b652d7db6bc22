"""A loop may run forward and backward inside the optimizer's step, in a closure, as L-BFGS has it."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from blocks import Block
from recollect.measuring.meter import measure_peak
from residual_model import Model
from small_llama import llama_step


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
