"""Ctrl-C while a unit runs: it is what the program gets, nothing stays behind, and the next step is exact."""

from typing import Any

import pytest
import torch
from torch import nn

import recollect
from blocks import Block
from recollect._torch_private import num_dispatch_modes, top_saved_tensors_hooks
from recollect.engine import tape_mode
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan

ROWS = torch.linspace(-1, 1, 8 * 4).reshape(8, 4)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(ROWS).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    "changes", ["push_dispatch_mode", "pop_dispatch_mode", "push_saved_tensors_hooks", "pop_saved_tensors_hooks"]
)
def test_interrupts_between_a_change_of_a_stack_and_its_note(changes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(4), Block(4))
    expected = gradients(model)
    graph = recollect.record(model, ROWS, loss_fn=torch.sum).graphs[0]
    actions = {value.name: "recompute" if value.name == "gelu" else "keep" for value in graph.values}
    with recollect.apply(model, Plan({path: UnitPlan(actions) for path in "01"})):
        for _ in range(3):  # Modules without values to drop run unwatched from here on.
            gradients(model)
        change, calls = getattr(tape_mode, changes), []

        def interrupted(*args: Any) -> Any:
            found = change(*args)
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return found

        with monkeypatch.context() as patch:
            patch.setattr(tape_mode, changes, interrupted)
            with pytest.raises(KeyboardInterrupt):
                gradients(model)
        assert (num_dispatch_modes(), top_saved_tensors_hooks()) == (0, None)
        found = gradients(model)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
