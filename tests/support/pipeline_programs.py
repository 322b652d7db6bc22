"""Two ranks of a real pipeline over gloo, each in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import recollect
from recollect.pipelines.schedule import PipelineSchedule, schedule_of

RANKS = 2
MICRO_BATCHES = 4
SHAPE = (16, 64)
SCHEDULES: dict[str, tuple[Any, int]] = {
    "GPipe": (ScheduleGPipe, 1),
    "1F1B": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
}
EXPECTED = {
    "GPipe": PipelineSchedule.gpipe(num_stages=RANKS, num_micro_batches=MICRO_BATCHES),
    "1F1B": PipelineSchedule.one_f_one_b(num_stages=RANKS, num_micro_batches=MICRO_BATCHES),
    "interleaved": PipelineSchedule.interleaved_1f1b(
        num_ranks=RANKS, stages_per_rank=2, num_micro_batches=MICRO_BATCHES
    ),
}


def stage_module(number: int) -> nn.Module:
    """A stage whose weights depend on its number only."""
    torch.manual_seed(number)
    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(3))
    return nn.Sequential(*layers)


def run(plans: dict[str, list[tuple[recollect.Plan, ...]]], folder: Path) -> list[dict[str, Any]]:
    """Run each schedule under each of its tuples of plans; return what each rank found, by schedule."""
    torch.multiprocessing.spawn(_rank, (plans, str(folder)), nprocs=RANKS)
    return [torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(RANKS)]


def _rank(rank: int, plans: dict[str, list[tuple[recollect.Plan, ...]]], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = {name: [_measured(rank, name, one) for one in several] for name, several in plans.items()}
    torch.save(found, Path(folder) / f"rank{rank}")
    dist.barrier()
    # The destructor of a gloo group may wait for a thread that waits for the interpreter's lock.
    os._exit(0)


def _measured(rank: int, name: str, plans: tuple[recollect.Plan, ...]) -> tuple[int, list[bytes], bool]:
    """Return the peak of the second step, the gradients, and whether torch's schedule reads as ours."""
    made, chunks = SCHEDULES[name]
    numbers = [rank + RANKS * chunk for chunk in range(chunks)]
    modules = [stage_module(number) for number in numbers]
    for number, module in zip(numbers, modules, strict=True):
        recollect.apply(module, plans[number])
    stages = [
        PipelineStage(module, number, RANKS * chunks, torch.device("cpu"))
        for number, module in zip(numbers, modules, strict=True)
    ]
    schedule = made(
        stages if chunks > 1 else stages[0], MICRO_BATCHES, loss_fn=lambda out, _target: out.square().mean()
    )
    torch.manual_seed(0)
    inputs = (torch.randn(MICRO_BATCHES * SHAPE[0], SHAPE[1]),) if rank == 0 else ()
    targets = {"target": torch.zeros(MICRO_BATCHES)} if rank == RANKS - 1 else {}

    def step() -> None:
        torch.manual_seed(5)
        for module in modules:
            module.zero_grad(set_to_none=True)
        schedule.step(*inputs, **targets, return_outputs=False)

    step()
    dist.barrier()
    found = recollect.measure_peak(step)
    gradients = [p.grad.numpy().tobytes() for module in modules for p in module.parameters() if p.grad is not None]
    return found.peak_bytes, gradients, schedule_of(schedule).ranks == EXPECTED[name].ranks
