"""Small steps made by hand, of an embedding, equal layers and a head, for the planner's tests."""

import random
from dataclasses import replace

from recollect.planning.option_table import OptionTable
from recollect.profile.events import StepLog
from recollect.profile.graph import OpRecord, UnitCall, UnitGraph, ValueRecord
from recollect.profile.profile import Profile
from recollect.simulation.simulate import simulate
from synthetic_step import with_log

PERSISTENT_BYTES = 1000


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


GATHER = "mlp._c10d_functional:all_gather_into_tensor"


def gathering_layer(
    *, replays: bool = True, gather_s: float = 0.05, order_s: float = 0.02, is_saved: bool = True
) -> UnitGraph:
    """A layer under sequence parallelism: a product reads what a gather returns, put in order."""
    values = (
        ValueRecord("input", 50, producer=None, saved=True),
        ValueRecord("input_layernorm.mul", 100, producer=0),
        ValueRecord(GATHER, 400, producer=1, must_keep=not replays),
        ValueRecord("mlp.cat", 400, producer=2, saved=is_saved),
        ValueRecord("mlp.up.mm", 400, producer=3, saved=True),
        ValueRecord("mlp.cat#1", 800, producer=4, saved=True),
        ValueRecord("down.mm", 50, producer=5, is_output=True),
    )
    reads = ((0,), (1,), (2,), (3,), (3, 4), (5,))
    times_s = (0.01, gather_s, order_s, 0.2, 0.04, 0.2)
    ops = [
        OpRecord(values[number].name, inputs, (number,), time_s)
        for number, (inputs, time_s) in enumerate(zip(reads, times_s, strict=True), start=1)
    ]
    return UnitGraph(values, tuple(ops))


def edge_unit(name: str, nbytes: int) -> UnitGraph:
    """An embedding or a head: one op."""
    values = (ValueRecord("input", 8, producer=None), ValueRecord(name, nbytes, producer=0, saved=True, is_output=True))
    return UnitGraph(values, (OpRecord(name, (0,), (1,), 0.1),))


def stack(num_layers: int, *, graph: UnitGraph | None = None, chained: bool = True) -> Profile:
    """An embedding, `num_layers` identical layers, a head."""
    layers = [
        UnitCall(f"layers.{i}", 1, repeated=True, chained=chained and i < num_layers - 1) for i in range(num_layers)
    ]
    calls = [UnitCall("embed", 0, chained=True), *layers, UnitCall("head", 2)]
    graphs = (edge_unit("embedding", 50), graph or layer(), edge_unit("mm", 80))
    for index in range(1, len(calls)):
        source = len(graphs[calls[index - 1].graph].values) - 1
        calls[index] = replace(calls[index], origins=((0, index - 1, source),))
    return with_log(
        Profile(
            graphs=graphs,
            calls=tuple(calls),
            log=StepLog(),
            step_s=num_layers * 1.3,
            persistent={"parameters": PERSISTENT_BYTES},
            model_class="Toy",
            batch="2 x 16",
        )
    )


def random_stack(seed: int) -> Profile:
    """Like `stack`, with random sizes and one to four layers."""
    rng = random.Random(seed)
    sizes = [rng.choice((10, 50, 200, 1000)) for _ in range(3)]
    graph = layer(norm_bytes=sizes[0], up_bytes=sizes[1], act_bytes=sizes[2], out_bytes=rng.choice((10, 100)))
    return stack(rng.randint(1, 4), graph=graph)


def peak_range(profile: Profile) -> tuple[int, int]:
    """Peaks of the leanest plan that keeps each output, and of keeping everything."""
    table = OptionTable(profile)
    least, most = (
        simulate(profile, table.decisions(choice)).peak_bytes for choice in ((0,) * len(table.rows), table.fattest)
    )
    return least, most
