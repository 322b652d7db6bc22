"""Model FLOPs by formula and hardware FLOPs by counting, against PyTorch's own counter."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import recollect
from recollect.lab.bench.measure import FlopCount
from recollect.lab.models.config import TransformerConfig, model_flops
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.planning.classic import ClassicName
from tiers import long

SEQUENCES, LENGTH = 2, 32
Batch = dict[str, torch.Tensor]


def built(config: TransformerConfig) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    tokens = torch.randint(config.vocab_size, (SEQUENCES, LENGTH))
    return GPTModel(config).train(), {"tokens": tokens, "labels": tokens}


def step(model: nn.Module, batch: Batch) -> None:
    model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)


def pytorchs_count(model: nn.Module, batch: Batch) -> float:
    with FlopCounterMode(display=False) as counter:
        step(model, batch)
    return float(counter.get_total_flops())


def our_count(model: nn.Module, batch: Batch) -> float:
    with FlopCount() as count:
        step(model, batch)
    return count.flops


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt-tiny", {}),
        ("gpt-tiny", {"share_embeddings_and_output_weights": True, "num_layers": 3, "ffn_hidden_size": 96}),
        ("llama-tiny", {}),
        ("llama-tiny", {"num_query_groups": 1, "kv_channels": 8}),
        ("mixtral-tiny", {}),
        ("mixtral-tiny", {"moe_layer_freq": 2, "moe_router_topk": 3, "moe_shared_expert_intermediate_size": 48}),
        ("deepseek-v3-tiny", {}),
        ("deepseek-v3-tiny", {"q_lora_rank": None, "mtp_num_layers": 2}),
    ],
)
def test_the_formula_is_what_pytorch_counts(name: str, changes: dict[str, Any]) -> None:
    # One by one: PyTorch's counter does not know grouped products.
    config = dataclasses.replace(NAMED_CONFIGS[name], core_attention="unfused", moe_grouped_gemm=False, **changes)
    expected = model_flops(config, num_sequences=SEQUENCES, seq_length=LENGTH, attention_fraction=1.0)
    model, batch = built(config)
    assert pytorchs_count(model, batch) == expected
    assert our_count(model, batch) == expected


@pytest.mark.parametrize("name", ["mixtral-tiny", "deepseek-v3-tiny"])
def test_grouped_products_count_as_one_by_one(name: str) -> None:
    config = dataclasses.replace(NAMED_CONFIGS[name], core_attention="unfused", moe_grouped_gemm=True)
    expected = model_flops(config, num_sequences=SEQUENCES, seq_length=LENGTH, attention_fraction=1.0)
    assert our_count(*built(config)) == expected
    assert pytorchs_count(*built(config)) < expected


def test_half_of_the_scores_is_the_default() -> None:
    config = NAMED_CONFIGS["llama-tiny"]
    full = model_flops(config, num_sequences=SEQUENCES, seq_length=LENGTH, attention_fraction=1.0)
    half = model_flops(config, num_sequences=SEQUENCES, seq_length=LENGTH)
    scores = (
        3 * 2 * SEQUENCES * LENGTH * LENGTH * config.num_layers * 2 * config.num_attention_heads * config.kv_channels
    )
    assert full - half == scores / 2


def test_fused_attention_computes_its_scores_twice() -> None:
    config = dataclasses.replace(NAMED_CONFIGS["llama-tiny"], core_attention="fused")
    model, batch = built(config)
    expected = model_flops(config, num_sequences=SEQUENCES, seq_length=LENGTH)
    once_more = SEQUENCES * LENGTH * LENGTH * config.num_attention_heads * config.kv_channels * config.num_layers
    assert our_count(model, batch) == expected + once_more
    # PyTorch's own counter knows the plain products of the same attention, and takes them for whole squares.
    with sdpa_kernel(SDPBackend.MATH):
        whole = model_flops(config, num_sequences=SEQUENCES, seq_length=LENGTH, attention_fraction=1.0)
        assert pytorchs_count(model, batch) == our_count(model, batch) == whole


@pytest.mark.parametrize("name", ["llama-tiny", "deepseek-v3-tiny"])
@pytest.mark.parametrize("schedule", ["full", *long(["sqrt"])])
def test_what_is_recomputed_counts_as_pytorch_counts_it(name: str, schedule: ClassicName) -> None:
    config = dataclasses.replace(NAMED_CONFIGS[name], core_attention="unfused", moe_grouped_gemm=False)
    model, batch = built(config)
    plain = our_count(model, batch)
    plan = recollect.classic_plan(recollect.record(model, batch), schedule)
    with recollect.apply(model, plan):
        counted = our_count(model, batch)
        assert counted == pytorchs_count(model, batch)
    # A forward again, less what backward does not ask for: each layer's last product.
    assert 1.1 * plain < counted < (4 / 3) * plain
