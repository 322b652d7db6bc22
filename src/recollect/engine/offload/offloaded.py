"""A value that is copied to host memory: where it is, and how it comes back.

| it is | its tensor | until |
|---|---|---|
| on the device, and being copied | held here | its trip says that it leaves; or something writes to it, or asks for it |
| in host memory | none | its trip says that it comes back; or something asks for it |
| on its way back | allocated here, not valid yet | something asks for it, waits, and gets it |

For the tape this is the recipe of a value: calling it returns the tensor. The rules are numbered as in `carriers.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from recollect._torch_private import disable_torch_dispatch, keeps_graph
from recollect.engine.offload.carriers import Host
from recollect.engine.offload.pool import Slot
from recollect.engine.streams import read_here, stream_of
from recollect.engine.values import Layout, bytes_of, laid_out, layout_of, private_copy, record_of
from recollect.errors import FreedValueError, MutatedValueError, OffloadError

_OUT = "to host memory"
_BACK = "back"


class Offloaded:
    """One value on its trip, just computed and without a graph; `label`: path of the unit, and name of the value in it."""

    __slots__ = (
        "__weakref__", "_arriving", "_back", "_device", "_host", "_label", "_layout", "_nbytes", "_out", "_problem", "_slot",
        "_stream", "_tensor", "_version",
    )  # fmt: skip

    def __init__(self, host: Host, tensor: torch.Tensor, slot: Slot, label: tuple[str, str]) -> None:
        self._host = host
        self._tensor: torch.Tensor | None = tensor
        self._layout: Layout = layout_of(tensor)
        self._nbytes = slot.nbytes
        self._slot: Slot | None = slot
        self._label = label
        # Makes an error for each reader of the value. A raised exception would hold the step, by its traceback.
        self._problem: Callable[[], Exception] | None = None
        self._version = tensor._version
        self._device = tensor.device
        self._stream = stream_of(tensor)
        self._arriving: torch.Tensor | None = None
        self._out: Any = None
        self._back: Any = None
        try:
            with disable_torch_dispatch():
                self._out = host.carrier.copy_out(bytes_of(tensor), slot)
        except Exception as error:
            self._slot = self._tensor = None
            host.pool.give_back(slot)
            raise self._failed(_OUT, error)() from None
        slot.copies = [self._out]

    def leave(self, num_raised: int = 0) -> None:
        """Leave the device: wait for the copy out (rule 2). Its errors are raised where something asks for it.

        `num_raised`: by how much a write that is about to run may have raised the version already.
        """
        if self._tensor is None:
            return
        try:
            self._host.wait(self._out)
            self._look_for_changes(self._tensor, num_raised)
        except Exception as error:
            self._problem = self._failed(_OUT, error)
        self._tensor = None

    def settle(self, num_raised: int) -> None:
        """Leave now, since something is about to write to the tensor: host memory has the old content."""
        self._host.num_missed += self._tensor is not None
        self.leave(num_raised)

    def come_back(self) -> None:
        """Begin to copy it back, if it is away (rule 3); it stays in host memory if a later backward will ask for it."""
        slot = self._slot
        if self._tensor is not None or self._arriving is not None or slot is None or self._problem is not None:
            return
        with disable_torch_dispatch():
            arriving = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
            try:
                self._back = self._host.carrier.copy_back(slot, arriving)
            except Exception as error:
                raise self._failed(_BACK, error)() from None
        slot.copies = [self._back]
        self._arriving = arriving
        self._stream = stream_of(arriving)
        if not keeps_graph():
            self._give_back()

    def __call__(self, tensors: list[Any], may_overwrite_first: bool) -> tuple[torch.Tensor]:
        if self._arriving is None:
            self._host.num_missed += 1
        tensor = self._tensor
        if tensor is not None:
            self._look_for_changes(tensor)
        if self._problem is not None:
            raise self._problem()
        if tensor is None:
            tensor = self._arrived()
        elif not keeps_graph():
            self.leave()
            self._give_back()
        if self._stream is not None:
            read_here(tensor, self._stream)
        return (tensor if self._arriving is None else private_copy(tensor),)

    def _arrived(self) -> torch.Tensor:
        self.come_back()
        arrived = self._arriving
        assert arrived is not None
        # Else the backward of a different graph has brought it back for good, and one after this will ask for it again.
        if self._slot is not None or not keeps_graph():
            self._arriving = None
        try:
            self._host.wait(self._back)
        except Exception as error:
            raise self._failed(_BACK, error)() from None
        with disable_torch_dispatch():
            return laid_out(arrived, self._layout)

    def _look_for_changes(self, tensor: torch.Tensor, num_raised: int = 0) -> None:
        changes = tensor._version - self._version
        is_freed = tensor.untyped_storage().nbytes() < self._nbytes
        if changes <= num_raised and not is_freed:
            return
        make = FreedValueError if is_freed else partial(MutatedValueError, changes=changes)
        unit, name = self._label
        self._problem = partial(make, unit=unit, module="", op=name, shape=tuple(self._layout[0]))

    def _failed(self, direction: str, error: Exception) -> Callable[[], OffloadError]:
        unit, name = self._label
        # Its ticket holds it.
        error.__traceback__ = None
        reason = f"{type(error).__name__}: {error}"
        return partial(OffloadError, unit=unit, name=name, direction=direction, reason=reason)

    def _give_back(self) -> None:
        if self._slot is not None:
            self._host.pool.give_back(self._slot)
            self._slot = None

    def __del__(self) -> None:
        # Rules 6 and 7. Errors of a value that nobody needs do not matter.
        for tensor, ticket in ((self._tensor, self._out), (self._arriving, self._back)):
            if tensor is not None:
                try:
                    self._host.carrier.wait(ticket)
                except Exception:  # noqa: S110
                    pass
        self._give_back()


def settle(storages: list[torch.UntypedStorage], *, is_raised: bool = False) -> None:
    """Have offloaded values in these storages leave, since an op is about to write there.

    `is_raised`: whether the op has already raised their versions.
    """
    for storage in storages:
        record = record_of(storage)
        node = record.base.node if record is not None and record.is_stored else None
        if node is not None and isinstance(node.call, Offloaded):
            node.call.settle(sum(other is storage for other in storages) if is_raised else 0)
