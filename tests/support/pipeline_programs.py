"""Real pipelines under `torch.distributed.pipelining`: each rank over gloo, in a process of its own."""

from __future__ import annotations

import fcntl
import functools
import gc
import os
import time
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
from recollect.costs.hardware import Hardware
from recollect.engine import tape
from recollect.pipelines.schedule import BACKWARD, FORWARD, INPUT, WEIGHT, PipelineAction, PipelineSchedule, schedule_of

SCHEDULES: Final[dict[str, tuple[Any, int]]] = {
    "GPipe": (ScheduleGPipe, 1),
    "1F1B": (Schedule1F1B, 1),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, 2),
    "interleaved zero bubble": (ScheduleInterleavedZeroBubble, 2),
    "ZBV": (ScheduleZBVZeroBubble, 2),
    "DualPipeV": (ScheduleDualPipeV, 2),
}
"""torch's classes, with the number of stages on each rank."""
if torch.__version__ < "2.12":
    # Sends the shapes of an output to the next stage on the same rank, too, which gloo refuses.
    del SCHEDULES["ZBV"], SCHEDULES["DualPipeV"]
SPLIT: Final = tuple(name for name in ("interleaved zero bubble", "ZBV", "DualPipeV") if name in SCHEDULES)
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
        num_timed: steps whose actions are timed, each after one of the first job.
        keeps_gradients: gradients are zeroed in place between steps, as predictions count them, and not made anew.
        return_outputs: steps return what the last stage makes, as torch's do by default.
    """

    num_ranks: int
    num_micro_batches: int
    shape: tuple[int, ...]
    stage_module: Callable[[int, int], nn.Module]
    hardware: Hardware | None = None
    """What times are modelled for; None to measure them."""
    num_timed: int = 0
    keeps_gradients: bool = False
    return_outputs: bool = False

    def num_stages(self, schedule: str) -> int:
        return self.num_ranks * SCHEDULES[schedule][1]

    def schedule(self, name: str) -> PipelineSchedule:
        dist.init_process_group("fake", rank=0, world_size=self.num_ranks)
        try:
            modules = [nn.Identity() for _ in range(SCHEDULES[name][1])]
            found = schedule_of(_torch_schedule(self, name, _torch_stages(self, name, 0, modules)))
            return replace(found, return_outputs=self.return_outputs)
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
    plans: tuple[recollect.Plan | tuple[recollect.Plan, ...], ...]
    how: How = "plans"
    stage_module: Callable[[int, int], nn.Module] | None = None
    """Makes the stages, if not the program."""


@dataclass(frozen=True)
class Ran:
    """What a rank found.

    Attributes:
        peak_bytes: in the last step.
        is_equal: whether its gradients are those of the schedule's first job.
        timed: processor seconds of each action of each timed step.
        first_timed: those of the first job's steps, each right before the one in `timed`.
    """

    peak_bytes: int
    is_equal: bool = True
    timed: tuple[dict[PipelineAction, float], ...] = ()
    first_timed: tuple[dict[PipelineAction, float], ...] = ()


def loss_of(output: torch.Tensor, _target: torch.Tensor | None = None) -> torch.Tensor:
    """The loss of the last stage."""
    return output.square().mean()


def run(program: Program, jobs: Sequence[Job], folder: Path, *, start_method: str = "spawn") -> list[list[Ran]]:
    """Run jobs one after the other, several steps of each; return what each rank found of each."""
    given = (program, list(jobs), str(folder))
    torch.multiprocessing.start_processes(_rank, given, nprocs=program.num_ranks, start_method=start_method)
    return [torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(program.num_ranks)]


def _rank(rank: int, program: Program, jobs: list[Job], folder: str) -> None:
    gc.freeze()  # what was imported is there for good: the meter need not look at it
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=program.num_ranks)
    found = []
    # As bytes, which are no tensors that the meter would count.
    expected: dict[object, list[bytes]] = {}
    turn = _Turn(Path(folder) / "turn")
    for job in jobs:
        running = _Running(rank, program, job, turn)
        timed = running.timed_after(_Running(rank, program, jobs[0], turn)) if program.num_timed else ((), ())
        # A stage that is timed refers to itself, so that other jobs' modules would stay for a while.
        gc.collect()
        peak_bytes, gradients = running.measured()
        # Other stages have other weights.
        key = job.schedule, job.stage_module
        if job.stage_module is not None and key not in expected:
            plain = replace(job, plans=tuple(recollect.Plan({}) for _ in job.plans), how="plans")
            expected[key] = _Running(rank, program, plain, turn).measured()[1]
        found.append(Ran(peak_bytes, gradients == expected.setdefault(key, gradients), *timed))
    torch.save(found, Path(folder) / f"rank{rank}")
    dist.barrier()
    # The destructor of a gloo group may wait for a thread that waits for the interpreter's lock.
    os._exit(0)


def _numbers(program: Program, schedule: str, rank: int) -> list[int]:
    num_stages = program.num_stages(schedule)
    if schedule in _V_SHAPED:
        return [rank, num_stages - 1 - rank]
    return list(range(rank, num_stages, program.num_ranks))


def _torch_stages(program: Program, name: str, rank: int, modules: Sequence[nn.Module]) -> list[PipelineStage]:
    numbers, num_stages = _numbers(program, name, rank), program.num_stages(name)
    return [
        PipelineStage(module, number, num_stages, torch.device("cpu"))
        for number, module in zip(numbers, modules, strict=True)
    ]


def _torch_schedule(program: Program, name: str, stages: list[PipelineStage]) -> Any:
    made, chunks = SCHEDULES[name]
    return made(stages if chunks > 1 else stages[0], program.num_micro_batches, loss_fn=loss_of)


class _Turn:
    """Lets one process of the machine compute at a time, so that the times of its actions are not those of shared cores."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_CREAT | os.O_RDWR)

    def __enter__(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)

    def __exit__(self, *_error: object) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)


class _Running:
    """A job on one rank."""

    def __init__(self, rank: int, program: Program, job: Job, turn: _Turn) -> None:
        numbers = _numbers(program, job.schedule, rank)
        tape.asks_again = (lambda: False) if job.how == "plans, recipes used up" else _ASKS_AGAIN
        stage_module, num_stages = job.stage_module or program.stage_module, program.num_stages(job.schedule)
        self.program = program
        self.modules = [stage_module(number, num_stages) for number in numbers]
        stages = _torch_stages(program, job.schedule, rank, self.modules)
        self.turn, self.seconds = turn, dict[PipelineAction, float]()
        for number, module, stage in zip(numbers, self.modules, stages, strict=True):
            if job.how == "torch.utils.checkpoint":
                for name, layer in module.named_children():
                    setattr(module, name, checkpoint_wrapper(layer))
            else:
                recollect.apply(module, job.plans[number]).follow(stage)
            if program.num_timed:
                self._time(stage)
        self.schedule = _torch_schedule(program, job.schedule, stages)
        torch.manual_seed(0)
        first, *rest = program.shape
        self.inputs = (torch.randn(program.num_micro_batches * first, *rest),) if 0 in numbers else ()
        self.targets = {"target": torch.zeros(program.num_micro_batches)} if num_stages - 1 in numbers else {}

    def _time(self, stage: PipelineStage) -> None:
        """Have a stage note what each of its actions takes of this thread, in which the CPU's backward runs, too."""
        methods = {FORWARD: "forward_one_chunk", BACKWARD: "backward_one_chunk", WEIGHT: "backward_weight_one_chunk"}
        for kind, name in methods.items():
            vars(stage)[name] = functools.partial(self._timed, stage.stage_index, kind, getattr(stage, name))

    def _timed(
        self, stage: int, kind: str, run: Callable[..., Any], micro_batch: int, *args: Any, **kwargs: Any
    ) -> Any:
        if kind == BACKWARD and not kwargs.get("full_backward", True):
            kind = INPUT
        with self.turn:
            begin = time.thread_time()
            result = run(micro_batch, *args, **kwargs)
            self.seconds[PipelineAction(stage, kind, micro_batch)] = time.thread_time() - begin
        return result

    def step(self) -> None:
        self.schedule.step(*self.inputs, **self.targets, return_outputs=self.program.return_outputs)

    def prepare(self) -> None:
        """Make the next step like every other, and wait for all ranks."""
        torch.manual_seed(1000)
        for module in self.modules:
            module.zero_grad(set_to_none=not self.program.keeps_gradients)
        dist.barrier()

    def timed_after(
        self, first: _Running
    ) -> tuple[tuple[dict[PipelineAction, float], ...], tuple[dict[PipelineAction, float], ...]]:
        """Return what each action takes in the timed steps of this job, and in those of the first one in between."""
        timed, first_timed = [], []
        for number in range(2 + self.program.num_timed):
            for running, steps in ((first, first_timed), (self, timed)):
                running.prepare()
                running.seconds = {}
                running.step()
                # The first two steps learn.
                if number >= 2:
                    steps.append(running.seconds)
        return tuple(timed), tuple(first_timed)

    def measured(self) -> tuple[int, list[bytes]]:
        """Run two steps to learn, and one whose peak counts; return it and the gradients."""
        for _ in range(2):
            self.prepare()
            self.step()
        self.prepare()
        found = recollect.measure_peak(self.step)
        gradients = [p.grad for module in self.modules for p in module.parameters() if p.grad is not None]
        return found.peak_bytes, [gradient.numpy().tobytes() for gradient in gradients]


_ASKS_AGAIN: Final = tape.asks_again
