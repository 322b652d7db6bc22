"""`attach` on a device: a loop keeps its weights and its budget, and what the device holds besides is counted once."""

from typing import Any

import pytest
import torch

import recollect
from budgets import budgets
from device_models import decoder
from device_steps import RecordProperty
from gradients import assert_same_gradients
from recollect.errors import BudgetWarning
from recollect.planning.choose import Planner
from training_peaks import peaks


class Loop:
    """A plain loop with AdamW, the same each time."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        case = decoder("llama", device)
        self.model, self.batch = case.model(), case.data()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            loss = self.model(**self.batch).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def attach(self, budget: int | str) -> Any:
        return recollect.attach(self.model, self.optimizer, budget, log=lambda line: None)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


def _half(profile: recollect.Profile) -> int:
    """The budget between the least peak and that of keeping everything."""
    (budget_bytes,) = budgets(Planner(profile), (0.5,))
    return budget_bytes


def test_weights_are_the_same(device: torch.device) -> None:
    plain, attached = Loop(device), Loop(device)
    plain.train(4)
    with attached.attach("100%") as handle:
        attached.train(2)
    with attached.attach(_half(handle.planned[0].profile)):
        attached.train(2)
    assert_same_gradients(plain.weights(), attached.weights())


def test_what_runs_again_is_measured(device: torch.device) -> None:
    loop = Loop(device)
    with loop.attach("100%") as handle:
        loop.train(2)
    with loop.attach(_half(handle.planned[0].profile)) as handle:
        loop.train(12)
    assert 0 < handle.numbers["measured_slowdown"] < 10
    assert f"slowdown {handle.numbers['measured_slowdown']:+.1%}: of " in handle.report()


def test_budget_holds_and_is_used(device: torch.device, record_property: RecordProperty) -> None:
    """Whether the optimizer's state was made in the recorded step, or was there already."""
    loop = Loop(device)
    with loop.attach("100%") as first:
        loop.train(2)
    budget_bytes = _half(first.planned[0].profile)
    with loop.attach(budget_bytes) as handle:
        loop.train(1)
        allocated, requested, _ = peaks(lambda: loop.train(3), [loop.model, loop.batch, loop.optimizer], device)
    assert first.recorded_steps == handle.recorded_steps == [0]
    predicted = handle.plan.predicted_peak_bytes
    for name, nbytes in (("budget", budget_bytes), ("predicted", predicted), ("allocated", allocated)):
        record_property(name, nbytes)
    assert 0.9 * predicted <= allocated <= budget_bytes
    assert requested <= predicted <= budget_bytes
    made, known = (one.planned[0].profile.persistent for one in (first, handle))
    assert made["optimizer_state"] == pytest.approx(known["optimizer_state"], rel=1e-2)
    assert made.get("other_allocations", 0) == pytest.approx(known.get("other_allocations", 0), abs=0.05 * predicted)


def test_every_step_is_measured_by_the_devices_own_count(cuda: torch.device) -> None:
    loop = Loop(cuda)
    with loop.attach("100%") as first:
        loop.train(1)
    with loop.attach(_half(first.planned[0].profile)) as handle:
        loop.train(3)
        (step,) = handle.planned
        assert step.measured_bytes == torch.cuda.max_memory_allocated(cuda)
        assert step.measured_bytes <= step.budget_bytes and ": held" in handle.report()


def test_what_is_allocated_later_is_noticed_once(cuda: torch.device) -> None:
    loop = Loop(cuda)
    with loop.attach("100%") as first:
        loop.train(1)
    half_bytes, plain_bytes = _half(first.planned[0].profile), first.plan.predicted_peak_bytes or 0
    with loop.attach(half_bytes) as handle:
        loop.train(2)
        # As much as leaves plans that fit.
        other = torch.empty((plain_bytes - half_bytes) // 2, dtype=torch.uint8, device=cuda)
        with pytest.warns(BudgetWarning, match="the device held .* at its peak, .* more than was planned for"):
            loop.train(1)
        loop.train(4)
        assert handle.recorded_steps == [0, 3]
        assert handle.planned[-1].profile.persistent["other_allocations"] >= other.nbytes
