"""Has the second run of a region find in its tensors what the first one found: parameters, large buffers, arguments.

Nothing is copied beforehand. An alias holds the memory that a tensor had, as autograd does with what it saves; an op
that is about to write to it has it copied first; and a write that nobody saw is an error, if it shows (`content.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from recollect._torch_private import is_traceable_wrapper_subclass, keeps_graph, preserved_versions
from recollect.engine.content import glance_at
from recollect.engine.values import TapeValue, alias_in_hook, layout_of, private_copy, watch
from recollect.errors import MutatedValueError

__all__ = ["HeldTensors", "is_put_in_place"]


def is_put_in_place(tensor: object) -> bool:
    """Whether a library gives a parameter its memory, or puts another in its place, whenever a module runs.

    DeepSpeed's ZeRO-3, the mixed precision of `DistributedDataParallel`, and FSDP2 with its DTensors.
    """
    return hasattr(tensor, "ds_tensor") or hasattr(tensor, "_mp_param") or is_traceable_wrapper_subclass(tensor)


class HeldTensors:
    """The tensors that one call of a region may read, as they are when it begins.

    Args:
        unit_path: of the region, for messages.
    """

    def __init__(self, unit_path: str) -> None:
        self._unit_path = unit_path
        self._held: dict[int, tuple[torch.Tensor, TapeValue, bool]] = {}
        # Those that are no plain memory: only their versions tell.
        self._others: list[tuple[torch.Tensor, int, str]] = []

    def hold(self, tensor: torch.Tensor, module_path: str = "") -> None:
        """Hold what a tensor contains, unless a library looks after it; `module_path`: where in the unit it is."""
        if id(tensor) in self._held or tensor.is_inference():
            return
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            self._others.append((tensor, tensor._version, module_path))
            return
        storage = tensor.untyped_storage()
        if is_put_in_place(tensor) or not storage.nbytes():
            return
        label = (self._unit_path, module_path, "")
        value = TapeValue(alias_in_hook(tensor), None, tensor._version, label, glance_at(tensor))
        watch(value, storage)
        self._held[id(tensor)] = tensor, value, tensor.requires_grad

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have all tensors contain what they contained, and what they contain now again afterwards.

        Raises:
            MutatedValueError: something unseen has written to one of them.
            FreedValueError: the memory of one was freed.
        """
        for other, version, path in self._others:
            if other._version != version:
                shape, changes = tuple(other.shape), other._version - version
                raise MutatedValueError(unit=self._unit_path, module=path, op="", shape=shape, changes=changes)
        with ExitStack() as stack:
            for tensor, value, requires_grad in self._held.values():
                content = value.fetch()
                if content.untyped_storage() is not tensor.untyped_storage() or layout_of(content) != layout_of(tensor):
                    # The second run may write to it. There can only be a third run if backward keeps its graph.
                    stack.enter_context(_contains(tensor, private_copy(content) if keeps_graph() else content))
                if tensor.requires_grad is not requires_grad and tensor.is_leaf:
                    stack.callback(tensor.requires_grad_, tensor.requires_grad)
                    tensor.requires_grad_(requires_grad)
            yield


@contextmanager
def _contains(tensor: torch.Tensor, content: torch.Tensor) -> Iterator[None]:
    present = alias_in_hook(tensor)
    with preserved_versions(tensor):
        tensor.data = content
        try:
            yield
        finally:
            tensor.data = present
