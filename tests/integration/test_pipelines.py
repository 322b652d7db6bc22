"""Plans of a pipeline under `torch.distributed.pipelining`, over gloo."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import recollect
from forked_processes import prepared_server
from pipeline_programs import SCHEDULES, SPLIT, Job, Program, run
from recollect.costs.hardware_table import choose_hardware
from recollect.integrations.megatron import RecomputeConfig, megatron_stage_plans
from recollect.pipelines.schedule import PipelineSchedule
from tiers import long_but

RANKS = 2
MICRO_BATCHES = 4
SHAPE = (16, 64)
BUFFER_BYTES = 4 * SHAPE[0] * SHAPE[1]
# Losses, and other scalars of a few bytes each.
SCALARS = 128
# What predictions add where micro-batches are left out: a gradient for each of a rank's stages.
SENT_BYTES = 2 * BUFFER_BYTES
PARTIAL = RecomputeConfig(
    recompute_granularity="full",
    recompute_method="block",
    recompute_num_layers=1,
    num_microbatches_with_partial_activation_checkpoints=1,
)


def stage_module(number: int, _num_stages: int) -> nn.Module:
    """A stage whose weights depend on its number only."""
    torch.manual_seed(number)
    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(3))
    return nn.Sequential(*layers)


def stage_with_head(number: int, num_stages: int) -> nn.Module:
    """A stage that makes wide outputs if it is the last one."""
    stage = stage_module(number, num_stages)
    return nn.Sequential(*stage, nn.Linear(64, 512)) if number == num_stages - 1 else stage


# Gradients are there from the beginning, as predictions count them: the first backward makes them bit by bit otherwise, and the
# fullest moment may come before the last of them. Modelled times, so that plans are the same in every run.
# With an H100's times and a CPU's kernels, as steps run on a CPU.
HARDWARE = replace(choose_hardware("H100", own_device=""), device="cpu")
PROGRAM = Program(RANKS, MICRO_BATCHES, SHAPE, stage_module, hardware=HARDWARE, keeps_gradients=True)
RETURNING = replace(PROGRAM, num_ranks=4, num_micro_batches=8, stage_module=stage_with_head, return_outputs=True)
OURS = {
    "GPipe": PipelineSchedule.gpipe(num_stages=RANKS, num_micro_batches=MICRO_BATCHES),
    "1F1B": PipelineSchedule.one_f_one_b(num_stages=RANKS, num_micro_batches=MICRO_BATCHES),
    "interleaved 1F1B": PipelineSchedule.interleaved_1f1b(
        num_ranks=RANKS, stages_per_rank=2, num_micro_batches=MICRO_BATCHES
    ),
}


# `tests/unit/pipelines` plays the others in one process, or they are much alike.
QUICK = ("1F1B", "interleaved zero bubble", "ZBV")


@cache
def pipelines(name: str) -> list[recollect.PipelinePlan]:
    """Everything kept, everything recomputed, Megatron's plans by micro-batch, and planned for 90 %."""
    schedule, profiles = PROGRAM.schedule(name), PROGRAM.profiles(name)
    split = PROGRAM.profiles(name, split_backward=True) if name in SPLIT else []
    settings = [[recollect.classic_plan(one, setting) for one in profiles] for setting in ("keep_all", "full")]
    settings.append(list(megatron_stage_plans(profiles, schedule, PARTIAL)))
    given = [recollect.predict_pipeline(profiles, schedule, plans, split_profiles=split) for plans in settings]
    return [*given, recollect.plan_pipeline(profiles, schedule, "90%", split_profiles=split)]


@pytest.mark.parametrize("name", long_but(QUICK, SCHEDULES))
def test_gradients_are_equal_and_peaks_as_predicted(name: str, tmp_path: Path) -> None:
    prepared_server()
    jobs = [Job(name, one.plans) for one in pipelines(name)]
    ranks = run(PROGRAM, jobs, tmp_path, start_method="forkserver")
    for pipeline, found in zip(pipelines(name), zip(*ranks, strict=True), strict=True):
        for predicted, ran in zip(pipeline.peaks_bytes, found, strict=True):
            assert ran.is_equal
            # These let go of what has arrived earlier than is predicted, the second one since PyTorch 2.15.
            more = SENT_BYTES + 2 * BUFFER_BYTES if name in ("DualPipeV", "interleaved zero bubble") else SENT_BYTES
            assert ran.peak_bytes - SCALARS <= predicted <= ran.peak_bytes + SCALARS + more
    plain, full, by_micro_batch, planned = pipelines(name)
    assert full.peak_bytes < planned.peak_bytes < plain.peak_bytes
    assert full.peak_bytes < by_micro_batch.peak_bytes < plain.peak_bytes


@pytest.mark.long
def test_traced_stages_have_the_same_gradients(tmp_path: Path) -> None:
    """In schedules with a whole and with a split backward, which asks for single nodes of a unit's chain."""
    names = [name for name in ("1F1B", "ZBV") if name in SCHEDULES]
    jobs = [Job(name, [plan.with_engine("graph") for plan in pipelines(name)[1].plans]) for name in names]
    prepared_server()
    found = run(PROGRAM, jobs, tmp_path, start_method="forkserver")
    assert [ran.is_equal for own in found for ran in own] == [True] * len(found) * len(names)


@pytest.mark.parametrize(
    "names",
    [("1F1B", "ZBV"), pytest.param(("interleaved 1F1B", "interleaved zero bubble"), marks=pytest.mark.long)],
    ids=" and ".join,
)
def test_outputs_that_are_returned_count(names: tuple[str, ...], tmp_path: Path) -> None:
    """As torch's schedules do by default: on four ranks, and where the loss saves them, too."""
    names = tuple(name for name in names if name in SCHEDULES)
    predicted = []
    for name in names:
        profiles, schedule = RETURNING.profiles(name), RETURNING.schedule(name)
        split = RETURNING.profiles(name, split_backward=True) if name in SPLIT else []
        for setting in ("keep_all", "full"):
            plans = [recollect.classic_plan(one, setting) for one in profiles]
            predicted.append(recollect.predict_pipeline(profiles, schedule, plans, split_profiles=split))
    prepared_server()
    jobs = [Job(name, one.plans) for name, one in zip(sorted(names * 2, key=names.index), predicted, strict=True)]
    ranks = run(RETURNING, jobs, tmp_path, start_method="forkserver")
    for number, one in enumerate(predicted):
        for peak_bytes, own in zip(one.peaks_bytes, ranks, strict=True):
            assert own[number].is_equal
            assert -SCALARS <= peak_bytes - own[number].peak_bytes <= SCALARS + SENT_BYTES, jobs[number]


def test_received_as_needed_stages_hold_less() -> None:
    """As measured under torch 2.15: when backward begins, all outputs have arrived, and one gradient is there, not all."""
    profiles = PROGRAM.profiles("GPipe")
    plans = [recollect.classic_plan(one, "keep_all") for one in profiles]
    before, since = (
        recollect.predict_pipeline(profiles, replace(OURS["GPipe"], as_needed=as_needed), plans).peaks_bytes[0]
        for as_needed in (False, True)
    )
    assert before - since == (2 * MICRO_BATCHES - 1) * BUFFER_BYTES


@pytest.mark.parametrize("name", OURS)
def test_torchs_schedules_read_as_ours(name: str) -> None:
    assert PROGRAM.schedule(name).ranks == OURS[name].ranks
