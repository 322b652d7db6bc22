"""Links between devices, and the time of a collective over them. Imports no torch.

links.csv has the rates, per device and direction, and the seconds of a hop. These are the rates that rings of NCCL reach: the
speeds that NCCL's own model assumes, as PyTorch's estimator has them (`torch/_inductor/comm_analysis.py`, from
`graph/topo.h` of NCCL); for PCIe 5 and Infinity Fabric, 70 % of the data sheet is an assumption. A hop is a ring step of
NCCL's "Simple" protocol (`graph/tuning.cc`). None of this is measured here.

Between nodes NCCL runs several rings at once, which leave a node through the network adapters of different devices: a group
with k devices in a node has the adapters of k. All groups of a layout communicate at the same time, so none has more.

The GH200 has NVLink 4 where 32 of them are connected by switches; where four share a board, a pair has a third of it.
Links between a device and host memory are in `hardware_table.py`.
"""

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from recollect.costs.hardware import Hardware
from recollect.costs.hardware_table import GPUS, HARDWARE, read_table
from recollect.errors import ConfigError, HardwareError

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]

# Time before the first step of an NCCL ring.
_START_S = 8.4e-6


@dataclass(frozen=True, slots=True)
class Link:
    """A kind of link."""

    name: str
    """Such as "NVLink 4"."""
    bytes_per_s: float
    """Bandwidth that collectives reach, per device and direction."""
    hop_s: float
    """Seconds from one device to the next for the smallest message."""


LINKS: dict[str, Link] = {
    name: Link(name, float(row["bytes_per_s"]), float(row["hop_s"])) for name, row in read_table("links.csv").items()
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equal devices; ranks are dealt out node by node."""

    hardware: Hardware
    within: Link
    """The link between devices of one node."""
    between: Link
    """The link between nodes, with each device's share of it while all use it."""
    devices_per_node: int

    def link_of(self, ranks: Sequence[int]) -> Link:
        nodes = {rank // self.devices_per_node for rank in ranks}
        return self.within if len(nodes) == 1 else self.between

    def collective_s(self, kind: CollectiveKind, nbytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds of a collective over rings: a time for each of their steps, and one for the bytes that they carry.

        An exchange is not a ring: data for devices of the same node does not leave it, and other data goes through each
        device's own adapter.

        `nbytes`: of the whole tensor that is gathered or reduced; for an exchange, the bytes that each rank sends.
        """
        count = len(ranks)
        if count < 2:
            return 0.0
        of_nodes = Counter(rank // self.devices_per_node for rank in ranks)
        together, num_nodes = min(of_nodes.values()), len(of_nodes)
        hops_s = (count - num_nodes) * self.within.hop_s + (num_nodes - 1) * self.between.hop_s
        part = nbytes / count
        if kind == "all_to_all":
            stays, leaves = (together - 1) * part, (count - together) * part
            return _START_S + hops_s + max(stays / self.within.bytes_per_s, leaves / self.between.bytes_per_s)
        rates = [self.within.bytes_per_s] * (together > 1) + [together * self.between.bytes_per_s] * (num_nodes > 1)
        once_s = hops_s + (count - 1) * part / min(rates)
        return _START_S + (2 * once_s if kind == "all_reduce" else once_s)

    def send_s(self, nbytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds to send something from one rank to the next."""
        link = self.link_of(ranks)
        return link.hop_s + nbytes / link.bytes_per_s


def cluster_of(
    hardware: Hardware,
    *,
    within: str | None = None,
    between: str | None = None,
    devices_per_node: int | None = None,
    adapters_per_node: int | None = None,
) -> Cluster:
    """Return a cluster of a device, with its usual links where none are given.

    Links are names in `LINKS`, in any case. The devices of a node share its network adapters; by default each has one.
    """
    count = 8 if devices_per_node is None else devices_per_node
    adapters = count if adapters_per_node is None else adapters_per_node
    for name, number in {"devices_per_node": count, "adapters_per_node": adapters}.items():
        if number < 1:
            raise ConfigError(
                settings={name: number},
                reason=f"it counts {name.partition('_')[0]}",
                advice="Pass 1 or more, such as 8.",
            )
    name = next((name for name, known in HARDWARE.items() if known == hardware), "")
    usual = GPUS.get(name, {})
    within, between = within or usual.get("in_node"), between or usual.get("between_nodes")
    if within is None or between is None:
        raise HardwareError(
            f"hardware {hardware.name!r}: its links to other devices are not known; expected them as well, within a node and "
            f"between nodes: of {', '.join(LINKS)}."
        )
    network = _link(between)
    network = replace(network, bytes_per_s=network.bytes_per_s * adapters / count)
    return Cluster(hardware, _link(within), network, count)


def _link(name: str) -> Link:
    by_name = {known.lower(): link for known, link in LINKS.items()}
    found = by_name.get(name.lower())
    if found is None:
        close = difflib.get_close_matches(name.lower(), by_name, n=1)
        meant = f" Did you mean {by_name[close[0]].name!r}?" if close else ""
        raise HardwareError(f"link: got {name!r}, expected one of {', '.join(LINKS)}.{meant}")
    return found
