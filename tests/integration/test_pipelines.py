"""Plans of a pipeline under `torch.distributed.pipelining`, over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import recollect
from pipeline_programs import EXPECTED, RANKS, SHAPE, run, stage_module
from recollect.profile.profile import Profile

BUFFER_BYTES = 4 * SHAPE[0] * SHAPE[1]
# gloo's threads let go of what they sent some time after the send has ended, and here that is up to two tensors.
LATE = 2 * BUFFER_BYTES + 1024


def recorded(number: int, num_stages: int) -> Profile:
    last = number == num_stages - 1
    return recollect.record(
        stage_module(number),
        torch.randn(SHAPE, requires_grad=number > 0),
        loss_fn=(lambda out: out.square().mean()) if last else torch.sum,
        gradients="accumulated",
        holds_output=False,
    )


@pytest.fixture(scope="module")
def pipelines() -> dict[str, list[recollect.PipelinePlan]]:
    """By schedule: everything kept, and planned for 90 %."""
    made = {}
    for name, schedule in EXPECTED.items():
        profiles = [recorded(number, schedule.num_stages) for number in range(schedule.num_stages)]
        plain = recollect.predict_pipeline(profiles, schedule, [recollect.Plan({})] * schedule.num_stages)
        made[name] = [plain, recollect.plan_pipeline(profiles, schedule, "90%")]
    return made


@pytest.fixture(scope="module")
def ranks(
    pipelines: dict[str, list[recollect.PipelinePlan]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    plans = {name: [one.plans for one in several] for name, several in pipelines.items()}
    return run(plans, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", EXPECTED)
def test_gradients_are_equal_and_peaks_as_predicted(
    pipelines: dict[str, list[recollect.PipelinePlan]], ranks: list[dict[str, Any]], name: str
) -> None:
    for rank in range(RANKS):
        (plain_bytes, plain_gradients, reads_alike), (planned_bytes, gradients, _) = ranks[rank][name]
        assert reads_alike
        assert gradients == plain_gradients
        plain, planned = (one.peaks_bytes[rank] for one in pipelines[name])
        # The first backward of all makes the gradients bit by bit; with GPipe that is the fullest moment.
        gradient_bytes = sum(map(len, gradients)) if name == "GPipe" else 0
        for measured, predicted in ((plain_bytes, plain), (planned_bytes, planned)):
            assert measured - LATE <= predicted <= measured + gradient_bytes + LATE
        assert pipelines[name][1].peak_bytes < pipelines[name][0].peak_bytes
