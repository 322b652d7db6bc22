"""Recording models whose parameters are DTensors, on the fake process group, which is global and so in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import recollect
from blocks import Stack, built

warnings.simplefilter("error")
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
torch.set_num_threads(1)
dist.init_process_group("fake", rank=0, world_size=2)
data = torch.randn(8, 16)


def record(model, **settings):
    return recollect.record(model, data, loss_fn=torch.sum, **settings)


def names(profile):
    return [value.name for graph in profile.graphs for value in graph.values]


def split(model):
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


# What DTensors try on fake tensors before an op's first run is no part of the step.
model = split(built(Stack))
first, second = record(model), record(model)
assert names(first) == names(second), (names(first), names(second))
assert not any("unseen" in name for name in names(first)), names(first)
plan = recollect.classic_plan(first, "full")

# FSDP2 keeps its own parameters, and with them those of the optimizer.
model = built(Stack)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
parameters = list(model.parameters())
ran = []
for parameter in parameters:
    parameter.register_post_accumulate_grad_hook(ran.append)
resize = torch.UntypedStorage.resize_
record(model, gradients="accumulated")
assert torch.UntypedStorage.resize_ is resize
assert not ran, "hooks ran"
model(data).sum().backward()
assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
assert all(parameter.grad is not None for parameter in parameters), "gradients went elsewhere"
assert len(ran) == len(parameters), "hooks are gone"
print("all well")
"""


def test_sharded_models_are_recorded_as_they_run() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.stdout.strip().endswith("all well"), done.stderr[-3000:]
