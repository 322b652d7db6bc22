"""Megatron's gradient buffers and fp32 copies, which its parameters name, count by name, and their gradients once."""

from typing import Any

import torch
from torch import nn

import recollect


def _collect(parameter: Any) -> None:
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def test_they_have_names_and_the_copies_gradients_are_gone_in_forward() -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
    ).bfloat16()
    parameters: list[Any] = list(model.parameters())
    for parameter in parameters:
        parameter.main_grad, parameter.main_param = torch.zeros_like(parameter), parameter.detach().float()
        parameter.register_post_accumulate_grad_hook(_collect)
    optimizer = torch.optim.SGD([parameter.main_param for parameter in parameters], lr=1e-3)
    attached = recollect.attach(model, optimizer, "95%", measure=True, log=lambda line: None)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(256, 64, dtype=torch.bfloat16)).sum().backward()
        for parameter in parameters:
            parameter.main_param.grad = parameter.main_grad.float()
        optimizer.step()
        for parameter in parameters:
            parameter.data.copy_(parameter.main_param)
    (planned,) = attached.planned
    nbytes = sum(parameter.nbytes for parameter in parameters)
    found = planned.profile.persistent
    assert [found[kind] for kind in ("parameters", "gradient_buffers", "master_weights")] == [
        nbytes,
        nbytes,
        2 * nbytes,
    ]
    assert planned.measured_bytes <= planned.peak_bytes < planned.measured_bytes + nbytes
