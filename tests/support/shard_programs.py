"""What two processes run in the tests of plans that hold values as parts by themselves: tensor parallelism over gloo.

A program that serves two cases, in this order: "over gloo" and "alone".
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import init_device_mesh

import recollect
from case_server import join, serve
from recollect._torch_parallel import fake_process_group
from recollect.engine.content import has_same_bits
from recollect.errors import BudgetTooSmallError
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.lab.parallel.tensor import tensor_parallel
from recollect.planning.choose import Planner
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.profile.graph import UnitGraph
from recollect.profile.profile import Profile

RANKS = 2
# Small weights, and long sequences.
WIDTH, LENGTH, LAYERS = 64, 512, 3
# Seconds of the ops that take longest, about as measured on two cores that do nothing else.
OP_S = {"all_reduce": 3e-3, "attention_for_cpu": 8e-4, "mm": 1e-4}
GATHER_S = 1e-3


def model() -> GPTModel:
    torch.manual_seed(0)
    config = llama_config(num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=4, vocab_size=64)
    made = tensor_parallel(GPTModel(config), init_device_mesh("cpu", (RANKS,)))
    return recollect.distribute_saved_activations(made)


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(64, (1, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def gradients(made: GPTModel) -> list[torch.Tensor]:
    made.zero_grad()
    loss = made(**batch()).loss
    loss.backward()
    return [loss.detach(), *(getattr(p.grad, "_local_tensor", p.grad).clone() for p in made.parameters())]


def without_parts(profile: Profile) -> Profile:
    return replace(profile, graphs=tuple(replace(graph, parts=()) for graph in profile.graphs))


def timed_alike(profile: Profile) -> Profile:
    """With the same times in every run, so that plans are the same on a machine that does other work meanwhile."""

    def timed(graph: UnitGraph) -> UnitGraph:
        ops = (
            replace(op, time_s=next((s for end, s in OP_S.items() if op.name.endswith(end)), 2e-5)) for op in graph.ops
        )
        parts = (replace(part, gather_s=GATHER_S) for part in graph.parts)
        tapes = tuple((module, 0.0) for module, _ in graph.module_tape_s)
        return replace(graph, ops=tuple(ops), parts=tuple(parts), tape_s=0.0, again_op_s=0.0, module_tape_s=tapes)

    graphs = tuple(map(timed, profile.graphs))
    forward_s = sum(op.time_s for call in profile.calls for op in graphs[call.graph].ops)
    return replace(profile, graphs=graphs, step_s=3 * forward_s, gather_latency_s=GATHER_S, gather_s_per_byte=0.0)


def num_parts(plan: Plan) -> int:
    return sum(action is Action.SHARD for unit in plan.units.values() for action in unit.actions.values())


def least_bytes(planner: Planner) -> int:
    try:
        planner.plan(1)
    except BudgetTooSmallError as error:
        return error.least_peak_bytes
    raise AssertionError("a byte was enough")


def plans_of(profile: Profile) -> tuple[dict[str, int], list[tuple[int, dict[str, Plan]]]]:
    """Least budgets with parts and without, and the plans that there are for each of the two."""
    planners = {"with": Planner(profile), "without": Planner(without_parts(profile))}
    least = {name: least_bytes(planner) for name, planner in planners.items()}
    budgets = least["with"], least["without"]
    return least, [
        (budget, {name: planner.plan(budget) for name, planner in planners.items() if budget >= least[name]})
        for budget in budgets
    ]


def over_gloo(rank: int) -> dict[str, Any]:
    """Plans with parts and without, at the least budgets of both, and what the step under each measures."""
    made = model()
    expected = gradients(made)
    profile = timed_alike(recollect.record(made, batch(), collectives="replay"))
    # The first rank plans for both.
    told = [plans_of(profile) if rank == 0 else None]
    dist.broadcast_object_list(told)
    assert told[0] is not None
    least, planned = told[0]
    found: dict[str, Any] = {
        "least": least,
        "json": recollect.Profile.from_json(profile.to_json()) == profile,
        "rows": [],
    }
    for kind in ("parts", "values"):
        found[kind] = {call.path: names_of(profile.graph_of(call), kind) for call in profile.calls}
    for budget, plans in planned:
        row: dict[str, Any] = {"budget": budget}
        for name, plan in plans.items():
            with recollect.apply(made, plan):
                # The first two steps compare the values of both ranks.
                steps = [gradients(made) for _ in range(3)]
            row[name] = {
                "slowdown": plan.predicted_slowdown,
                "bound": plan.bound_slowdown,
                "peak": plan.predicted_peak_bytes,
                "parts": num_parts(plan),
                "equal": all(has_same_bits(a, b) for got in steps for a, b in zip(got, expected, strict=True)),
            }
        found["rows"].append(row)
    return found


def names_of(graph: UnitGraph, kind: str) -> list[str]:
    if kind == "parts":
        return sorted(graph.values[part.value].name for part in graph.parts)
    return sorted(value.name for value in graph.values if value.producer is not None)


def alone() -> dict[str, Any]:
    """What the leanest plan of one rank needs; without partners all values seem to be the same on all ranks."""
    made = model()
    profile = timed_alike(recollect.record(made, batch(), collectives="replay"))
    planner = Planner(profile)
    plan = planner.plan(least_bytes(planner))
    report = recollect.verify(made, batch(), plan, compare="step", time=False)
    return {"parts": num_parts(plan), "peak": plan.predicted_peak_bytes, "measured": report.plan_peak_bytes}


def without_the_other(rank: int) -> dict[str, Any]:
    """What the first rank finds, which has only a pretended partner from then on."""
    dist.barrier()
    dist.destroy_process_group()
    if rank:
        return {}
    with fake_process_group(rank, RANKS):
        found = alone()
        tokens = batch()
        fake = recollect.record(model(), {name: tensor.to("meta") for name, tensor in tokens.items()}, fake=True)
    return {
        **found,
        "ranks": fake.shard_ranks,
        "fake_parts": {call.path: names_of(fake.graph_of(call), "parts") for call in fake.calls},
        "gather_s": [fake.gather_latency_s, fake.gather_s_per_byte],
    }


if __name__ == "__main__":
    own_rank = join(RANKS)
    serve(lambda name: over_gloo(own_rank) if name == "over gloo" else without_the_other(own_rank))
