"""Random training steps made by hand, small enough to try every plan: units, and a log of events that fits them.

A unit is a random program of ops. Forward runs the units in order; values die after their last reader. Each op saves some
of its arguments or results. Backward goes through the ops in reverse, asks for what each one saved, makes the gradients of
its arguments and lets go.
"""

from __future__ import annotations

import random
from dataclasses import replace

from recollect.profile.events import (
    ALLOC,
    BACKWARD,
    DIES,
    FREE,
    OP,
    OPTIMIZER,
    PHASE,
    RELEASE,
    RETURN,
    SAVE,
    USE,
    WORK,
    StepLog,
)
from recollect.profile.graph import OpRecord, UnitCall, UnitGraph, ValueRecord
from recollect.profile.profile import Profile

Event = tuple[int, ...]
INPUT = 0
"""Index of a unit's input among its values."""


def random_unit(
    rng: random.Random, num_values: int, *, state_bytes: int, saved_part: float
) -> tuple[UnitGraph, list[list[int]]]:
    """A unit with so many computed values, the last of them its output, and what each of its ops saves."""
    values = [ValueRecord("input", 8, producer=None)]
    ops: list[OpRecord] = []
    saves: list[list[int]] = []
    while len(values) <= num_values:
        inputs = sorted({rng.choice(range(len(values))[-3:]) for _ in range(rng.choice((1, 1, 2)))})
        is_pair = rng.random() < 0.15 and len(values) < num_values
        outputs = list(range(len(values), len(values) + 1 + is_pair))
        must_keep = rng.random() < 0.08
        for index in outputs:
            nbytes = rng.choice((8, 16, 40, 100))
            values.append(ValueRecord(f"op{len(ops)}.{index}", nbytes, producer=len(ops), must_keep=must_keep))
        ops.append(
            OpRecord(
                f"op{len(ops)}",
                tuple(inputs),
                tuple(outputs),
                time_s=float(rng.choice((1, 2, 3, 10, 30))),
                state_bytes=state_bytes if rng.random() < 0.1 else 0,
                working_bytes=rng.choice((0, 0, 0, 50)),
            )
        )
        saves.append([index for index in (*inputs, *outputs) if rng.random() < saved_part])
    values[0] = replace(values[0], nbytes=values[-1].nbytes)
    values[-1] = replace(values[-1], is_output=True)
    for index in {index for saved in saves for index in saved}:
        values[index] = replace(values[index], saved=True)
    return UnitGraph(tuple(values), tuple(ops)), saves


class _Writer:
    """Writes the log of a step."""

    def __init__(self, graph: UnitGraph, saves: list[list[int]], num_units: int) -> None:
        self.graph = graph
        self.saves = saves
        self.num_units = num_units
        self.output = len(graph.values) - 1
        self.log: list[Event] = []
        self.handles: dict[tuple[int, int], list[int]] = {}
        self.num_handles = 0
        self.num_storages = 0

    def new_storage(self, nbytes: int) -> int:
        self.log.append((ALLOC, self.num_storages, nbytes))
        self.num_storages += 1
        return self.num_storages - 1

    def save(self, call: int, op: int, value: int) -> None:
        owner = (call, value) if value != INPUT else (call - 1, self.output)
        # What the first unit reads is part of the batch: always there.
        if owner[0] < 0:
            return
        self.log.append((SAVE, *owner, self.num_handles, owner[0]))
        self.handles.setdefault((call, op), []).append(self.num_handles)
        self.num_handles += 1

    def forward(self, call: int) -> None:
        for index, op in enumerate(self.graph.ops):
            for value in self.saves[index]:
                if value in op.inputs:
                    self.save(call, index, value)
            self.log.append((OP, call, index))
            for value in self.saves[index]:
                if value in op.outputs:
                    self.save(call, index, value)
            for value in (*op.inputs, *op.outputs):
                is_read_later = any(value in later.inputs for later in self.graph.ops[index + 1 :])
                if value not in (INPUT, self.output) and not is_read_later:
                    self.log.append((DIES, call, value))
        self.log.append((RETURN, call))
        if call > 0:
            self.log.append((DIES, call - 1, self.output))

    def backward(self, call: int, gradient: int, rng: random.Random) -> int:
        gradients = {self.output: gradient}
        for index in range(len(self.graph.ops) - 1, -1, -1):
            op = self.graph.ops[index]
            handles = self.handles.get((call, index), [])
            self.log += [(USE, handle) for handle in handles]
            self.log.append((WORK, rng.choice((0, 0, 60))))
            for value in op.inputs:
                if value not in gradients:
                    gradients[value] = self.new_storage(self.graph.values[value].nbytes)
            self.log += [(RELEASE, handle) for handle in handles]
            self.log += [(FREE, gradients.pop(value)) for value in op.outputs if value in gradients]
            if rng.random() < 0.2:
                # A parameter's gradient: it stays.
                self.new_storage(20)
        return gradients.pop(INPUT) if INPUT in gradients else self.new_storage(8)


def random_step(
    seed: int, *, num_values: int, num_units: int = 1, state_bytes: int = 0, saved_part: float = 0.6
) -> Profile:
    """A step of `num_units` identical units with so many computed values each; some ops are random if they have a state."""
    rng = random.Random(seed)
    graph, saves = random_unit(rng, num_values, state_bytes=state_bytes, saved_part=saved_part)
    writer = _Writer(graph, saves, num_units)
    for call in range(num_units):
        writer.forward(call)
    loss = writer.new_storage(rng.choice((8, 100)))
    writer.log += [(DIES, num_units - 1, writer.output), (PHASE, BACKWARD)]
    gradient = writer.new_storage(graph.values[-1].nbytes)
    writer.log.append((FREE, loss))
    seeds = rng.random()
    for call in range(num_units - 1, -1, -1):
        # Identical layers run identical backwards.
        gradient = writer.backward(call, gradient, random.Random(seeds))
    writer.log += [(FREE, gradient), (PHASE, OPTIMIZER), (WORK, 30)]
    calls = tuple(
        UnitCall(
            f"layers.{i}",
            0,
            repeated=True,
            chained=i < num_units - 1,
            origins=((INPUT, i - 1, writer.output),) if i else (),
        )
        for i in range(num_units)
    )
    step_s = 3 * num_units * graph.forward_s
    log = StepLog(blocks=(tuple(writer.log),), sequence=((0, -1),))
    return Profile((graph,), calls, log, step_s=step_s, persistent={"parameters": 100})
