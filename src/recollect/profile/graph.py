"""What one training step computes, as frozen data: values, ops, units, and the whole profile.

A profile is recorded once (`recollect.record`) and read by every planner. Nothing here imports torch, so a profile can
be saved where the accelerator is and planned anywhere else.

| word | here |
|---|---|
| value | `ValueRecord`: one tensor of a unit's forward; views are folded into the value that owns the storage |
| op | `OpRecord`: what produces values, with its time |
| unit | `UnitGraph`: the values and ops of one layer; identical layers share one graph |
| call | `UnitCall`: one run of a unit in the step, in forward order |

Limitations: a unit's graph is one recorded forward. Control flow that depends on the data is recorded as it came.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from recollect.errors import ProfileFormatError
from recollect.plans.value_names import module_of

__all__ = ["OpRecord", "Profile", "StepLog", "UnitCall", "UnitGraph", "ValueRecord"]


@dataclass(frozen=True, slots=True)
class ValueRecord:
    """One tensor of a unit's forward.

    Attributes:
        name: stable name inside the unit, such as "mlp.up_proj.mm".
        nbytes: size of its storage in bytes.
        producer: index of the op that computes it; None for a unit input or another leaf, which costs nothing.
        must_keep: running its op again would not give the same value (random numbers, routing indices, collectives).
        saved: autograd saved it in the step without recompute.
        is_output: the unit returns it.
        mutated_later: an op writes to its storage after it was computed, so holding it does not hold its value.
    """

    name: str
    nbytes: int
    producer: int | None
    must_keep: bool = False
    saved: bool = False
    is_output: bool = False
    mutated_later: bool = False


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One op of a unit's forward.

    Attributes:
        name: stem of the names of its results.
        inputs, outputs: indices of the values that it reads and computes.
        time_s: seconds that one more run takes, with the tape's own Python around it.
        mutates: it writes its only output into the storage of its first input.
        working_bytes: most bytes that it adds while it runs, its results among them; 0 if only these count.
        state_bytes: size of the generator state that has to be held to run it again, for a random op.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    time_s: float
    mutates: bool = False
    state_bytes: int = 0
    working_bytes: int = 0


@dataclass(frozen=True, slots=True)
class UnitGraph:
    """The values and ops of one unit, ops in the order in which forward ran them.

    Attributes:
        values, ops: what there is.
        tape_s: seconds that forward takes longer on the tape whatever is dropped; a unit has to be on it to drop anything.
        module_tape_s: (module path, seconds) for the unit's modules: what forward takes longer if any value that the module
            computes is dropped, since the tape then sees all of its ops.

    Raises:
        ValueError: an index out of range, a producer that does not list its value, an op that reads a value computed
            later, two produced values with one name, a negative size, or a time that is negative or not finite.

    Example:
        >>> x = ValueRecord("input", 4096, producer=None)
        >>> h = ValueRecord("up.mm", 16384, producer=0, saved=True)
        >>> y = ValueRecord("down.mm", 4096, producer=1, is_output=True)
        >>> graph = UnitGraph((x, h, y), (OpRecord("up.mm", (0,), (1,), 1e-4), OpRecord("down.mm", (1,), (2,), 1e-4)))
        >>> graph.saved_bytes
        16384
    """

    values: tuple[ValueRecord, ...]
    ops: tuple[OpRecord, ...]
    tape_s: float = 0.0
    module_tape_s: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for where, tape_s in (("tape_s", self.tape_s), *((f"module_tape_s[{m!r}]", s) for m, s in self.module_tape_s)):
            if not (math.isfinite(tape_s) and tape_s >= 0):
                raise ValueError(f"{where}: got {tape_s} s, expected a finite number, 0 or more")
        names: set[str] = set()
        for index, value in enumerate(self.values):
            self._check_value(index, value)
            if value.producer is None:
                continue
            if value.name in names:
                raise ValueError(f"value {index}: the name {value.name!r} is used twice, expected one value per name")
            names.add(value.name)
        for index, op in enumerate(self.ops):
            self._check_op(index, op)

    def _check_value(self, index: int, value: ValueRecord) -> None:
        where = f"value {index} ({value.name!r})"
        if value.nbytes < 0:
            raise ValueError(f"{where}: got {value.nbytes} bytes, expected 0 or more")
        if value.producer is None:
            return
        if not 0 <= value.producer < len(self.ops):
            raise ValueError(f"{where}: producer is op {value.producer}, expected 0 to {len(self.ops) - 1}")
        if index not in self.ops[value.producer].outputs:
            raise ValueError(f"{where}: op {value.producer} is its producer but does not list it as an output")

    def _check_op(self, index: int, op: OpRecord) -> None:
        where = f"op {index} ({op.name!r})"
        if not (math.isfinite(op.time_s) and op.time_s >= 0):
            raise ValueError(f"{where}: got a time of {op.time_s} s, expected a finite number, 0 or more")
        for name in ("state_bytes", "working_bytes"):
            if getattr(op, name) < 0:
                raise ValueError(f"{where}: got {getattr(op, name)} {name}, expected 0 or more")
        for value in (*op.inputs, *op.outputs):
            if not 0 <= value < len(self.values):
                raise ValueError(f"{where}: refers to value {value}, expected 0 to {len(self.values) - 1}")
        for value in op.inputs:
            producer = self.values[value].producer
            if producer is not None and producer >= index:
                raise ValueError(f"{where}: reads value {value} of op {producer}, expected ops in forward order")
        for value in op.outputs:
            if self.values[value].producer != index:
                raise ValueError(
                    f"{where}: lists value {value} as an output, whose producer is {self.values[value].producer}"
                )

    def watched_s(self, dropped: Iterable[int]) -> float:
        """Seconds that forward takes longer on the tape if these values are dropped."""
        modules = {module_of(self.values[value].name) for value in dropped}
        return self.tape_s + math.fsum(seconds for module, seconds in self.module_tape_s if module in modules)

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd saves in the step without recompute, unit inputs and other leaves not counted."""
        return sum(value.nbytes for value in self.values if value.saved and value.producer is not None)

    @property
    def forward_s(self) -> float:
        """Seconds that the unit's forward takes: the sum over its ops."""
        return math.fsum(op.time_s for op in self.ops)


@dataclass(frozen=True, slots=True)
class UnitCall:
    """One run of a unit in the step.

    Attributes:
        path: module path of the unit; calls with the same path (a shared module) share a decision.
        graph: index in `Profile.graphs`.
        repeated: the unit is one of the model's repeated layers (not embedding, norm, head or loss).
        chained: the unit's output is an input of the next call in `Profile.calls`, so that this output may be dropped
            and computed again from an earlier unit's input.
        origins: for each value of the graph that another call computed: (value, index of that call, its value there).
        outside: for each value of the graph that was made between units: (value, number of its storage in the log).
    """

    path: str
    graph: int
    repeated: bool = False
    chained: bool = False
    origins: tuple[tuple[int, int, int], ...] = ()
    outside: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StepLog:
    """The step's memory events, for `recollect.simulation.simulate` only.

    Attributes:
        blocks: distinct runs of events; an event is (opcode, operands...). Identical layers share one block.
        sequence: the step, as (block index, index in `Profile.calls` or -1).

    Raises:
        ValueError: something that is not an int, a block or call index out of range.
    """

    blocks: tuple[tuple[tuple[int, ...], ...], ...] = ()
    sequence: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for index, block in enumerate(self.blocks):
            for position, event in enumerate(block):
                if not event or any(type(item) is not int for item in event):
                    raise ValueError(f"block {index}, event {position}: got {event!r}, expected one or more ints")
        for position, step in enumerate(self.sequence):
            if len(step) != 2 or any(type(item) is not int for item in step):
                raise ValueError(f"sequence entry {position}: got {step!r}, expected (block index, call index or -1)")
            if not 0 <= step[0] < len(self.blocks):
                raise ValueError(f"sequence entry {position}: block {step[0]}, expected 0 to {len(self.blocks) - 1}")
            if step[1] < -1:
                raise ValueError(f"sequence entry {position}: call {step[1]}, expected -1 or more")


@dataclass(frozen=True)
class Profile:
    """The record of one training step.

    Attributes:
        graphs: distinct unit graphs.
        calls: the units' runs in forward order.
        log: the step's memory events.
        step_s: predicted seconds of forward and backward without recompute.
        persistent: bytes that live through the whole step, by kind ("parameters", "gradients", "buffers", "batch",
            "optimizer_state", "other_allocations").
        device: "cpu", "cuda:0", ...; `device_name` is the model of the device that the times are for.
        device_memory_bytes: size of that device's memory; 0 where it is not known.
        fake: recorded on fake tensors, so times come from a cost model.
        calibration_bytes: measured minus simulated peak of the recorded step; 0 for a fake profile.
        torch_version, model_class, batch: what was recorded, in words.
        loss_chunks: parts in which output matrix and loss were computed; see `Plan.loss_chunks`.

    Raises:
        ValueError: a call or an event that refers to what is not there, or a negative or non-finite number.
    """

    graphs: tuple[UnitGraph, ...]
    calls: tuple[UnitCall, ...]
    log: StepLog
    step_s: float
    persistent: Mapping[str, int] = field(default_factory=dict)
    device: str = "cpu"
    device_name: str = ""
    fake: bool = False
    calibration_bytes: int = 0
    torch_version: str = ""
    model_class: str = ""
    batch: str = ""
    loss_chunks: int = 1
    device_memory_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "persistent", MappingProxyType(dict(self.persistent)))
        if not (math.isfinite(self.step_s) and self.step_s >= 0):
            raise ValueError(f"step_s: got {self.step_s}, expected a finite number of seconds, 0 or more")
        if self.loss_chunks < 1:
            raise ValueError(f"loss_chunks: got {self.loss_chunks}, expected 1 or more")
        if self.device_memory_bytes < 0:
            raise ValueError(f"device_memory_bytes: got {self.device_memory_bytes} bytes, expected 0 or more")
        for kind, nbytes in self.persistent.items():
            if nbytes < 0:
                raise ValueError(f"persistent[{kind!r}]: got {nbytes} bytes, expected 0 or more")
        for index, call in enumerate(self.calls):
            if not 0 <= call.graph < len(self.graphs):
                what = f"call {index} ({call.path!r})"
                raise ValueError(f"{what}: graph {call.graph}, expected 0 to {len(self.graphs) - 1}")
            for origin in call.origins:
                self._check_origin(f"call {index} ({call.path!r}): origin {origin}", call, origin)
            for value, storage in call.outside:
                if not 0 <= value < len(self.graphs[call.graph].values):
                    what = f"call {index} ({call.path!r}): outside ({value}, {storage})"
                    raise ValueError(f"{what} is of a value that is not there")
        for position, (_, call_index) in enumerate(self.log.sequence):
            if call_index >= len(self.calls):
                raise ValueError(f"log entry {position}: call {call_index}, expected -1 to {len(self.calls) - 1}")

    def _check_origin(self, where: str, call: UnitCall, origin: tuple[int, int, int]) -> None:
        here, other, there = origin
        if not 0 <= other < len(self.calls):
            raise ValueError(f"{where} is of call {other}, expected 0 to {len(self.calls) - 1}")
        source = self.graphs[self.calls[other].graph]
        if not (0 <= here < len(self.graphs[call.graph].values) and 0 <= there < len(source.values)):
            raise ValueError(f"{where} is of a value that is not there")

    def __reduce__(self) -> tuple[Any, ...]:
        # A mappingproxy cannot be pickled or deep-copied.
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Profile, tuple({**values, "persistent": dict(self.persistent)}.values())

    def __hash__(self) -> int:
        return hash((self.graphs, self.calls, self.step_s, self.model_class, self.batch))

    def __repr__(self) -> str:
        source = "fake" if self.fake else self.device
        return (
            f"Profile({self.model_class or 'model'} on {source}, batch {self.batch or 'unknown'}, "
            f"{len(self.calls)} unit calls, {len(self.graphs)} distinct)"
        )

    @property
    def persistent_bytes(self) -> int:
        """Bytes that live through the whole step."""
        return sum(self.persistent.values())

    def graph_of(self, call: UnitCall) -> UnitGraph:
        """Return the graph of one of `calls`."""
        return self.graphs[call.graph]

    def to_json(self) -> str:
        """Return the profile as JSON text, which `from_json` reads back to an equal profile."""
        # The codec builds these classes, so it can only be imported once they are there.
        from recollect.profile.codec import encode_profile

        return encode_profile(self)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read a profile.

        Raises:
            ProfileFormatError: the text is no JSON, is not a profile, is of a later version, or holds numbers that
                cannot be; says where.
        """
        from recollect.profile.codec import decode_profile

        return decode_profile(text)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON; compressed if the name ends in ".gz"."""
        data = self.to_json().encode()
        # A fixed time stamp makes equal profiles equal files.
        Path(path).write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile that `save` wrote.

        Raises:
            ProfileFormatError: the file does not hold a profile; names the file.
            OSError: the file cannot be read.
        """
        data = Path(path).read_bytes()
        try:
            text = (gzip.decompress(data) if str(path).endswith(".gz") else data).decode()
        except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise ProfileFormatError(f"{path}: not a profile: {error}. Record it again.") from None
        try:
            return cls.from_json(text)
        except ProfileFormatError as error:
            raise ProfileFormatError(f"{path}: {error}") from None
