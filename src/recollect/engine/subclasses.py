"""Takes wrapper tensor subclasses (DTensor and its kin) apart for the tape, and puts them together again."""

from collections.abc import Iterator
from typing import Any

import torch

from recollect._torch_private import is_opaque_subclass
from recollect.engine.values import TapeValue
from recollect.tensors import inner_tensors, tensors_in

_INDICES = (torch.int32, torch.int64)


class PackedSubclass:
    """A saved tensor subclass (DTensor, ...): its inner tensors as values, and the data to rebuild it."""

    __slots__ = ("context", "kind", "others", "packed", "size", "stride")

    def __init__(self, tensor: Any, pack: Any) -> None:
        with torch.no_grad():
            names, self.context = tensor.__tensor_flatten__()
        self.kind = type(tensor)
        self.size, self.stride = tensor.size(), tensor.stride()
        inner = {name: getattr(tensor, name) for name in names}
        # A nested tensor is identified by the tensor object of its offsets: an equal one is not enough.
        content = {n: t for n, t in inner.items() if isinstance(t, torch.Tensor) and t.dtype not in _INDICES}
        self.packed = {name: pack(item) for name, item in content.items()}
        # Not all of them are tensors: a DTensor also lists its device mesh.
        self.others = {name: item for name, item in inner.items() if name not in self.packed}

    def rebuild(self, unpack: Any) -> torch.Tensor:
        inner = {**self.others, **{name: unpack(item) for name, item in self.packed.items()}}
        return self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)


def held_whole(tensor: torch.Tensor, label: tuple[str, str, str]) -> TapeValue:
    with torch.no_grad():
        return TapeValue(tensor.detach(), None, tensor._version, label)


def strided_tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the strided tensors in nested containers; for a DTensor and its kin, the inner tensors."""
    for tensor in tensors_in(output):
        if is_opaque_subclass(tensor):
            continue
        inner = inner_tensors(tensor)
        if inner:
            yield from strided_tensors(inner)
        elif tensor.layout is torch.strided:
            yield tensor
