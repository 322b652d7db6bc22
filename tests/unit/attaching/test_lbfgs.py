"""L-BFGS runs the model inside its step, and holds more from step to step until its history is full."""

import pytest
import torch
from torch import Tensor, nn

import recollect
from blocks import Block
from recollect.measuring.meter import measure_peak

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
