"""Router and experts against the same thing written as loops, and the load balance."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from recollect.engine.content import has_same_bits
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.mlp import Activation, GroupedLinear, MoELayer
from recollect.lab.models.router import TopKRouter
from recollect.lab.models.sizes import NAMED_CONFIGS

NAMES = ["mixtral-tiny", "deepseek-v3-tiny"]


def named(name: str, **changes: Any) -> TransformerConfig:
    return dataclasses.replace(NAMED_CONFIGS[name], **changes)


def router_of(config: TransformerConfig, seed: int = 0) -> TopKRouter:
    torch.manual_seed(seed)
    router = TopKRouter(config)
    with torch.no_grad():
        router.weight.normal_()
        if router.expert_bias is not None:
            router.expert_bias.normal_(std=0.3)
    return router


def routed_by_hand(router: TopKRouter, token: Tensor) -> dict[int, float]:
    config = router.config
    logits = (router.weight @ token).tolist()
    if config.moe_router_score_function == "sigmoid":
        scores = torch.tensor(logits).sigmoid().tolist()
        bias = [0.0] * len(scores) if router.expert_bias is None else router.expert_bias.tolist()
        ranks = [score + b for score, b in zip(scores, bias, strict=True)]
    else:
        scores = torch.tensor(logits).softmax(0).tolist()
        ranks = scores
    allowed = list(range(len(ranks)))
    if config.moe_router_num_groups and config.moe_router_group_topk:
        size = len(ranks) // config.moe_router_num_groups
        groups = [allowed[i : i + size] for i in range(0, len(ranks), size)]
        best = config.moe_router_topk // config.moe_router_group_topk
        groups.sort(key=lambda group: sum(sorted((ranks[e] for e in group), reverse=True)[:best]), reverse=True)
        allowed = [expert for group in groups[: config.moe_router_group_topk] for expert in group]
    chosen = sorted(allowed, key=lambda expert: ranks[expert], reverse=True)[: config.moe_router_topk]
    weights = {expert: scores[expert] for expert in chosen}
    if not config.moe_router_pre_softmax:
        weights = {expert: weight / sum(weights.values()) for expert, weight in weights.items()}
    factor = config.moe_router_topk_scaling_factor or 1.0
    return {expert: weight * factor for expert, weight in weights.items()}


@pytest.mark.parametrize(
    "config",
    [
        named("mixtral-tiny"),
        named("mixtral-tiny", moe_router_pre_softmax=True),
        named("mixtral-tiny", moe_router_topk=1, moe_router_topk_scaling_factor=1.5),
        named("mixtral-tiny", moe_router_num_groups=4, moe_router_group_topk=2),
        named("deepseek-v3-tiny"),
        named("deepseek-v3-tiny", moe_router_topk=5, moe_router_group_topk=3),
        named("deepseek-v3-tiny", moe_router_enable_expert_bias=False, moe_router_topk=3),
        named("deepseek-v3-tiny", moe_router_num_groups=None, moe_router_group_topk=None),
    ],
    ids=["softmax", "pre-softmax", "top-1", "softmax-groups", "sigmoid", "uneven-groups", "no-bias", "no-groups"],
)
def test_router_chooses_and_weighs_as_by_hand(config: TransformerConfig) -> None:
    router = router_of(config)
    x = torch.randn(3, 20, config.hidden_size) / 8
    routing = router(x)
    for token, experts, probabilities in zip(
        x.flatten(0, 1), routing.experts_NJ.tolist(), routing.probabilities_NJ.tolist(), strict=True
    ):
        # fp32 in another order of operations
        assert dict(zip(experts, probabilities, strict=True)) == pytest.approx(routed_by_hand(router, token), rel=1e-5)
    assert torch.equal(
        routing.statistics.tokens_per_expert,
        routing.experts_NJ.flatten().bincount(minlength=config.num_moe_experts or 0),
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    ("grouped", "dtype", "tolerance"),  # sums of 64 numbers of size 1: 64 roundings of 2^-53 or 2^-24
    [(False, torch.float64, 1e-12), (True, torch.float64, 1e-12), (True, torch.float32, 1e-5)],
)
def test_layer_is_the_weighted_sum_of_its_experts(
    name: str, has_bias: bool, is_gated: bool, grouped: bool, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    config = named(name, add_bias_linear=has_bias, gated_linear_unit=is_gated, moe_grouped_gemm=grouped)
    layer = MoELayer(config).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.1)
    x = torch.randn(2, 7, config.hidden_size, dtype=dtype)
    routing = layer.router(x)
    activation = Activation(config)
    fc1, fc2 = layer.experts.linear_fc1, layer.experts.linear_fc2
    expected = torch.zeros(14, config.hidden_size, dtype=dtype)
    for position, token in enumerate(x.flatten(0, 1)):
        for expert, weight in zip(routing.experts_NJ[position], routing.probabilities_NJ[position], strict=True):
            inside = fc1.weight[expert] @ token + (0 if fc1.bias is None else fc1.bias[expert])
            out = fc2.weight[expert] @ activation(inside) + (0 if fc2.bias is None else fc2.bias[expert])
            expected[position] += weight * out
        if layer.shared_experts is not None:
            expected[position] += layer.shared_experts(token)
    torch.testing.assert_close(layer(x)[0].flatten(0, 1), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loop_and_grouped_product_have_the_same_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ends = torch.tensor([0, 20, 20, 65, 70], dtype=torch.int32)  # the first and third expert get no token
    x, upstream = torch.randn(70, 24, dtype=dtype), torch.randn(70, 40, dtype=dtype)
    results = []
    for is_grouped in (False, True):
        torch.manual_seed(1)
        linear = GroupedLinear(5, 24, 40, bias=False, init_std=0.5, is_grouped=is_grouped).to(dtype)
        rows = x.clone().requires_grad_()
        out = linear(rows, ends)
        out.backward(upstream)
        results.append((out, rows.grad, linear.weight.grad))
    assert all(has_same_bits(loop, grouped) for loop, grouped in zip(*results, strict=True))  # type: ignore[arg-type]
    assert not results[0][2][0].any()


def aux_loss_by_hand(router: TopKRouter, sequences: list[Tensor]) -> float:
    """E * sum over experts of (share of choices) * (mean score), of each sequence, without bias and groups."""
    config = dataclasses.replace(router.config, moe_router_num_groups=None, moe_router_group_topk=None)
    plain = TopKRouter(dataclasses.replace(config, moe_router_enable_expert_bias=False))
    plain.weight = router.weight
    losses = []
    for tokens in sequences:
        logits = tokens @ router.weight.T
        scores = logits.sigmoid() if config.moe_router_score_function == "sigmoid" else logits.softmax(-1)
        scores = scores / scores.sum(-1, keepdim=True)
        counts = plain(tokens.unsqueeze(0)).statistics.tokens_per_expert
        losses.append((counts / counts.sum() * scores.mean(0)).sum() * counts.numel())
    return config.moe_aux_loss_coeff * torch.stack(losses).mean().item()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_auxiliary_loss(name: str, kind: Any) -> None:
    router = router_of(named(name, moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.5))
    x = torch.randn(3, 20, 64) / 8
    loss = router(x).statistics.aux_loss
    sequences = list(x) if kind == "seq_aux_loss" else [x.flatten(0, 1)]
    assert loss.item() == pytest.approx(aux_loss_by_hand(router, sequences), rel=1e-5)
    loss.backward()
    assert router.weight.grad.any()


def test_there_is_no_auxiliary_loss_where_none_is_wanted() -> None:
    x = torch.randn(1, 4, 64)
    assert TopKRouter(named("mixtral-tiny", moe_router_load_balancing_type="none"))(x).statistics.aux_loss is None
    assert TopKRouter(named("mixtral-tiny", moe_aux_loss_coeff=0.0))(x).statistics.aux_loss is None
    router = TopKRouter(named("mixtral-tiny"))
    with torch.no_grad():
        assert router(x).statistics.aux_loss is None
    assert router.eval()(x).statistics.aux_loss is None


def test_bias_rises_where_few_tokens_went() -> None:
    router = TopKRouter(named("deepseek-v3-tiny", moe_router_bias_update_rate=0.25))
    router.tokens_per_expert.copy_(torch.tensor([3, 1, 2] + [2] * 13))
    router.update_expert_bias()
    assert router.expert_bias.tolist() == [-0.25, 0.25] + [0.0] * 14
    assert not router.tokens_per_expert.any()
    router.update_expert_bias()  # nothing counted, nothing moved
    assert router.expert_bias.tolist() == [-0.25, 0.25] + [0.0] * 14


@pytest.mark.parametrize("cast", [lambda m: m.bfloat16(), lambda m: m.to(torch.float16), lambda m: m.half()])
def test_bias_stays_fp32(cast: Any) -> None:
    router = router_of(named("deepseek-v3-tiny"))
    before = router.expert_bias.clone()
    cast(router)
    assert router.weight.dtype != torch.float32
    assert torch.equal(router.expert_bias, before)
    with torch.device("meta"):
        on_meta = cast(TopKRouter(named("deepseek-v3-tiny")))
    assert on_meta.to_empty(device="cpu").expert_bias.dtype == torch.float32


@pytest.mark.parametrize("wanted", [None, "fp32"])
def test_logits_are_computed_in_the_dtype_that_is_asked_for(wanted: Any) -> None:
    router = router_of(named("mixtral-tiny", moe_router_dtype=wanted)).bfloat16()
    x = torch.randn(1, 32, 64).bfloat16()
    exact = (x.double()[0] @ router.weight.double().T).softmax(-1)
    got = torch.zeros(32, 8, dtype=torch.float64)
    config = named("mixtral-tiny", moe_router_topk=8, moe_router_pre_softmax=True, moe_router_dtype=wanted)
    every = TopKRouter(config)
    every.weight = router.weight
    routing = every(x)
    got.scatter_(1, routing.experts_NJ, routing.probabilities_NJ.double())
    error = (got - exact).abs().max().item()
    # Logits of size 8 to 16 in bf16 are off by up to 2^-5; in fp32 by 2^-20.
    assert error > 1e-3 if wanted is None else error < 1e-4
