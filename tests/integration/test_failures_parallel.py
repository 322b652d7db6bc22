"""Classic failures of activation checkpointing in two processes, with recollect; the page of bugs of others has more."""

from typing import Any

import pytest
import torch

from gradients import assert_same_gradients
from rank_programs import RANKS, data_parallel, fully_sharded, run_on_ranks

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs PyTorch with the gloo backend")


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw under `DistributedDataParallel`, by way and by when it was put on (before or after DDP)."""
    return run_on_ranks(data_parallel, tmp_path_factory.mktemp("data-parallel"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw under `fully_shard`, by way."""
    return run_on_ranks(fully_sharded, tmp_path_factory.mktemp("fully-sharded"))


@needs_gloo
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("way", ["full", "nothing-kept", "random", "traced"])
def test_row_5_ready_once_with_recollect(replicas: list[dict[str, Any]], way: str, moment: str) -> None:
    for rank in range(RANKS):
        expected, got = replicas[rank]["plain after"], replicas[rank][f"{way} {moment}"]
        assert not any(replicas[rank][f"{way} {moment} why not"])
        for step in range(3):
            assert_same_gradients(expected[step], got[step])


@needs_gloo
@pytest.mark.parametrize("way", ["full", "random", "traced"])
def test_row_6_no_second_gather_with_recollect(shards: list[dict[str, Any]], way: str) -> None:
    for rank in range(RANKS):
        expected, got = shards[rank]["plain"], shards[rank][way]
        assert isinstance(got, dict), got
        assert_same_gradients(expected["gradients"], got["gradients"])
        assert got["all-gathers"] == expected["all-gathers"]
        assert not any(got["why not"])


@needs_gloo
def test_dropped_outputs_of_sharded_units_are_exact_or_an_error(shards: list[dict[str, Any]]) -> None:
    """The next unit's backward needs parameters that are not gathered yet: never a wrong gradient."""
    for rank in range(RANKS):
        expected, got = shards[rank]["plain"], shards[rank]["nothing-kept"]
        if isinstance(got, dict):
            assert_same_gradients(expected["gradients"], got["gradients"])
        else:
            assert "blocks." in got, "the message names the unit"
            assert "Keep the output" in got
