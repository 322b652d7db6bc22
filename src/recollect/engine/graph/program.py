"""Makes the two functions that a traced unit runs under a plan, and notes what forward saves for backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recollect.engine.graph.code import Run, RunInParts, backward_code, forward_code
from recollect.engine.graph.cut import Cut


@dataclass(eq=False, slots=True)
class Program:
    """The two functions of one cut.

    Attributes:
        read: positions of inputs of which forward saves something: others may write to them.
        returned: positions of outputs of which forward saves something.
        shown: positions of saved tensors that are outputs, and of these outputs.
        again: for each of `read`, then of `returned`, whether ops read it that run again: content is compared, too, as on
            the tape.
    """

    cut: Cut
    forward: Run
    backward: Run
    read: tuple[int, ...]
    returned: tuple[int, ...]
    shown: tuple[tuple[int, int], ...]
    again: tuple[bool, ...]
    in_parts: RunInParts | None = None

    @property
    def needs(self) -> list[Any]:
        """The values that its backward gets from forward, in order."""
        return [*self.cut.saved, *self.cut.draws]

    @classmethod
    def of(cls, made: Cut) -> Program:
        trace = made.trace
        storages = {tensor.storage for tensor in made.saved}
        outputs = {tensor: index for index, tensor in enumerate(trace.outputs) if tensor not in trace.passed_on}
        read = tuple(index for index, tensor in enumerate(trace.inputs) if tensor.storage in storages)
        returned = tuple(index for tensor, index in outputs.items() if tensor.storage in storages)
        # Batch norm runs again without the statistics that it updates.
        again = ((op, tensor) for op in made.backward if not op.is_backward for tensor in op.reads)
        read_again = {tensor.storage for op, tensor in again if tensor not in op.updated}
        seen = [*(trace.inputs[index] for index in read), *(trace.outputs[index] for index in returned)]
        return cls(
            made,
            forward_code(made),
            backward_code(made),
            read,
            returned,
            tuple((index, outputs[tensor]) for index, tensor in enumerate(made.saved) if tensor in outputs),
            tuple(tensor.storage in read_again for tensor in seen),
        )

    def pick(self, saved: list[Any], other: Program) -> list[Any]:
        """Return the values that this one's backward needs of those that a different one's forward has saved."""
        has = other.needs
        return [saved[has.index(one)] for one in self.needs]
