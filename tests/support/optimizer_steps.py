"""Steps of optimizers: the gradients that a real one takes, and the peak of a predicted one."""

import torch
from torch import nn

from recollect.profile import events
from recollect.recording.optimizer_step import OptimizerStep

CPU = torch.device("cpu")


def give_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None


def peak_bytes(step: OptimizerStep) -> int:
    alive: dict[int, int] = {}
    peak = 0
    for code, number, *size in step.events:
        if code == events.ALLOC:
            alive[number] = size[0]
            peak = max(peak, sum(alive.values()))
        else:
            del alive[number]
    assert not alive
    return peak
