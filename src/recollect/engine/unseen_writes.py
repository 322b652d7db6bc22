"""Finds writes to tensors that raise no version and that no dispatch mode sees.

Those of c10d's collectives are known by name (`facts.py`), those of autograd Functions by their arguments before and after
(`function_run.py`): the tape forgets how such a tensor was made, and holds it from there on. For all others (a kernel that was
given an address, a backend that is called directly, any of them between units), the first call of a unit compares the content
of each tensor, each time that it is read and once more at the end, with what it was when an op made or first read it. A write
within the call is an error; of an output that was overwritten between units, the tape forgets in later calls how it was made.
"""

import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from recollect.engine.content import checksum
from recollect.engine.values import NOTES, Layout, forget_record, leaves_of, record_of, snapshot_leaves
from recollect.errors import MutatedValueError
from recollect.tensors import version_of

_Label = tuple[str, str, str]

_UNKNOWN_WRITER = "something that PyTorch does not see, such as a kernel that was given its address"


def forget_overwritten(tensor: torch.Tensor, writer: str, label: _Label) -> None:
    """Forget how a storage's content was made, because something writes to it that raises no version.

    It is an error if a value that backward needs is dropped, or held on this storage, and would change with it.
    """
    storage = tensor.untyped_storage()
    record = record_of(storage)
    if record is not None:
        values = (record.base, *record.views.values())
        if any(reference() in values for reference in record.call.saved):
            raise _error(tensor.size(), label, writer)
        forget_record(storage)
    for value in leaves_of(storage):
        raise _error(tensor.size(), value.label, writer)
    forget_content(storage)


def forget_updated(statistics: Sequence[torch.Tensor], writer: str, label: _Label) -> None:
    """Forget how statistics were made that an op is about to update; earlier readers keep their old content.

    It is an error if an op before this one has saved them for its gradient, which would read their new content.
    """
    storages = [tensor.untyped_storage() for tensor in statistics]
    for tensor, storage in zip(statistics, storages, strict=True):
        snapshot_leaves(storage)
        record = record_of(storage)
        if record is not None:
            values = (record.base, *record.views.values())
            # The op itself has saved each, too.
            if sum(reference() in values for reference in record.call.saved) > sum(one is storage for one in storages):
                raise _error(tensor.size(), label, writer)
            forget_record(storage)


def forget_content(storage: torch.UntypedStorage) -> None:
    vars(storage).pop(NOTES, None)


class _Note(NamedTuple):
    version: int
    checksum: int
    label: _Label
    call: "Comparison"


class Comparison:
    """Compares contents during one call of a unit; adds the units whose outputs were overwritten before it to a set."""

    def __init__(self, overwritten: set[str]) -> None:
        self.overwritten = overwritten
        self._noted: list[weakref.ref[torch.UntypedStorage]] = []

    def note(self, tensor: torch.Tensor, storage: torch.UntypedStorage, layout: Layout, label: _Label) -> None:
        """Note the content of a part of a tensor's storage; if it was noted at the same version, compare it with that."""
        version = version_of(tensor)
        notes: dict[Layout, _Note] = vars(storage).setdefault(NOTES, {})
        if any(note.version != version for note in notes.values()):
            notes.clear()  # Of parts that were written to in sight, between units.
        before = notes.get(layout)
        now = _content(storage, layout)
        if before is None:
            notes[layout] = _Note(version, now, label, self)
            self._noted.append(weakref.ref(storage))
        elif now != before.checksum:
            if before.call is self:
                raise _error(layout[0], before.label, _UNKNOWN_WRITER)
            forget_overwritten(tensor, _UNKNOWN_WRITER, before.label)
            self.overwritten.add(before.label[0])

    def end(self) -> None:
        """Compare everything once more; forget the content of tensors without a recipe."""
        for storage in filter(None, (reference() for reference in self._noted)):
            for layout, note in vars(storage).get(NOTES, {}).items():
                if _content(storage, layout) != note.checksum and storage.nbytes():
                    raise _error(layout[0], note.label, _UNKNOWN_WRITER)
            if record_of(storage) is None:
                forget_content(storage)


def _content(storage: torch.UntypedStorage, layout: Layout) -> int:
    size, stride, offset, dtype = layout
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if math.prod(size) else 0
    begin, end = int(offset) * dtype.itemsize, (int(offset) + extent) * dtype.itemsize
    return checksum(storage, begin, end) if end <= storage.nbytes() else 0


def _error(size: torch.Size, label: _Label, writer: str) -> MutatedValueError:
    unit, module, op = label
    return MutatedValueError(unit=unit, module=module, op=op, shape=tuple(size), changes=0, writer=writer)
