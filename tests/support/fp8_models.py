"""Small models that multiply in 8 bits, and steps of them with several micro-batches."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

import recollect
from policies import Random
from recollect.applying import apply_policy
from recollect.integrations.megatron import RecomputeConfig, megatron_plan
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.plans.plan import Plan

RECIPES = {
    "delayed": {"fp8": "hybrid", "fp8_amax_history_len": 3, "fp8_amax_compute_algo": "max"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {
        **{"num_moe_experts": 2, "moe_ffn_hidden_size": 128, "moe_grouped_gemm": True, "gated_linear_unit": True},
        **{
            "activation_func": "silu",
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "core_attention": "unfused",
        },
    },
}
SETS = {"dense": ("layernorm", "mlp", "core_attn"), "experts": ("layernorm", "moe_act", "moe", "core_attn")}
"""Megatron's modules that a kind has."""
Order = Literal["one by one", "in flight"]
LAYERS = ("decoder.layers.0", "decoder.layers.1")


def model_of(kind: str, recipe: str | None, *, seed: int = 0, **changes: Any) -> GPTModel:
    """Two layers, with dropout, in bf16; blocks of 128 need wider ones."""
    width = 128 if recipe == "blockwise" else 32
    sizes = {
        "num_layers": 2,
        "hidden_size": width,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "ffn_hidden_size": width,
    }
    torch.manual_seed(seed)
    own = {} if recipe is None else RECIPES[recipe]
    config = TransformerConfig(**{**sizes, **KINDS[kind], "moe_ffn_hidden_size": width, **own, **changes})
    return GPTModel(config, compute_dtype=torch.bfloat16)


def batches(model: GPTModel, count: int = 4, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of as many tokens as the recipe needs."""
    positions = 64 if model.config.fp8_recipe == "blockwise" else 16
    shape = (count, 2, positions + 1)
    tokens = torch.randint(64, shape, generator=torch.Generator().manual_seed(seed))
    return [(one[:, :-1], one[:, 1:]) for one in tokens]


def step(
    model: GPTModel, given: list[tuple[Tensor, Tensor]], order: Order, *, retain: bool = False
) -> dict[str, Tensor]:
    """Accumulate gradients, with all forwards before the first backward if `in flight`; return all that may differ."""
    model.zero_grad()
    losses = []
    for batch in given:
        losses.append(model(*batch).loss)
        if order == "one by one":
            losses[-1].backward()
    if order == "in flight":
        for loss in losses:
            if retain:
                loss.backward(retain_graph=True)
            loss.backward()
    found = {f"loss {number}": loss.detach() for number, loss in enumerate(losses)}
    found |= {f"gradient {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


def different(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]


def plans_of(kind: str, model: GPTModel, num_random: int) -> list[Plan | Random]:
    """Megatron's full recompute, each of its modules, all of them with their outputs, and random choices."""
    profile = recollect.record(model, batches(model)[0], loss_fn=lambda out: out.loss)
    full = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    sets = [(name,) for name in SETS[kind]] + [SETS[kind]]
    modules = [
        RecomputeConfig(
            recompute_granularity="selective",
            recompute_modules=names,
            recompute_discard_outputs=names if len(names) > 1 else None,
        )
        for names in sets
    ]
    return [megatron_plan(profile, config) for config in (full, *modules)] + [
        Random(seed) for seed in range(num_random)
    ]


def applied(model: GPTModel, plan: Plan | Random) -> AbstractContextManager[Any]:
    return recollect.apply(model, plan) if isinstance(plan, Plan) else apply_policy(model, LAYERS, plan)


def first_difference(
    kind: str, recipe: str, plans: Sequence[Plan | Random], num_steps: int, order: Order, count: int = 4
) -> list[str]:
    """Train a model under one plan after the other beside one without any; return what differs first.

    Whatever a step of a plan leaves is what the next one begins with, and all of it is compared after each: so as many steps
    under any one of these plans would be equal, too.
    """
    plain, planned = model_of(kind, recipe), model_of(kind, recipe)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in (plain, planned)]
    for number in range(num_steps):
        given = batches(plain, count, seed=number)
        torch.manual_seed(number)
        expected = step(plain, given, order)
        torch.manual_seed(number)
        with applied(planned, plans[number % len(plans)]):
            found = step(planned, given, order)
        if not all(tensor.isfinite().all() for tensor in expected.values()):
            return [f"step {number}: not finite"]
        if names := different(expected, found):
            return [f"step {number}, {plans[number % len(plans)]}: {name}" for name in names]
        for optimizer in optimizers:
            optimizer.step()
    return different(dict(plain.state_dict()), dict(planned.state_dict()))
