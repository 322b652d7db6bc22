"""Represents tensors to the tape: its knowledge of each storage, and the values that stand for tensors.

A dropped tensor is recognised by its storage. The storage object carries a `StorageRecord` as a Python attribute, which
lives and dies with the bytes, so a reused address can never be mistaken for an old one. A storage without a record is
unknown to the tape, and anything unknown is kept.
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recollect._torch_private import disable_torch_dispatch, is_fake_tensor, share_version_counters
from recollect.engine.content import glance_at
from recollect.engine.streams import read_here, stream_of
from recollect.errors import FreedValueError, MutatedValueError
from recollect.replay import Node, Recipes, Value
from recollect.tensors import has_strides, version_of

_RECORD = "_recollect_record"
_LEAVES = "_recollect_leaves"
NOTES = "_recollect_notes"
"""Where `unseen_writes.py` notes a storage's content; a write that is seen removes it."""
# Dead weak references are removed from a storage's list of leaves when it reaches this length. Parameters and buffers
# outlive the values that stand for them, step after step; other storages rarely see more than a handful.
_SWEEP_LENGTH = 16

# Kernels of GPUs, and cuBLAS where it chooses one, ask how even an address is, up to this.
_EVEN_BYTES = 256

# Marks a value whose tensor is not watched for changes; the version of those that do not count them.
UNWATCHED = -1
# The label of values that were dropped.
_MADE_AGAIN = ("", "", "")

Layout = tuple[torch.Size, tuple[int, ...], int | torch.SymInt, torch.dtype]
"""Shape, strides, storage offset and dtype, which tell apart tensors on one storage."""


def layout_of(tensor: torch.Tensor) -> Layout:
    return tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype


class TapeValue(Value):
    """A value whose tensor, once held, must not be changed in place before it is used.

    `version`: the tensor's version counter when it was taken, or `UNWATCHED`.
    `content`: the result of `glance_at` on the tensor when an op read it; None if nothing compares it.
    `label`: (unit path, module path, op) of the first taker, for the error message.
    `stream`: the CUDA stream on which it became available; None on other devices.
    """

    __slots__ = ("content", "label", "stream", "version")

    # Sets every slot without calling the base class's constructor, because this runs several times per op.
    def __init__(
        self,
        tensor: torch.Tensor | None = None,
        node: Node | None = None,
        version: int = UNWATCHED,
        label: tuple[str, str, str] = _MADE_AGAIN,
        content: bytes | int | None = None,
    ) -> None:
        self.tensor = tensor
        self.node = node
        self.is_viewed = tensor is not None
        self.version = version
        self.label = label
        self.content = content
        self.stream = None if tensor is None else stream_of(tensor)

    def take(self, tensor: Any) -> None:
        self.tensor = tensor
        self.node = None
        if tensor is not None:
            self.stream = stream_of(tensor)
            self.version = tensor._version  # A Function's backward that gets it may write to it.

    def fetch(self) -> torch.Tensor:
        """Return the tensor to run an op on it again; raise an error if it has changed since it was taken."""
        tensor = self.fetch_saved()
        if self.content is not None and self.content != glance_at(tensor):
            unit, module, op = self.label
            raise MutatedValueError(unit=unit, module=module, op=op, shape=tuple(tensor.shape), changes=0)
        return tensor

    def fetch_saved(self) -> torch.Tensor:
        """Return the tensor as autograd would, which detects only changes that raise the version."""
        tensor: torch.Tensor = self.tensor
        if self.stream is not None:
            read_here(tensor, self.stream)
        if self.version == UNWATCHED:
            return tensor
        if self.label is not _MADE_AGAIN:
            check_filled(tensor, *self.label)
        if changes := tensor._version - self.version:
            unit, module, op = self.label
            raise MutatedValueError(unit=unit, module=module, op=op, shape=tuple(tensor.shape), changes=changes)
        return tensor

    def hold(self, tensor: torch.Tensor, version: int) -> None:
        """Become available with a tensor that something else may write to."""
        self.take(tensor)
        self.version = version
        self.content = None
        self.is_viewed = True

    def holds(self, storage: torch.UntypedStorage) -> bool:
        tensor: torch.Tensor | None = self.tensor
        return tensor is not None and tensor.layout is torch.strided and tensor.untyped_storage() is storage

    def snapshot(self, num_raised: int = 0) -> None:
        """Take a private copy, because the tensor is about to be written to; its version is `num_raised` ahead of that."""
        if self.tensor is not None and self.version + num_raised == version_of(self.tensor):
            self.tensor = private_copy(self.tensor)
            self.version = UNWATCHED
            self.content = None


Box = tuple[tuple[int, int], ...]
"""Where a part of a buffer begins and ends in each dimension."""


def _box_of(
    base_size: Sequence[int], base_stride: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int
) -> Box | None:
    """Return where a slice of a dense buffer lies, or None for a view that is not a slice along its dimensions.

    Example:
        >>> _box_of((2, 6), (6, 1), (2, 4), (6, 1), 2)
        ((0, 2), (2, 6))
    """
    if len(size) != len(base_size):
        return None
    begins = [0] * len(size)
    for dim in sorted(range(len(size)), key=lambda d: -base_stride[d]):
        if base_size[dim] == 1:
            continue  # The stride of a dimension of size 1 means nothing.
        if stride[dim] != base_stride[dim] or not base_stride[dim]:
            return None
        begins[dim], offset = divmod(offset, base_stride[dim])
    box = tuple((begin, begin + length) for begin, length in zip(begins, size, strict=True))
    fits = offset == 0 and all(end <= whole for (_, end), whole in zip(box, base_size, strict=True))
    return box if fits else None


def _is_covered(base_size: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether a buffer is filled, as when a model assembles its keys in a `torch.empty`.

    Of two overlapping parts, the second is ignored.

    Example:
        >>> _is_covered((2, 6), [((0, 2), (2, 6)), ((0, 2), (0, 2))])
        True
    """
    counted: list[Box] = []
    for box in boxes:
        if all(_are_apart(box, other) for other in counted):
            counted.append(box)
    return sum(math.prod(end - begin for begin, end in box) for box in counted) == math.prod(base_size)


def _are_apart(one: Box, other: Box) -> bool:
    return any(a[1] <= b[0] or b[1] <= a[0] for a, b in zip(one, other, strict=True))


class StorageRecord:
    """The tape's knowledge of one dropped storage: the value that covers all of it, and its views.

    `base`: the value of the tensor that was made with this storage; `layout` is that tensor's layout.
    `views`: values of other tensors on this storage, made from `base` on first request.
    `version`: the version counter at which this record holds; `is_bumped`: the tape saw an in-place op run, and the
        counter rises by one when autograd gets control back.
    `created`: "undefined" or "constant" while the tensor has only its initial content (`torch.empty`, `torch.zeros`).
        It can be made again only after writes that the tape sees, which must cover all of it if it is undefined.
    `filled`: the parts of an undefined buffer written so far.
    `is_stored`: it is stored, but not in memory as a whole (a part, offloaded), and stays so when it is returned.
    `call`: stands for the unit's call that made this storage, which decides whether it is held when it is returned.
    """

    __slots__ = ("base", "call", "created", "filled", "is_bumped", "is_stored", "layout", "version", "views")

    def __init__(self, base: TapeValue, layout: Layout, version: int, created: str | None, call: Recipes) -> None:
        self.base = base
        self.call = call
        self.layout = layout
        self.version = version
        self.is_bumped = False
        self.is_stored = False
        self.created = created
        self.filled: list[Box] = []
        self.views: dict[Layout, TapeValue] = {}

    def rebase(self, base: TapeValue, version: int, written: Layout, *, is_raised: bool = False) -> None:
        """Replace the content: an in-place op at `version` wrote the part `written`, making the new value `base`.

        `is_raised`: this op has already raised the version counter, and will not raise it again.
        """
        self.base = base
        self.is_stored = False
        self.views = {}
        if self.created == "undefined" and written != self.layout:
            box = self.part(written)
            self.filled += [box] if box is not None else []
            self.created = None if _is_covered(self.layout[0], self.filled) else "undefined"
        else:
            self.created = None
        self.expect_bump(version)
        self.is_bumped = not is_raised

    def part(self, layout: Layout) -> Box | None:
        """Return which part of the storage a tensor occupies, or None if the tensor is not a slice of it."""
        size, stride, offset, _ = layout
        return _box_of(*self.layout[:2], size, stride, offset) if isinstance(offset, int) else None

    def expect_bump(self, version: int) -> None:
        """Note that an in-place op that the tape saw ran at this version."""
        self.version = version
        self.is_bumped = True

    def is_current(self, version: int) -> bool:
        """Whether a tensor with this version counter still has the content this record describes."""
        if version == self.version:
            return True
        if self.is_bumped and version == self.version + 1:
            self.version = version
            self.is_bumped = False
            return True
        return False

    def value_of(self, layout: Layout) -> TapeValue:
        if layout == self.layout:
            return self.base
        view = self.views.get(layout)
        if view is None:
            made = self.base.node
            node = Node(_ViewCall(layout), [self.base], recipes=None if made is None else made.recipes)
            self.base.is_viewed = True
            view = TapeValue(node=node)
            view.is_viewed = True
            node.add_output(view)
            self.views[layout] = view
        return view


@dataclass(slots=True, eq=False)
class _ViewCall:
    """Makes a view with a given layout from the tensor that covers the storage."""

    layout: Layout

    def __call__(self, tensors: list[Any], may_overwrite_first: bool) -> tuple[torch.Tensor]:
        return (laid_out(tensors[0], self.layout),)


def laid_out(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the part of a tensor's storage that has a given layout, read as that layout's type (`view_as_real`)."""
    size, stride, offset, dtype = layout
    if tensor.dtype != dtype:
        # As a view, which shares the version counter.
        step = max(tensor.itemsize, dtype.itemsize)
        num_bytes = tensor.untyped_storage().nbytes() // step * step
        tensor = tensor.as_strided((num_bytes // tensor.itemsize,), (1,), 0).view(dtype)
    return tensor.as_strided(size, stride, offset)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def record_of(storage: torch.UntypedStorage) -> StorageRecord | None:
    return vars(storage).get(_RECORD)


def is_dropped(tensor: Any) -> bool:
    """Whether this is a tensor that has a recipe; buffers and kept tensors are written to directly."""
    is_strided = isinstance(tensor, torch.Tensor) and has_strides(tensor)
    return is_strided and record_of(tensor.untyped_storage()) is not None


def is_known(storage: torch.UntypedStorage) -> bool:
    """Whether a tensor on this storage was seen before, and is either dropped or held."""
    known = vars(storage)
    return _RECORD in known or _LEAVES in known


def is_new(result: Any) -> bool:
    """Whether an op has made a tensor with its own storage, not a view that its schema does not mention."""
    is_strided = isinstance(result, torch.Tensor) and has_strides(result)
    return is_strided and not is_known(result.untyped_storage()) and not result.storage_offset()


def attach_record(storage: torch.UntypedStorage, record: StorageRecord) -> None:
    vars(storage)[_RECORD] = record


def forget_record(storage: torch.UntypedStorage) -> None:
    """Forget how this storage's content was made: from here on, its readers keep it."""
    vars(storage).pop(_RECORD, None)


def alias_in_hook(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same storage, with the same version counter, that does not hold the autograd graph.

    Holding the tensor itself would make a reference cycle through its `grad_fn`. For use in saved-tensor hooks: the
    guard hides `detach` from the active dispatch modes (0.6 us instead of 17 us).
    """
    with disable_torch_dispatch():
        return tensor.detach()


def alias_in_mode(tensor: torch.Tensor) -> torch.Tensor:
    """Do the same inside a dispatch mode, below autograd, where an alias would get its own version counter."""
    with share_version_counters():
        return tensor.detach()


def expect_bump(tensor: torch.Tensor) -> None:
    """Prepare for an op that changes a tensor's layout in place: the version rises but the content stays the same."""
    storage = tensor.untyped_storage()
    record = record_of(storage)
    if record is not None and record.is_current(tensor._version):
        record.expect_bump(tensor._version)
    for reference in vars(storage).get(_LEAVES, ()):
        leaf = reference()
        if leaf is not None and leaf.version == tensor._version:
            leaf.version += 1


def check_filled(tensor: torch.Tensor, unit: str, module: str = "", op: str = "") -> None:
    """Raise an error if FSDP2, or whoever freed a tensor, has not filled it again; `unit`, `module`, `op`: its first taker."""
    if has_strides(tensor) and not tensor.untyped_storage().nbytes() and tensor.numel():
        raise FreedValueError(unit=unit, module=module, op=op, shape=tuple(tensor.shape))


def private_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor unseen by the active dispatch modes, because the copy is the tape's, not an op of the model.

    It has the same strides and as even an address: kernels may add in a different order otherwise.
    """
    if is_fake_tensor(tensor):
        return tensor.clone()
    with disable_torch_dispatch(), torch.no_grad():
        if not has_strides(tensor) or not tensor.numel():
            return tensor.clone()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        begin = tensor.storage_offset() % max(1, _EVEN_BYTES // tensor.itemsize)
        if extent == tensor.numel() and not begin:
            return tensor.clone()
        part = tensor.as_strided((extent,), (1,))
        return part.new_empty(begin + extent)[begin:].copy_(part).as_strided(tensor.size(), tensor.stride())


def watch(value: TapeValue, storage: torch.UntypedStorage) -> None:
    """Let `snapshot_leaves` find this value when its storage is about to be written to."""
    leaves: list[weakref.ref[TapeValue]] = vars(storage).setdefault(_LEAVES, [])
    if len(leaves) >= _SWEEP_LENGTH:
        leaves[:] = [reference for reference in leaves if reference() is not None]
    leaves.append(weakref.ref(value))


def leaves_of(storage: torch.UntypedStorage) -> list[TapeValue]:
    values = [reference() for reference in vars(storage).get(_LEAVES, ())]
    return [value for value in values if value is not None and value.holds(storage)]


def snapshot_targets(targets: Sequence[torch.Tensor], *, is_raised: bool) -> list[torch.UntypedStorage]:
    """Do `snapshot_leaves` for tensors that an op writes to; return their storages."""
    storages = [tensor.untyped_storage() for tensor in targets]
    for storage in storages:
        snapshot_leaves(storage, sum(other is storage for other in storages) if is_raised else 0)
    return storages


def snapshot_leaves(storage: torch.UntypedStorage, num_raised: int = 0) -> None:
    """Give every value that holds a tensor on this storage a private copy, because an in-place op is about to run.

    `num_raised`: by how much this op has already raised its version counter.
    """
    vars(storage).pop(NOTES, None)
    for reference in vars(storage).pop(_LEAVES, ()):
        value = reference()
        if value is not None:
            value.snapshot(num_raised)
