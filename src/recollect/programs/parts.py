"""Divides a unit's backward into parts, each of which hands over the gradients that are there at its end."""

from collections.abc import Sequence
from typing import Final

from recollect.profile.joint import JointRecord
from recollect.programs.cut import Cut

# Of a unit's gradients of parameters: smaller ones wait for the next one.
_LARGE_PART: Final = 1 / 16

Part = tuple[int, list[int]]
"""Gradients to hand over, and the number of ops of backward that have run then."""


def stretches(joint: JointRecord, cut: Cut) -> list[list[int]]:
    """Return the inputs whose gradients each part hands over, in the order of backward."""
    order: dict[int, int] = {}
    for position, number in enumerate(cut.backward):
        order.update(dict.fromkeys(joint.ops[number].results, position))
    own = [index for index in joint.parameters if joint.gradients[index]]
    own.sort(key=lambda index: max(order.get(tensor, -1) for tensor in joint.gradients[index]))
    sizes = {index: joint.bytes_of(joint.inputs[index]) for index in own}
    found: list[list[int]] = [[]]
    for index in own:
        found[-1].append(index)
        if sizes[index] >= _LARGE_PART * sum(sizes.values()):
            found.append([])
    # The last one has all that is left: the inputs that are no parameters.
    found[-1] += [index for index in range(len(joint.inputs)) if index not in own]
    return found


def parts(joint: JointRecord, cut: Cut, stretches: Sequence[Sequence[int]]) -> list[Part]:
    """Return which gradients the parts hand over, given the inputs of each, and when.

    Not before the last op that reads the parameter itself: a hook may be the optimizer, which changes it then.
    """
    last: dict[int, int] = {}
    for position, number in enumerate(cut.backward):
        op = joint.ops[number]
        tensors = (tensor for tensor in (*op.results, *op.reads) if tensor >= 0)
        last.update((joint.tensors[tensor], position + 1) for tensor in tensors)
    found: list[Part] = []
    for inputs in stretches:
        gradients = [tensor for index in inputs for tensor in joint.gradients[index]]
        reads = [*gradients, *(joint.inputs[index] for index in inputs)]
        begin = found[-1][0] if found else 0
        found.append((max([begin, *(last.get(joint.tensors[tensor], 0) for tensor in reads)]), gradients))
    return found
