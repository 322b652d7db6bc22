"""What a recording says that its step leaves alive, against all tensors that there are before it and after it.

On CUDA whatever else the allocator has grown by counts as workspaces of libraries, for good.
"""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from recollect.costs.op_costs import MeasuredCosts
from recollect.measuring.meter import storage_bytes
from recollect.recording.find_units import find_units
from recollect.recording.optimizers import state_tensors
from recollect.recording.step_recording import StepRecording
from small_llama import batch_of, llama

CPU = torch.device("cpu")


def live_bytes() -> int:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return storage_bytes([*tensors, *gradients])


def recorded(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> tuple[int, int]:
    recording = StepRecording(model, find_units(model), MeasuredCosts(CPU), CPU)
    known = {"parameters": list(model.parameters()), "optimizer_state": state_tensors(optimizer)}
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    before_bytes = live_bytes() - storage_bytes(gradients)
    recording.start(known, gradients=gradients)
    del known, gradients
    held = step()
    recording.stop(optimizer)
    left_bytes = live_bytes() - before_bytes
    del held
    return recording.left_bytes, left_bytes


@pytest.mark.parametrize("frees", [False, True], ids=["adds to gradients", "frees gradients"])
def test_all_that_a_step_leaves_alive_is_known(frees: bool) -> None:
    """Optimizer state that is made, gradients that come and go, an output that is held, and what the recording copies."""
    model, batch = llama(), batch_of()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> object:
        output = model(**batch)
        if frees:
            optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        return output

    num_parameters = len(list(model.parameters()))
    for has_state in (False, True):
        said_bytes, left_bytes = recorded(model, optimizer, step)
        # Counts of steps, four bytes each, are made out of sight.
        assert 0 <= left_bytes - said_bytes <= (0 if has_state else 4 * num_parameters), has_state
        assert left_bytes > (1 if has_state else 3) * storage_bytes(model.parameters())
