"""Classic failures of activation checkpointing with recollect, in one process and two; the page of bugs of others has more."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blocks import Stack, built, mean_square, partitioned
from gradients import assert_same_gradients, call, gradients, step_of
from policies import FEW_PLANS, Policy
from rank_programs import RANKS, data_parallel, fully_sharded, run_on_ranks
from recollect.applying import apply_policy
from zoo import ZOO

few_plans = pytest.mark.parametrize("policy", FEW_PLANS.values(), ids=FEW_PLANS)
LLAMA, PADDED_LLAMA = ZOO["llama"], ZOO["llama_padded"]


def rows(count: int = 6, width: int = 16) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(count, width)


def _with_frozen_norms() -> Stack:
    model: Stack = built(Stack)
    for block in model.blocks:
        block.norm.requires_grad_(False)
        block.up.requires_grad_(False)
    return model


def _leaves_of_blocks(model: Stack) -> list[nn.Module]:
    """The granularity of DeepSpeed: each linear layer and norm is gathered by itself."""
    return [module for block in model.blocks for module in block.children()]


@few_plans
def test_partitioned_frozen_parameters_with_recollect(policy: Policy) -> None:
    model = _with_frozen_norms()
    expected = gradients(model, rows(), mean_square)
    for modules in (_leaves_of_blocks(model), list(model.blocks)):
        with partitioned(modules), apply_policy(model, model.layers, policy):
            assert_same_gradients(expected, gradients(model, rows(), mean_square))


@few_plans
def test_cache_grows_once_with_recollect(policy: Policy) -> None:
    """Transformers' flag avoids this by switching the cache off; here it may stay on."""
    for case in (LLAMA, PADDED_LLAMA):
        model = case.model()
        expected = step_of(case, model)
        with apply_policy(model, case.layers, policy):
            assert_same_gradients(expected, step_of(case, model))
            output = call(model, case.data())
            output.loss.backward()
            assert output.past_key_values.get_seq_length() == 12


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
        assert isinstance(got, list), got
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
