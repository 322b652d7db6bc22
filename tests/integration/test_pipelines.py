"""Plans of a pipeline under `torch.distributed.pipelining`, over gloo."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recollect
from pipeline_programs import SCHEDULES, SPLIT, Job, Program, Ran, run
from recollect.pipelines.schedule import PipelineSchedule

RANKS = 2
MICRO_BATCHES = 4
SHAPE = (16, 64)
BUFFER_BYTES = 4 * SHAPE[0] * SHAPE[1]
# gloo's threads let go of what they sent some time after the send has ended, and here that is up to two tensors.
LATE = 2 * BUFFER_BYTES + 1024
# The first backward of all makes the gradients bit by bit; here the fullest moment may come before the last of them.
FULLEST_EARLY = ("GPipe", *SPLIT)


def stage_module(number: int, _num_stages: int) -> nn.Module:
    """A stage whose weights depend on its number only."""
    torch.manual_seed(number)
    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(3))
    return nn.Sequential(*layers)


PROGRAM = Program(RANKS, MICRO_BATCHES, SHAPE, stage_module)
OURS = {
    "GPipe": PipelineSchedule.gpipe(num_stages=RANKS, num_micro_batches=MICRO_BATCHES),
    "1F1B": PipelineSchedule.one_f_one_b(num_stages=RANKS, num_micro_batches=MICRO_BATCHES),
    "interleaved 1F1B": PipelineSchedule.interleaved_1f1b(
        num_ranks=RANKS, stages_per_rank=2, num_micro_batches=MICRO_BATCHES
    ),
}


@pytest.fixture(scope="module")
def pipelines() -> dict[str, list[recollect.PipelinePlan]]:
    """By schedule: everything kept, everything recomputed, and planned for 90 %."""
    made = {}
    for name in SCHEDULES:
        schedule, profiles = PROGRAM.schedule(name), PROGRAM.profiles(name)
        split = PROGRAM.profiles(name, split_backward=True) if name in SPLIT else []
        settings = [[recollect.classic_plan(one, setting) for one in profiles] for setting in ("keep_all", "full")]
        given = [recollect.predict_pipeline(profiles, schedule, plans, split_profiles=split) for plans in settings]
        made[name] = [*given, recollect.plan_pipeline(profiles, schedule, "90%", split_profiles=split)]
    return made


@pytest.fixture(scope="module")
def ranks(
    pipelines: dict[str, list[recollect.PipelinePlan]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[list[Ran]]]:
    """By schedule, for each of its plans: what each rank found."""
    jobs = [Job(name, one.plans) for name, several in pipelines.items() for one in several]
    found = run(PROGRAM, jobs, tmp_path_factory.mktemp("ranks"))
    return {
        name: [[own[index] for own in found] for index, job in enumerate(jobs) if job.schedule == name]
        for name in pipelines
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_equal_and_peaks_as_predicted(
    pipelines: dict[str, list[recollect.PipelinePlan]], ranks: dict[str, list[list[Ran]]], name: str
) -> None:
    for pipeline, found in zip(pipelines[name], ranks[name], strict=True):
        for predicted, ran in zip(pipeline.peaks_bytes, found, strict=True):
            assert ran.is_equal
            gradient_bytes = ran.gradient_bytes if name in FULLEST_EARLY else 0
            assert ran.peak_bytes - LATE <= predicted <= ran.peak_bytes + gradient_bytes + LATE
    plain, full, planned = pipelines[name]
    assert full.peak_bytes < planned.peak_bytes < plain.peak_bytes


@pytest.mark.parametrize("name", OURS)
def test_torchs_schedules_read_as_ours(name: str) -> None:
    assert PROGRAM.schedule(name).ranks == OURS[name].ranks
