"""Tells whether the inputs of a call share memory as those of the traced one did."""

from collections.abc import Sequence

import torch

from recollect.engine.graph.traced_op import TracedOp, TracedTensor


class OtherMemoryError(Exception):
    """A call cannot run from a trace: its inputs share memory in a different way, or gradients have different types."""


class SharedMemory:
    """The memory that several inputs of a trace share, or that ops write to.

    A trace takes views of the same place for one tensor, whichever inputs they are of.
    """

    def __init__(self, inputs: Sequence[TracedTensor], ops: Sequence[TracedOp]) -> None:
        written = {storage for op in ops for storage in (*op.written, *(one.storage for one in op.updated))}
        groups: dict[int, list[int]] = {}
        for index, one in enumerate(inputs):
            groups.setdefault(one.storage, []).append(index)
        # The inputs on each memory, and where they begin.
        self._groups = [
            (group, _begins([inputs[index].layout[2:4] for index in group]))
            for storage, group in groups.items()
            if len(group) > 1 or storage in written
        ]

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise `OtherMemoryError` if the inputs of a call share memory differently."""
        memory = [one.untyped_storage()._cdata for one in inputs] if self._groups else []
        for group, begins in self._groups:
            if group != [index for index, one in enumerate(memory) if one == memory[group[0]]]:
                raise OtherMemoryError
            if begins != _begins([(int(inputs[index].storage_offset()), inputs[index].dtype) for index in group]):
                raise OtherMemoryError


def _begins(places: Sequence[tuple[int, torch.dtype]]) -> list[int]:
    """Return how many bytes after the first of them tensors begin, from their offsets in one storage."""
    begins = [offset * dtype.itemsize for offset, dtype in places]
    return [begin - begins[0] for begin in begins]
