"""What the offloaded values of an applied plan share: host memory, what carries copies there, and counts."""

from __future__ import annotations

import time
from typing import Any

import torch

from recollect.engine.offload.carriers import carrier_for
from recollect.engine.offload.pool import HostPool


class Host:
    """Host memory beside a device.

    Args:
        device: where values are computed.
        most_bytes: the host memory that they need; None if nobody knows.

    Attributes:
        device: where values are computed.
        carrier: copies them.
        pool: host memory.
        num_missed: values that were asked for, or written to, at another moment than the plan says.
        stalled_s: seconds that whoever computes has waited for copies, on the CPU.

    Raises:
        OffloadError: there is not so much host memory, or nothing copies from the device.
    """

    def __init__(self, device: torch.device, most_bytes: int | None) -> None:
        self.device = device
        self.carrier = carrier_for(device)
        self.pool = HostPool(self.carrier.host_memory, most_bytes)
        self.num_missed = 0
        self.stalled_s = 0.0

    def wait(self, ticket: Any) -> None:
        """Have what computes wait for a copy."""
        begin = time.perf_counter()
        self.carrier.wait(ticket)
        self.stalled_s += time.perf_counter() - begin
