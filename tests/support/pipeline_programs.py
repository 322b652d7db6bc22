"""Real pipelines under `torch.distributed.pipelining`: each rank over gloo, in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import recollect
from recollect.engine import tape
from recollect.pipelines.schedule import PipelineSchedule, schedule_of

SCHEDULES: Final[dict[str, tuple[Any, int]]] = {
    "GPipe": (ScheduleGPipe, 1),
    "1F1B": (Schedule1F1B, 1),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, 2),
    "interleaved zero bubble": (ScheduleInterleavedZeroBubble, 2),
    "ZBV": (ScheduleZBVZeroBubble, 2),
    "DualPipeV": (ScheduleDualPipeV, 2),
}
"""torch's classes, with the number of stages on each rank."""
SPLIT: Final = ("interleaved zero bubble", "ZBV", "DualPipeV")
"""Those that split backward in two."""
_V_SHAPED: Final = ("ZBV", "DualPipeV")

How = Literal["plans", "plans, recipes used up", "torch.utils.checkpoint"]
"""How a rank recomputes: as recollect does, as it did when a backward that keeps its graph used recipes up, or by PyTorch."""


@dataclass(frozen=True)
class Program:
    """A pipeline to run.

    Attributes:
        stage_module: makes a stage of (number, number of stages), with weights that depend on these only.
        shape: of a micro-batch.
    """

    num_ranks: int
    num_micro_batches: int
    shape: tuple[int, ...]
    stage_module: Callable[[int, int], nn.Module]
    hardware: str | None = None
    """What times are modelled for; None to measure them."""

    def num_stages(self, schedule: str) -> int:
        """Number of stages, those of all ranks together."""
        return self.num_ranks * SCHEDULES[schedule][1]

    def schedule(self, name: str) -> PipelineSchedule:
        """Return what torch's schedule runs on each rank."""
        dist.init_process_group("fake", rank=0, world_size=self.num_ranks)
        try:
            modules = [nn.Identity() for _ in range(SCHEDULES[name][1])]
            return schedule_of(_torch_schedule(self, name, 0, modules))
        finally:
            dist.destroy_process_group()

    def profiles(self, name: str, *, split_backward: bool = False) -> list[recollect.Profile]:
        """Record each stage on one micro-batch; those in the middle that have as many layers, and are alike, once."""
        num_stages = self.num_stages(name)
        known: dict[tuple[bool, bool, int], recollect.Profile] = {}
        made = []
        for number in range(num_stages):
            place = number == 0, number == num_stages - 1, len(list(self.stage_module(number, num_stages).children()))
            if place not in known:
                known[place] = recollect.record(
                    self.stage_module(number, num_stages),
                    torch.randn(self.shape, requires_grad=number > 0),
                    loss_fn=loss_of if place[1] else torch.sum,
                    gradients="accumulated",
                    holds_output=False,
                    split_backward=split_backward,
                    fake=self.hardware is not None,
                    hardware=self.hardware,
                )
            made.append(known[place])
        return made


@dataclass(frozen=True)
class Job:
    """One way to run a program: its schedule, and the plans of its stages."""

    schedule: str
    plans: tuple[recollect.Plan, ...]
    how: How = "plans"
    stage_module: Callable[[int, int], nn.Module] | None = None
    """Makes the stages, if not the program."""


@dataclass(frozen=True)
class Ran:
    """What a rank found: its peak in the last step, and whether its gradients are those of the schedule's first job."""

    peak_bytes: int
    is_equal: bool
    gradient_bytes: int


def loss_of(output: torch.Tensor, _target: torch.Tensor | None = None) -> torch.Tensor:
    """The loss of the last stage."""
    return output.square().mean()


def run(program: Program, jobs: Sequence[Job], folder: Path, *, num_steps: int = 2) -> list[list[Ran]]:
    """Run jobs one after the other, several steps of each; return what each rank found of each."""
    torch.multiprocessing.spawn(_rank, (program, list(jobs), str(folder), num_steps), nprocs=program.num_ranks)
    return [torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(program.num_ranks)]


def _rank(rank: int, program: Program, jobs: list[Job], folder: str, num_steps: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=program.num_ranks)
    found = []
    # As bytes, which are no tensors that the meter would count.
    expected: dict[str, list[bytes]] = {}
    for job in jobs:
        peak_bytes, gradients = _measured(rank, program, job, num_steps)
        if job.stage_module is not None:
            # Other stages have other weights.
            plain = replace(job, plans=tuple(recollect.Plan({}) for _ in job.plans), how="plans")
            _, own = _measured(rank, program, plain, num_steps)
        else:
            own = expected.setdefault(job.schedule, gradients)
        is_equal = gradients == own
        found.append(Ran(peak_bytes, is_equal, sum(map(len, gradients))))
    torch.save(found, Path(folder) / f"rank{rank}")
    dist.barrier()
    # The destructor of a gloo group may wait for a thread that waits for the interpreter's lock.
    os._exit(0)


def _numbers(program: Program, schedule: str, rank: int) -> list[int]:
    """Return the stages of a rank."""
    num_stages = program.num_stages(schedule)
    if schedule in _V_SHAPED:
        return [rank, num_stages - 1 - rank]
    return list(range(rank, num_stages, program.num_ranks))


def _torch_schedule(program: Program, name: str, rank: int, modules: Sequence[nn.Module]) -> Any:
    made, chunks = SCHEDULES[name]
    numbers, num_stages = _numbers(program, name, rank), program.num_stages(name)
    stages = [
        PipelineStage(module, number, num_stages, torch.device("cpu"))
        for number, module in zip(numbers, modules, strict=True)
    ]
    return made(stages if chunks > 1 else stages[0], program.num_micro_batches, loss_fn=loss_of)


def _measured(rank: int, program: Program, job: Job, num_steps: int) -> tuple[int, list[bytes]]:
    """Run the steps of a rank; return the peak of the last, and its gradients."""
    numbers, num_stages = _numbers(program, job.schedule, rank), program.num_stages(job.schedule)
    tape.asks_again = (lambda: False) if job.how == "plans, recipes used up" else _ASKS_AGAIN
    stage_module = job.stage_module or program.stage_module
    modules = [stage_module(number, num_stages) for number in numbers]
    for number, module in zip(numbers, modules, strict=True):
        if job.how == "torch.utils.checkpoint":
            for name, layer in module.named_children():
                setattr(module, name, checkpoint_wrapper(layer))
        else:
            recollect.apply(module, job.plans[number])
    schedule = _torch_schedule(program, job.schedule, rank, modules)
    torch.manual_seed(0)
    first, *rest = program.shape
    inputs = (torch.randn(program.num_micro_batches * first, *rest),) if 0 in numbers else ()
    targets = {"target": torch.zeros(program.num_micro_batches)} if num_stages - 1 in numbers else {}

    def step() -> None:
        schedule.step(*inputs, **targets, return_outputs=False)

    for number in range(num_steps):
        torch.manual_seed(1000 + number)
        for module in modules:
            module.zero_grad(set_to_none=True)
        dist.barrier()
        if number < num_steps - 1:
            step()
        else:
            found = recollect.measure_peak(step)
    gradients = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    return found.peak_bytes, [gradient.numpy().tobytes() for gradient in gradients]


_ASKS_AGAIN: Final = tape.asks_again
