"""Measure pipelines of four processes: one recompute setting for all stages against `plan_pipeline`, by schedule and budget.

    python benchmarks/pipelines.py        # about three minutes on two cores

Each process runs one rank over gloo with the schedules of `torch.distributed.pipelining`. Peaks are of the fullest rank, as
`measure_peak` sees them, in the third step, when torch has all its buffers; gradients are compared with those without
recompute, bit for bit. Times are predicted: four processes on two cores tell nothing about four devices.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import recollect
from flags import RESULTS, parse
from results_csv import Number, append

_RANKS = 4
_MICRO_BATCHES = 8
_WIDTH = 64
_LAYERS = 16
_SHAPE = (8, 64, _WIDTH)
_SCHEDULES: dict[str, tuple[Any, int]] = {
    "GPipe": (ScheduleGPipe, 1),
    "1F1B": (Schedule1F1B, 1),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, 2),
}
_BUDGETS = ("80%", "60%", "45%")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Where results go."""

    out: Path = RESULTS
    """Folder of `pipelines.csv`."""


@dataclass(frozen=True)
class Row:
    """A schedule under plans: what is predicted of the fullest rank and the step."""

    schedule: str
    plans: str
    pipeline: recollect.PipelinePlan


def stage_module(number: int, num_stages: int) -> nn.Module:
    """Return a stage: its share of the layers, with weights that depend on its number only."""
    torch.manual_seed(number)
    layers = (
        nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        for _ in range(_LAYERS // num_stages)
    )
    return nn.Sequential(*layers)


def stage_profiles(num_stages: int) -> list[recollect.Profile]:
    """Record each stage on one micro-batch."""
    profiles = []
    for number in range(num_stages):
        micro_batch = torch.randn(_SHAPE, requires_grad=number > 0)
        last = number == num_stages - 1
        profiles.append(
            recollect.record(
                stage_module(number, num_stages),
                micro_batch,
                loss_fn=(lambda out: out.square().mean()) if last else torch.sum,
                gradients="accumulated",
                holds_output=False,
            )
        )
    return profiles


def rows() -> list[Row]:
    """Plan all schedules and budgets, and predict the uniform settings."""
    found = []
    for name, (_, chunks) in _SCHEDULES.items():
        profiles = stage_profiles(_RANKS * chunks)
        if name == "GPipe":
            schedule = recollect.PipelineSchedule.gpipe(num_stages=_RANKS, num_micro_batches=_MICRO_BATCHES)
        else:
            schedule = recollect.PipelineSchedule.interleaved_1f1b(
                num_ranks=_RANKS, stages_per_rank=chunks, num_micro_batches=_MICRO_BATCHES
            )
        for setting in ("keep_all", "full"):
            plans = [recollect.classic_plan(profile, setting) for profile in profiles]
            found.append(Row(name, f"{setting} in all stages", recollect.predict_pipeline(profiles, schedule, plans)))
        for budget in _BUDGETS:
            found.append(Row(name, f"planned for {budget}", recollect.plan_pipeline(profiles, schedule, budget)))
    return found


def _rank(rank: int, rows: list[Row], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_RANKS)
    measured: list[tuple[int, bool]] = []
    # As bytes, which are no tensors that the meter would count.
    expected: dict[str, list[bytes]] = {}
    for row in rows:
        peak_bytes, gradients = _measured(rank, row)
        known = expected.setdefault(row.schedule, gradients)
        measured.append((peak_bytes, gradients == known))
    torch.save(measured, Path(folder) / f"rank{rank}")
    dist.barrier()
    # The destructor of a gloo group may wait for a thread that waits for the interpreter's lock.
    os._exit(0)


def _measured(rank: int, row: Row) -> tuple[int, list[bytes]]:
    """Run three steps of a rank; return the peak of the third, and its gradients."""
    made, chunks = _SCHEDULES[row.schedule]
    num_stages = _RANKS * chunks
    numbers = [rank + _RANKS * chunk for chunk in range(chunks)]
    modules = [stage_module(number, num_stages) for number in numbers]
    for number, module in zip(numbers, modules, strict=True):
        recollect.apply(module, row.pipeline.plans[number])
    stages = [
        PipelineStage(module, number, num_stages, torch.device("cpu"))
        for number, module in zip(numbers, modules, strict=True)
    ]
    schedule = made(
        stages if chunks > 1 else stages[0], _MICRO_BATCHES, loss_fn=lambda out, _target: out.square().mean()
    )
    torch.manual_seed(0)
    whole = torch.randn(_MICRO_BATCHES * _SHAPE[0], *_SHAPE[1:]) if rank == 0 else None
    target = torch.zeros(_MICRO_BATCHES) if num_stages - 1 in numbers else None

    def step() -> None:
        inputs = () if whole is None else (whole,)
        schedule.step(*inputs, **({} if target is None else {"target": target}), return_outputs=False)

    for number in range(3):
        torch.manual_seed(1000 + number)
        for module in modules:
            module.zero_grad(set_to_none=True)
        dist.barrier()
        if number < 2:
            step()
        else:
            found = recollect.measure_peak(step)
    gradients = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    return found.peak_bytes, [gradient.numpy().tobytes() for gradient in gradients]


def main() -> None:
    """Plan, measure, print and append."""
    flags = parse(Flags, __doc__)
    torch.set_num_threads(1)
    found = rows()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (found, folder), nprocs=_RANKS)
        ranks = [torch.load(Path(folder) / f"rank{rank}") for rank in range(_RANKS)]
    print(f"{'schedule':<18}{'plans':<24}{'predicted':>12}{'measured':>12}{'off':>8}{'step':>8}  gradients")
    numbers: list[Number] = []
    for index, row in enumerate(found):
        measured = [rank[index] for rank in ranks]
        off = max(
            (seen - predicted) / predicted
            for (seen, _), predicted in zip(measured, row.pipeline.peaks_bytes, strict=True)
        )
        fullest = max(seen for seen, _ in measured)
        is_equal = all(equal for _, equal in measured)
        print(
            f"{row.schedule:<18}{row.plans:<24}{row.pipeline.peak_bytes:>12,}{fullest:>12,}{off:>+8.1%}"
            f"{row.pipeline.slowdown:>+8.1%}  {'equal' if is_equal else 'DIFFERENT'}"
        )
        what = f"{row.schedule}, {row.plans}"
        numbers += [
            Number("predicted_peak", "bytes", what, row.pipeline.peak_bytes),
            Number("measured_peak", "bytes", what, fullest),
            Number("most_above_prediction", "fraction", what, off),
            Number("predicted_slowdown", "fraction", what, row.pipeline.slowdown),
            Number("gradients_equal", "bool", what, float(is_equal)),
        ]
    append(flags.out / "pipelines.csv", numbers, {"device": "cpu"})


if __name__ == "__main__":
    main()
