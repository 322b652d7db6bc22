"""Defines what carries copies between a device and host memory; there is one kind for each kind of device.

Whoever computes and the two engines that copy run beside each other. Who waits for whom:

1. a copy out waits for the op that made the value;
2. a value leaves the device when its copy out is over: whoever computes waits for it;
3. bytes for a copy back are allocated by whoever computes, and the copy waits until then;
4. whoever uses a value waits for its copy back;
5. a copy out into a slot waits for the last copies from and to it;
6. a value that is freed while it comes back waits first,
7. and so does one that is freed while it is copied out;
8. a copy back waits for its copy out.

Nothing else waits, and nobody asks whether a copy is over: when a value leaves or comes back does not depend on how fast
copies are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from recollect.engine.offload.pool import Slot
from recollect.engine.offload.streams import AcceleratorStreams, StreamCarrier
from recollect.engine.offload.threads import ThreadCarrier
from recollect.errors import OffloadError


class Carrier(Protocol):
    """Copies bytes between a device and host memory; a copy under way is told by a ticket."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return a stretch of host memory, as bytes.

        Raises:
            OffloadError: there is not so much of it.
        """
        ...

    def copy_out(self, source: torch.Tensor, slot: Slot) -> Any:
        """Begin to copy bytes to a slot, after what computes them and after the slot's copies; return a ticket."""
        ...

    def copy_back(self, slot: Slot, target: torch.Tensor) -> Any:
        """Begin to copy a slot to bytes that were just allocated, after the slot's copies; return a ticket."""
        ...

    def wait(self, ticket: Any) -> None:
        """Have what computes wait for a copy; raise what went wrong with it."""
        ...


CARRIERS: dict[str, Callable[[], Carrier]] = {"cpu": ThreadCarrier}
"""The one place to register a carrier, by the type of the device, for whatever streams of PyTorch's accelerator do not suit."""


def carrier_for(device: torch.device) -> Carrier:
    """Return what carries copies from and to a device.

    Raises:
        OffloadError: nothing does.
    """
    accelerator = torch.accelerator.current_accelerator()
    if device.type in CARRIERS:
        return CARRIERS[device.type]()
    if accelerator is not None and device.type == accelerator.type:
        return StreamCarrier(AcceleratorStreams())
    expected = f"{', '.join(CARRIERS)}, or PyTorch's accelerator, which is {accelerator}"
    raise OffloadError(reason=f"values on {device} cannot be copied; expected {expected}")
