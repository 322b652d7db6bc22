"""What each of two processes runs in the tests of data parallelism, over gloo on the CPU."""

import gc
import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import recollect
from blocks import Stack, built
from engines import Traced, traced, traced_forwards
from forked_processes import prepared_server
from policies import FULL, NOTHING_KEPT, Random
from recollect.applying import apply, apply_policy
from recollect.errors import RecollectError
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.plans.plan import Plan
from recollect.plans.unit_plan import UnitPlan
from recollect.plans.value_names import collective_kind
from recollect.profile.profile import Profile
from recollect.simulation.predicted import predicted_plan
from watch import Watch

RANKS = 2
Program = Callable[[], dict[str, Any]]


def run_on_ranks(program: Program, directory: Path, ranks: int = RANKS) -> list[dict[str, Any]]:
    """Run `program` in two or more processes and return what each of them returned."""
    prepared_server()
    given = (program, str(directory), ranks)
    torch.multiprocessing.start_processes(_rank, given, nprocs=ranks, start_method="forkserver")
    return [torch.load(directory / f"rank{rank}", weights_only=False) for rank in range(ranks)]


def _rank(rank: int, program: Program, directory: str, ranks: int) -> None:
    gc.freeze()  # what was imported is there for good: the meter need not look at it
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    result = program()
    dist.barrier()
    dist.destroy_process_group()
    torch.save(result, Path(directory) / f"rank{rank}")


def _data() -> torch.Tensor:
    torch.manual_seed(100 + dist.get_rank())
    return torch.randn(4, 16)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: getattr(parameter.grad, "_local_tensor", parameter.grad).clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _step(model: nn.Module) -> dict[str, torch.Tensor]:
    data = _data()
    model.zero_grad()
    torch.manual_seed(7)
    model(data).square().mean().backward()
    return _gradients(model)


WAYS: dict[str, Callable[[Stack], AbstractContextManager[Any]]] = {
    "plain": lambda model: nullcontext(),
    "full": lambda model: apply_policy(model, model.layers, FULL),
    "nothing-kept": lambda model: apply_policy(model, model.layers, NOTHING_KEPT),
    "random": lambda model: apply_policy(model, model.layers, Random(1)),
    "traced": lambda model: traced(model, model.layers, FULL),
}


def _why_not(handle: Any) -> list[str]:
    """Return for each unit with a trace why it has none in the end."""
    return [forward.why_not for forward in traced_forwards(handle)] if isinstance(handle, Traced) else []


def data_parallel() -> dict[str, Any]:
    """Gradients of three steps of each way, with the search for unused parameters on."""
    outcome: dict[str, Any] = {}
    for name, way in WAYS.items():
        for moment in ("before", "after"):
            model = built(lambda: Stack(dropout=0.1))
            if moment == "after":
                wrapped = DistributedDataParallel(model, find_unused_parameters=True)
            with way(model) as handle:
                if moment == "before":
                    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
                outcome[f"{name} {moment}"] = [_step(wrapped) for _ in range(3)]
                outcome[f"{name} {moment} why not"] = _why_not(handle)
    return outcome


def fully_sharded() -> dict[str, Any]:
    """Gradients and numbers of all-gathers of each way, or the error; parameters are freed after forward."""
    outcome: dict[str, Any] = {}
    for name, way in WAYS.items():
        model = built(lambda: Stack(dropout=0.1))
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        with way(model) as handle:
            try:
                _step(model)
                found = _step(model)
                with Watch() as watch:
                    _step(model)
                outcome[name] = {"gradients": found, "all-gathers": _all_gathers(watch), "why not": _why_not(handle)}
            except RuntimeError as error:
                outcome[name] = str(error)
    return outcome


def replayed_collectives() -> dict[str, Any]:
    """Gradients where all ranks run collectives again under one plan, and the error where one rank has another plan."""
    mesh = init_device_mesh("cpu", (RANKS,))
    model = built(lambda: Stack(dropout=0.1))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    torch.manual_seed(100)
    data = torch.randn(4, 16)
    profile = recollect.record(model, data, loss_fn=lambda out: out.square().mean(), collectives="replay")
    sent: list[Any] = [recollect.classic_plan(profile, "full")]
    dist.broadcast_object_list(sent)
    plan: Plan = sent[0]
    first, unit = next(iter(plan.units.items()))
    lean = {name: "keep" if name.endswith("all_reduce") else action for name, action in unit.actions.items()}
    plans = {"plain": Plan({}), "one plan": plan}
    # Neither rank may wait in a collective for one that has raised.
    plans["two plans"] = plan if dist.get_rank() else Plan({**plan.units, first: UnitPlan(lean)})
    plans["one keeps collectives"] = plan if dist.get_rank() else _without_collectives(plan)
    plans["one has nothing to do"] = Plan({}) if dist.get_rank() else plan
    plans["both keep collectives"] = Plan({}) if dist.get_rank() else _without_collectives(plan)
    outcome: dict[str, Any] = {}
    for name, used in plans.items():
        model.zero_grad()
        with recollect.apply(model, used), Watch() as watch:
            torch.manual_seed(7)
            try:
                model(data).square().mean().backward()
            except RecollectError as error:
                outcome[name] = {"error": str(error)}
                continue
        outcome[name] = {"gradients": _gradients(model), "all-reduces": watch.ops["_c10d_functional::all_reduce"]}
    return outcome


def _without_collectives(plan: Plan) -> Plan:
    return Plan(
        {
            path: UnitPlan({name: "keep" if collective_kind(name) else action for name, action in unit.actions.items()})
            for path, unit in plan.units.items()
        }
    )


def sharded_values() -> dict[str, Any]:
    """Gradients where all ranks compute the same and hold parts of it; errors where they do not."""
    model = built(lambda: Stack(dropout=0.1))
    recollect.distribute_saved_activations(model)
    torch.manual_seed(100)
    data = torch.randn(5, 16)
    profile = recollect.record(model, data, loss_fn=lambda out: out.square().mean())
    sent: list[Any] = [{name: planned_parts(profile, seed) for name, seed in (("random", 1), ("all", None))}]
    dist.broadcast_object_list(sent)
    plans: dict[str, Plan] = {"plain": Plan({}), **sent[0]}
    outcome: dict[str, Any] = {}
    for name, plan in plans.items():
        outcome[name] = _shared_step(model, plan, data)
    outcome["other data"] = _shared_step(model, plans["all"], data + dist.get_rank())
    another = plans["random"] if dist.get_rank() else plans["all"]
    outcome["other plans"] = _shared_step(model, another, data)
    return outcome


def _shared_step(model: nn.Module, plan: Plan, data: torch.Tensor) -> dict[str, Any]:
    model.zero_grad()
    try:
        with recollect.apply(model, plan), Watch() as watch:
            torch.manual_seed(7)
            output = model(data)
            kept_bytes = watch.live_bytes()
            output.square().mean().backward()
    except RecollectError as error:
        return {"error": str(error)}
    return {"gradients": _gradients(model), "kept bytes": kept_bytes, "all-gathers": _all_gathers(watch)}


def planned_parts(profile: Profile, seed: int | None) -> Plan:
    coin = random.Random(seed)
    units = {}
    for call in profile.calls:
        graph = profile.graph_of(call)
        actions = {}
        for value in graph.values:
            if value.producer is None or value.must_keep:
                continue
            words = ["recompute"] if seed is None else ["keep", "recompute"]
            if not value.mutated_later and not graph.ops[value.producer].mutates:
                words = ["shard"] if seed is None else [*words, "shard"]
            actions[value.name] = coin.choice(words)
        units[call.path] = UnitPlan(actions)
    plan = Plan(units)
    return predicted_plan(profile, plan)


def loss_in_chunks() -> dict[str, Any]:
    """Gradients of a language model with its loss in one piece and in chunks, replicated and sharded; or the error."""

    def model(shape: str) -> nn.Module:
        torch.manual_seed(0)
        made = GPTModel(llama_config(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64))
        if shape == "replicated":
            return DistributedDataParallel(made)
        for layer in made.decoder.layers:
            fully_shard(layer)
        if shape == "head of its own":
            fully_shard(made.output_layer)
        return fully_shard(made)

    outcome: dict[str, Any] = {}
    torch.manual_seed(100 + dist.get_rank())
    tokens = torch.randint(64, (2, 9))
    for shape in ("replicated", "sharded", "head of its own"):
        for num_chunks in (1, 4):
            built_model = model(shape)
            with apply(built_model, Plan({}, loss_chunks=num_chunks)):
                try:
                    built_model(tokens, tokens).loss.backward()
                    outcome[f"{shape} {num_chunks}"] = _gradients(built_model)
                except RuntimeError as error:
                    outcome[f"{shape} {num_chunks}"] = str(error)
    return outcome


def _all_gathers(watch: Watch) -> int:
    return sum(count for name, count in watch.ops.items() if "all_gather" in name or "allgather" in name)
