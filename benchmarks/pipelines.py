"""Measure pipelines of four processes: one recompute setting for all stages against `plan_pipeline`, by schedule and budget.

    python benchmarks/pipelines.py                                # all schedules: about ten minutes on two cores
    python benchmarks/pipelines.py --schedules ZBV DualPipeV      # some of them

Each process runs one rank over gloo with the schedules of `torch.distributed.pipelining`. Peaks are of the fullest rank, as
`measure_peak` sees them, in the third step, when torch has all its buffers; gradients are compared with those without
recompute, bit for bit. Where backward is split in two, full recompute runs in three ways: as recollect does it, with recipes
that are used up by the first half, and by `torch.utils.checkpoint`. Times are predicted: four processes on two cores tell
nothing about four devices.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import recollect
from flags import RESULTS, parse
from results_csv import Number, append

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
from pipeline_programs import SCHEDULES, SPLIT, Job, Program, Ran, run

_WIDTH = 64
_LAYERS = 16
_BUDGETS = ("80%", "60%", "45%")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What to run, and where results go."""

    schedules: list[str] = field(default_factory=lambda: list(SCHEDULES))
    """Names of schedules, such as "1F1B" or "ZBV"."""
    out: Path = RESULTS
    """Folder of `pipelines.csv`."""


@dataclass(frozen=True)
class Row:
    """A job under its name, and what is predicted of it; None for how recollect does not run."""

    name: str
    job: Job
    pipeline: recollect.PipelinePlan | None


def stage_module(number: int, num_stages: int) -> nn.Module:
    """Return a stage: its share of the layers, with weights that depend on its number only."""
    torch.manual_seed(number)
    layers = (
        nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        for _ in range(_LAYERS // num_stages)
    )
    return nn.Sequential(*layers)


PROGRAM = Program(num_ranks=4, num_micro_batches=8, shape=(8, 64, _WIDTH), stage_module=stage_module)


def rows(name: str) -> list[Row]:
    """Plan one schedule for all budgets, and predict the uniform settings."""
    schedule, profiles = PROGRAM.schedule(name), PROGRAM.profiles(name)
    split = PROGRAM.profiles(name, split_backward=True) if name in SPLIT else []
    found = []
    for setting in ("keep_all", "full"):
        plans = [recollect.classic_plan(profile, setting) for profile in profiles]
        made = recollect.predict_pipeline(profiles, schedule, plans, split_profiles=split)
        found.append(Row(f"{setting} in all stages", Job(name, made.plans), made))
    if split:
        full = found[-1].job.plans
        found.append(Row("full, recipes used up", Job(name, full, "plans, recipes used up"), None))
        found.append(Row("torch.utils.checkpoint", Job(name, full, "torch.utils.checkpoint"), None))
    for budget in _BUDGETS:
        made = recollect.plan_pipeline(profiles, schedule, budget, split_profiles=split)
        found.append(Row(f"planned for {budget}", Job(name, made.plans), made))
    return found


def _reported(row: Row, ranks: list[Ran]) -> list[Number]:
    """Print what was measured of a row; return its numbers."""
    fullest = max(ran.peak_bytes for ran in ranks)
    is_equal = all(ran.is_equal for ran in ranks)
    what = f"{row.job.schedule}, {row.name}"
    numbers = [
        Number("measured_peak", "bytes", what, fullest),
        Number("gradients_equal", "bool", what, float(is_equal)),
    ]
    predicted = f"{'':>28}"
    if row.pipeline is not None:
        off = max(
            (ran.peak_bytes - nbytes) / nbytes for ran, nbytes in zip(ranks, row.pipeline.peaks_bytes, strict=True)
        )
        predicted = f"{row.pipeline.peak_bytes:>12,}{off:>+8.1%}{row.pipeline.slowdown:>+8.1%}"
        numbers += [
            Number("predicted_peak", "bytes", what, row.pipeline.peak_bytes),
            Number("most_above_prediction", "fraction", what, off),
            Number("predicted_slowdown", "fraction", what, row.pipeline.slowdown),
        ]
    print(
        f"{row.job.schedule:<24}{row.name:<24}{fullest:>12,}{predicted}  {'equal' if is_equal else 'DIFFERENT'}",
        flush=True,
    )
    return numbers


def main() -> None:
    """Plan, measure, print and append."""
    flags = parse(Flags, __doc__)
    torch.set_num_threads(1)
    numbers: list[Number] = []
    print(f"{'schedule':<24}{'plans':<24}{'measured':>12}{'predicted':>12}{'off':>8}{'step':>8}  gradients")
    for name in flags.schedules:
        made = rows(name)
        with tempfile.TemporaryDirectory() as folder:
            ranks = run(PROGRAM, [row.job for row in made], Path(folder), num_steps=3)
        for index, row in enumerate(made):
            numbers += _reported(row, [rank[index] for rank in ranks])
    append(flags.out / "pipelines.csv", numbers, {"device": "cpu"})


if __name__ == "__main__":
    main()
