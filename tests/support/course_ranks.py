"""Loops of two processes that train together over gloo, and whose steps change their course in one of them, or in both.

The steps of a trained model are measured by a meter of its own; see `metered_processes.py`.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import recollect
from loops.courses import Net
from loops.loop import text_batches
from metered_trainers import Case, StepPeaks

RANK = int(os.environ.get("RANK", "0"))
os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"})

# Enough for the processes to have stopped asking each other in each step, and to ask again after the course has changed.
NUM_STEPS = 40
_DATA = text_batches(4, 64)
_FIRST_CHANGE = 12


def _deeper_in_one(number: int) -> int:
    return 2 if RANK == 1 and number >= _FIRST_CHANGE and number % 3 == 0 else 1


def _deeper_in_both(number: int) -> int:
    return 2 if number >= _FIRST_CHANGE and number % 3 == 0 else 1


def _case(loops: Callable[[int], int], *, shards: bool = False) -> Case:
    def run(budget: int | str | None, peaks: StepPeaks) -> tuple[nn.Module, int]:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = Net()
        if shards:
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        trained: Any = model if shards else DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        attached = None if budget is None else recollect.attach(trained, optimizer, budget, log=lambda line: None)
        peaks.begin()
        for number in range(NUM_STEPS):
            batch = _DATA(2 * number + RANK)
            trained(**batch, loops=loops(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks.end()
        if attached is None:
            return model, 0
        recorded: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(recorded, attached.recorded_steps)
        assert recorded[0] == recorded[1], recorded
        attached.remove()
        return model, len(attached.recorded_steps)

    return run


CASES: dict[str, Case] = {
    "deeper in one, DDP": _case(_deeper_in_one),
    "deeper in both, FSDP2": _case(_deeper_in_both, shards=True),
}
