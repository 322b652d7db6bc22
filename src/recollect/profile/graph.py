"""The computation of a training step's units, as frozen data: values, ops, graphs and calls.

| word | here |
|---|---|
| value | `ValueRecord`: one tensor of a unit's forward; views are folded into the value that owns the storage |
| op | `OpRecord`: an op that computes values, with its time |
| unit | `UnitGraph`: the values and ops of one layer; identical layers share one graph |
| call | `UnitCall`: one run of a unit in the step, in forward order |

Limitations: a unit's graph is one recorded forward. Control flow that depends on data is recorded as it ran.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated

from recollect.plans.value_names import module_of
from recollect.profile.joint import JointRecord
from recollect.profile.variant import VariantRecord


@dataclass(frozen=True, slots=True)
class ValueRecord:
    """One tensor of a unit's forward."""

    name: str
    """Stable within the unit, such as "mlp.up_proj.mm"."""
    nbytes: int
    """Size of its storage in bytes."""
    producer: int | None
    """Index of the op that computes it; None for an input of the unit or any other leaf, which costs nothing."""
    must_keep: bool = False
    """Running its op again would not reproduce it (random numbers, routing indices, collectives)."""
    saved: bool = False
    """Autograd saved it in the step without recompute."""
    is_output: bool = False
    mutated_later: bool = False
    """An op writes to its storage later, so holding the storage does not preserve the value."""
    saved_elements: int = 0
    """Numbers in the largest tensor that autograd saved of it, which may be a part; 0 if unknown."""
    stays: bool = False
    """The tape does not see its writes, so it cannot be stored elsewhere either."""


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One op of a unit's forward."""

    name: str
    """Stem of the names of its results."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    """Indices of the values that it reads and computes."""
    time_s: float
    """Seconds that it takes, without the overhead of Python and PyTorch around it."""
    mutates: bool = False
    """It writes its only output into the storage of its first input."""
    state_bytes: int = 0
    """For a random op, bytes of the generator state that must be held to run it again."""
    working_bytes: int = 0
    """Peak growth while it runs, its results included; 0 if only the results count."""


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A value that is the same on all ranks of a group: each may hold a part."""

    value: int
    """Its index."""
    nbytes: int
    """Bytes of this rank's part."""
    gather_s: float
    """Seconds until the whole value is available again."""


@dataclass(frozen=True, slots=True)
class UnitGraph:
    """The values and ops of one unit, ops in the order in which forward ran them."""

    values: tuple[ValueRecord, ...]
    ops: tuple[OpRecord, ...]
    tape_s: float = 0.0
    """Overhead of the tape in forward, whatever is dropped; a unit has to be on the tape to drop anything."""
    module_tape_s: tuple[tuple[str, float], ...] = ()
    """(module path, seconds): extra overhead in forward if any value that the module computes is dropped, since the tape then
    has to see all of the module's ops."""
    again_op_s: float = 0.0
    """The tape's overhead around each op that it reruns."""
    parts: tuple[PartRecord, ...] = ()
    """Of the values that were the same on all ranks, those that can be held as parts."""
    variants: tuple[VariantRecord, ...] = ()
    """The unit's costs inside `torch.compile`, one for each set of values to keep, PyTorch's own choice first; empty if it
    is not to be compiled."""
    eager_s: float = 0.0
    """Seconds of forward and backward outside the compiler, measured with those of the variants; 0 without variants."""
    joint: JointRecord | None = None
    """Its ops in forward and backward, as traced; None if it was not supposed to be traced, or could not be."""
    why_not_traced: str = ""
    """Why it could not be; empty if it could, or was not supposed to be."""

    def __post_init__(self) -> None:
        times = tuple((name, getattr(self, name)) for name in ("tape_s", "again_op_s", "eager_s"))
        for where, tape_s in (*times, *((f"module_tape_s[{m!r}]", s) for m, s in self.module_tape_s)):
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
        for part in self.parts:
            if not 0 <= part.value < len(self.values) or self.values[part.value].producer is None:
                raise ValueError(f"part of value {part.value}: expected a value that an op of the unit computes")
            if part.nbytes < 0 or not (math.isfinite(part.gather_s) and part.gather_s >= 0):
                raise ValueError(
                    f"part of value {part.value}: got {part.nbytes} bytes and {part.gather_s} s, expected 0 or more"
                )

        self._check_variants()

    def _check_variants(self) -> None:
        for number, variant in enumerate(self.variants):
            for value in (*variant.kept, *variant.held):
                if not 0 <= value < len(self.values):
                    raise ValueError(f"variant {number}: value {value}, expected 0 to {len(self.values) - 1}")
            if variant.is_default != (number == 0):
                raise ValueError(f"variant {number}: expected PyTorch's own choice first, and only there")

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

    def again_s(self, op: OpRecord) -> float:
        """Return the seconds that an op takes on the tape when it runs again."""
        return op.time_s + self.again_op_s

    def watched_s(self, dropped: Iterable[int]) -> float:
        """Return the overhead of the tape in forward, in seconds, if these values are dropped."""
        modules = {module_of(self.values[value].name) for value in dropped}
        return self.tape_s + math.fsum(seconds for module, seconds in self.module_tape_s if module in modules)

    def beyond_default_s(self, seconds: float) -> float:
        """Return the seconds beyond those of the compiler's own choice; 0 if they differ by rounding, as of modelled times."""
        default_s = self.variants[0].step_s
        return 0.0 if math.isclose(seconds, default_s) else seconds - default_s

    @property
    def made(self) -> list[tuple[int, ValueRecord]]:
        """The values that its ops compute, with their indices: all but its inputs and other leaves."""
        return [(index, value) for index, value in enumerate(self.values) if value.producer is not None]

    @property
    def saved_values(self) -> list[int]:
        """Indices of the values made that autograd saves in the step without recompute."""
        return [index for index, value in self.made if value.saved]

    @property
    def saved_bytes(self) -> int:
        return sum(self.values[index].nbytes for index in self.saved_values)

    @property
    def forward_s(self) -> float:
        """Seconds of the unit's forward: the sum over its ops."""
        return math.fsum(op.time_s for op in self.ops)

    def keeping_draws(self) -> "UnitGraph":
        """Return it with the results of random ops kept, and whatever is later written over them."""
        kept = {value for op in self.ops if op.state_bytes for value in op.outputs}
        for op in self.ops:
            if op.mutates and op.inputs[0] in kept:
                kept.update(op.outputs)
        values = (replace(value, must_keep=True) if index in kept else value for index, value in enumerate(self.values))
        return replace(self, values=tuple(values))


@dataclass(frozen=True, slots=True)
class UnitCall:
    """One run of a unit in the step."""

    path: str
    """Module path of the unit; calls with one path (a shared module) share a decision."""
    graph: int
    """Index in `Profile.graphs`."""
    repeated: bool = False
    """The unit is one of the model's repeated layers (not embedding, norm, head or loss)."""
    chained: bool = False
    """The next call in `Profile.calls` reads the unit's output, so the output may be dropped and recomputed from an earlier
    unit's input."""
    origins: tuple[Annotated[tuple[int, int, int], "value", "call", "value of that call"], ...] = ()
    """For each value that a different call computed."""
    outside: tuple[Annotated[tuple[int, int], "value", "storage"], ...] = ()
    """For each value computed between units, its storage in the log."""
    num_runs: int = 1
    """The number of equal runs of the real step that this one stands for; see `recollect.profile.repeated_steps`."""

    def __post_init__(self) -> None:
        if self.num_runs < 1:
            raise ValueError(f"num_runs of {self.path!r}: got {self.num_runs}, expected 1 or more")
