"""What connects a device with the memory of its host. Imports no torch.

Rates are what large copies from and to pinned memory reach, per device and direction. Nothing here is measured by us: these are
others' figures, for one direction at a time. Both directions at once, devices that share a switch, and memory of another socket
can halve them. `recollect calibrate` measures your own link, with both directions at once.

| link | data sheet | out | in | source of what is reached (nvbandwidth) |
|---|--:|--:|--:|---|
| PCIe 4 | 32 GB/s | 25 GB/s | 25 GB/s | forums.developer.nvidia.com, topic 352186: A100 SXM (at once: 24 out, 11 in) |
| PCIe 5 | 64 GB/s | 55 GB/s | 55 GB/s | the example of dev.smart-guide.co.kr: 55.6 in; out is assumed to be the same |
| NVLink-C2C | 450 GB/s | 170 GB/s | 410 GB/s | NVIDIA/Megatron-LM, issue 6491: GH200 (170 out, 411 to 421 in) |

The data sheets are PCI-SIG's for 16 lanes, and NVIDIA's "GH200 Grace Hopper Superchip" of 2023. A latency of 10 us, for the
launch of a copy and the event after it, is an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

from recollect.costs.number_checks import check_not_negative, check_positive

_LATENCY_S = 10e-6


@dataclass(frozen=True, slots=True)
class HostLink:
    """How fast copies between a device and the memory of its host are.

    Attributes:
        to_host_bytes_per_s: what large copies out of the device reach.
        from_host_bytes_per_s: what large copies into it reach.
        latency_s: seconds that a copy takes however little it copies.

    Raises:
        ValueError: a rate that is not finite or not positive, a latency that is not finite or negative.

    Example:
        >>> link = HostLink(to_host_bytes_per_s=25e9, from_host_bytes_per_s=25e9, latency_s=1e-5)
        >>> link.profile_fields()["host_latency_s"]
        1e-05
    """

    to_host_bytes_per_s: float
    from_host_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        check_positive("host_link: to_host_bytes_per_s", self.to_host_bytes_per_s)
        check_positive("host_link: from_host_bytes_per_s", self.from_host_bytes_per_s)
        check_not_negative("host_link: latency_s", self.latency_s)

    def profile_fields(self) -> dict[str, float]:
        """Return the numbers under their names in a `Profile`."""
        return {
            "to_host_bytes_per_s": self.to_host_bytes_per_s,
            "from_host_bytes_per_s": self.from_host_bytes_per_s,
            "host_latency_s": self.latency_s,
        }


HOST_LINKS: dict[str, HostLink] = {
    "PCIe 4": HostLink(25e9, 25e9, _LATENCY_S),
    "PCIe 5": HostLink(55e9, 55e9, _LATENCY_S),
    "NVLink-C2C": HostLink(170e9, 410e9, _LATENCY_S),
}
