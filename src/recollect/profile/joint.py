"""The ops of a unit's forward and backward, as traced, from which a program for any plan is cut."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JointOp:
    """One call of an op; tensors and memory are numbered as in its `JointRecord`."""

    func: str = ""
    """The op, as PyTorch names it."""
    name: str = ""
    """Stem of the names of its results, as in plans; empty for results that have none."""
    reads: tuple[int, ...] = ()
    """The tensors among its arguments."""
    results: tuple[int, ...] = ()
    """The tensors that it returns; -1 for a result that is none. One that it writes to comes back as a new one."""
    writes: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    """Memory that it writes to as well, but neither reads nor writes to when it runs again: statistics of a batch norm."""
    working_bytes: int = 0
    """Peak growth while it runs, its results included; 0 if only the results count."""
    state_bytes: int = 0
    """For a random op, bytes of the generator state that must be held to run it again."""
    is_view: bool = False
    """It makes no memory, and writes to none."""
    is_random: bool = False
    keeps: bool = False
    """Its results are kept whatever the plan says."""
    stays: str = ""
    """Why it must not run again; empty if it may."""
    runs_anyway: bool = False
    """It runs even if nothing reads its results."""
    sums_into: tuple[int, ...] = ()
    """Of a sum of two tensors, the positions of those whose memory can take the result."""


@dataclass(frozen=True, slots=True)
class JointRecord:
    """A traced unit: the ops that eager mode runs in forward and in backward, in order."""

    storages: tuple[int, ...]
    """Bytes of each piece of memory."""
    tensors: tuple[int, ...]
    """For each tensor, its memory."""
    ops: tuple[JointOp, ...]
    num_forward: int
    """How many of them are forward's; these come first."""
    inputs: tuple[int, ...]
    """The tensors that it is given: parameters and arguments."""
    outputs: tuple[int, ...]
    """The tensors that it returns."""
    tangents: tuple[int, ...]
    gradients: tuple[tuple[int, ...], ...]
    """For each input, the tensors that are added up to its gradient, in order."""
    parameters: tuple[int, ...] = ()
    """The positions of the inputs that are parameters and need gradients."""
    input_values: tuple[int, ...] = ()
    """For each input, its index in the unit's values; -1 for parameters and values that outlive the step."""
    holds_tangents: bool = False
    """The gradients that backward begins with stay alive until it ends, as with torch 2.11."""

    def __post_init__(self) -> None:
        named = [*self.inputs, *self.outputs, *self.tangents, *(t for one in self.gradients for t in one)]
        named += [tensor for op in self.ops for tensor in (*op.reads, *op.results) if tensor != -1]
        for what, found, number in (
            ("tensor", named, len(self.tensors)),
            (
                "memory",
                [*self.tensors, *(one for op in self.ops for one in (*op.writes, *op.updates))],
                len(self.storages),
            ),
        ):
            wrong = next((one for one in found if not 0 <= one < number), None)
            if wrong is not None:
                raise ValueError(f"joint: {what} {wrong}, expected 0 to {number - 1}")
        if not 0 <= self.num_forward <= len(self.ops):
            raise ValueError(f"joint: {self.num_forward} ops of forward, expected 0 to {len(self.ops)}")

    def bytes_of(self, tensor: int) -> int:
        return self.storages[self.tensors[tensor]]
