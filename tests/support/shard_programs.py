"""What two processes run in the tests of plans that hold values as parts by themselves: tensor parallelism over gloo."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import init_device_mesh

import recollect
from recollect.errors import BudgetTooSmallError
from recollect.lab.models.architectures import llama_config
from recollect.lab.models.gpt import GPTModel
from recollect.lab.parallel.tensor import tensor_parallel
from recollect.planning.choose import Planner
from recollect.plans.action import Action
from recollect.plans.plan import Plan
from recollect.profile.profile import Profile

RANKS = 2
WIDTH, LENGTH, LAYERS = (int(word) for word in os.environ.get("SHARD_SIZES", "64 32 4").split())


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
    assert loss is not None
    loss.backward()
    return [loss.detach(), *(getattr(p.grad, "_local_tensor", p.grad).clone() for p in made.parameters())]


def without_parts(profile: Profile) -> Profile:
    return replace(profile, graphs=tuple(replace(graph, parts=()) for graph in profile.graphs))


def num_parts(plan: Plan) -> int:
    return sum(action is Action.SHARD for unit in plan.units.values() for action in unit.actions.values())


def least_bytes(planner: Planner) -> int:
    try:
        planner.plan(1)
    except BudgetTooSmallError as error:
        return error.least_peak_bytes
    raise AssertionError("a byte was enough")


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    made = model()
    expected = gradients(made)
    profile = recollect.record(made, batch(), collectives="replay")
    planners = {"with": Planner(profile), "without": Planner(without_parts(profile))}
    least = {name: least_bytes(planner) for name, planner in planners.items()}
    found: dict[str, Any] = {
        "least": least,
        "plain": planners["with"].plain_peak_bytes,
        "parts": {
            call.path: sorted(profile.graph_of(call).values[part.value].name for part in profile.graph_of(call).parts)
            for call in profile.calls
        },
        "values": {
            call.path: [v.name for v in profile.graph_of(call).values if v.producer is not None]
            for call in profile.calls
        },
        "json": recollect.Profile.from_json(profile.to_json()) == profile,
        "rows": [],
    }
    span = found["plain"] - least["without"]
    for budget in (least["with"], least["without"], *(least["without"] + span * part // 10 for part in (1, 2, 4))):
        row: dict[str, Any] = {"budget": budget}
        for name, planner in planners.items():
            if budget < least[name]:
                continue
            plan = planner.plan(budget)
            with recollect.apply(made, plan):
                got = gradients(made)
                for _ in range(2):
                    gradients(made)
            row[name] = {
                "slowdown": plan.predicted_slowdown,
                "bound": plan.bound_slowdown,
                "peak": plan.predicted_peak_bytes,
                "parts": num_parts(plan),
                "equal": all(torch.equal(one, other) for one, other in zip(got, expected, strict=True)),
                "plan": plan.to_json(),
            }
            report = recollect.verify(made, batch(), plan, compare="step")
            row[name] |= {"measured": report.plan_peak_bytes}
        found["rows"].append(row)
    torch.save(found, Path(folder) / f"rank{rank}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    run(int(sys.argv[1]), sys.argv[2])
