"""Random training steps made by hand, small enough to try every plan: units, and a log of events that fits them.

A unit is a random program of ops. Forward runs the units in order; values die after their last reader. Each op saves some
of its arguments or results. Backward goes through the ops in reverse, asks for what each one saved, makes the gradients of
its arguments and lets go.
"""

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


class LogWriter:
    """Writes the log of a step, call by call.

    Args:
        profile: graphs and calls; the input of each call is the output of the call before.
        saves: for each graph, what each of its ops saves.
    """

    def __init__(self, profile: Profile, saves: list[list[list[int]]]) -> None:
        self.profile = profile
        self.saves = saves
        self.log: list[Event] = []
        self.handles: dict[tuple[int, int], list[int]] = {}
        self.num_handles = 0
        self.num_storages = 0

    def graph(self, call: int) -> UnitGraph:
        return self.profile.graph_of(self.profile.calls[call])

    def output(self, call: int) -> int:
        return len(self.graph(call).values) - 1

    def new_storage(self, nbytes: int) -> int:
        self.log.append((ALLOC, self.num_storages, nbytes))
        self.num_storages += 1
        return self.num_storages - 1

    def save(self, call: int, op: int, value: int) -> None:
        owner = (call, value) if value != INPUT else (call - 1, self.output(call - 1))
        # What the first unit reads is part of the batch: always there.
        if owner[0] < 0:
            return
        self.log.append((SAVE, *owner, self.num_handles, owner[0]))
        self.handles.setdefault((call, op), []).append(self.num_handles)
        self.num_handles += 1

    def forward(self, call: int) -> None:
        ops, saves = self.graph(call).ops, self.saves[self.profile.calls[call].graph]
        for index, op in enumerate(ops):
            for value in saves[index]:
                if value in op.inputs:
                    self.save(call, index, value)
            self.log.append((OP, call, index))
            for value in saves[index]:
                if value in op.outputs:
                    self.save(call, index, value)
            for value in (*op.inputs, *op.outputs):
                is_read_later = any(value in later.inputs for later in ops[index + 1 :])
                if value not in (INPUT, self.output(call)) and not is_read_later:
                    self.log.append((DIES, call, value))
        self.log.append((RETURN, call))
        if call > 0:
            self.log.append((DIES, call - 1, self.output(call - 1)))

    def backward(self, call: int, gradient: int, rng: random.Random | None) -> int:
        """Go through the ops in reverse; with a generator, some work in bytes and make gradients that stay."""
        values = self.graph(call).values
        gradients = {self.output(call): gradient}
        for index in range(len(self.graph(call).ops) - 1, -1, -1):
            op = self.graph(call).ops[index]
            handles = self.handles.get((call, index), [])
            self.log += [(USE, handle) for handle in handles]
            if rng is not None:
                self.log.append((WORK, rng.choice((0, 0, 60))))
            for value in op.inputs:
                if value not in gradients:
                    gradients[value] = self.new_storage(values[value].nbytes)
            self.log += [(RELEASE, handle) for handle in handles]
            self.log += [(FREE, gradients.pop(value)) for value in op.outputs if value in gradients]
            if rng is not None and rng.random() < 0.2:
                # A parameter's gradient: it stays.
                self.new_storage(20)
        return gradients.pop(INPUT) if INPUT in gradients else self.new_storage(8)

    def step(self, loss_bytes: int, backward_seed: float | None) -> StepLog:
        last = len(self.profile.calls) - 1
        for call in range(last + 1):
            self.forward(call)
        loss = self.new_storage(loss_bytes)
        self.log += [(DIES, last, self.output(last)), (PHASE, BACKWARD)]
        gradient = self.new_storage(self.graph(last).values[-1].nbytes)
        self.log.append((FREE, loss))
        for call in range(last, -1, -1):
            # Identical layers run identical backwards.
            rng = None if backward_seed is None else random.Random(backward_seed)
            gradient = self.backward(call, gradient, rng)
        self.log += [(FREE, gradient), (PHASE, OPTIMIZER), (WORK, 30)]
        return StepLog(tuple(self.log))


def with_log(profile: Profile) -> Profile:
    """A profile with the log of its step, in which each op saves those of its inputs that are marked as saved.

    A value that no op reads and is saved is saved by the op that makes it.
    """
    saves = []
    for graph in profile.graphs:
        read = {value for op in graph.ops for value in op.inputs}
        saves.append([[v for v in (*op.inputs, *set(op.outputs) - read) if graph.values[v].saved] for op in graph.ops])
    return replace(profile, log=LogWriter(profile, saves).step(loss_bytes=8, backward_seed=None))


def writing(graph: UnitGraph, rng: random.Random) -> UnitGraph:
    """The same unit, of which most ops that read a value last write over it."""
    ops, values = list(graph.ops), list(graph.values)
    for index, op in enumerate(ops):
        old, new = op.inputs[-1], op.outputs[0]
        is_last = not any(old in later.inputs for later in ops[index + 1 :])
        if old != INPUT and is_last and len(op.outputs) == 1 and rng.random() < 0.7:
            ops[index] = replace(op, inputs=(old, *op.inputs[:-1]), mutates=True, working_bytes=0)
            values[new] = replace(values[new], nbytes=values[old].nbytes)
    return UnitGraph(tuple(values), tuple(ops))


def random_step(
    seed: int,
    *,
    num_values: int,
    num_units: int = 1,
    state_bytes: int = 0,
    saved_part: float = 0.6,
    writes: bool = False,
) -> Profile:
    """A step of `num_units` identical units with so many computed values each; some ops are random if they have a state.

    `writes`: most ops that can write over what they read.
    """
    rng = random.Random(seed)
    graph, saves = random_unit(rng, num_values, state_bytes=state_bytes, saved_part=saved_part)
    graph = writing(graph, random.Random(seed)) if writes else graph
    output = len(graph.values) - 1
    calls = tuple(
        UnitCall(
            f"layers.{i}",
            0,
            repeated=True,
            chained=i < num_units - 1,
            origins=((INPUT, i - 1, output),) if i else (),
        )
        for i in range(num_units)
    )
    step_s = 3 * num_units * graph.forward_s
    profile = Profile((graph,), calls, StepLog(), step_s=step_s, persistent={"parameters": 100})
    loss_bytes = rng.choice((8, 100))
    return replace(profile, log=LogWriter(profile, [saves]).step(loss_bytes, rng.random()))
