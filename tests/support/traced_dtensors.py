"""What two processes run in the tests of layers from traces whose parameters are DTensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import recollect
from blocks import Computes
from case_server import join, save_and_exit
from engines import traced_forwards

RANKS = 2
WIDTH = 16


def mlp() -> Computes:
    parts = {"up": nn.Linear(WIDTH, 4 * WIDTH), "down": nn.Linear(4 * WIDTH, WIDTH)}
    return Computes(lambda self, hidden: self.down(torch.nn.functional.gelu(self.up(hidden))), **parts)


class Block(nn.Module):
    drops = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = mlp()
        self.register_parameter("shift", None)

    def forward(self, hidden: Any) -> Any:
        if self.shift is not None:
            hidden = hidden + DTensor.from_local(self.shift, hidden.device_mesh, hidden.placements)
        return hidden + nn.functional.dropout(self.mlp(self.norm(hidden)), self.drops)


class Model(nn.Module):
    """Blocks between a layer that reads tokens and the mean of squares; `layout`: of what the first block gets."""

    layout: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Any) -> Any:
        hidden = self.first(tokens)
        if self.layout is not None:
            hidden = hidden.redistribute(placements=[self.layout])
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


def tensor(model: Model, mesh: Any) -> None:
    """Blocks pass on plain tensors, of which each process has all."""
    for block in model.blocks:
        parallelize_module(block, mesh, {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})


def sequence(model: Model, mesh: Any) -> None:
    """Blocks pass on DTensors, split along the sequence."""
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    down = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    for block in model.blocks:
        ways = {"norm": SequenceParallel(), "mlp": whole, "mlp.up": ColwiseParallel(), "mlp.down": down}
        parallelize_module(block, mesh, ways)
    first = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)
    parallelize_module(model, mesh, {"first": first})


def mixed(model: Model, mesh: Any) -> None:
    """A plain parameter and a DTensor get the same gradient: for the one it is a plain tensor, for the other a DTensor."""
    sequence(model, mesh)
    for block in model.blocks:
        block.shift = nn.Parameter(torch.ones(2, 8 // RANKS, WIDTH))


def sharded(model: Model, mesh: Any) -> None:
    """FSDP2 shards what tensor parallelism, here of one process, has left."""
    both = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("data", "tensor"))
    tensor(model, both["tensor"])
    for block in model.blocks:
        fully_shard(block, mesh=both["data"])
    fully_shard(model, mesh=both["data"])


def drawing(model: Model, mesh: Any) -> None:
    """Draws random numbers for DTensors."""
    sequence(model, mesh)
    for block in model.blocks:
        block.drops = 0.5


def respread(model: Model, mesh: Any) -> None:
    """The first block gets a DTensor that it spreads in a different way."""
    sequence(model, mesh)
    model.layout = Replicate()


WAYS = {way.__name__: way for way in (tensor, sequence, sharded, mixed, drawing, respread)}


def built(way: str) -> Model:
    torch.manual_seed(0)
    model = Model()
    WAYS[way](model, init_device_mesh("cpu", (RANKS,)))
    return model


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(seed))


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def scalar(loss: Any) -> Tensor:
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def once(model: Model) -> None:
    scalar(model(tokens())).backward()


def micro_batches(model: Model) -> None:
    for seed in range(3):
        scalar(model(tokens(seed))).backward()


def in_flight(model: Model) -> None:
    losses = [scalar(model(tokens(seed))) for seed in range(2)]
    for loss in losses:
        loss.backward()


def kept(model: Model) -> None:
    loss = scalar(model(tokens()))
    loss.backward(retain_graph=True)
    loss.backward()


def frozen(model: Model) -> None:
    for block in model.blocks:
        block.mlp.up.requires_grad_(False)
    once(model)


LOOPS = {loop.__name__: loop for loop in (once, micro_batches, in_flight, kept, frozen)}
# FSDP2 brings nothing of its own to the others, nor do plain parameters.
LOOPS_OF = {
    "tensor": tuple(LOOPS),
    "sequence": tuple(LOOPS),
    "sharded": ("once", "micro_batches"),
    "mixed": ("once",),
}


def trained(model: Model, loop: Callable[[Model], None]) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    found = []
    for _ in range(4):
        loop(model)
        found += [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(local(p).detach().clone() for p in model.parameters())]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def traced(way: str, loop: Callable[[Model], None], plan: recollect.Plan) -> dict[str, Any]:
    """Whether a loop has the same bits under a plan, and what was said."""
    expected, model = trained(built(way), loop), built(way)
    with warnings.catch_warnings(record=True) as told, recollect.apply(model, plan):
        warnings.simplefilter("always")
        found = trained(model, loop)
    return {"same": same(expected, found), "told": [str(one.message) for one in told]}


def num_tape_calls_after_pause(way: str, plan: recollect.Plan) -> int:
    """Return how many layers run on the tape in the first step after a plan was suspended."""
    model = built(way)
    with recollect.apply(model, plan) as applied:
        for _ in range(4):
            once(model)
        with applied.suspended():
            once(model)
        tape = traced_forwards(applied)[0].tape
        with mock.patch.object(tape, "run", wraps=tape.run) as run:
            once(model)
        return run.call_count


def least_growth(way: str, plan: recollect.Plan) -> int:
    """Return by how many bytes a step grows, once traced; gloo may let go of a buffer late."""
    model, given = built(way), tokens()

    def step() -> None:
        scalar(model(given)).backward()
        model.zero_grad()

    with recollect.apply(model, plan):
        for _ in range(3):
            step()
        return min(recollect.measure_peak(step, device="cpu").peak_growth_bytes for _ in range(8))


def cases() -> Iterator[tuple[str, Any]]:
    for way in WAYS:
        profile = recollect.record(built(way), tokens(), engine="graph", gradients="freed")
        yield f"why not {way}", sorted({graph.why_not_traced for graph in profile.graphs})
        ends = [recollect.classic_plan(profile, name).predicted_peak_bytes or 0 for name in ("full", "keep_all")]
        plan = recollect.plan(profile, sum(ends) // 2, engine="graph")
        for name in LOOPS_OF.get(way, ("once",)):
            yield f"{name} {way}", traced(way, LOOPS[name], plan)
        if way == "tensor":
            yield "on the tape after a pause", num_tape_calls_after_pause(way, plan)
        if way in ("tensor", "sequence"):
            excess = profile.persistent_bytes + least_growth(way, plan) - (plan.predicted_peak_bytes or 0)
            yield f"excess {way}", excess


if __name__ == "__main__":
    join(RANKS)
    save_and_exit(dict(cases()))
