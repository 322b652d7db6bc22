"""Cuts a trace by a plan, as `recollect.programs.cut` cuts its record."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recollect.engine.graph.joint import Joint
from recollect.engine.graph.trace import BackwardTrace, Specs, Tangents, Trace
from recollect.engine.graph.traced_op import TracedOp, TracedTensor
from recollect.programs.cut import Cut as NumberedCut
from recollect.programs.cut import cut as cut_record
from recollect.programs.parts import parts, stretches

IsKept = Callable[[TracedOp, int], bool]
"""Whether a plan keeps a result of an op of forward, given its position among the op's results."""


@dataclass(eq=False, slots=True)
class Cut:
    """A cut of `recollect.programs.cut`, with ops and tensors in place of numbers.

    Attributes:
        gradients: for each input, the addends of its gradient.
        specs: how those are spread that are DTensors.
        sums: for each sum that is made in place, the addend whose memory takes it, and the other one.
        joint, numbers: the trace as a record, and the cut as numbers in it.
    """

    trace: Trace
    kind: Tangents
    tangents: list[TracedTensor]
    forward: list[TracedOp]
    saved: list[TracedTensor]
    draws: list[TracedOp]
    backward: list[TracedOp]
    gradients: list[list[TracedTensor]]
    specs: Specs
    sums: dict[TracedOp, tuple[TracedTensor, TracedTensor]]
    joint: Joint
    numbers: NumberedCut

    def stretches(self) -> list[list[int]]:
        return stretches(self.joint.record, self.numbers)

    def parts(self, stretches: Sequence[Sequence[int]]) -> list[tuple[int, list[TracedTensor]]]:
        """Return gradients to hand over, and the number of ops of backward that have run then, for each stretch."""
        found = parts(self.joint.record, self.numbers, stretches)
        return [(position, [self.joint.tensors[tensor] for tensor in tensors]) for position, tensors in found]


def cut(trace: Trace, backward: BackwardTrace, is_kept: IsKept) -> Cut:
    """Cut a trace; raise `UntraceableError` if something would have to run again that cannot."""
    joint = Joint(trace, backward)
    found = cut_record(joint.record, lambda number, index: is_kept(joint.ops[number], index))
    return Cut(
        trace=trace,
        kind=backward.kind,
        tangents=backward.tangents,
        forward=[joint.ops[number] for number in found.forward],
        saved=sorted((joint.tensors[tensor] for tensor in found.saved), key=lambda tensor: tensor.index),
        draws=[joint.ops[number] for number in found.draws],
        backward=[joint.ops[number] for number in found.backward],
        gradients=backward.gradients,
        specs=backward.specs,
        sums={
            joint.ops[number]: (joint.ops[number].reads[index], joint.ops[number].reads[1 - index])
            for number, index in found.sums.items()
        },
        joint=joint,
        numbers=found,
    )
