"""Measure pipelines of four processes: one recompute setting for all stages against `plan_pipeline`, by schedule and budget.

    python benchmarks/pipelines.py                                # all schedules: a few minutes on two idle cores
    python benchmarks/pipelines.py --schedules ZBV DualPipeV      # some of them
    python benchmarks/pipelines.py --no-measure                   # what is predicted only

For each budget: the best of Megatron's settings that is the same for all stages and fits, a plan for each stage, and the same
with the split of layers chosen, too (named by its numbers of layers; not run again where the even split was chosen). Below
them `recompute_num_layers` = 1 in each stage with the first micro-batch of each window alone recomputing so little
(`num_microbatches_with_partial_activation_checkpoints`). Each process runs one rank over gloo with the schedules of
`torch.distributed.pipelining`. Peaks are of the fullest rank, as `measure_peak` sees them, once torch has all its buffers;
gradients are compared with those without recompute of the same split, bit for bit. Where backward is split in two, full
recompute runs in three ways: as recollect does it, with recipes that are used up by the first half, and by
`torch.utils.checkpoint`.

Plans are made from stages recorded on this processor. Four processes on two cores do not run at once, so that the step is put
together: the processes compute one at a time, and the processor time of each action is played in the order of the schedule, as
if each rank had a device. Steps alternate with steps without recompute; "measured" is the median of their ratios.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import nn

import recollect
from flags import RESULTS, parse
from recollect.errors import BudgetTooSmallError
from recollect.integrations.megatron import megatron_stage_plans
from recollect.pipelines.schedule import PipelineAction, played_s
from results_csv import Number, append

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
from pipeline_programs import SCHEDULES, SPLIT, Job, Program, Ran, loss_of, run

_WIDTH = 256
_SEQUENCE = 64
_LAYERS = 16
_BUDGETS = ("80%", "60%", "45%")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What to run, and where results go."""

    schedules: list[str] = field(default_factory=lambda: list(SCHEDULES))
    """Names of schedules, such as "1F1B" or "ZBV"."""
    measure: bool = True
    """Run the pipelines, too; otherwise only what is predicted is printed, and nothing is appended."""
    out: Path = RESULTS
    """Folder of `pipelines.csv`."""


@dataclass(frozen=True)
class Row:
    """A job under its name, and what is predicted of it.

    Attributes:
        pipeline: what is predicted; None for how recollect does not run.
        slowdown: how much longer its step takes than that of the even split without recompute, as a fraction; predicted.
    """

    name: str
    job: Job
    pipeline: recollect.PipelinePlan | None = None
    slowdown: float = 0.0


@dataclass(frozen=True)
class Stages:
    """Makes stages with these numbers of layers, or with equal ones; weights depend on the number of the stage only.

    Layers are nested where stages are put together from layers that were recorded alone, each in an `nn.Sequential`.
    """

    sizes: tuple[int, ...] = ()
    nested: bool = False

    def __call__(self, number: int, num_stages: int) -> nn.Module:
        """Return a stage."""
        torch.manual_seed(number)
        layers = (
            nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(self.sizes[number] if self.sizes else _LAYERS // num_stages)
        )
        return nn.Sequential(*(nn.Sequential(layer) if self.nested else layer for layer in layers))


PROGRAM = Program(
    num_ranks=4,
    num_micro_batches=8,
    shape=(2, _SEQUENCE, _WIDTH),
    stage_module=Stages(),
    num_timed=3,
    keeps_gradients=True,
)


def rows(name: str) -> list[Row]:
    """Plan one schedule for all budgets, and predict the uniform settings."""
    schedule, profiles = PROGRAM.schedule(name), PROGRAM.profiles(name)
    split = PROGRAM.profiles(name, split_backward=True) if name in SPLIT else []
    found = []
    for setting in ("keep_all", "full"):
        plans = [recollect.classic_plan(profile, setting) for profile in profiles]
        made = recollect.predict_pipeline(profiles, schedule, plans, split_profiles=split)
        found.append(Row(f"{setting} in all stages", Job(name, made.plans), made, made.slowdown))
    if split:
        full = found[-1].job.plans
        found.append(Row("full, recipes used up", Job(name, full, "plans, recipes used up")))
        found.append(Row("torch.utils.checkpoint", Job(name, full, "torch.utils.checkpoint")))
    for budget in _BUDGETS:
        try:
            made = recollect.plan_pipeline(profiles, schedule, budget, split_profiles=split)
        except BudgetTooSmallError as error:
            print(f"{name:<24}nothing fits {budget}: {error.least_peak_bytes:,} bytes are the least", flush=True)
            continue
        assert made.budget_bytes is not None
        uniform = _best_uniform(profiles, split, schedule, made.budget_bytes)
        if uniform is not None:
            found.append(Row(f"Megatron for {budget}", Job(name, uniform.plans), uniform, uniform.slowdown))
        found.append(Row(f"planned for {budget}", Job(name, made.plans), made, made.slowdown))
        chosen = _with_split(name, schedule, budget, made)
        if chosen is not None:
            found.append(chosen)
    config = recollect.RecomputeConfig(
        recompute_granularity="full",
        recompute_method="block",
        recompute_num_layers=1,
        num_microbatches_with_partial_activation_checkpoints=1,
    )
    by_micro_batch = megatron_stage_plans(profiles, schedule, config)
    made = recollect.predict_pipeline(profiles, schedule, by_micro_batch, split_profiles=split)
    found.append(Row("Megatron by micro-batch", Job(name, made.plans), made, made.slowdown))
    return found


def _best_uniform(
    profiles: list[recollect.Profile],
    split: list[recollect.Profile],
    schedule: recollect.PipelineSchedule,
    budget_bytes: int,
) -> recollect.PipelinePlan | None:
    """Return the fastest of Megatron's settings that fits, the same for all stages; None if none does."""
    most = len(profiles[0].calls)
    configs = [
        recollect.RecomputeConfig(recompute_granularity="full", recompute_method=method, recompute_num_layers=n)
        for method in ("block", "uniform")
        for n in range(1, most + 1)
    ]
    found = []
    for config in (recollect.RecomputeConfig(), *configs):
        plans = megatron_stage_plans(profiles, schedule, config)
        made = recollect.predict_pipeline(profiles, schedule, plans, split_profiles=split)
        if made.peak_bytes <= budget_bytes:
            found.append(made)
    return min(found, key=lambda made: made.step_s, default=None)


def _layer_profiles(*, split_backward: bool) -> list[recollect.Profile]:
    """Record a first, a middle and a last layer; return them as all layers of the model."""
    made = []
    for number in range(3):
        made.append(
            recollect.record(
                Stages((1,))(0, 1),
                torch.randn(PROGRAM.shape, requires_grad=number > 0),
                loss_fn=loss_of if number == 2 else torch.sum,
                gradients="accumulated",
                holds_output=False,
                units=["0"],
                split_backward=split_backward,
            )
        )
    return [made[0], *[made[1]] * (_LAYERS - 2), made[2]]


def _with_split(
    name: str, schedule: recollect.PipelineSchedule, budget: str, planned: recollect.PipelinePlan
) -> Row | None:
    """Choose the split together with the plans; None if the even one is chosen.

    Layers and stages were timed apart, so that the step is compared with that of the even split put together from layers.
    """
    assert planned.budget_bytes is not None
    split_layers = _layer_profiles(split_backward=True) if name in SPLIT else []
    chosen = recollect.split_pipeline(
        _layer_profiles(split_backward=False), schedule, planned.budget_bytes, split_layers=split_layers
    )
    if len(set(chosen.sizes)) == 1:
        return None
    assert chosen.even_step_s is not None
    slowdown = (1 + planned.slowdown) * chosen.pipeline.step_s / chosen.even_step_s - 1
    job = Job(name, chosen.pipeline.plans, stage_module=Stages(chosen.sizes, nested=True))
    return Row(f"{'-'.join(map(str, chosen.sizes))} for {budget}", job, chosen.pipeline, slowdown)


@dataclass(frozen=True)
class Measured:
    """What was measured of a row, of all ranks together.

    Attributes:
        peak_bytes: of the fullest rank.
        step_s: the step, played with the processor seconds of each action; the median.
        slowdown: how much longer it took than the step without recompute right before it, as a fraction; the median.
    """

    peak_bytes: int
    step_s: float
    slowdown: float

    @classmethod
    def of(cls, schedule: recollect.PipelineSchedule, ranks: list[Ran]) -> Measured:
        """Put together what the ranks found."""
        steps_s = _played(schedule, [ran.timed for ran in ranks])
        plain_s = _played(schedule, [ran.first_timed for ran in ranks])
        return cls(
            peak_bytes=max(ran.peak_bytes for ran in ranks),
            step_s=median(steps_s),
            slowdown=median(step / plain for step, plain in zip(steps_s, plain_s, strict=True)) - 1,
        )


def _played(schedule: recollect.PipelineSchedule, ranks: list[tuple[dict[PipelineAction, float], ...]]) -> list[float]:
    """Return the seconds of each step, of what its actions took on all ranks."""
    return [
        played_s(schedule, {action: s for own in step for action, s in own.items()}.__getitem__)
        for step in zip(*ranks, strict=True)
    ]


def _reported(row: Row, ranks: list[Ran], found: Measured) -> list[Number]:
    """Print what was measured of a row; return its numbers."""
    is_equal = all(ran.is_equal for ran in ranks)
    what = f"{row.job.schedule}, {row.name}"
    numbers = [
        Number("measured_peak", "bytes", what, found.peak_bytes),
        Number("gradients_equal", "bool", what, float(is_equal)),
        Number("measured_step", "s", what, found.step_s),
        Number("measured_slowdown", "fraction", what, found.slowdown),
    ]
    predicted = f"{'':>28}"
    if row.pipeline is not None:
        off = max(
            (ran.peak_bytes - nbytes) / nbytes for ran, nbytes in zip(ranks, row.pipeline.peaks_bytes, strict=True)
        )
        predicted = f"{row.pipeline.peak_bytes:>12,}{off:>+8.1%}{row.slowdown:>+8.1%}"
        numbers += [
            Number("predicted_peak", "bytes", what, row.pipeline.peak_bytes),
            Number("most_above_prediction", "fraction", what, off),
            Number("predicted_slowdown", "fraction", what, row.slowdown),
            Number("predicted_step", "s", what, row.pipeline.step_s),
        ]
    print(
        f"{row.job.schedule:<24}{row.name:<26}{found.peak_bytes:>12,}{predicted}{found.slowdown:>+10.1%}"
        f"  {'equal' if is_equal else 'DIFFERENT'}",
        flush=True,
    )
    return numbers


def main() -> None:
    """Plan, measure, print and append."""
    flags = parse(Flags, __doc__)
    torch.set_num_threads(1)
    print(
        f"{'schedule':<24}{'plans':<26}{'measured':>12}{'predicted':>12}{'off':>8}{'step':>8}{'measured':>10}"
        "  gradients"
    )
    for name in flags.schedules:
        made = rows(name)
        if not flags.measure:
            for row in (row for row in made if row.pipeline is not None):
                print(
                    f"{name:<24}{row.name:<26}{row.pipeline.peak_bytes:>24,}{row.pipeline.step_s * 1e3:>12.1f} ms",
                    flush=True,
                )
            continue
        with tempfile.TemporaryDirectory() as folder:
            ranks = run(PROGRAM, [row.job for row in made], Path(folder))
        schedule = PROGRAM.schedule(name)
        numbers: list[Number] = []
        for index, row in enumerate(made):
            own = [rank[index] for rank in ranks]
            numbers += _reported(row, own, Measured.of(schedule, own))
        append(flags.out / "pipelines.csv", numbers, {"device": "cpu"})


if __name__ == "__main__":
    main()
