"""Loops of two processes that train together, over gloo: Accelerate with DDP and FSDP2, and ZeRO-1 by hand.

The steps of a trained model are measured by a meter of its own; see `metered_processes.py`.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import recollect
from hugging_face_trainers import llama, shard_on_the_cpu, texts
from metered_trainers import NUM_STEPS, SHARDED_STEPS, Case, StepPeaks

RANK = int(os.environ.get("RANK", "0"))
os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"})


def batches(steps: int) -> Iterator[dict[str, torch.Tensor]]:
    data = texts(8 * steps, 64)
    for number in range(steps):
        rows = data[8 * number + 4 * RANK :][:4]
        yield {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}


def _train(
    model: nn.Module,
    optimizer: Any,
    budget: int | str | None,
    peaks: StepPeaks,
    backward: Callable[[torch.Tensor], object],
    steps: int,
) -> int:
    attached = None if budget is None else recollect.attach(model, optimizer, budget, log=lambda line: None)
    torch.manual_seed(3 + RANK)
    peaks.begin()
    for batch in batches(steps):
        backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        peaks.end()
    if attached is None:
        return 0
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, dict(attached.planned[-1].plan.units))
    assert all(plan == plans[0] for plan in plans), "two plans"
    attached.remove()
    return len(attached.recorded_steps)


def _accelerated(*, shards: bool) -> Case:
    def run(budget: int | str | None, peaks: StepPeaks) -> tuple[nn.Module, int]:
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True)
        if shards:
            shard_on_the_cpu(accelerator)
        assert accelerator.num_processes == int(os.environ["WORLD_SIZE"])
        model = llama().train()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        assert isinstance(model, FSDPModule if shards else DistributedDataParallel)
        steps = SHARDED_STEPS if shards else NUM_STEPS
        recorded = _train(model, optimizer, budget, peaks, accelerator.backward, steps)
        return model.module if isinstance(model, DistributedDataParallel) else model, recorded

    return run


def _replicated(budget: int | str | None, peaks: StepPeaks) -> tuple[nn.Module, int]:
    """DDP and ZeRO-1, as PyTorch's documentation has them."""
    PartialState(cpu=True)
    model = DistributedDataParallel(llama().train(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    recorded = _train(model, optimizer, budget, peaks, torch.Tensor.backward, NUM_STEPS)
    return model.module, recorded


CASES: dict[str, Case] = {
    "DDP": _accelerated(shards=False),
    "FSDP2": _accelerated(shards=True),
    "ZeRO-1, bucket views": _replicated,
}
