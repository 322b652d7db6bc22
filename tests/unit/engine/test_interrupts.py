"""Ctrl-C or an error in a unit's own checkpoint: the program gets it, nothing stays behind, and the next step is exact."""

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import recollect
from blocks import Block
from recollect._torch_private import num_dispatch_modes, top_saved_tensors_hooks
from recollect.engine import tape_mode
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan

ROWS = torch.linspace(-1, 1, 8 * 4).reshape(8, 4)


def gradients(model: nn.Module, run: Any = None) -> list[torch.Tensor]:
    model.zero_grad()
    (run or model)(ROWS).square().sum().backward()
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


class Checkpointed(Block):
    """A block that recomputes by itself, and runs out of memory when it is told to."""

    options: dict[str, Any]
    is_full = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            out = super(Checkpointed, self).forward(x)
            if self.is_full:
                raise torch.OutOfMemoryError
            return out

        out: torch.Tensor = checkpoint(run, x, use_reentrant=False, **self.options)
        return out


@pytest.mark.parametrize("is_selective", [False, True])
def test_an_error_inside_a_units_own_checkpoint_leaves_nothing_behind(is_selective: bool) -> None:
    torch.manual_seed(0)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    first, last = Checkpointed(4), Checkpointed(4)
    first.options = last.options = {"context_fn": contexts} if is_selective else {}
    model = nn.Sequential(first, last)
    expected = gradients(model)
    found = partial(gradients, model, partial(recollect.checkpoint, model))
    last.is_full = True
    with pytest.raises(torch.OutOfMemoryError):
        found()
    gc.collect()
    assert (num_dispatch_modes(), top_saved_tensors_hooks()) == (0, None)
    last.is_full = False
    assert all(torch.equal(one, other) for one, other in zip(found(), expected, strict=True))
