"""A record on fake tensors has the kernels of the device that it is for, also where that is not here."""

from typing import Any

import pytest
import torch

import recollect
from recollect.checkpointing.op_policy import policy_plan
from recollect.costs.hardware_table import find_hardware
from recollect.costs.links import cluster_of
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.parallel.cluster_step import ClusterStep, record_stages
from recollect.lab.parallel.layout import DeviceLayout
from recollect.profile.graph import UnitGraph, ValueRecord
from recollect.profile.profile import Profile

LENGTH, WIDTH = 64, 32
GPT = TransformerConfig(num_layers=2, hidden_size=WIDTH, num_attention_heads=2, vocab_size=96)


def recorded(device: str = "meta", **settings: Any) -> Profile:
    with torch.device(device):
        model = GPTModel(GPT).bfloat16()
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64, device=device)
    return recollect.record(model, {"tokens": tokens, "labels": tokens}, fake=True, **settings)


def layer_of(profile: Profile) -> UnitGraph:
    return next(profile.graph_of(call) for call in profile.calls if call.path == "decoder.layers.1")


def made(profile: Profile, kind: str) -> list[ValueRecord]:
    return [value for value in layer_of(profile).values if kind in value.name]


def test_a_mask_of_dropout_takes_a_byte_an_element_on_a_gpu() -> None:
    elements = LENGTH * WIDTH  # after attention, and after the MLP
    masks = [value.nbytes for value in made(recorded(hardware="H100"), "native_dropout") if value.name.endswith(".1")]
    assert masks == [elements] * 2
    on_cpu = [
        value.nbytes for value in made(recorded(hardware="cpu"), "bernoulli_") if "core_attention" not in value.name
    ]
    assert on_cpu == [2 * elements] * 2


def test_attention_with_dropout_is_one_kernel_on_a_gpu() -> None:
    """It saves its arguments, the result, a number a row and the state of the generator; no scores."""
    profile = recorded(hardware="H100")
    sizes = [value.nbytes for value in made(profile, "core_attention") if value.saved]
    assert sizes == [2 * LENGTH * WIDTH, 4 * 2 * LENGTH, 16, 8]
    scores = [value.nbytes for value in made(recorded(hardware="cpu"), "core_attention")]
    assert max(scores) >= 2 * 2 * LENGTH**2


def test_kernels_are_those_of_the_model_s_own_device_unless_another_is_named() -> None:
    here = recorded("cpu")
    assert (here.kernels, recorded("cpu", hardware="H100").kernels, recorded().kernels) == ("cpu", "cuda", "cuda")
    assert not made(here, "native_dropout")
    assert Profile.from_json(here.to_json()) == here


def test_policies_are_asked_about_the_kernels_that_were_recorded() -> None:
    kernels = [torch.ops.aten.native_dropout.default, torch.ops.aten._scaled_dot_product_flash_attention.default]
    with torch.device("meta"):
        model = GPTModel(GPT).bfloat16()
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64, device="meta")
    batch = {"tokens": tokens, "labels": tokens}
    profile = recollect.record(model, batch, fake=True, hardware="H100")
    actions = policy_plan(profile, model, batch, kernels).units["decoder.layers.1"].actions
    assert {actions[value.name] for value in made(profile, "native_dropout")} == {"keep"}
    assert {actions[value.name] for value in made(profile, "linear_fc1")} == {"recompute"}


def chunks(ranks: int) -> tuple[UnitGraph, float]:
    """The layer of one rank of context parallelism, and the seconds of its attention in forward."""
    config = llama_config(num_layers=1, hidden_size=8192, num_attention_heads=64, vocab_size=128)
    layout = DeviceLayout(context_parallel_size=ranks)
    step = ClusterStep(config=config, layout=layout, cluster=cluster_of(find_hardware("H100")), seq_length=32768)
    profile = record_stages(step).profiles[0]
    graph = next(profile.graph_of(call) for call in profile.calls if call.path == "decoder.layers.0")
    return graph, sum(op.time_s for op in graph.ops if "attention" in op.name.rpartition(".")[2])


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallelism_shares_causal_attention_without_masks(ranks: int) -> None:
    """A rank's two chunks see as much as all others' do: with masks attention would take 1 + 1 / (2 ranks) times as long."""
    whole, part = chunks(1), chunks(ranks)
    assert part[1] == pytest.approx(whole[1] / ranks, rel=0.04)  # smaller kernels fill the device less
    assert all("arange" not in value.name and "le" != value.name.rpartition(".")[2] for value in part[0].values)
