"""Megatron's `distribute_saved_activations`: which values become parts, one on each rank."""

from typing import Any

import pytest
import torch

import recollect
from recollect._torch_parallel import fake_process_group
from recollect.errors import ConfigError
from recollect.integrations.megatron import RecomputeConfig, megatron_plan
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.plans.action import Action
from recollect.profile.profile import Profile

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs PyTorch with torch.distributed")

WIDTH, LENGTH = 32, 16


def recorded(*, on_ranks: bool) -> Profile:
    model = GPTModel(llama_config(num_layers=4, hidden_size=WIDTH, num_attention_heads=2, vocab_size=64))
    tokens = torch.randint(0, 64, (1, LENGTH))
    if on_ranks:
        recollect.distribute_saved_activations(model)
    return recollect.record(model, {"tokens": tokens, "labels": tokens}, fake=True)


@pytest.fixture(scope="module")
def profile() -> Profile:
    with fake_process_group(0, 2):
        return recorded(on_ranks=True)


def full(method: str, number: int) -> RecomputeConfig:
    settings: dict[str, Any] = {"recompute_method": method, "recompute_num_layers": number}
    return RecomputeConfig(recompute_granularity="full", distribute_saved_activations=True, **settings)


@pytest.mark.parametrize(
    ("method", "number", "makers"),
    [
        ("uniform", 1, ["decoder.layers.0", "decoder.layers.1", "decoder.layers.2", "embedding"]),
        ("uniform", 2, ["decoder.layers.1", "embedding"]),
        ("block", 2, ["decoder.layers.0", "embedding"]),
    ],
)
def test_the_inputs_that_are_kept_become_parts(profile: Profile, method: str, number: int, makers: list[str]) -> None:
    """Not rotary positions, which all layers read, nor what the layers read that keep everything."""
    plan = megatron_plan(profile, full(method, number))
    parts = {path: [n for n, a in unit.actions.items() if a is Action.SHARD] for path, unit in plan.units.items()}
    assert sorted(path for path, names in parts.items() if names) == makers
    for path in makers:
        graph = next(profile.graph_of(call) for call in profile.calls if call.path == path)
        assert parts[path] == [value.name for value in graph.values if value.is_output and value.producer is not None]


def test_each_rank_keeps_half(profile: Profile) -> None:
    whole = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    kept = []
    for config in (whole, full("uniform", 1)):
        usage = recollect.layer_usage(profile, megatron_plan(profile, config))
        kept.append(sum(nbytes for unit in usage for _, nbytes in unit.kept))
    assert kept[0] - kept[1] == 4 * LENGTH * WIDTH * 4 // 2


def test_a_profile_of_one_process_has_no_ranks_to_distribute_to() -> None:
    with pytest.raises(
        ConfigError, match=r"=True: the step was recorded without ranks to distribute to\. Call recollect"
    ):
        megatron_plan(recorded(on_ranks=False), full("uniform", 1))
