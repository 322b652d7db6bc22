"""Small profiles made by hand, and a simulator simple enough to check by eye, for the planner's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from recollect.planning.hull import evaluate
from recollect.profile.events import StepLog
from recollect.profile.graph import OpRecord, UnitCall, UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from recollect.simulation.simulate import CallDecision

PERSISTENT_BYTES = 1000


@dataclass(frozen=True)
class ToySimulation:
    """What the toy simulator predicts."""

    peak_bytes: int
    recompute_s: float
    peak_call: str


def layer(*, norm_bytes: int = 100, up_bytes: int = 400, act_bytes: int = 400, out_bytes: int = 50) -> UnitGraph:
    """x -> norm -> up -> act -> down: a cheap norm, an expensive matrix product, a cheap activation."""
    values = (
        ValueRecord("input", out_bytes, producer=None, saved=True),
        ValueRecord("norm.mul", norm_bytes, producer=0, saved=True),
        ValueRecord("mlp.up.mm", up_bytes, producer=1, saved=True),
        ValueRecord("mlp.act.silu", act_bytes, producer=2, saved=True),
        ValueRecord("mlp.down.mm", out_bytes, producer=3, is_output=True),
    )
    ops = (
        OpRecord("norm.mul", (0,), (1,), 0.01),
        OpRecord("mlp.up.mm", (1,), (2,), 0.2),
        OpRecord("mlp.act.silu", (2,), (3,), 0.02),
        OpRecord("mlp.down.mm", (3,), (4,), 0.2),
    )
    return UnitGraph(values, ops)


def edge_unit(name: str, nbytes: int) -> UnitGraph:
    """An embedding or a head: one op."""
    values = (ValueRecord("input", 8, producer=None), ValueRecord(name, nbytes, producer=0, saved=True, is_output=True))
    return UnitGraph(values, (OpRecord(name, (0,), (1,), 0.1),))


def stack(num_layers: int, *, graph: UnitGraph | None = None, chained: bool = True) -> Profile:
    """An embedding, `num_layers` identical layers, a head."""
    layers = [
        UnitCall(f"layers.{i}", 1, repeated=True, chained=chained and i < num_layers - 1) for i in range(num_layers)
    ]
    return Profile(
        graphs=(edge_unit("embedding", 50), graph or layer(), edge_unit("mm", 80)),
        calls=(UnitCall("embed", 0, chained=True), *layers, UnitCall("head", 2)),
        log=StepLog(),
        step_s=num_layers * 1.3,
        persistent={"parameters": PERSISTENT_BYTES},
        model_class="Toy",
        batch="2 x 16",
    )


def random_stack(seed: int) -> Profile:
    """Like `stack`, with random sizes and one to four layers."""
    rng = random.Random(seed)
    sizes = [rng.choice((10, 50, 200, 1000)) for _ in range(3)]
    graph = layer(norm_bytes=sizes[0], up_bytes=sizes[1], act_bytes=sizes[2], out_bytes=rng.choice((10, 100)))
    return stack(rng.randint(1, 4), graph=graph)


def simulate(profile: Profile, decisions: Sequence[CallDecision]) -> ToySimulation:
    """Predict the peak from sizes alone.

    Forward of a call has what earlier calls keep and all of its own values; backward what it and earlier calls keep and
    what it recomputes, with the outputs that it needs of earlier calls that dropped theirs.
    """
    peak_bytes, peak_call, kept_bytes, segment_bytes = profile.persistent_bytes, "optimizer", 0, 0
    recompute_s = 0.0
    for call, decision in zip(profile.calls, decisions, strict=True):
        graph = profile.graph_of(call)
        produced = {i for i, value in enumerate(graph.values) if value.producer is not None}
        choice = evaluate(graph, produced - decision.recompute, output="keep" if decision.keep_output else "recompute")
        forward_bytes = kept_bytes + sum(graph.values[i].nbytes for i in produced)
        kept_bytes += choice.kept_bytes
        recompute_s += choice.recompute_s
        recomputed = {i for op in choice.recompute_ops for i in graph.ops[op].outputs}
        backward_bytes = kept_bytes + segment_bytes + sum(graph.values[i].nbytes for i in recomputed)
        segment_bytes = 0 if decision.keep_output else segment_bytes + graph.values[-1].nbytes
        call_bytes = profile.persistent_bytes + max(forward_bytes, backward_bytes)
        if call_bytes > peak_bytes:
            peak_bytes, peak_call = call_bytes, call.path
    return ToySimulation(peak_bytes=peak_bytes, recompute_s=recompute_s, peak_call=peak_call)
