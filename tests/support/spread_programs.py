"""What each of four processes runs in the tests of context and expert parallelism over gloo; a program that serves cases."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, init_device_mesh

import recollect
from case_server import join, serve
from parallel_programs import DROPPING, GPT, LLAMA, farthest, refusal, whole_gradients
from recollect._torch_parallel import flat_mesh
from recollect.lab.models.config import TransformerConfig
from recollect.lab.models.gpt import GPTModel
from recollect.lab.models.sizes import NAMED_CONFIGS
from recollect.lab.parallel.context import context_parallel
from recollect.lab.parallel.expert import expert_parallel
from recollect.lab.parallel.mesh import data_parallel
from recollect.lab.parallel.tensor import tensor_parallel

RANKS = 4
QUIET: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
DEEPSEEK = replace(NAMED_CONFIGS["deepseek-v3-tiny"], **QUIET, num_layers=2, moe_layer_freq=(0, 1), mtp_num_layers=1)
MIXTRAL = replace(NAMED_CONFIGS["mixtral-tiny"], **QUIET, num_layers=2)
CONTEXT_MODELS = {
    "llama": LLAMA,
    "gpt": replace(GPT, core_attention="unfused"),
    "deepseek": replace(DEEPSEEK, moe_aux_loss_coeff=0.1),
    "mixtral": replace(MIXTRAL, moe_aux_loss_coeff=0.1),
}


def built(config: TransformerConfig) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(config)


def batch(seed: int = 1) -> dict[str, Tensor]:
    """The first sequence has labels in its last three quarters, so that a chunk of the first rank has none."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (2, 17), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :4] = -100
    return {"tokens": tokens[:, :-1].contiguous(), "labels": labels}


def gradients(model: GPTModel, inputs: dict[str, Tensor], ranks: int = 1) -> dict[str, Tensor]:
    """The loss and the gradients, with dropout drawn alike; `ranks` of tensor parallelism."""
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(**inputs).loss
    loss.backward()
    return {"loss": loss.detach(), **whole_gradients(model, ranks)}


def mean(found: dict[str, Tensor]) -> dict[str, Tensor]:
    for tensor in found.values():
        dist.all_reduce(tensor)
    return {name: tensor / RANKS for name, tensor in found.items()}


def plans_change_no_bit(model: GPTModel, inputs: dict[str, Tensor]) -> Iterator[tuple[str, bool]]:
    expected = gradients(model, inputs)
    profile = recollect.record(model, inputs, collectives="replay")
    plans = {name: recollect.classic_plan(profile, name) for name in ("keep_all", "full")}
    if dist.get_rank() == 0:
        plans["budget"] = recollect.plan(profile, sum(plan.predicted_peak_bytes or 0 for plan in plans.values()) // 2)
    common = [plans]
    dist.broadcast_object_list(common)  # times differ, and so would plans
    for name, plan in common[0].items():
        with recollect.apply(model, plan):
            got = gradients(model, inputs)
        yield name, all(torch.equal(got[key], expected[key]) for key in expected)


def context(name: str, world: DeviceMesh, halves: DeviceMesh) -> Iterator[tuple[str, Any]]:
    config = CONTEXT_MODELS[name]
    expected = gradients(built(config), batch())
    found = gradients(context_parallel(built(config), halves["inner"]), batch())
    yield "loss", found["loss"].item()
    yield "2", farthest(mean(found), expected)
    if name == "llama":
        found = gradients(context_parallel(built(config), world), batch())
        yield "4", farthest(mean(found), expected)
        sharded = data_parallel(context_parallel(built(config), world), world)
        yield "with data", farthest(gradients(sharded, batch()), expected)
        both = context_parallel(
            tensor_parallel(built(config), halves["inner"], sequence_parallel=True), halves["outer"]
        )
        yield "with tensor", farthest(mean(gradients(both, batch(), ranks=2)), expected)
        inputs = {name: tensor[:, :6] for name, tensor in batch().items()}
        yield "refused", refusal(lambda: context_parallel(built(LLAMA), world)(**inputs))


CONTEXT_PLANS = {"gpt": DROPPING, "deepseek": replace(DEEPSEEK, hidden_dropout=0.1)}


def context_plans(name: str, halves: DeviceMesh) -> Iterator[tuple[str, bool]]:
    return plans_change_no_bit(context_parallel(built(CONTEXT_PLANS[name]), halves["inner"]), batch())


# Without a loss over each rank's batch, which is another one; the bias moves far enough to change routes.
EXPERT_MODELS = {
    "deepseek": replace(DEEPSEEK, moe_aux_loss_coeff=0.1, moe_router_bias_update_rate=0.05),
    "mixtral": replace(MIXTRAL, moe_aux_loss_coeff=0.1),
    "loop": replace(MIXTRAL, moe_grouped_gemm=False, add_bias_linear=True),
}


def mean_of_whole(model: GPTModel) -> dict[str, Tensor]:
    """The mean over the batches of all ranks, which a model on one device runs in turn."""
    found = [gradients(model, batch(rank)) for rank in range(RANKS)]
    return {name: torch.stack([one[name] for one in found]).mean(dim=0) for name in found[0]}


def mean_of_shared(model: GPTModel, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean over ranks with batches of their own; experts have the sum already."""
    found = gradients(model, own)
    shared = {name: found.pop(name) / RANKS for name in [*found] if ".experts." in name}
    return {**mean(found), **shared}


def experts(name: str, world: DeviceMesh, halves: DeviceMesh) -> Iterator[tuple[str, Any]]:
    own, config = batch(dist.get_rank()), EXPERT_MODELS[name]
    whole, shared = built(config), expert_parallel(built(config), world)
    yield name, farthest(mean_of_shared(shared, own), mean_of_whole(whole))
    if name != "deepseek":
        return
    for model in (whole, shared):
        model.update_expert_bias()
    biases = [dict(model.named_buffers()) for model in (whole, shared)]
    yield "bias", all(torch.equal(biases[0][key], biases[1][key]) for key in biases[0] if "bias" in key)
    yield "again", farthest(mean_of_shared(shared, own), mean_of_whole(whole))
    inner = expert_parallel(built(config), halves["inner"])
    sharded = data_parallel(inner, flat_mesh(halves), expert_mesh=halves["outer"])
    yield "with data", farthest(mean_loss(gradients(sharded, own)), mean_of_whole(built(config)))
    alone = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("replicas", "expert"))
    sharded = data_parallel(
        expert_parallel(built(config), alone["expert"]), flat_mesh(alone), expert_mesh=alone["replicas"]
    )
    yield "with data alone", farthest(mean_loss(gradients(sharded, own)), mean_of_whole(built(config)))
    model = expert_parallel(context_parallel(built(config), world), world)
    yield "with context", farthest(mean_of_shared(model, batch()), gradients(built(config), batch()))


def expert_plans(name: str, world: DeviceMesh) -> Iterator[tuple[str, bool]]:
    model = expert_parallel(built(replace(EXPERT_MODELS[name], hidden_dropout=0.1)), world)
    return plans_change_no_bit(model, batch(dist.get_rank()))


def few_experts(world: DeviceMesh) -> Iterator[tuple[str, Any]]:
    few = {name: tensor[:1, :8] for name, tensor in batch(dist.get_rank()).items()}
    lonely = replace(MIXTRAL, moe_router_topk=1, num_moe_experts=4)
    found = gradients(expert_parallel(one_route(lonely), world), {**few, "labels": few["tokens"]})
    yield "without rows", sorted(found) == sorted(gradients(built(lonely), few))
    yield "refused", refusal(lambda: expert_parallel(built(replace(MIXTRAL, num_moe_experts=6)), world))
    yield "none", refusal(lambda: expert_parallel(built(LLAMA), world))
    yield "balanced", refusal(lambda: expert_parallel(built(MIXTRAL), world, balanced=True)(**few))


def refused(halves: DeviceMesh) -> Iterator[tuple[str, Any]]:
    biased = replace(MIXTRAL, add_bias_linear=True)
    yield "tensor refused", refusal(lambda: tensor_parallel(built(biased), halves["inner"]))
    split = tensor_parallel(built(MIXTRAL), halves["inner"])
    yield "both refused", refusal(lambda: expert_parallel(split, halves["inner"]))


def one_route(config: TransformerConfig) -> GPTModel:
    """A model whose tokens all go to the first expert."""
    model = built(config)
    for name, parameter in model.named_parameters():
        if name.endswith("router.weight"):
            torch.nn.init.zeros_(parameter)
    return model


def mean_loss(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**found, **mean({"loss": found["loss"]})}


def main() -> None:
    join(RANKS)
    world = init_device_mesh("cpu", (RANKS,))
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    cases: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
        **{f"context {name}": partial(context, name, world, halves) for name in CONTEXT_MODELS},
        **{f"context plans {name}": partial(context_plans, name, halves) for name in CONTEXT_PLANS},
        **{f"experts {name}": partial(experts, name, world, halves) for name in EXPERT_MODELS},
        **{f"expert plans {name}": partial(expert_plans, name, world) for name in EXPERT_MODELS},
        "few experts": lambda: few_experts(world),
        "refused": lambda: refused(halves),
    }
    serve(lambda name: dict(cases[name]()))


if __name__ == "__main__":
    main()
