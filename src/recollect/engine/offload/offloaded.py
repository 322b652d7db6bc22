"""A value that is copied to host memory: where it is, and how it comes back.

| it is | its tensor | until |
|---|---|---|
| on the device, and being copied | held here | its trip says that it leaves; or something writes to it, or asks for it |
| in host memory | none | its trip says that it comes back; or something asks for it |
| on its way back | allocated here, not valid yet | something asks for it, waits, and gets it |

For the tape this is the recipe of a value: calling it returns the tensor. The numbers of the rules are those of `carriers.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from recollect._torch_private import disable_torch_dispatch, keeps_graph
from recollect.engine.offload.host import Host
from recollect.engine.offload.pool import Slot
from recollect.engine.values import Layout, bytes_of, laid_out, layout_of, record_of
from recollect.errors import MutatedValueError, OffloadError

__all__ = ["Offloaded", "settle"]


class Offloaded:
    """One value on its trip.

    Args:
        host: where it goes.
        tensor: the value, just computed; it holds no graph.
        slot: room for it in host memory.
        label: path of the unit, and name of the value in it.
    """

    __slots__ = (
        "__weakref__", "_arriving", "_back", "_changes", "_host", "_label", "_layout", "_nbytes", "_out", "_slot", "_tensor",
        "version",
    )  # fmt: skip

    def __init__(self, host: Host, tensor: torch.Tensor, slot: Slot, label: tuple[str, str]) -> None:
        self._host = host
        self._tensor: torch.Tensor | None = tensor
        self._layout: Layout = layout_of(tensor)
        self._nbytes = tensor.untyped_storage().nbytes()
        self._slot: Slot | None = slot
        self._label = label
        self._changes = 0
        self.version = tensor._version
        self._arriving: torch.Tensor | None = None
        self._back: Any = None
        with disable_torch_dispatch(), torch.no_grad():
            self._out: Any = host.carrier.copy_out(bytes_of(tensor), slot)

    def expect_bump(self) -> None:
        """Prepare for an op that changes the tensor's layout only, though its version rises."""
        self.version += 1

    def leave(self) -> None:
        """Leave the device: wait for the copy out (rule 2).

        Raises:
            OffloadError: it failed.
        """
        if self._tensor is None:
            return
        self._wait_out()
        # A write out of sight may have come while it was copied.
        self._changes = self._tensor._version - self.version
        self._tensor = None

    def settle(self) -> None:
        """Leave now, since something is about to write to the tensor: host memory has the old content."""
        self._host.num_missed += self._tensor is not None
        self.leave()

    def come_back(self) -> None:
        """Begin to copy it back, if it is away (rule 3); it stays in host memory if another backward will ask for it."""
        if self._tensor is not None or self._arriving is not None or self._slot is None:
            return
        with disable_torch_dispatch(), torch.no_grad():
            self._arriving = torch.empty(self._nbytes, dtype=torch.uint8, device=self._host.device)
            self._back = self._host.carrier.copy_back(self._slot, self._arriving)
        if not keeps_graph():
            self._give_back()

    def __call__(self, tensors: list[Any], may_overwrite_first: bool) -> tuple[torch.Tensor]:
        """Return the tensor, for which something asks.

        Raises:
            OffloadError: a copy failed.
            MutatedValueError: something wrote to it while it was copied out.
        """
        tensor = self._tensor
        if tensor is not None:
            self._host.num_missed += 1
            if not keeps_graph():
                self._wait_out()
                self._tensor = None
                self._give_back()
            return (tensor,)
        if self._changes:
            unit, name = self._label
            raise MutatedValueError(unit=unit, module="", op=name, shape=tuple(self._layout[0]), changes=self._changes)
        if self._arriving is None:
            self._host.num_missed += 1
            self.come_back()
        arrived = self._arriving
        assert arrived is not None
        self._wait_back()
        self._arriving = None
        with disable_torch_dispatch(), torch.no_grad():
            return (laid_out(arrived, self._layout),)

    def _wait_out(self) -> None:
        self._wait(self._out, "to host memory")

    def _wait_back(self) -> None:
        self._wait(self._back, "back")

    def _wait(self, ticket: Any, direction: str) -> None:
        try:
            self._host.wait(ticket)
        except Exception as error:
            unit, name = self._label
            raise OffloadError(
                unit=unit, name=name, direction=direction, reason=f"{type(error).__name__}: {error}"
            ) from error

    def _give_back(self) -> None:
        if self._slot is not None:
            self._host.pool.give_back(self._slot, self._back)
            self._slot = None

    def __del__(self) -> None:
        # Rules 6 and 7. What went wrong with a value that nobody needs does not matter.
        for tensor, ticket in ((getattr(self, "_tensor", None), "_out"), (getattr(self, "_arriving", None), "_back")):
            if tensor is not None:
                try:
                    self._host.carrier.wait(getattr(self, ticket, None))
                except Exception:  # noqa: S110
                    pass
        if getattr(self, "_slot", None) is not None:
            self._give_back()


def settle(storage: torch.UntypedStorage) -> None:
    """Have an offloaded value leave that this storage holds, since something is about to write to it."""
    record = record_of(storage)
    node = record.base.node if record is not None and record.is_stored else None
    if node is not None and isinstance(node.call, Offloaded):
        node.call.settle()
