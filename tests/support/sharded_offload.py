"""What two processes run in the tests of plans that offload values of a model that FSDP2 shards, over gloo.

python sharded_offload.py RANK FOLDER
"""

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import recollect
from blocks import Stack
from case_server import join, serve
from offload_plans import random_offload_plan
from offload_programs import carried_by, offload_of, plan_that_offloads, seen_names
from recollect.engine.content import has_same_bits
from recollect.engine.offload.carriers import ThreadCarrier
from recollect.engine.offload.pool import Slot
from recollect.errors import PlanError
from recollect.plans.plan import Plan
from recollect.simulation.decisions import decide
from recollect.simulation.simulate import simulate

RANKS, WIDTH, ROWS = 2, 32, 64


class Guard(ThreadCarrier):
    """Counts what it copies, and what of that are parameters, whole ones or their parts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.num_values = self.num_parameters = 0

    def copy_out(self, source: Tensor, slot: Slot) -> Future[None]:
        held = {
            getattr(parameter, "_local_tensor", parameter).untyped_storage().data_ptr()
            for parameter in self._model.parameters()
        }
        self.num_values += 1
        self.num_parameters += source.data_ptr() in held
        return super().copy_out(source, slot)


class Sharded:
    """A model, sharded block by block, with its gradients without a plan."""

    def __init__(self, policy: MixedPrecisionPolicy) -> None:
        torch.manual_seed(0)
        self.model = Stack(WIDTH, 4, 0.1)
        for block in self.model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.data = torch.randn(ROWS, WIDTH)
        self.plain = self.gradients()

    def gradients(self) -> list[Tensor]:
        self.model.zero_grad()
        torch.manual_seed(1)
        self.model(self.data).sum().backward()
        grads = [parameter.grad for parameter in self.model.parameters()]
        return [grad.to_local().clone() for grad in grads if isinstance(grad, DTensor)]

    def under(self, plan: Plan) -> dict[str, Any]:
        guard = Guard(self.model)
        with carried_by(lambda: guard), recollect.apply(self.model, plan) as applied:
            steps = [self.gradients() for _ in range(3)]
            host = offload_of(applied).host
        return {
            "is_equal": all(map(has_same_bits, self.plain * 3, sum(steps, []))),
            "values": guard.num_values,
            "parameters": guard.num_parameters,
            "missed": host.num_missed,
            "left": host.pool.taken_bytes,
            "ends": [slab.slots.end_bytes for slab in host.pool._slabs],
        }


def run_case(name: str) -> dict[str, Any]:
    sharded = Sharded(MixedPrecisionPolicy(param_dtype=torch.bfloat16) if name == "bf16" else MixedPrecisionPolicy())
    names = seen_names(sharded.model, sharded.model.layers, sharded.gradients)
    found: dict[str, Any] = {"all": sharded.under(plan_that_offloads(names)), "random": []}
    profile = recollect.record(sharded.model, sharded.data, loss_fn=torch.sum)
    for seed in range(3):
        plan = random_offload_plan(profile, seed, drops_outputs=False)
        host_bytes = simulate(profile, decide(profile, plan)).host_bytes
        found["random"].append(
            {"host_bytes": host_bytes, **sharded.under(replace(plan, predicted_host_bytes=host_bytes))}
        )
    try:
        recollect.apply(sharded.model, Plan({"blocks.0": recollect.UnitPlan({}, output="recompute")}))
    except PlanError as error:
        found["refused"] = str(error)
    return found


if __name__ == "__main__":
    join(RANKS)
    serve(run_case)
